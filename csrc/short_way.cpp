// Called with CPython's own convention, since a cold call through pybind costs as much as all the
// rest. Each function returns None, before any side effect, where the general way must look. Where
// Python has no global lock, that is always.
#include <torch/csrc/Device.h>
#include <torch/csrc/autograd/python_variable.h>

#include <cmath>
#include <optional>
#include <utility>
#include <vector>

#include "bindings.h"
#include "cpu/multi_tensor.h"

namespace ampfast {
namespace {

constexpr uint64_t kCpu = device_bit(at::kCPU);

// Holds the gradients while other threads may have the interpreter.
template <class Kernel>
void run(const ShortWalk& walk, const Kernel& kernel) {
  std::vector<at::Tensor> owners;
  if (walk.list.elements() >= kElementsWorthReleasing) {
    for (const at::Tensor* grad : walk.grads) {
      owners.push_back(*grad);
    }
  }
  run(walk.list, kernel);
}

// A 0-dim tensor on the CPU that kernels read or write, or null.
const at::Tensor* scalar_of(PyObject* object, at::ScalarType dtype) {
  if (!THPVariable_CheckExact(object)) {
    return nullptr;
  }
  const at::Tensor& tensor = THPVariable_Unpack(object);
  return tensor.dim() == 0 && is_scalar(tensor, dtype, kCpu) ? &tensor : nullptr;
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

// The mark of an optimizer as unscaled, with a flag that says "skip" until its pass is over:
// whatever ends that one early, nobody steps on gradients that are half written. Made before the
// walk, and with what it replaces kept until after the pass: what makes or drops objects may run
// Python, which could take gradients away.
class Mark {
 public:
  explicit Mark(PyObject* state) : state_(state), flag_(new_scalar<float>(1)) {
    static PyObject* const device = THPDevice_New(at::Device(at::kCPU));
    set(flags_.ptr(), device, wrapped(flag_).ptr());
    for (PyObject* name : {found_name(), stage_name()}) {
      if (PyObject* before = PyDict_GetItemWithError(state, name)) {
        before_.push_back(py::reinterpret_borrow<py::object>(before));
      }
    }
  }

  void put(PyObject* unscaled) const {
    set(state_, found_name(), flags_.ptr());
    set(state_, stage_name(), unscaled);
  }

  float* flag() const { return flag_.mutable_data_ptr<float>(); }

 private:
  static PyObject* stage_name() {
    static PyObject* const name = PyUnicode_InternFromString("stage");
    return name;
  }

  PyObject* state_;
  at::Tensor flag_;
  py::dict flags_;
  std::vector<py::object> before_;
};

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

// CPython gives a class another version when it, or a base, gets an attribute; 0 is none.
unsigned int version_of(PyTypeObject* type) {
#if PY_VERSION_HEX < 0x030b0000
  return PyType_HasFeature(type, Py_TPFLAGS_VALID_VERSION_TAG) != 0 ? type->tp_version_tag : 0;
#else
  return type->tp_version_tag;
#endif
}

// Tells whether a class has these methods, too; asked anew only when the class changed.
bool has_original_hooks(PyTypeObject* type) {
  static PyTypeObject* known = nullptr;
  static unsigned int known_version = 0;
  if (type == known && known_version != 0 && version_of(type) == known_version) {
    return true;
  }
  if (type->tp_getattro != PyObject_GenericGetAttr) {
    return false;
  }
  // What is read from an instance's own dict must not be a property of its class.
  for (const char* own : {"_enabled", "_scale", "_growth_tracker", "_per_optimizer_states"}) {
    if (PyObject_HasAttrString(reinterpret_cast<PyObject*>(type), own) != 0) {
      return false;
    }
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
  known_version = version_of(type);
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

// Gradients that a pass will write, and the factor that unscales them.
struct Unscaling {
  ShortWalk walk;
  float inv_scale;
};

// From the first arguments of the next two functions.
std::optional<Unscaling> unscaling(PyObject* const* args) {
  const at::Tensor* scale = scalar_of(args[1], at::kFloat);
  if (scale == nullptr || !PyDict_CheckExact(args[3])) {
    return std::nullopt;
  }
  std::optional<ShortWalk> walk = short_walk(args[0], args[2] == Py_True, true);
  if (!walk) {
    return std::nullopt;
  }
  return Unscaling{*std::move(walk), inverse_scale(*scale->const_data_ptr<float>())};
}

// unscale_groups(param_groups, scale, allow_fp16, state, unscaled) -> whether the step is skipped
PyObject* unscale_groups(PyObject* const* args) {
  if (!PyDict_CheckExact(args[3])) {
    return nullptr;
  }
  const Mark mark(args[3]);
  const std::optional<Unscaling> work = unscaling(args);
  if (!work) {
    return nullptr;
  }
  mark.put(args[4]);
  float* flag = mark.flag();
  run(work->walk, [&] { *flag = cpu::unscale(work->walk.list, work->inv_scale) ? 1 : 0; });
  return Py_NewRef(*flag != 0 ? Py_True : Py_False);
}

// clip_groups(param_groups, scale, allow_fp16, state, unscaled, max_norm, largest) -> norm
PyObject* clip_groups(PyObject* const* args) {
  if (!PyDict_CheckExact(args[3])) {
    return nullptr;
  }
  const Mark mark(args[3]);
  const std::optional<Unscaling> work = unscaling(args);
  if (!work) {
    return nullptr;
  }
  const GradList& list = work->walk.list;
  const at::Tensor norm = list.has_float64() ? new_scalar<double>(0) : new_scalar<float>(0);
  double row[2] = {};
  double coefficient = 1;
  Clip clip;
  clip.norms = row;
  clip.rows = 1;
  clip.max_norm = PyFloat_AsDouble(args[5]);
  clip.largest = args[6] == Py_True;
  clip.coefficient = &coefficient;
  if (list.has_float64()) {
    clip.wide_norm = norm.mutable_data_ptr<double>();
  } else {
    clip.norm = norm.mutable_data_ptr<float>();
  }
  mark.put(args[4]);
  float* flag = mark.flag();
  for (const at::Tensor* grad : work->walk.grads) {
    grad->unsafeGetTensorImpl()->bump_version();
  }
  run(work->walk, [&] {
    const cpu::Norms norms = cpu::norms(list, work->inv_scale);
    row[0] = norms.sum_of_squares;
    row[1] = norms.absolute_maximum;
    apply(clip);
    cpu::unscale(list, work->inv_scale, nullptr, coefficient);
    *flag = std::isfinite(norms.absolute_maximum) ? 0 : 1;
  });
  return wrapped(norm).release().ptr();
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

// any_found(flags) -> bool
PyObject* any_found(PyObject* const* args) {
  const std::optional<double> sum = sum_of(args[0]);
  return sum ? Py_NewRef(*sum != 0 ? Py_True : Py_False) : nullptr;
}

// update_scale(states, scale, growth_tracker, growth_factor, backoff_factor, growth_interval,
// words, norm) -> True; `states` as the scaler has them by optimizer, `norm` may be None.
PyObject* update_scale(PyObject* const* args) {
  static PyObject* const agreement_name = PyUnicode_InternFromString("agreement");
  const at::Tensor* scale = scalar_of(args[1], at::kFloat);
  const at::Tensor* tracker = scalar_of(args[2], at::kInt);
  const at::Tensor* norm = args[7] == Py_None ? nullptr : scalar_of(args[7], at::kFloat);
  if (scale == nullptr || tracker == nullptr || (norm == nullptr && args[7] != Py_None) ||
      !PyDict_Check(args[0]) || !PyFloat_CheckExact(args[3]) || !PyFloat_CheckExact(args[4]) ||
      !PyLong_CheckExact(args[5]) || !THPVariable_CheckExact(args[6])) {
    return nullptr;
  }
  int overflow = 0;
  const long long interval = PyLong_AsLongLongAndOverflow(args[5], &overflow);
  const std::optional<Update> update =
      update_of(*scale, *tracker, &THPVariable_Unpack(args[6]), norm, PyFloat_AS_DOUBLE(args[3]),
                PyFloat_AS_DOUBLE(args[4]), interval);
  if (overflow != 0 || !update) {
    return nullptr;
  }
  bool found = false;
  bool checked = false;
  PyObject *key = nullptr, *state = nullptr;
  for (Py_ssize_t place = 0; PyDict_Next(args[0], &place, &key, &state) != 0;) {
    PyObject* flags =
        PyDict_CheckExact(state) ? PyDict_GetItemWithError(state, found_name()) : nullptr;
    const std::optional<double> sum = flags == nullptr ? std::nullopt : sum_of(flags);
    // Ranks may still have to agree on it.
    if (!sum || PyDict_GetItemWithError(state, agreement_name) != nullptr) {
      return nullptr;
    }
    found |= *sum != 0;
    checked |= PyDict_GET_SIZE(flags) != 0;
  }
  if (!checked) {
    return nullptr;
  }
  apply(*update, found);
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
