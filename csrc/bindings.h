// The Python face of the core: what its parts add to the module, and how they read arguments.
#pragma once

#include <type_traits>

#include "gradients.h"
#include "scale.h"
#include "track.h"

namespace ampfast {

// Calls of a step of Python's; the stub _C.pyi describes them.
void bind_steps(py::module_& m);
// Calls over kernels that are launched.
void bind_device_kernels(py::module_& m);
// Reads of the tensors of watched models.
void bind_watch(py::module_& m);

namespace cuda {
// Launches of the CUDA kernels.
void bind(py::module_& m);

// Launches a read of a list of one tensor, whose device is the current one, into a row of
// kPeakWords.
void read_peak(const GradList& list, double* row);
}  // namespace cuda

template <class Kernel>
auto without_gil_if_long(const GradList& grads, const Kernel& kernel) {
  std::optional<py::gil_scoped_release> release;
  if (grads.elements() >= kElementsWorthReleasing) {
    release.emplace();
  }
  return kernel();
}

template <class T>
at::Tensor new_scalar(T value) {
  const c10::InferenceMode usual(false);
  at::Tensor tensor = at::detail::empty_cpu({}, c10::CppTypeToScalarType<T>::value);
  *tensor.mutable_data_ptr<T>() = value;
  return tensor;
}

// Memory of a tensor, whose dtype is checked too; null for one that is undefined.
template <class T>
T* data_of(const at::Tensor& tensor, const char* name, at::Device device, int64_t numel = 1) {
  if (!tensor.defined()) {
    return nullptr;
  }
  using Value = std::remove_const_t<T>;
  constexpr at::ScalarType dtype = c10::CppTypeToScalarType<Value>::value;
  TORCH_CHECK(tensor.scalar_type() == dtype && tensor.device() == device && is_dense(tensor) &&
                  tensor.numel() == numel && tensor.is_contiguous(),
              name, " must be a contiguous tensor of ", numel, " elements of ", dtype, " on ",
              device);
  TORCH_CHECK(has_memory(tensor), "the memory of ", name, " was freed or resized");
  return tensor.data_ptr<Value>();
}

// A tensor, undefined for None.
at::Tensor tensor_of(PyObject* object);

// Python's tensor, or None for one that is undefined.
inline py::object wrapped(const at::Tensor& tensor) {
  return py::reinterpret_steal<py::object>(THPVariable_Wrap(tensor));
}

// The class of Python's objects that hold a T.
template <class T>
PyTypeObject* class_of() {
  static const py::handle type = py::type::of<T>().release();
  return reinterpret_cast<PyTypeObject*>(type.ptr());
}

// What an object of a final class of the core holds. pybind's casters look for the class each time.
template <class T>
T& object_of(PyObject* object) {
  auto* const instance = reinterpret_cast<py::detail::instance*>(object);
  T* const held = Py_TYPE(object) == class_of<T>()
                      ? instance->get_value_and_holder().template value_ptr<T>()
                      : nullptr;
  TORCH_CHECK_TYPE(held != nullptr, "expected a ", py::type_id<T>(), ", got ",
                   Py_TYPE(object)->tp_name);
  return *held;
}

// Python's objects for what kernels are given; the stub _C.pyi describes their fields. A tensor
// that may be None is undefined then, and all that are given are on one device.

struct ClipObject {
  at::Tensor sums;
  double max_norm = 0;
  bool largest = false;
  at::Tensor norm, coefficient, scale, divisor, found_inf;
  double skip_above = INFINITY;
  at::Tensor accepted_norms;

  // The clipping, for kernels of that device.
  Clip on(at::Device device) const;
  // Takes what a pass that decides it has left: its sums and, where norms are compared, its flag.
  void take(const at::Tensor& its_sums, const at::Tensor& flag);
};

struct UpdateObject {
  at::Tensor scale, growth_tracker;
  py::object found_infs = py::none();  // a list or tuple of tensors
  py::object growth_factor = py::none(), backoff_factor = py::none();
  py::object growth_interval = py::none();
  at::Tensor state, norm;
  bool applied = false;  // as the ending of a pass

  // The update, without its flags; nothing where the kernels do not know its tensors, the flags
  // among them, and its numbers exactly.
  std::optional<Update> known() const;
  std::vector<at::Tensor> flags() const;
};

struct Pass {
  bool write = false;
  Factor how = Factor::kNone;
  at::Tensor factor, found_inf;
  bool accumulate = true;
  at::Tensor coefficient, sums, marks, now, factor_copy;
  std::shared_ptr<UpdateObject> ending;  // done by the last program of the pass
  std::shared_ptr<ClipObject> clip;      // decided at the end of a pass with sums
};

Marks marks_of(const Pass& pass, at::Device device);

void bind_arguments(py::module_& m);

// For every class: pybind11 takes it for granted that an object gets memory.
py::custom_type_setup may_lack_memory();

// Functions with CPython's own convention, since a cold call through pybind costs as much as all
// the rest. Null without an error is None, and every exception of C++ is one of Python. A method's
// first argument is its object.
template <PyObject* (*kBody)(PyObject* const*), Py_ssize_t kArguments, bool kIsMethod>
PyObject* call(PyObject* self, PyObject* const* args, Py_ssize_t count) {
  if (count != kArguments) {
    return PyErr_Format(PyExc_TypeError, "takes %zd arguments, got %zd", kArguments, count);
  }
  PyObject* all[kArguments + 1] = {self};
  std::copy_n(args, kArguments, all + 1);
  try {
    PyObject* result = kBody(kIsMethod ? all : args);
    return result != nullptr || PyErr_Occurred() != nullptr ? result : Py_NewRef(Py_None);
  } catch (const std::exception&) {
    torch::translate_exception_to_python(std::current_exception());
    return nullptr;
  }
}

// Adds a function to a module, or a method to a class.
template <PyObject* (*kBody)(PyObject* const*), Py_ssize_t kArguments, bool kIsMethod = false>
void add_call(const py::object& place, const char* name) {
  // Through void, as CPython's own casts go: the flag tells the true type.
  void* function = reinterpret_cast<void*>(&call<kBody, kArguments, kIsMethod>);
  static PyMethodDef method{name, reinterpret_cast<PyCFunction>(function), METH_FASTCALL, nullptr};
  auto* const type = reinterpret_cast<PyTypeObject*>(place.ptr());
  const py::object module = place.attr("__name__");
  py::setattr(place, name,
              py::reinterpret_steal<py::object>(
                  kIsMethod ? PyDescr_NewMethod(type, &method)
                            : PyCFunction_NewEx(&method, place.ptr(), module.ptr())));
}

}  // namespace ampfast
