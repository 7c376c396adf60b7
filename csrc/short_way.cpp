// The raw calls of the short way. Each returns None, before any side effect, where the general way
// must look; where Python has no global lock, that is always.
#include <ATen/ops/empty.h>
#include <torch/csrc/Device.h>
#include <torch/csrc/autograd/python_variable.h>

#include <cmath>
#include <optional>
#include <utility>
#include <vector>

#include "bindings.h"
#include "cpu/multi_tensor.h"
#include "device_table.h"
#include "master_weights.h"

namespace ampfast {
namespace {

// A 0-dim tensor that kernels read or write, or null.
const at::Tensor* scalar_of(PyObject* object, at::ScalarType dtype,
                            uint64_t devices = device_bit(at::kCPU)) {
  if (!THPVariable_CheckExact(object)) {
    return nullptr;
  }
  const at::Tensor& tensor = THPVariable_Unpack(object);
  return tensor.dim() == 0 && is_scalar(tensor, dtype, devices) ? &tensor : nullptr;
}

#ifdef Py_GIL_DISABLED
constexpr bool kHasLock = false;
#else
constexpr bool kHasLock = true;
#endif

py::dict dict_of(PyObject* dict) { return py::reinterpret_borrow<py::dict>(dict); }

// Attributes of a scaler and keys of its entries for optimizers.
struct Names {
  PyObject* short_way = PyUnicode_InternFromString("_short_way");
  PyObject* riding = PyUnicode_InternFromString("_riding");
  PyObject* enabled = PyUnicode_InternFromString("_enabled");
  PyObject* scale = PyUnicode_InternFromString("_scale");
  PyObject* growth_tracker = PyUnicode_InternFromString("_growth_tracker");
  PyObject* growth_factor = PyUnicode_InternFromString("_growth_factor");
  PyObject* backoff_factor = PyUnicode_InternFromString("_backoff_factor");
  PyObject* growth_interval = PyUnicode_InternFromString("_growth_interval");
  PyObject* states = PyUnicode_InternFromString("_per_optimizer_states");
  PyObject* default_factory = PyUnicode_InternFromString("default_factory");
  PyObject* stage = PyUnicode_InternFromString("stage");
  PyObject* found_inf = PyUnicode_InternFromString("found_inf_per_device");
  PyObject* agreement = PyUnicode_InternFromString("agreement");
};

const Names& names() {
  static const Names names;
  return names;
}

// Borrowed; null if there is none.
PyObject* item(PyObject* dict, PyObject* name) { return PyDict_GetItemWithError(dict, name); }

// The mark of an optimizer as unscaled, with a flag that says "skip" until its pass is over:
// whatever ends that one early, nobody steps on gradients that are half written. Made before the
// walk, and with what it replaces kept until after the pass: what makes or drops objects may run
// Python, which could take gradients away.
class Mark {
 public:
  explicit Mark(PyObject* state) : state_(state), flag_(new_scalar<float>(1)) {
    static PyObject* const device = THPDevice_New(at::Device(at::kCPU));
    flags_[device] = flag_;
    before_[0] = py::reinterpret_borrow<py::object>(item(state, names().found_inf));
    before_[1] = py::reinterpret_borrow<py::object>(item(state, names().stage));
  }

  // Returns the flag.
  float* put(PyObject* unscaled) const {
    dict_of(state_)[names().found_inf] = flags_;
    dict_of(state_)[names().stage] = unscaled;
    return flag_.mutable_data_ptr<float>();
  }

