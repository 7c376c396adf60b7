// The Python face of the core: what its parts add to the module, and how they read arguments.
#pragma once

#include <type_traits>

#include "gradients.h"
#include "scale.h"

namespace ampfast {

// Calls over gradients and the update of a scale; the stub _C.pyi describes them.
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

// Memory of a tensor, whose dtype is checked too; null without one.
template <class T>
T* data_of(const at::Tensor* tensor, const char* name, at::Device device, int64_t numel = 1) {
  if (tensor == nullptr) {
    return nullptr;
  }
  using Value = std::remove_const_t<T>;
  constexpr at::ScalarType dtype = c10::CppTypeToScalarType<Value>::value;
  TORCH_CHECK(tensor->scalar_type() == dtype && tensor->device() == device && is_dense(*tensor) &&
                  tensor->numel() == numel && tensor->is_contiguous(),
              name, " must be a contiguous tensor of ", numel, " elements of ", dtype, " on ",
              device);
  TORCH_CHECK(has_memory(*tensor), "the memory of ", name, " was freed or resized");
  return tensor->data_ptr<Value>();
}

// A tensor, or null for None.
const at::Tensor* tensor_of(PyObject* object);

// Python's numbers.
double float_of(PyObject* object);
int64_t int_of(PyObject* object);

// A gradient list, on that device where one is given.
const GradList& list_of(PyObject* object, std::optional<at::Device> device = std::nullopt);

// Throws unless `object` is a tuple.
void require_tuple(PyObject* object, const char* name);

// A named tuple's fields by their place, borrowed.
class Fields {
 public:
  Fields(PyObject* tuple, Py_ssize_t count, const char* name) : tuple_(tuple) {
    TORCH_CHECK_TYPE(PyTuple_Check(tuple) && PyTuple_GET_SIZE(tuple) == count, name);
  }
  PyObject* tuple() const { return tuple_; }
  PyObject* operator[](int place) const { return PyTuple_GET_ITEM(tuple_, place); }
  const at::Tensor* tensor(int place) const { return tensor_of((*this)[place]); }
  bool is_true(int place) const { return (*this)[place] == Py_True; }

 private:
  PyObject* tuple_;
};

// One pass over gradients: Python's `Pass`.
struct Pass : Fields {
  enum { kWrite, kHow, kFactor, kFoundInf, kAccumulate, kCoefficient, kSums, kMarks, kNow };
  enum { kFactorCopy = kNow + 1, kEnding, kClip, kFields };
  explicit Pass(PyObject* tuple) : Fields(tuple, kFields, "expected a Pass") {}

  const bool write = is_true(kWrite);
  const bool accumulate = is_true(kAccumulate);
  const Factor how = factor_of((*this)[kHow]);

 private:
  static Factor factor_of(PyObject* object);
};

// A clipping's fields: Python's `Clip`.
struct ClipTuple : Fields {
  enum { kSums, kMaxNorm, kLargest, kNorm, kCoefficient, kScale, kDivisor, kFoundInf, kSkipAbove };
  enum { kAcceptedNorms = kSkipAbove + 1, kFields };
  explicit ClipTuple(PyObject* tuple) : Fields(tuple, kFields, "expected a Clip") {}
};

AcceptedNorms accepted_norms_of(const at::Tensor* words, at::Device device);

// Overflow counters, rows of kMarkWords, and the completed steps of a pass; null without any.
struct Marks {
  int64_t* words = nullptr;
  int64_t parameters = 0;
  const int64_t* now = nullptr;
};
Marks marks_of(const Pass& pass, at::Device device);

// A clipping, as Python's `Clip`.
Clip clip_of(PyObject* tuple, at::Device device);

// The fields of Python's `Update`, in order.
enum UpdateField { kScale, kTracker, kFlags, kGrowth, kBackoff, kInterval, kState, kNorm };

// An update of Python's, without its flags; nothing where the kernels do not know its tensors, the
// flags among them, and its numbers exactly.
std::optional<Update> update_of(PyObject* tuple);

// Functions with CPython's own convention, since a cold call through pybind costs as much as all
// the rest. Null without an error is None, and every exception of C++ is one of Python.
template <PyObject* (*kBody)(PyObject* const*), Py_ssize_t kArguments>
PyObject* call(PyObject*, PyObject* const* args, Py_ssize_t count) {
  if (count != kArguments) {
    return PyErr_Format(PyExc_TypeError, "takes %zd arguments, got %zd", kArguments, count);
  }
  try {
    PyObject* result = kBody(args);
    return result != nullptr || PyErr_Occurred() != nullptr ? result : Py_NewRef(Py_None);
  } catch (const std::exception&) {
    torch::translate_exception_to_python(std::current_exception());
    return nullptr;
  }
}

template <PyObject* (*kBody)(PyObject* const*), Py_ssize_t kArguments>
void add_call(py::module_& m, const char* name) {
  // Through void, as CPython's own casts go: the flag tells the true type.
  void* function = reinterpret_cast<void*>(&call<kBody, kArguments>);
  static PyMethodDef method[] = {
      {name, reinterpret_cast<PyCFunction>(function), METH_FASTCALL, nullptr}, {}};
  if (PyModule_AddFunctions(m.ptr(), method) != 0) {
    throw py::error_already_set();
  }
}

}  // namespace ampfast
