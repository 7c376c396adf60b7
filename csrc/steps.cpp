// Calls of the CPU's kernels, and questions of Python's steps that a frame of Python would answer
// slowly.
#include "found.h"

namespace ampfast {

namespace {

// A new object, unless memory was out.
template <class Object>
Object owned(PyObject* object) {
  if (object == nullptr) {
    throw py::error_already_set();
  }
  return py::reinterpret_steal<Object>(object);
}

// run(list, pass) -> found_inf, of the pass or a new one
PyObject* run(PyObject* const* args) {
  const at::Tensor flag = run_on_cpu(object_of<GradList>(args[0]), object_of<Pass>(args[1]));
  return wrapped(flag).release().ptr();
}

// clip(clip)
PyObject* clip(PyObject* const* args) {
  clip_coefficient(object_of<ClipObject>(args[0]).on(at::kCPU));
  return nullptr;
}

// Whether one of these flags is set, as torch adds them; nothing where one is not on the CPU.
std::optional<bool> found_on_cpu(PyObject* flags) {
  if (!PyDict_CheckExact(flags)) {
    return std::nullopt;
  }
  double sum = 0;  // of Python's floats
  for (const auto& [device, flag] : py::reinterpret_borrow<py::dict>(flags)) {
    if (!THPVariable_CheckExact(flag.ptr())) {
      return std::nullopt;
    }
    const at::Tensor& tensor = THPVariable_Unpack(flag.ptr());
    if (tensor.dim() != 0 || !is_scalar(tensor, at::kFloat, device_bit(at::kCPU))) {
      return std::nullopt;
    }
    sum += *tensor.const_data_ptr<float>();
  }
  return sum != 0;
}

// is_found(flags) -> bool, or None
PyObject* is_found(PyObject* const* args) {
  const std::optional<bool> found = found_on_cpu(args[0]);
  return found ? PyBool_FromLong(static_cast<long>(*found)) : nullptr;
}

// flag_of(flags) -> a new flag, 0 or 1, or None
PyObject* flag_of(PyObject* const* args) {
  const std::optional<bool> found = found_on_cpu(args[0]);
  return found ? wrapped(new_scalar<float>(*found ? 1 : 0)).release().ptr() : nullptr;
}

// can_update(update) -> whether kernels know its tensors and numbers exactly
PyObject* can_update(PyObject* const* args) {
  return PyBool_FromLong(object_of<UpdateObject>(args[0]).known().has_value());
}

bool update_on_cpu(const UpdateObject& given) {
  const std::optional<Update> update = given.known();
  if (!update || !given.scale.is_cpu()) {
    return false;
  }
  float sum = 0;  // as torch adds them
  for (const at::Tensor& flag : given.flags()) {
    sum += *flag.const_data_ptr<float>();
  }
  update_scale(*update, sum);
  given.scale.unsafeGetTensorImpl()->bump_version();  // as torch's op
  return true;
}

// update(update) -> whether the scale and its tracker were written
PyObject* update(PyObject* const* args) {
  return PyBool_FromLong(update_on_cpu(object_of<UpdateObject>(args[0])));
}

// update_by(kernels, scale, growth_tracker, found_infs, growth_factor, backoff_factor,
// growth_interval, state, norm) -> None, or an Update that the kernels left; without kernels, None,
// an Update that is yet to be done
PyObject* update_by(PyObject* const* args) {
  static PyObject* const core = py::module_::import("ampfast._C").release().ptr();
  const auto object = [args](int i) { return py::reinterpret_borrow<py::object>(args[i]); };
  UpdateObject given{tensor_of(args[1]), tensor_of(args[2]), object(3),
                     object(4),          object(5),          object(6),
                     tensor_of(args[7]), tensor_of(args[8])};
  // Python's object takes longer to make than all the rest.
  if (args[0] == core && update_on_cpu(given)) {
    return nullptr;
  }
  py::object made = py::cast(std::make_shared<UpdateObject>(std::move(given)));
  const bool asks = args[0] != core && args[0] != Py_None;
  const bool is_done = asks && py::getattr(args[0], names::update)(made).cast<bool>();
  return is_done ? nullptr : made.release().ptr();
}

// The record of an optimizer, which is made if there is none.
py::object record_of(py::handle records, PyObject* optimizer) {
  const auto key = owned<py::object>(PyLong_FromVoidPtr(optimizer));
  const py::dict there = py::getattr(records, names::known);
  PyObject* const record = PyDict_GetItemWithError(there.ptr(), key.ptr());
  return record != nullptr ? py::reinterpret_borrow<py::object>(record)
                           : py::getattr(records, "of")(py::handle(optimizer));
}

// turn_of(records, turns, optimizer) -> the optimizer's turn in an iteration, which may begin here
PyObject* turn_of(PyObject* const* args) {
  static const py::handle type = of_python("ampfast.gradients", "Turn").release();
  static const py::handle ready = of_python("ampfast.gradients", "READY").release();
  const auto key = owned<py::object>(PyLong_FromVoidPtr(args[2]));
  const auto turns = py::reinterpret_borrow<py::dict>(args[1]);
  const py::object record = record_of(args[0], args[2]);
  const py::object last = py::getattr(record, names::turn);
  auto turn = py::reinterpret_borrow<py::object>(PyDict_GetItemWithError(turns.ptr(), key.ptr()));
  if (turn && turn.is(last)) {
    return turn.release().ptr();
  }
  if (!turn || !py::type::handle_of(turn).is(type)) {
    const py::dict made = type();
    if (turn) {
      made.attr("update")(turn);  // others put torch's plain dicts there
    } else {
      made[names::stage] = ready;
      made[names::found_inf_per_device] = py::dict();
    }
    turns[key] = made;
    turn = made;
  }
  py::setattr(turn, names::record, record);
  const py::object before = py::dict(last)[names::found_inf_per_device];
  const bool is_checked = PyObject_IsTrue(before.ptr()) == 1;
  py::setattr(turn, names::last_flags, is_checked ? before : py::getattr(last, names::last_flags));
  py::setattr(record, names::turn, turn);
  return turn.release().ptr();
}

// flags_of(turns, agree) -> the flags of an iteration; agree(turn) ends what ranks have to agree on
PyObject* flags_of(PyObject* const* args) {
  const py::handle agree = args[1];
  py::list found;
  const auto turns = owned<py::list>(PyDict_Values(args[0]));
  for (const py::handle turn : turns) {
    if (!PyDict_CheckExact(turn.ptr()) &&
        !py::getattr(turn, names::agreement, py::none()).is_none()) {
      agree(turn);
    }
    const py::dict flags = py::dict(turn[names::found_inf_per_device]);
    for (const auto& [device, flag] : flags) {
      found.append(flag);
    }
  }
  return found.release().ptr();
}

// overrides(scaler, hooks) -> whether its class or the scaler itself has another method than the
// one given for one of the names
PyObject* overrides(PyObject* const* args) {
  const auto own = owned<py::object>(PyObject_GenericGetDict(args[0], nullptr));
  for (const auto& [name, original] : py::reinterpret_borrow<py::dict>(args[1])) {
    if (_PyType_Lookup(Py_TYPE(args[0]), name.ptr()) != original.ptr() ||
        PyDict_GetItemWithError(own.ptr(), name.ptr()) != nullptr) {
      return Py_NewRef(Py_True);
    }
  }
  return Py_NewRef(Py_False);
}

// Bytes, two for each dtype and device type of the parameters of a group that are trained.
py::object kinds_of(PyObject* params) {
  if (params == nullptr || !(PyList_Check(params) || PyTuple_Check(params))) {
    return py::none();
  }
  c10::SmallVector<uint16_t, 8> kinds;
  PyObject** const items = PySequence_Fast_ITEMS(params);
  for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(params); ++i) {
    if (!THPVariable_Check(items[i])) {
      continue;
    }
    const at::Tensor& param = THPVariable_Unpack(items[i]);
    const auto dtype = static_cast<uint16_t>(param.scalar_type());
    const auto kind =
        static_cast<uint16_t>(dtype << 8 | static_cast<uint8_t>(param.device().type()));
    if (std::find(kinds.begin(), kinds.end(), kind) == kinds.end() &&
        (param.requires_grad() || param.grad().defined())) {
      kinds.push_back(kind);
    }
  }
  return py::bytes(reinterpret_cast<const char*>(kinds.data()), kinds.size() * sizeof(uint16_t));
}

// A reference to the function of an optimizer's step, which a schedule may wrap; what equals
// nothing if that takes none.
py::object step_of(PyObject* optimizer) {
  const py::object step = py::getattr(optimizer, names::step, py::none());
  PyObject* function = PyMethod_Check(step.ptr()) ? PyMethod_GET_FUNCTION(step.ptr()) : step.ptr();
  auto reference = py::reinterpret_steal<py::object>(PyWeakref_NewRef(function, nullptr));
  if (!reference) {
    PyErr_Clear();
    return py::float_(NAN);
  }
  return reference;
}

// Nothing unless an optimizer, or else its class, says that it takes grad_scale; else a list of
// what decides whether it does: its class, that word, its step and, of each group, "fused" and the
// kinds of its parameters.
std::optional<py::list> claim_of(PyObject* optimizer) {
  auto* const type = reinterpret_cast<PyObject*>(Py_TYPE(optimizer));
  const auto own = py::reinterpret_steal<py::object>(PyObject_GenericGetDict(optimizer, nullptr));
  PyErr_Clear();  // it may have no __dict__
  PyObject* word =
      own ? PyDict_GetItemWithError(own.ptr(), names::_step_supports_amp_scaling) : nullptr;
  if (word == nullptr || word == Py_None) {
    word = _PyType_Lookup(Py_TYPE(optimizer), names::_step_supports_amp_scaling) == Py_True
               ? Py_True
               : Py_False;
  }
  const int takes_scale = PyObject_IsTrue(word);
  if (takes_scale < 0) {
    throw py::error_already_set();
  }
  if (takes_scale == 0) {
    return std::nullopt;
  }
  py::list claim;
  claim.append(py::handle(type));
  claim.append(py::handle(word));
  claim.append(step_of(optimizer));
  const py::object groups = py::getattr(optimizer, names::param_groups, py::none());
  if (PyList_Check(groups.ptr())) {
    for (const py::handle group : py::list(groups)) {
      if (PyDict_Check(group.ptr())) {
        PyObject* const is_fused = PyDict_GetItemWithError(group.ptr(), names::fused);
        claim.append(is_fused == nullptr ? py::handle(Py_None) : py::handle(is_fused));
        claim.append(kinds_of(PyDict_GetItemWithError(group.ptr(), names::params)));
      }
    }
  }
  return claim;
}

// divides_by(records, optimizer) -> as `decide_division` says; its record keeps the answer until
// the claim or torch's kernels change
PyObject* divides_by(PyObject* const* args) {
  static const py::handle module = py::module_::import("ampfast.optim.fused_support").release();
  static const py::handle torch = py::module_::import("torch").release();
  std::optional<py::list> claim = claim_of(args[1]);
  if (!claim) {
    return nullptr;
  }
  claim->append(py::getattr(module, names::operators)(torch));
  const py::object record = record_of(args[0], args[1]);
  const py::object known = py::getattr(record, names::divides_by);
  if (!known.is_none()) {
    const int is_same = PyObject_RichCompareBool(py::tuple(known)[0].ptr(), claim->ptr(), Py_EQ);
    if (is_same < 0) {
      throw py::error_already_set();
    }
    if (is_same == 1) {
      return py::object(py::tuple(known)[1]).release().ptr();
    }
  }
  const auto decide = py::getattr(module, "decide_division");
  return decide(py::handle(args[1]), record, *claim).release().ptr();
}

// drop_unheld(values) drops the tensors of a dict that are held by nothing else.
PyObject* drop_unheld(PyObject* const* args) {
#ifndef Py_GIL_DISABLED  // counts of references are approximate there
  std::vector<py::object> unheld;
  for (const auto& [key, value] : py::reinterpret_borrow<py::dict>(args[0])) {
    if (Py_REFCNT(key.ptr()) == 1 && THPVariable_Unpack(key.ptr()).use_count() == 1) {
      unheld.push_back(py::reinterpret_borrow<py::object>(key));
    }
  }
  for (const py::object& tensor : unheld) {
    if (PyDict_DelItem(args[0], tensor.ptr()) != 0) {
      throw py::error_already_set();
    }
  }
#endif
  return nullptr;
}

}  // namespace

void bind_steps(py::module_& m) {
  add_call<run, 2>(m, "run");
  add_call<clip, 1>(m, "clip");
  add_call<is_found, 1>(m, "is_found");
  add_call<flag_of, 1>(m, "flag_of");
  add_call<divides_by, 2>(m, "divides_by");
  add_call<drop_unheld, 1>(m, "drop_unheld");
  add_call<overrides, 2>(m, "overrides");
  add_call<can_update, 1>(m, "can_update");
  add_call<update, 1>(m, "update");
  add_call<update_by, 9>(m, "update_by");
  add_call<turn_of, 3>(m, "turn_of");
  add_call<flags_of, 2>(m, "flags_of");
}

}  // namespace ampfast
