// Called with CPython's own convention, since a cold call through pybind costs as much as all the
// rest. Each function returns None, before any side effect, where the general way must look. Where
// Python has no global lock, that is always.
#include "short_way.h"

#include <ATen/EmptyTensor.h>
#include <torch/csrc/Device.h>
#include <torch/csrc/autograd/python_variable.h>

#include <cmath>
#include <optional>
#include <utility>
#include <vector>

#include "cpu/multi_tensor.h"
#include "gradients.h"
#include "scale.h"

namespace ampfast {
namespace {

namespace py = pybind11;

constexpr uint64_t kCpu = device_bit(at::kCPU);

// From this many elements on, other threads may have the interpreter meanwhile.
constexpr int64_t kElementsWorthReleasing = 8 * kChunk;

// Runs kernels, without the interpreter if that takes long.
template <class Kernel>
void run(const ShortWalk& walk, const Kernel& kernel) {
  if (walk.list.elements() < kElementsWorthReleasing) {
    kernel();
    return;
  }
  std::vector<at::Tensor> owners;
  owners.reserve(walk.grads.size());
  for (const at::Tensor* grad : walk.grads) {
    owners.push_back(*grad);
  }
  const py::gil_scoped_release release;
  kernel();
}

// A 0-dim tensor on the CPU that kernels read or write, or null.
const at::Tensor* scalar_of(PyObject* object, at::ScalarType dtype) {
  if (!THPVariable_CheckExact(object)) {
    return nullptr;
  }
  const at::Tensor& tensor = THPVariable_Unpack(object);
  return tensor.dim() == 0 && is_scalar(tensor, dtype, kCpu) ? &tensor : nullptr;
}

template <class T>
at::Tensor new_scalar(T value) {
  at::Tensor tensor = at::detail::empty_cpu({}, c10::CppTypeToScalarType<T>::value);
  *tensor.mutable_data_ptr<T>() = value;
  return tensor;
}

void set(PyObject* dict, PyObject* key, PyObject* value) {
  if (PyDict_SetItem(dict, key, value) != 0) {
    throw py::error_already_set();
  }
}

py::object wrapped(const at::Tensor& tensor) {
  PyObject* object = THPVariable_Wrap(tensor);
  if (object == nullptr) {
    throw py::error_already_set();
  }
  return py::reinterpret_steal<py::object>(object);
}

PyObject* found_name() {
  static PyObject* const name = PyUnicode_InternFromString("found_inf_per_device");
  return name;
}

// Puts a flag into an optimizer's state and marks it as unscaled. The flag says "skip" until its
// pass is over: whatever ends that one early, nobody steps on gradients that are half written.
float* mark_unscaled(PyObject* state, PyObject* unscaled) {
  static PyObject* const stage_name = PyUnicode_InternFromString("stage");
  static PyObject* const device = THPDevice_New(at::Device(at::kCPU));
  const at::Tensor flag = new_scalar<float>(1);
  const py::dict flags;
  set(flags.ptr(), device, wrapped(flag).ptr());
  set(state, found_name(), flags.ptr());
  set(state, stage_name, unscaled);
  return flag.mutable_data_ptr<float>();
}

// The sum of the flags in a dict by device, as torch takes it; nothing if one is unusual.
std::optional<double> sum_of(PyObject* flags) {
  if (!PyDict_CheckExact(flags)) {
    return std::nullopt;
  }
  double sum = 0;
  PyObject *device = nullptr, *flag = nullptr;
  for (Py_ssize_t place = 0; PyDict_Next(flags, &place, &device, &flag) != 0;) {
    const at::Tensor* tensor = scalar_of(flag, at::kFloat);
    if (tensor == nullptr) {
      return std::nullopt;
    }
    sum += *tensor->const_data_ptr<float>();
  }
  return sum;
}

// Methods that decide what a call does, by name, as the class of scalers has them.
PyObject* hooks = nullptr;

// watch_hooks(hooks)
PyObject* watch_hooks(PyObject* const* args) {
  Py_XDECREF(hooks);
  hooks = Py_NewRef(args[0]);
  return nullptr;
}

// Tells whether a class has these methods, too; asked anew only when the class changed.
bool has_original_hooks(PyTypeObject* type) {
  static PyTypeObject* known = nullptr;
  static unsigned int known_version = 0;
  // CPython gives a class another version when it, or a base, gets an attribute; 0 is none.
  const bool has_version = (type->tp_flags & Py_TPFLAGS_VALID_VERSION_TAG) != 0;
  if (has_version && type == known && known_version != 0 && type->tp_version_tag == known_version) {
    return true;
  }
  PyObject *name = nullptr, *original = nullptr;
  for (Py_ssize_t place = 0; PyDict_Next(hooks, &place, &name, &original) != 0;) {
    const py::object method = py::reinterpret_steal<py::object>(
        PyObject_GetAttr(reinterpret_cast<PyObject*>(type), name));
    if (method.ptr() != original) {
      PyErr_Clear();
      return false;
    }
  }
  known = type;
  known_version = type->tp_version_tag;
  return true;
}

// usual_scale(scaler) -> scale
PyObject* usual_scale(PyObject* const* args) {
  static PyObject* const way = PyUnicode_InternFromString("_takes_short_way");
  static PyObject* const enabled = PyUnicode_InternFromString("_enabled");
  static PyObject* const scale_name = PyUnicode_InternFromString("_scale");
  static PyObject* const tracker_name = PyUnicode_InternFromString("_growth_tracker");
  const py::object own =
      py::reinterpret_steal<py::object>(PyObject_GenericGetDict(args[0], nullptr));
  if (!own || PyDict_GetItemWithError(own.ptr(), way) != Py_True ||
      PyDict_GetItemWithError(own.ptr(), enabled) != Py_True || hooks == nullptr ||
      !has_original_hooks(Py_TYPE(args[0]))) {
    PyErr_Clear();
    return nullptr;
  }
  PyObject *name = nullptr, *original = nullptr;
  for (Py_ssize_t place = 0; PyDict_Next(hooks, &place, &name, &original) != 0;) {
    if (PyDict_GetItemWithError(own.ptr(), name) != nullptr) {
      return nullptr;
    }
  }
  PyObject* scale = PyDict_GetItemWithError(own.ptr(), scale_name);
  PyObject* tracker = PyDict_GetItemWithError(own.ptr(), tracker_name);
  const bool usual = scale != nullptr && scalar_of(scale, at::kFloat) != nullptr &&
                     tracker != nullptr && tracker != Py_None;
  return usual ? Py_NewRef(scale) : nullptr;
}

// record(entries, optimizer, value) -> True, where `entries` has a weak reference to it by its id
PyObject* record(PyObject* const* args) {
  const py::object key = py::reinterpret_steal<py::object>(PyLong_FromVoidPtr(args[1]));
  PyObject* entry = key ? PyDict_GetItemWithError(args[0], key.ptr()) : nullptr;
  PyObject* reference = entry == nullptr ? nullptr : PyTuple_GET_ITEM(entry, 0);
  if (reference == nullptr || !PyWeakref_CheckRef(reference)) {
    return nullptr;
  }
  const py::object referent = py::reinterpret_steal<py::object>(PyObject_CallNoArgs(reference));
  if (referent.ptr() != args[1]) {
    return nullptr;
  }
  const py::object changed = py::reinterpret_steal<py::object>(PyTuple_Pack(2, reference, args[2]));
  if (!changed) {
    return nullptr;
  }
  set(args[0], key.ptr(), changed.ptr());
  return Py_NewRef(Py_True);
}

// unscale_groups(param_groups, scale, allow_fp16, state, unscaled) -> whether the step is skipped
PyObject* unscale_groups(PyObject* const* args) {
  const at::Tensor* scale = scalar_of(args[1], at::kFloat);
  if (scale == nullptr || !PyDict_CheckExact(args[3])) {
    return nullptr;
  }
  const std::optional<ShortWalk> walk = short_walk(args[0], args[2] == Py_True, true);
  if (!walk) {
    return nullptr;
  }
  const float inv_scale = inverse_scale(*scale->const_data_ptr<float>());
  float* flag = mark_unscaled(args[3], args[4]);
  run(*walk, [&] { *flag = cpu::unscale(walk->list, inv_scale) ? 1 : 0; });
  return Py_NewRef(*flag != 0 ? Py_True : Py_False);
}

// check_groups(param_groups, grad_scale) -> (found_inf, grad_scale), new tensors
PyObject* check_groups(PyObject* const* args) {
  const at::Tensor* scale = scalar_of(args[1], at::kFloat);
  if (scale == nullptr) {
    return nullptr;
  }
  const std::optional<ShortWalk> walk = short_walk(args[0], true, false);
  if (!walk) {
    return nullptr;
  }
  const float divisor = *scale->const_data_ptr<float>();
  bool found = false;
  run(*walk, [&] { found = cpu::check(walk->list, Use::kDivide, divisor); });
  return PyTuple_Pack(2, wrapped(new_scalar<float>(found ? 1 : 0)).ptr(),
                      wrapped(new_scalar(divisor)).ptr());
}

// clip_groups(param_groups, scale, allow_fp16, state, unscaled, max_norm, largest) -> norm
PyObject* clip_groups(PyObject* const* args) {
  const at::Tensor* scale = scalar_of(args[1], at::kFloat);
  if (scale == nullptr || !PyDict_CheckExact(args[3])) {
    return nullptr;
  }
  const std::optional<ShortWalk> walk = short_walk(args[0], args[2] == Py_True, true);
  if (!walk) {
    return nullptr;
  }
  const float inv_scale = inverse_scale(*scale->const_data_ptr<float>());
  const at::Tensor norm = walk->list.has_float64() ? new_scalar<double>(0) : new_scalar<float>(0);
  py::object result = wrapped(norm);
  double row[2] = {};
  double coefficient = 1;
  Clip clip;
  clip.norms = row;
  clip.rows = 1;
  clip.max_norm = PyFloat_AsDouble(args[5]);
  clip.largest = args[6] == Py_True;
  clip.coefficient = &coefficient;
  if (walk->list.has_float64()) {
    clip.wide_norm = norm.mutable_data_ptr<double>();
  } else {
    clip.norm = norm.mutable_data_ptr<float>();
  }
  float* flag = mark_unscaled(args[3], args[4]);
  for (const at::Tensor* grad : walk->grads) {
    grad->unsafeGetTensorImpl()->bump_version();
  }
  run(*walk, [&] {
    const cpu::Norms norms = cpu::norms(walk->list, inv_scale);
    row[0] = norms.sum_of_squares;
    row[1] = norms.absolute_maximum;
    apply(clip);
    cpu::unscale(walk->list, inv_scale, nullptr, coefficient);
    *flag = std::isfinite(norms.absolute_maximum) ? 0 : 1;
  });
  return result.release().ptr();
}

// any_found(flags) -> bool
PyObject* any_found(PyObject* const* args) {
  const std::optional<double> sum = sum_of(args[0]);
  return sum ? Py_NewRef(*sum != 0 ? Py_True : Py_False) : nullptr;
}

// update_scale(states, scale, growth_tracker, growth_factor, backoff_factor, growth_interval,
// words, norm) -> True; `states` as the scaler has them by optimizer, `norm` may be None.
PyObject* update_scale(PyObject* const* args) {
  const at::Tensor* scale = scalar_of(args[1], at::kFloat);
  const at::Tensor* tracker = scalar_of(args[2], at::kInt);
  const at::Tensor* norm = args[7] == Py_None ? nullptr : scalar_of(args[7], at::kFloat);
  if (scale == nullptr || scale->is_inference() || scale->requires_grad() || tracker == nullptr ||
      (norm == nullptr && args[7] != Py_None) || !PyDict_Check(args[0]) ||
      !PyFloat_CheckExact(args[3]) || !PyFloat_CheckExact(args[4]) || !PyLong_CheckExact(args[5]) ||
      !THPVariable_CheckExact(args[6])) {
    return nullptr;
  }
  const at::Tensor& words = THPVariable_Unpack(args[6]);
  int overflow = 0;
  const long long interval = PyLong_AsLongLongAndOverflow(args[5], &overflow);
  if (overflow != 0 || words.scalar_type() != at::kLong || words.numel() != kStateWords ||
      !is_plain(words, kCpu)) {
    return nullptr;
  }
  bool found = false;
  bool checked = false;
  PyObject *key = nullptr, *state = nullptr;
  for (Py_ssize_t place = 0; PyDict_Next(args[0], &place, &key, &state) != 0;) {
    PyObject* flags =
        PyDict_CheckExact(state) ? PyDict_GetItemWithError(state, found_name()) : nullptr;
    const std::optional<double> sum = flags == nullptr ? std::nullopt : sum_of(flags);
    if (!sum) {
      return nullptr;
    }
    found |= *sum != 0;
    checked |= PyDict_GET_SIZE(flags) != 0;
  }
  if (!checked) {
    return nullptr;
  }
  Update update;
  update.scale = scale->mutable_data_ptr<float>();
  update.growth_tracker = tracker->mutable_data_ptr<int32_t>();
  update.state = words.mutable_data_ptr<int64_t>();
  update.norm = norm == nullptr ? nullptr : norm->const_data_ptr<float>();
  update.growth_factor = PyFloat_AS_DOUBLE(args[3]);
  update.backoff_factor = PyFloat_AS_DOUBLE(args[4]);
  update.growth_interval = interval;
  apply(update, found);
  scale->unsafeGetTensorImpl()->bump_version();
  return Py_NewRef(Py_True);
}

// Calls a body with the arguments of a function: null without an error is None, and every
// exception of C++ is one of Python.
template <PyObject* (*kBody)(PyObject* const*), Py_ssize_t kArguments>
PyObject* call(PyObject*, PyObject* const* args, Py_ssize_t count) {
  if (count != kArguments) {
    return PyErr_Format(PyExc_TypeError, "takes %zd arguments, got %zd", kArguments, count);
  }
#ifndef Py_GIL_DISABLED
  try {
    PyObject* result = kBody(args);
    if (result != nullptr || PyErr_Occurred() != nullptr) {
      return result;
    }
  } catch (py::error_already_set& error) {
    error.restore();
    return nullptr;
  } catch (const std::exception& error) {
    PyErr_SetString(PyExc_RuntimeError, error.what());
    return nullptr;
  }
#endif
  return Py_NewRef(Py_None);
}

template <PyObject* (*kBody)(PyObject* const*), Py_ssize_t kArguments>
PyMethodDef method(const char* name) {
  // Through void, as CPython's own casts go: the flag tells the true type.
  void* function = reinterpret_cast<void*>(&call<kBody, kArguments>);
  return {name, reinterpret_cast<PyCFunction>(function), METH_FASTCALL, nullptr};
}

}  // namespace

void bind_short_way(py::module_& m) {
  static PyMethodDef methods[] = {method<watch_hooks, 1>("watch_hooks"),
                                  method<usual_scale, 1>("usual_scale"),
                                  method<record, 3>("record"),
                                  method<unscale_groups, 5>("unscale_groups"),
                                  method<check_groups, 2>("check_groups"),
                                  method<clip_groups, 7>("clip_groups"),
                                  method<any_found, 1>("any_found"),
                                  method<update_scale, 8>("update_scale"),
                                  {nullptr, nullptr, 0, nullptr}};
  if (PyModule_AddFunctions(m.ptr(), methods) != 0) {
    throw py::error_already_set();
  }
}

}  // namespace ampfast
