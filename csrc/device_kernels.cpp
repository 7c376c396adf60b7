#include "device_kernels.h"

#include <c10/core/DeviceGuard.h>

#include <array>
#include <mutex>

#include "device_table.h"

namespace ampfast {

py::object with_fields(PyObject* tuple, std::initializer_list<std::pair<int, PyObject*>> fields) {
  const Py_ssize_t count = PyTuple_GET_SIZE(tuple);
  py::tuple plain(count);
  for (Py_ssize_t i = 0; i < count; ++i) {
    PyTuple_SET_ITEM(plain.ptr(), i, Py_NewRef(PyTuple_GET_ITEM(tuple, i)));
  }
  for (const auto& [place, value] : fields) {
    plain[place] = py::handle(value);
  }
  const py::tuple given = py::make_tuple(plain);
  PyObject* made = PyTuple_Type.tp_new(Py_TYPE(tuple), given.ptr(), nullptr);
  if (made == nullptr) {
    throw py::error_already_set();
  }
  return py::reinterpret_steal<py::object>(made);
}

namespace {

// Raises unless kernels can read and write what a pass over a list is given.
void require_pass(const GradList& list, const Pass& pass) {
  const at::Device device = list.device();
  data_of<const float>(pass.tensor(Pass::kFactor), "the factor", device);
  data_of<float>(pass.tensor(Pass::kFoundInf), "found_inf", device);
  data_of<float>(pass.tensor(Pass::kFactorCopy), "factor_copy", device);
  bool scales = data_of<double>(pass.tensor(Pass::kCoefficient), "coefficient", device);
  if (pass[Pass::kClip] != Py_None) {
    scales = clip_of(pass[Pass::kClip], device).sums;
  }
  const bool sums = data_of<double>(pass.tensor(Pass::kSums), "sums", device, 2);
  marks_of(pass, device);
  TORCH_CHECK(!(scales && sums), "sums are taken in the pass before the one with a coefficient");
}

py::object wrapped(const at::Tensor& tensor) {
  return py::reinterpret_steal<py::object>(THPVariable_Wrap(tensor));
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

at::Tensor run_on(PyObject* launcher, const GradList& list, PyObject* tuple) {
  const Pass pass(tuple);
  require_pass(list, pass);
  const at::Tensor* given = pass.tensor(Pass::kFoundInf);
  const at::TensorOptions options = at::TensorOptions(at::kFloat).device(list.device());
  if (list.chunks() == 0) {
    if (const at::Tensor* sums = pass.tensor(Pass::kSums)) {
      sums->zero_();
    }
    if (pass[Pass::kClip] != Py_None) {
      clip_on(launcher, pass[Pass::kClip]);
    }
    return given != nullptr ? *given : allocated({}, options).zero_();
  }
  const OnDevice here(list.device());
  const at::Tensor flag = given != nullptr ? *given : allocated({}, options);
  const py::object ending = py::reinterpret_borrow<py::object>(pass[Pass::kEnding]);
  py::object copy = py::reinterpret_borrow<py::object>(pass[Pass::kFactorCopy]);
  if (!ending.is_none() && pass.how == Factor::kDivide) {
    copy = wrapped(allocated({}, options));
    ending.attr("divisor") = copy;
  }
  launch(launcher, list,
         with_fields(tuple, {{Pass::kFoundInf, wrapped(flag).ptr()},
                             {Pass::kAccumulate, given != nullptr ? Py_True : Py_False},
                             {Pass::kFactorCopy, copy.ptr()}}));
  if (!ending.is_none()) {
    ending.attr("applied") = true;
    if (const py::object update = ending.attr("update"); !update.is_none()) {
      const at::Tensor* scale = tensor_of(PyTuple_GET_ITEM(update.ptr(), kScale));
      scale->unsafeGetTensorImpl()->bump_version();  // as torch's op
    }
  }
  return flag;
}

void clip_on(PyObject* launcher, PyObject* clip) {
  const at::Tensor* sums = tensor_of(PyTuple_GET_ITEM(clip, 0));
  const OnDevice here(sums->device());
  py::handle(launcher).attr("clip_coefficient")(py::handle(clip));
}

namespace {

// run_on(launcher, list, pass) -> found_inf, of the pass or a new one
PyObject* run_on(PyObject* const* args) {
  return THPVariable_Wrap(ampfast::run_on(args[0], list_of(args[1]), args[2]));
}

// clip_on(launcher, clip)
PyObject* call_clip_on(PyObject* const* args) {
  const at::Tensor* sums = ClipTuple(args[1]).tensor(ClipTuple::kSums);
  TORCH_CHECK_TYPE(sums != nullptr, "a Clip has sums and a norm");
  clip_of(args[1], sums->device());
  clip_on(args[0], args[1]);
  return nullptr;
}

// riding(pass, ending) -> the pass with that ending
PyObject* riding(PyObject* const* args) {
  const Pass pass(args[0]);
  return with_fields(args[0], {{Pass::kEnding, args[1]}}).release().ptr();
}

// update_on(launcher, update) -> True, with the scale and its tracker written
PyObject* update_on(PyObject* const* args) {
  constexpr Py_ssize_t kMostFlags = 4;  // of one launch
  if (!update_of(args[1])) {
    return nullptr;
  }
  const at::Tensor& scale = THPVariable_Unpack(PyTuple_GET_ITEM(args[1], kScale));
  py::object update = py::reinterpret_borrow<py::object>(args[1]);
  if (PyObject* flags = PyTuple_GET_ITEM(args[1], kFlags); PyObject_Length(flags) > kMostFlags) {
    const py::object join = py::module_::import("ampfast.backends.scalars").attr("joint_flag");
    py::list joint;
    joint.append(join(py::handle(flags), scale.device()));
    update = with_fields(args[1], {{kFlags, joint.ptr()}});
  }
  const OnDevice here(scale.device());
  py::handle(args[0]).attr("update_scale")(update);
  scale.unsafeGetTensorImpl()->bump_version();  // as torch's op
  return Py_NewRef(Py_True);
}

// Arguments of a kernel of Triton's, with addresses for tensors or, where that compiles it first,
// with the tensors.
class Arguments {
 public:
  void add(const at::Tensor* tensor) {
    nones_ |= static_cast<uint64_t>(tensor == nullptr) << count_;
    values_[count_++].tensor = tensor;
  }
  void add(const at::Tensor& tensor) { add(&tensor); }
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
      } else if (value.tensor == nullptr) {
        object = Py_NewRef(Py_None);
      } else if (with_addresses) {
        object = PyLong_FromVoidPtr(value.tensor->data_ptr());
      } else {
        object = THPVariable_Wrap(*value.tensor);
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
    const at::Tensor* tensor = nullptr;
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

enum KernelName { kMultiTensor, kUpdateScale };

// triton_multi_tensor(module, launches, pass, table, segment, is_last)
PyObject* triton_multi_tensor(PyObject* const* args) {
  const Pass pass(args[2]);
  const auto& table = py::cast<const DeviceTable&>(py::handle(args[3]));
  const auto& segment = py::cast<const Segment&>(py::handle(args[4]));
  const bool is_last = args[5] == Py_True;
  const at::Tensor* coefficient = pass.tensor(Pass::kCoefficient);
  const at::Tensor* norm = nullptr;
  double max_norm = 0;
  bool largest = false;
  if (pass[Pass::kClip] != Py_None) {
    const ClipTuple clip(pass[Pass::kClip]);
    coefficient = clip.tensor(ClipTuple::kSums);
    norm = clip.tensor(ClipTuple::kNorm);
    max_norm = PyFloat_AsDouble(clip[ClipTuple::kMaxNorm]);
    largest = clip.is_true(ClipTuple::kLargest);
  }
  py::object update = py::none();
  if (is_last && pass[Pass::kEnding] != Py_None) {
    update = py::handle(pass[Pass::kEnding]).attr("update");
  }
  Arguments arguments;
  arguments.add(table.words);
  arguments.add_number(segment.word);
  arguments.add_number(segment.chunks);
  arguments.add_number(segment.first);
  arguments.add_number(table.partials.numel());
  arguments.add(table.header);
  arguments.add(table.partials);
  arguments.add(pass.tensor(Pass::kFactor));
  arguments.add(coefficient);
  for (const int place : {int{Pass::kFoundInf}, int{Pass::kSums}, int{Pass::kFactorCopy},
                          int{Pass::kMarks}, int{Pass::kNow}}) {
    arguments.add(pass.tensor(place));
  }
  if (update.is_none()) {
    for (int i = 0; i < 4; ++i) {
      arguments.add(static_cast<const at::Tensor*>(nullptr));
    }
    arguments.add_number(1.0);
    arguments.add_number(1.0);
    arguments.add_number(0);
  } else {
    const Fields fields(update.ptr(), kNorm + 1, "expected an Update");
    const py::sequence flags = py::reinterpret_borrow<py::sequence>(fields[kFlags]);
    arguments.add(fields.tensor(kScale));
    arguments.add(fields.tensor(kTracker));
    arguments.add(fields.tensor(kState));
    arguments.add(flags.size() == 0 ? nullptr : tensor_of(py::object(flags[0]).ptr()));
    arguments.add(fields[kGrowth]);
    arguments.add(fields[kBackoff]);
    arguments.add(fields[kInterval]);
  }
  arguments.add(norm);
  arguments.add_number(max_norm);
  arguments.add_number(static_cast<int>(largest));

  const bool has_sums = pass.tensor(Pass::kSums) != nullptr;
  Key key;
  key.add(kMultiTensor, 1).add(arguments.nones(), 32).add(dtype_of(segment.dtype), 2);
  key.add(pass.write, 1).add(pass.how, 2);
  key.add(is_last, 1).add(pass.accumulate, 1);
  key.add(norm != nullptr && norm->scalar_type() == at::kDouble, 1);
  launch_variant(args[0], "multi_tensor", key.bits(), table.header.device(),
                 args[1] == Py_True ? segment.chunks : 0, arguments, [&] {
                   const py::object wide =
                       norm != nullptr ? py::cast(norm->scalar_type()) : py::none();
                   return py::make_tuple(segment.dtype, pass.write, static_cast<int>(pass.how),
                                         has_sums, is_last, pass.accumulate, wide);
                 });
  return nullptr;
}

// triton_update_scale(module, update)
PyObject* triton_update_scale(PyObject* const* args) {
  const Fields fields(args[1], kNorm + 1, "expected an Update");
  const py::sequence flags = py::reinterpret_borrow<py::sequence>(fields[kFlags]);
  Arguments arguments;
  for (const UpdateField place : {kScale, kTracker, kState, kNorm}) {
    arguments.add(fields.tensor(place));
  }
  for (size_t i = 0; i < 4; ++i) {
    arguments.add(tensor_of(py::object(flags[i < flags.size() ? i : 0]).ptr()));
  }
  for (const UpdateField place : {kGrowth, kBackoff, kInterval}) {
    arguments.add(fields[place]);
  }
  const uint64_t key = Key().add(kUpdateScale, 1).add(arguments.nones(), 32).bits();
  launch_variant(args[0], "update_scale", key, fields.tensor(kScale)->device(), 1, arguments,
                 [] { return py::tuple(); });
  return nullptr;
}

}  // namespace

void bind_device_kernels(py::module_& m) {
  add_call<run_on, 3>(m, "run_on");
  add_call<call_clip_on, 2>(m, "clip_on");
  add_call<update_on, 2>(m, "update_on");
  add_call<riding, 2>(m, "riding");
  add_call<triton_multi_tensor, 6>(m, "triton_multi_tensor");
  add_call<triton_update_scale, 2>(m, "triton_update_scale");
}

}  // namespace ampfast
