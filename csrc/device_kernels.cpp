#include "device_kernels.h"

#include <c10/core/DeviceGuard.h>

#include <array>
#include <mutex>

#include "device_table.h"

namespace ampfast {

namespace {

// Raises unless kernels can read and write what a pass over a list is given.
void require_pass(const GradList& list, const Pass& pass) {
  const at::Device device = list.device();
  data_of<const float>(pass.factor, "the factor", device);
  data_of<float>(pass.found_inf, "found_inf", device);
  data_of<float>(pass.factor_copy, "factor_copy", device);
  const bool scales = data_of<double>(pass.coefficient, "coefficient", device) != nullptr;
  const bool sums = data_of<double>(pass.sums, "sums", device, 2) != nullptr;
  marks_of(pass, device);
  TORCH_CHECK(!(scales && sums), "sums are taken in the pass before the one with a coefficient");
  TORCH_CHECK(sums || !pass.clip, "a pass that decides a clipping needs sums");
}

// Makes a device and its current stream current.
class OnDevice {
 public:
  explicit OnDevice(at::Device device) {
    if (!device.is_cpu()) {
      guard_.reset_device(device);
    }
  }

 private:
  c10::OptionalDeviceGuard guard_;
};

bool is_capturing(PyObject* launcher) {
  return py::handle(launcher).attr("is_capturing")().cast<bool>();
}

// No other pass with the same header, that of the stream, may come between its launches, which may
// give Python's lock away.
std::unique_lock<std::mutex> one_pass() {
  static auto& mutex = *new std::mutex;
  std::unique_lock<std::mutex> lock(mutex, std::try_to_lock);
  if (!lock) {
    const py::gil_scoped_release release;
    lock.lock();
  }
  return lock;
}

void launch(PyObject* launcher, const GradList& list, const py::object& pass) {
  const std::shared_ptr<DeviceTable> table = table_of(list, is_capturing(launcher));
  const py::object given = py::cast(table),
                   multi_tensor = py::handle(launcher).attr("multi_tensor");
  const size_t last = table->segments.size() - 1;
  const auto for_each_segment = [&](const py::object& call) {
    for (size_t i = 0; i <= last; ++i) {
      const auto policy = py::return_value_policy::reference;
      call(pass, given, py::cast(&table->segments[i], policy), i == last);
    }
  };
  if (last > 0 && py::hasattr(launcher, "prepare")) {
    // If a later launch failed, half of the gradients would be written.
    for_each_segment(py::handle(launcher).attr("prepare"));
  }
  const std::unique_lock<std::mutex> lock = one_pass();
  try {
    for_each_segment(multi_tensor);
  } catch (...) {
    table->header.zero_();  // where intermediate launches leave results
    throw;
  }
}

}  // namespace

at::Tensor run_on(PyObject* launcher, const GradList& list, Pass pass) {
  require_pass(list, pass);
  const at::TensorOptions options = at::TensorOptions(at::kFloat).device(list.device());
  pass.accumulate = pass.found_inf.defined();
  if (!pass.accumulate) {
    pass.found_inf = allocated({}, options);
  }
  if (pass.clip) {
    pass.clip->take(pass.sums, pass.found_inf);
    pass.clip->on(list.device());
  }
  if (list.elements() == 0) {
    if (pass.sums.defined()) {
      pass.sums.zero_();
    }
    if (pass.factor_copy.defined()) {
      pass.factor_copy.copy_(pass.factor);
    }
    if (!pass.accumulate) {
      pass.found_inf.zero_();
    }
    if (pass.clip) {
      clip_on(launcher, pass.clip);
    }
    return pass.found_inf;
  }
  const OnDevice here(list.device());
  const py::object ending = pass.ending;
  const at::Tensor flag = pass.found_inf;
  launch(launcher, list, py::cast(std::make_shared<Pass>(std::move(pass))));
  if (!ending.is_none()) {
    ending.attr("applied") = true;
    const py::object update = ending.attr("update");
    // As torch's op.
    object_of<UpdateObject>(update.ptr()).scale.unsafeGetTensorImpl()->bump_version();
  }
  return flag;
}

void clip_on(PyObject* launcher, const std::shared_ptr<ClipObject>& clip) {
  const OnDevice here(clip->sums.device());
  py::handle(launcher).attr("clip_coefficient")(clip);
}

namespace {

// run_on(launcher, list, pass) -> found_inf, of the pass or a new one
PyObject* call_run_on(PyObject* const* args) {
  return wrapped(run_on(args[0], list_of(args[1]), object_of<Pass>(args[2]))).release().ptr();
}

// clip_on(launcher, clip)
PyObject* call_clip_on(PyObject* const* args) {
  const auto clip = py::cast<std::shared_ptr<ClipObject>>(py::handle(args[1]));
  TORCH_CHECK_TYPE(clip->sums.defined(), "a Clip has sums and a norm");
  clip->on(clip->sums.device());
  clip_on(args[0], clip);
  return nullptr;
}

// update_on(launcher, update) -> True, with the scale and its tracker written
PyObject* update_on(PyObject* const* args) {
  constexpr size_t kMostFlags = 4;  // of one launch
  const auto& update = object_of<UpdateObject>(args[1]);
  if (!update.known()) {
    return nullptr;
  }
  py::object given = py::reinterpret_borrow<py::object>(args[1]);
  if (py::len(update.found_infs) > kMostFlags) {
    auto joined = std::make_shared<UpdateObject>(update);
    const py::object join = py::module_::import("ampfast.backends.scalars").attr("joint_flag");
    joined->found_infs = py::make_tuple(join(update.found_infs, update.scale.device()));
    given = py::cast(joined);
  }
  const OnDevice here(update.scale.device());
  py::handle(args[0]).attr("update_scale")(given);
  update.scale.unsafeGetTensorImpl()->bump_version();  // as torch's op
  return Py_NewRef(Py_True);
}

// Arguments of a kernel of Triton's, with addresses for tensors or, where that compiles it first,
// with the tensors.
class Arguments {
 public:
  // One that is undefined is None. Held until the launch is made.
  void add(const at::Tensor& tensor) {
    nones_ |= static_cast<uint64_t>(!tensor.defined()) << count_;
    values_[count_++].tensor = tensor;
  }
  void add(PyObject* value) { values_[count_++].object = value; }
  template <class T>
  void add_number(T value) {
    owned_.emplace_back(py::cast(value));
    add(owned_.back().ptr());
  }