 private:
  PyObject* state_;
  at::Tensor flag_;
  py::dict flags_;
  py::object before_[2];
};

// Takes the flags in a dict by key; tells whether none is unusual.
template <class Take>
bool take_flags(PyObject* flags, const Take& take) {
  if (!PyDict_CheckExact(flags)) {
    return false;
  }
  PyObject *key = nullptr, *flag = nullptr;
  for (Py_ssize_t place = 0; PyDict_Next(flags, &place, &key, &flag) != 0;) {
    if (!take(flag)) {
      return false;
    }
  }
  return true;
}

// Adds flags on the CPU, as torch does.
template <class Sum>
auto adding(Sum& sum) {
  return [&sum](PyObject* flag) {
    const at::Tensor* tensor = scalar_of(flag, at::kFloat);
    sum += tensor != nullptr ? *tensor->const_data_ptr<float>() : 0;
    return tensor != nullptr;
  };
}

// Methods that decide what a call does, by name, as the class of scalers has them; the factory of
// entries for optimizers, and one that it made; the class of optimizers whose gradients are cast.
PyObject* hooks = nullptr;
PyObject* factory = nullptr;
PyObject* new_entry = nullptr;
PyObject* casting = nullptr;

// watch_hooks(hooks, factory, new_entry, casting)
PyObject* watch_hooks(PyObject* const* args) {
  for (PyObject** watched : {&hooks, &factory, &new_entry, &casting}) {
    Py_XDECREF(std::exchange(*watched, Py_NewRef(*args++)));
  }
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

// The own dict of a scaler for which the short way may do; null for another one, and where Python
// has no global lock.
py::object usual_dict(PyObject* scaler) {
  if (!kHasLock) {
    return {};
  }
  py::object held = py::reinterpret_steal<py::object>(PyObject_GenericGetDict(scaler, nullptr));
  PyObject* own = held.ptr();
  const auto has = [own](PyObject* name) {
    PyObject* value = item(own, name);
    return value != nullptr && value != Py_None;
  };
  if (own == nullptr || !has(names().short_way) || has(names().riding) ||
      item(own, names().enabled) != Py_True || hooks == nullptr ||
      !has_original_hooks(Py_TYPE(scaler))) {
    PyErr_Clear();
    return {};
  }
  PyObject *name = nullptr, *original = nullptr;
  for (Py_ssize_t place = 0; PyDict_Next(hooks, &place, &name, &original) != 0;) {
    if (item(own, name) != nullptr) {
      return {};
    }
  }
  PyObject* scale = item(own, names().scale);
  const bool is_usual = scale != nullptr &&
                        scalar_of(scale, at::kFloat, kKernelDevices) != nullptr &&
                        has(names().growth_tracker);
  return is_usual ? held : py::object();
}

// The casts of an optimizer's gradients, or None.
py::object casts_of_optimizer(PyObject* optimizer) {
  if (PyType_IsSubtype(Py_TYPE(optimizer), reinterpret_cast<PyTypeObject*>(casting)) == 0) {
    return py::none();
  }
  return py::reinterpret_borrow<py::object>(optimizer).attr("_masters").attr("casts");
}

// usual_entry(scaler, optimizer) -> (scale, entry, casts): the optimizer's entry, made if there is
// none; without a call to its factory, which cold takes as long as all else here.
PyObject* usual_entry(PyObject* const* args) {
  const py::object own = usual_dict(args[0]);
  PyObject* states = own ? item(own.ptr(), names().states) : nullptr;
  if (states == nullptr || !PyDict_Check(states)) {
    return nullptr;
  }
  const py::object casts = casts_of_optimizer(args[1]);
  const py::object key = py::reinterpret_steal<py::object>(PyLong_FromVoidPtr(args[1]));
  PyObject* entry = key ? item(states, key.ptr()) : nullptr;
  py::object made;
  if (entry == nullptr) {
    const py::object its_factory =
        py::reinterpret_steal<py::object>(PyObject_GetAttr(states, names().default_factory));
    made = py::reinterpret_steal<py::object>(PyDict_Copy(new_entry));
    if (its_factory.ptr() != factory || !key || !made) {
      PyErr_Clear();
      return nullptr;
    }
    made[names().found_inf] = py::dict();
    dict_of(states)[key] = made;
    entry = made.ptr();
  }
  return PyTuple_Pack(3, item(own.ptr(), names().scale), entry, casts.ptr());
}

// record(entries, optimizer, value) -> True, where `entries` has a weak reference to it by its id
PyObject* record(PyObject* const* args) {
  const py::object key = py::reinterpret_steal<py::object>(PyLong_FromVoidPtr(args[1]));
  PyObject* entry = key && kHasLock ? item(args[0], key.ptr()) : nullptr;
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
  dict_of(args[0])[key] = changed;
  return Py_NewRef(Py_True);
}

// A pass that will write gradients: the mark of their optimizer, not yet put, their factor, and
// their casts, or null.
struct Unscaling {
  Mark mark;
  ShortWalk walk;
  float inv_scale;
  Casts* casts;

  template <class Kernel>
  void run(const Kernel& kernel) const {
    ampfast::run(walk.list, kernel);
    if (casts != nullptr) {
      casts->finish();
    }
  }
};

// From the first arguments of the next two functions.
std::optional<Unscaling> unscaling(PyObject* const* args) {
  const at::Tensor* scale = scalar_of(args[1], at::kFloat);
  if (scale == nullptr || !PyDict_CheckExact(args[3])) {
    return std::nullopt;
  }
  Mark mark(args[3]);
  Casts* casts = casts_of(args[5]);
  const bool allow_fp16 = args[2] == Py_True || casts != nullptr;
  std::optional<ShortWalk> walk = short_walk(args[0], at::kCPU, allow_fp16, true, casts);
  if (!walk) {
    return std::nullopt;
  }
  const float inv_scale = inverse_scale(*scale->const_data_ptr<float>());
  return Unscaling{std::move(mark), *std::move(walk), inv_scale, casts};
}

// unscale_groups(param_groups, scale, allow_fp16, state, unscaled, casts) -> whether the step is
// skipped
PyObject* unscale_groups(PyObject* const* args) {
  const std::optional<Unscaling> work = unscaling(args);
  if (!work) {
    return nullptr;
  }
  const GradList& list = work->walk.list;
  float* flag = work->mark.put(args[4]);
  work->run([&] { *flag = std::isfinite(cpu::unscale(list, work->inv_scale)) ? 0 : 1; });
  return Py_NewRef(*flag != 0 ? Py_True : Py_False);
}

// clip_groups(param_groups, scale, allow_fp16, state, unscaled, casts, max_norm, largest,
// skip_above, taken) -> norm; without spikes `skip_above` is None, and `taken` may be.
PyObject* clip_groups(PyObject* const* args) {
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
  clip.max_norm = PyFloat_AsDouble(args[6]);
  clip.largest = args[7] == Py_True;
  clip.coefficient = &coefficient;
  if (list.has_float64()) {
    clip.wide_norm = norm.mutable_data_ptr<double>();
  } else {
    clip.norm = norm.mutable_data_ptr<float>();
  }
  float found = 0;
  if (args[8] != Py_None) {
    clip.found_inf = &found;
    clip.skip_above = PyFloat_AsDouble(args[8]);
    if (args[9] != Py_None) {
      clip.taken = taken_of(THPVariable_Unpack(args[9]), at::kCPU);
    }
  }
  float* flag = work->mark.put(args[4]);
  for (const Taken& taken : work->walk.grads) {
    taken.grad->unsafeGetTensorImpl()->bump_version();
  }
  work->run([&] {
    const cpu::Norms norms = cpu::norms(list, work->inv_scale);
    row[0] = norms.sum_of_squares;
    row[1] = norms.absolute_maximum;
    found = std::isfinite(norms.absolute_maximum) ? 0 : 1;
    apply(clip);
    cpu::unscale(list, work->inv_scale, nullptr, coefficient);
    *flag = found;
  });
  return py::cast(norm).release().ptr();
}

// check_groups(param_groups, grad_scale) -> (flag, found_inf, grad_scale), new tensors: the flag
// once for the scaler and once for the optimizer, which may write it.
PyObject* check_groups(PyObject* const* args) {
  const at::Tensor* scale = scalar_of(args[1], at::kFloat);
  if (scale == nullptr) {
    return nullptr;
  }
  const std::optional<ShortWalk> walk = short_walk(args[0], at::kCPU, true, false);
  if (!walk) {
    return nullptr;
  }
  const float divisor = *scale->const_data_ptr<float>();
  bool found = false;
  run(walk->list, [&] { found = !std::isfinite(cpu::check(walk->list, Use::kDivide, divisor)); });
  const float flag = found ? 1 : 0;
  return py::make_tuple(new_scalar(flag), new_scalar(flag), new_scalar(divisor)).release().ptr();
}

// pass_on_device(param_groups, scale, allow_fp16, state, unscaled, casts, clips, launch) ->
// launch(table, scale, flag), with a new flag for it to write, or where it clips
// launch(table, scale, flag, is_wide). With a `state` the gradients are written, and it is marked.
PyObject* pass_on_device(PyObject* const* args) {
  const at::Tensor* scale = scalar_of(args[1], at::kFloat, kKernelDevices);
  const bool writes = args[3] != Py_None;
  if (scale == nullptr || (writes && !PyDict_CheckExact(args[3]))) {
    return nullptr;
  }
  const at::Device device = scale->device();
  std::optional<Mark> mark;
  if (writes) {
    mark.emplace(args[3]);
  }
  const py::object flag = py::cast(at::empty({}, at::TensorOptions(at::kFloat).device(device)));
  py::dict flags;
  flags[py::reinterpret_steal<py::object>(THPDevice_New(device))] = flag;
  Casts* casts = casts_of(args[5]);
  std::optional<ShortWalk> walk = short_walk(args[0], device, args[2] == Py_True, writes, casts);
  if (!walk || walk->list.chunks() == 0) {
    return nullptr;
  }
  walk->own();  // until the launch, before which Python runs
  const py::object table =
      py::cast(std::const_pointer_cast<DeviceTable>(table_of(walk->list, /*capturing=*/false)));
  if (mark) {
    mark->put(args[4]);
  }
  PyObject* is_wide = nullptr;
  if (args[6] == Py_True) {
    is_wide = walk->list.has_float64() ? Py_True : Py_False;
    for (const at::Tensor& grad : walk->owners) {
      grad.unsafeGetTensorImpl()->bump_version();
    }
  }
  py::object result = py::reinterpret_steal<py::object>(
      PyObject_CallFunctionObjArgs(args[7], table.ptr(), args[1], flag.ptr(), is_wide, nullptr));
  if (result && mark) {
    dict_of(args[3])[names().found_inf] = flags;
    if (casts != nullptr) {
      casts->finish();
    }
  }
  return result.release().ptr();
}

// any_found(flags) -> bool
PyObject* any_found(PyObject* const* args) {
  double sum = 0;  // of Python's floats
  return kHasLock && take_flags(args[0], adding(sum)) ? Py_NewRef(sum != 0 ? Py_True : Py_False)
                                                      : nullptr;
}

// The update of a scaler on the device of its scale, with words and norm as in the next functions.
// `take` gets the flags of its optimizers.
template <class Take>
std::optional<Update> usual_update(PyObject* own, at::Device device, PyObject* words,
                                   PyObject* norm, const Take& take) {
  const uint64_t devices = device_bit(device.type());
  const at::Tensor& scale = THPVariable_Unpack(item(own, names().scale));
  const at::Tensor* tracker = scalar_of(item(own, names().growth_tracker), at::kInt, devices);
  const at::Tensor* its_norm = norm == Py_None ? nullptr : scalar_of(norm, at::kFloat, devices);
  PyObject* growth_factor = item(own, names().growth_factor);
  PyObject* backoff_factor = item(own, names().backoff_factor);
  PyObject* growth_interval = item(own, names().growth_interval);
  PyObject* states = item(own, names().states);
  if (!THPVariable_CheckExact(words) || tracker == nullptr ||
      (its_norm == nullptr && norm != Py_None) || growth_factor == nullptr ||
      !PyFloat_CheckExact(growth_factor) || backoff_factor == nullptr ||
      !PyFloat_CheckExact(backoff_factor) || growth_interval == nullptr ||
      !PyLong_CheckExact(growth_interval) || states == nullptr || !PyDict_Check(states)) {
    return std::nullopt;
  }
  int overflow = 0;
  const long long interval = PyLong_AsLongLongAndOverflow(growth_interval, &overflow);
  if (overflow != 0) {
    return std::nullopt;
  }
  bool checked = false;
  PyObject *key = nullptr, *state = nullptr;
  for (Py_ssize_t place = 0; PyDict_Next(states, &place, &key, &state) != 0;) {
    PyObject* flags = PyDict_CheckExact(state) ? item(state, names().found_inf) : nullptr;
    // Ranks may still have to agree on it.
    if (flags == nullptr || item(state, names().agreement) != nullptr || !take_flags(flags, take)) {
      return std::nullopt;
    }
    checked |= PyDict_GET_SIZE(flags) != 0;
  }
  if (!checked) {
    return std::nullopt;
  }
  return update_of(device, scale, *tracker, &THPVariable_Unpack(words), its_norm,
                   PyFloat_AS_DOUBLE(growth_factor), PyFloat_AS_DOUBLE(backoff_factor), interval);
}

// update_scale(scaler, words, norm) -> True; `norm` may be None.
PyObject* update_scale(PyObject* const* args) {
  const py::object own = usual_dict(args[0]);
  if (!own) {
    return nullptr;
  }
  float sum = 0;
  const std::optional<Update> update =
      usual_update(own.ptr(), at::kCPU, args[1], args[2], adding(sum));
  if (!update) {
    return nullptr;
  }
  apply(*update, sum);
  const at::Tensor& scale = THPVariable_Unpack(item(own.ptr(), names().scale));
  scale.unsafeGetTensorImpl()->bump_version();
  return Py_NewRef(Py_True);
}

// update_on_device(scaler, words, norm, launch) -> True, after launch(scale, growth_tracker, flags,
// factors, words, norm)
PyObject* update_on_device(PyObject* const* args) {
  const py::object own = usual_dict(args[0]);
  if (!own) {
    return nullptr;
  }
  PyObject* scale = item(own.ptr(), names().scale);
  const at::Device device = THPVariable_Unpack(scale).device();
  py::list flags;
  const auto update = usual_update(own.ptr(), device, args[1], args[2], [&](PyObject* flag) {
    const at::Tensor* tensor = scalar_of(flag, at::kFloat, device_bit(device.type()));
    return tensor != nullptr && tensor->device() == device && PyList_Append(flags.ptr(), flag) == 0;
  });
  if (!update) {
    return nullptr;
  }
  const py::object factors = py::reinterpret_steal<py::object>(PyTuple_Pack(
      3, item(own.ptr(), names().growth_factor), item(own.ptr(), names().backoff_factor),
      item(own.ptr(), names().growth_interval)));
  const py::object launched = py::reinterpret_steal<py::object>(
      PyObject_CallFunctionObjArgs(args[3], scale, item(own.ptr(), names().growth_tracker),
                                   flags.ptr(), factors.ptr(), args[1], args[2], nullptr));
  if (!launched) {
    return nullptr;
  }
  THPVariable_Unpack(scale).unsafeGetTensorImpl()->bump_version();
  return Py_NewRef(Py_True);
}

}  // namespace

void bind_short_way(py::module_& m) {
  static PyMethodDef methods[] = {method<watch_hooks, 4>("watch_hooks"),
                                  method<usual_entry, 2>("usual_entry"),
                                  method<record, 3>("record"),
                                  method<unscale_groups, 6>("unscale_groups"),
                                  method<check_groups, 2>("check_groups"),
                                  method<clip_groups, 10>("clip_groups"),
                                  method<any_found, 1>("any_found"),
                                  method<update_scale, 3>("update_scale"),
                                  method<pass_on_device, 8>("pass_on_device"),
                                  method<update_on_device, 4>("update_on_device"),
                                  {nullptr, nullptr, 0, nullptr}};
  add_methods(m, methods);
}

}  // namespace ampfast
