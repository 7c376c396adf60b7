#include "device_kernels.h"

#include <c10/core/DeviceGuard.h>

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

// A device to make current, with its current stream; none for a CPU.
std::optional<at::Device> current(at::Device device) {
  return device.is_cpu() ? std::nullopt : std::optional(device);
}

bool is_capturing(PyObject* launcher) {
  return py::handle(launcher).attr(names::is_capturing)().cast<bool>();
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

// By a launcher as ampfast/backends/__init__.py describes it, also where that is of C++.
void launch(PyObject* launcher, const GradList& list, const py::object& pass) {
  const std::shared_ptr<DeviceTable> table = table_of(list, is_capturing(launcher));
  const py::object given = py::cast(table),
                   multi_tensor = py::handle(launcher).attr(names::multi_tensor);
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
  const c10::OptionalDeviceGuard here(current(list.device()));
  const std::shared_ptr<UpdateObject> ending = pass.ending;
  const at::Tensor flag = pass.found_inf;
  launch(launcher, list, py::cast(std::make_shared<Pass>(std::move(pass))));
  if (ending) {
    ending->applied = true;
    ending->scale.unsafeGetTensorImpl()->bump_version();  // as torch's op
  }
  return flag;
}

void clip_on(PyObject* launcher, const std::shared_ptr<ClipObject>& clip) {
  const c10::OptionalDeviceGuard here(current(clip->sums.device()));
  py::handle(launcher).attr("clip_coefficient")(clip);
}

namespace {

// run_on(launcher, list, pass) -> found_inf, of the pass or a new one
PyObject* call_run_on(PyObject* const* args) {
  return wrapped(run_on(args[0], object_of<GradList>(args[1]), object_of<Pass>(args[2])))
      .release()
      .ptr();
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
  if (!update.known() || py::len(update.found_infs) == 0) {
    return nullptr;
  }
  py::object given = py::reinterpret_borrow<py::object>(args[1]);
  if (py::len(update.found_infs) > kMostFlags) {
    auto joined = std::make_shared<UpdateObject>(update);
    const py::object join = py::module_::import("ampfast.backends.scalars").attr("joint_flag");
    joined->found_infs = py::make_tuple(join(update.found_infs, update.scale.device()));
    given = py::cast(joined);
  }
  const c10::OptionalDeviceGuard here(current(update.scale.device()));
  py::handle(args[0]).attr("update_scale")(given);
  update.scale.unsafeGetTensorImpl()->bump_version();  // as torch's op
  return Py_NewRef(Py_True);
}

// An argument of a kernel of Triton's; an undefined tensor is None.
struct Argument {
  Argument(const at::Tensor& tensor) : tensor(&tensor) {}
  Argument(at::Tensor&&) = delete;  // it must live until the launch is made
  Argument(py::object object) : object(std::move(object)) {}

  const at::Tensor* tensor = nullptr;
  py::object object;
};
using Arguments = std::initializer_list<Argument>;

// With addresses for tensors or, where that compiles the kernel first, with the tensors.
py::tuple made(Arguments arguments, bool with_addresses) {
  py::tuple all(arguments.size());
  Py_ssize_t place = 0;
  for (const auto& [tensor, object] : arguments) {
    py::object value = object;
    if (tensor != nullptr && tensor->defined() && with_addresses) {
      value = py::int_(reinterpret_cast<uintptr_t>(tensor->data_ptr()));
    } else if (tensor != nullptr) {
      value = wrapped(*tensor);
    }
    PyTuple_SET_ITEM(all.ptr(), place++, value.release().ptr());
  }
  return all;
}

// Launches a variant of a kernel: the first time as `module._first`, which compiles it, then as
// that has left it in `module._launched`.
template <class Switches>
void launch_variant(PyObject* module, const char* name, uint64_t key, at::Device device,
                    int64_t chunks, Arguments arguments, const Switches& switches) {
  for (const auto& [tensor, object] : arguments) {
    // Which of the tensors are missing is compiled in.
    key = key << 1 | static_cast<uint64_t>(tensor != nullptr && !tensor->defined());
  }
  const py::int_ number(key << 8 | static_cast<uint8_t>(device.index() + 1));
  const py::object launched = py::handle(module).attr("_launched");
  PyObject* known = PyDict_GetItemWithError(launched.ptr(), number.ptr());
  if (known == nullptr) {
    py::handle(module).attr("_first")(number, name, device, chunks, made(arguments, false),
                                      switches());
    return;
  }
  const int64_t resident = PyLong_AsLongLong(PyTuple_GET_ITEM(known, 0));
  const bool takes_addresses = PyTuple_GET_ITEM(known, 2) == Py_True;
  if (chunks > 0) {
    const py::object call = py::reinterpret_borrow<py::object>(PyTuple_GET_ITEM(known, 1));
    call(std::min(chunks, resident), made(arguments, takes_addresses));
  }
}

// triton_multi_tensor(module, launches, pass, table, segment, is_last)
PyObject* triton_multi_tensor(PyObject* const* args) {
  static const ClipObject no_clip;
  static const auto& no_update =
      *new UpdateObject{{}, {}, py::tuple(), py::float_(1.0), py::float_(1.0), py::int_(0), {}, {}};
  const auto& pass = object_of<Pass>(args[2]);
  const auto& table = object_of<DeviceTable>(args[3]);
  const auto& segment = object_of<Segment>(args[4]);
  const bool is_last = args[5] == Py_True;
  const ClipObject& clip = pass.clip ? *pass.clip : no_clip;
  const UpdateObject& update = is_last && pass.ending ? *pass.ending : no_update;
  const std::vector<at::Tensor> flags = update.flags();
  const at::Tensor other_flag = flags.empty() ? at::Tensor() : flags.front();
  const at::Tensor& norms = clip.accepted_norms;
  const bool is_wide = clip.norm.defined() && clip.norm.scalar_type() == at::kDouble;
  static_assert(kDtypeCount <= 4);
  uint64_t key = 1;  // that of `update_scale` is 0
  for (const int bits : {static_cast<int>(dtype_of(segment.dtype)), static_cast<int>(pass.how),
                         pass.write << 1 | is_last, pass.accumulate << 1 | is_wide,
                         clip.largest << 1 | clip.found_inf.defined()}) {
    key = key << 2 | static_cast<uint64_t>(bits);
  }
  launch_variant(args[0], "multi_tensor", key, table.header.device(),
                 args[1] == Py_True ? segment.chunks : 0,
                 {table.words,
                  py::int_(segment.word),
                  py::int_(segment.chunks),
                  py::int_(segment.first),
                  py::int_(table.partials.numel()),
                  table.header,
                  table.partials,
                  pass.factor,
                  pass.clip ? clip.coefficient : pass.coefficient,
                  pass.found_inf,
                  pass.sums,
                  pass.clip ? clip.divisor : pass.factor_copy,
                  pass.marks,
                  pass.now,
                  update.scale,
                  update.growth_tracker,
                  update.state,
                  other_flag,
                  update.growth_factor,
                  update.backoff_factor,
                  update.growth_interval,
                  clip.norm,
                  py::float_(clip.max_norm),
                  py::float_(clip.skip_above),
                  norms,
                  py::int_(norms.defined() ? norms.numel() - kNormRing : 0)},
                 [&] {
                   return py::make_tuple(segment.dtype, pass.write, static_cast<int>(pass.how),
                                         pass.sums.defined(), clip.largest,
                                         clip.found_inf.defined(), is_last, pass.accumulate);
                 });
  return nullptr;
}

// triton_update_scale(module, update)
PyObject* triton_update_scale(PyObject* const* args) {
  const auto& update = object_of<UpdateObject>(args[1]);
  const std::vector<at::Tensor> flags = update.flags();
  const auto flag = [&](size_t i) -> const at::Tensor& { return flags[i < flags.size() ? i : 0]; };
  launch_variant(
      args[0], "update_scale", 0, update.scale.device(), 1,
      {update.scale, update.growth_tracker, update.state, update.norm, flag(0), flag(1), flag(2),
       flag(3), update.growth_factor, update.backoff_factor, update.growth_interval},
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