  // Which of the tensors are missing: that is compiled in.
  uint64_t nones() const { return nones_; }

  py::tuple made(bool with_addresses) const {
    py::tuple all(count_);
    for (size_t i = 0; i < count_; ++i) {
      const Value& value = values_[i];
      PyObject* object = value.object;
      if (object != nullptr) {
        Py_INCREF(object);
      } else if (value.tensor.defined() && with_addresses) {
        object = PyLong_FromVoidPtr(value.tensor.data_ptr());
      } else {
        object = THPVariable_Wrap(value.tensor);
      }
      if (object == nullptr) {
        throw py::error_already_set();
      }
      PyTuple_SET_ITEM(all.ptr(), i, object);
    }
    return all;
  }

 private:
  struct Value {
    at::Tensor tensor;
    PyObject* object = nullptr;
  };
  std::array<Value, 32> values_;
  std::vector<py::object> owned_;
  size_t count_ = 0;
  uint64_t nones_ = 0;
};

// Launches a variant of a kernel: the first time as `module._first`, which compiles it, then as
// that has left it in `module._launched`.
template <class Switches>
void launch_variant(PyObject* module, const char* name, uint64_t key, at::Device device,
                    int64_t chunks, const Arguments& arguments, const Switches& switches) {
  const py::int_ number(key << 8 | static_cast<uint8_t>(device.index() + 1));
  const py::object launched = py::handle(module).attr("_launched");
  PyObject* known = PyDict_GetItemWithError(launched.ptr(), number.ptr());
  if (known == nullptr) {
    py::handle(module).attr("_first")(number, name, device, chunks, arguments.made(false),
                                      switches());
    return;
  }
  const int64_t resident = PyLong_AsLongLong(PyTuple_GET_ITEM(known, 0));
  const bool takes_addresses = PyTuple_GET_ITEM(known, 2) == Py_True;
  if (chunks > 0) {
    const py::object call = py::reinterpret_borrow<py::object>(PyTuple_GET_ITEM(known, 1));
    call(std::min(chunks, resident), arguments.made(takes_addresses));
  }
}

// Bits of a variant's key, from the last to the first that is added.
class Key {
 public:
  template <class T>
  Key& add(T value, int bits) {
    bits_ = bits_ << bits | static_cast<uint64_t>(value);
    return *this;
  }
  uint64_t bits() const { return bits_; }

 private:
  uint64_t bits_ = 0;
};

void add_rule(const UpdateObject& update, Arguments& arguments) {
  arguments.add(update.growth_factor.ptr());
  arguments.add(update.backoff_factor.ptr());
  arguments.add(update.growth_interval.ptr());
}

enum KernelName { kMultiTensor, kUpdateScale };

// triton_multi_tensor(module, launches, pass, table, segment, is_last)
PyObject* triton_multi_tensor(PyObject* const* args) {
  const auto& pass = object_of<Pass>(args[2]);
  const auto& table = object_of<DeviceTable>(args[3]);
  const auto& segment = object_of<Segment>(args[4]);
  const bool is_last = args[5] == Py_True;
  const ClipObject clip = pass.clip ? *pass.clip : ClipObject{};
  py::object update = py::none();
  if (is_last && !pass.ending.is_none()) {
    update = pass.ending.attr("update");
  }
  Arguments arguments;
  arguments.add(table.words);
  arguments.add_number(segment.word);
  arguments.add_number(segment.chunks);
  arguments.add_number(segment.first);
  arguments.add_number(table.partials.numel());
  for (const at::Tensor& tensor :
       {table.header, table.partials, pass.factor, pass.clip ? clip.coefficient : pass.coefficient,
        pass.found_inf, pass.sums, pass.clip ? clip.divisor : pass.factor_copy, pass.marks,
        pass.now}) {
    arguments.add(tensor);
  }
  if (update.is_none()) {
    for (int i = 0; i < 4; ++i) {
      arguments.add(at::Tensor());
    }
    arguments.add_number(1.0);
    arguments.add_number(1.0);
    arguments.add_number(0);
  } else {
    const auto& fields = object_of<UpdateObject>(update.ptr());
    const std::vector<at::Tensor> flags = fields.flags();
    arguments.add(fields.scale);
    arguments.add(fields.growth_tracker);
    arguments.add(fields.state);
    arguments.add(flags.empty() ? at::Tensor() : flags.front());
    add_rule(fields, arguments);
  }
  arguments.add(clip.norm);
  arguments.add_number(clip.max_norm);
  arguments.add_number(clip.skip_above);
  arguments.add(clip.accepted_norms);
  arguments.add_number(clip.accepted_norms.defined() ? clip.accepted_norms.numel() - kNormRing : 0);

  const bool is_wide = clip.norm.defined() && clip.norm.scalar_type() == at::kDouble;
  Key key;
  static_assert(kDtypeCount <= 1 << 2);
  key.add(kMultiTensor, 1).add(arguments.nones(), 32).add(dtype_of(segment.dtype), 2);
  key.add(pass.write, 1).add(pass.how, 2);
  key.add(is_last, 1).add(pass.accumulate, 1).add(is_wide, 1);
  key.add(clip.largest, 1).add(clip.found_inf.defined(), 1);
  launch_variant(args[0], "multi_tensor", key.bits(), table.header.device(),
                 args[1] == Py_True ? segment.chunks : 0, arguments, [&] {
                   const py::object wide =
                       clip.norm.defined() ? py::cast(clip.norm.scalar_type()) : py::none();
                   return py::make_tuple(segment.dtype, pass.write, static_cast<int>(pass.how),
                                         pass.sums.defined(), clip.largest,
                                         clip.found_inf.defined(), is_last, pass.accumulate, wide);
                 });
  return nullptr;
}

// triton_update_scale(module, update)
PyObject* triton_update_scale(PyObject* const* args) {
  const auto& update = object_of<UpdateObject>(args[1]);
  const std::vector<at::Tensor> flags = update.flags();
  Arguments arguments;
  for (const at::Tensor& tensor :
       {update.scale, update.growth_tracker, update.state, update.norm}) {
    arguments.add(tensor);
  }
  for (size_t i = 0; i < 4; ++i) {
    arguments.add(flags[i < flags.size() ? i : 0]);
  }
  add_rule(update, arguments);
  const uint64_t key = Key().add(kUpdateScale, 1).add(arguments.nones(), 32).bits();
  launch_variant(args[0], "update_scale", key, update.scale.device(), 1, arguments,
                 [] { return py::tuple(); });
  return nullptr;
}

}  // namespace

void bind_device_kernels(py::module_& m) {
  add_call<call_run_on, 3>(m, "run_on");
  add_call<call_clip_on, 2>(m, "clip_on");
  add_call<update_on, 2>(m, "update_on");
  add_call<triton_multi_tensor, 6>(m, "triton_multi_tensor");
  add_call<triton_update_scale, 2>(m, "triton_update_scale");
}

}  // namespace ampfast
