#include "found.h"

#include <pybind11/stl.h>
#include <torch/csrc/Device.h>

#include "cpu/multi_tensor.h"
#include "device_kernels.h"
#include "track.h"

namespace ampfast {

py::object device_object(at::Device device) {
  static PyObject* const cpu = THPDevice_New(at::Device(at::kCPU));
  return device.is_cpu() ? py::reinterpret_borrow<py::object>(cpu)
                         : py::reinterpret_steal<py::object>(THPDevice_New(device));
}

py::dict dict_of(const Flags& flags) {
  py::dict found;
  for (const auto& [device, flag] : flags) {
    found[device_object(device)] = flag;
  }
  return found;
}

at::Tensor moved(const at::Tensor& scalar, at::Device device) {
  if (!scalar.defined() || scalar.device() == device) {
    return scalar;
  }
  return scalar.to(device, scalar.scalar_type(), /*non_blocking=*/!device.is_cpu());
}

Turn::Turn(PyObject* turn) : turn_(turn), flag_(new_scalar<float>(1)) {
  TORCH_CHECK_TYPE(PyDict_Check(turn), "expected the turn of an optimizer");
  flags_[device_object(at::kCPU)] = flag_;
  before_[0] = py::reinterpret_borrow<py::object>(
      PyDict_GetItemWithError(turn, names::found_inf_per_device));
  before_[1] = py::reinterpret_borrow<py::object>(PyDict_GetItemWithError(turn, names::stage));
}

void Turn::begin(const py::object& agreement) const {
  if (!agreement.is_none()) {
    set(names::agreement, agreement);
  }
  flags(flags_);
  unscaled();
}

bool Turn::is_ready() const {
  static const py::handle ready = of_python("ampfast.gradients", "READY").release();
  return PyDict_GetItemWithError(turn_, names::stage) == ready.ptr();
}

void Turn::unscaled() const {
  static const py::handle stage = of_python("ampfast.gradients", "UNSCALED").release();
  py::reinterpret_borrow<py::dict>(turn_)[names::stage] = stage;
}

void Turn::flags(const Flags& flags) const {
  const bool is_own = flags.size() == 1 && flags[0].second.is_same(flag_);
  this->flags(is_own ? flags_ : dict_of(flags));
}

void Turn::flags(const py::dict& flags) const {
  py::reinterpret_borrow<py::dict>(turn_)[names::found_inf_per_device] = flags;
}

py::dict Turn::flags() const {
  return py::reinterpret_borrow<py::dict>(
      PyDict_GetItemWithError(turn_, names::found_inf_per_device));
}

void Turn::set(PyObject* name, const py::object& value) const { py::setattr(turn_, name, value); }

at::Tensor run_on_cpu(const GradList& list, const Pass& pass, const at::Tensor& new_flag) {
  cpu::Work work;
  work.write = pass.write;
  work.how = pass.how;
  const char* name = pass.how == Factor::kDivide ? "grad_scale" : "inv_scale";
  if (const auto* factor = data_of<const float>(pass.factor, name, at::kCPU)) {
    work.factor = *factor;
  }
  if (const auto* coefficient = data_of<const double>(pass.coefficient, "coefficient", at::kCPU)) {
    work.coefficient = *coefficient;
  }
  if (pass.how == Factor::kTimesReciprocal) {
    work.how = Factor::kTimes;
    work.factor = inverse_scale(work.factor);
  }
  work.sums = data_of<double>(pass.sums, "sums", at::kCPU, 2);
  work.marks = marks_of(pass, at::kCPU);
  const at::Tensor flag = pass.found_inf.defined() ? pass.found_inf
                          : new_flag.defined()     ? new_flag
                                                   : new_scalar<float>(0);
  float* written = data_of<float>(flag, "found_inf", at::kCPU);
  if (pass.factor_copy.defined()) {
    *data_of<float>(pass.factor_copy, "factor_copy", at::kCPU) = work.factor;
  }
  const double peak = without_gil_if_long(list, [&] { return cpu::run(list, work); });
  const bool found = !std::isfinite(peak);
  if (found || new_flag.is_same(flag)) {
    *written = found ? 1 : 0;
  }
  if (pass.clip) {
    pass.clip->take(pass.sums, flag);
    clip_coefficient(pass.clip->on(at::kCPU));
  }
  return flag;
}

namespace {

at::Tensor new_sums(const Batch& batch) {
  if (batch.list) {
    // As a Clip has it.
    return allocated({1, 2}, at::TensorOptions(at::kDouble).device(batch.device));
  }
  const auto widest = of_python("ampfast.backends.scalars", "widest");
  const auto dtype = widest(device_object(batch.device)).cast<at::ScalarType>();
  return allocated({2}, at::TensorOptions(dtype).device(batch.device));
}

at::Tensor marks_on(const py::object& rows, at::Device device) {
  const py::dict known = rows.attr(names::counters);
  PyObject* marks = PyDict_GetItemWithError(known.ptr(), device_object(device).ptr());
  return marks != nullptr ? tensor_of(marks)
                          : tensor_of(rows.attr("counters_on")(device_object(device)).ptr());
}

}  // namespace

Flags Found::run(const Pass& pass, const Running& how) {
  const bool decides = !pass.coefficient.defined();
  if (pass.write && decides) {
    require("require_unscalable");
  }
  if (pass.write && how.turn != nullptr && !batches.empty()) {
    how.turn->begin(how.agreement);
  }
  if (pass.write && !decides) {
    for (const GradRef& ref : walk.grads) {
      ref.grad->unsafeGetTensorImpl()->bump_version();  // as torch's clip
    }
  }
  const bool is_whole = batches.size() == 1 && walk.shards.is_none();
  // Of the flag as it was given, also after gradients of its own device have set it.
  const bool copies = pass.found_inf.defined() && batches.size() > 1;
  const at::Tensor initial = copies ? pass.found_inf.clone() : pass.found_inf;
  Flags flags;
  for (const Batch& batch : batches) {
    Pass here = pass;
    here.factor = pass.how == Factor::kNone ? at::Tensor() : moved(pass.factor, batch.device);
    here.coefficient = moved(pass.coefficient, batch.device);
    auto known = std::find_if(flags.begin(), flags.end(),
                              [&](const auto& each) { return each.first == batch.device; });
    if (known != flags.end()) {
      here.found_inf = known->second;
    } else if (initial.defined() && initial.device() != batch.device) {
      here.found_inf = moved(initial, batch.device);
    }
    if (!how.rows.is_none()) {
      here.marks = marks_on(how.rows, batch.device);
      const at::Tensor words = tensor_of(how.words.ptr());
      here.now =
          words.device() == batch.device ? words : moved(words.narrow(0, 0, 1), batch.device);
    }
    if (how.sums != nullptr) {
      how.sums->push_back(here.sums = new_sums(batch));
    }
    at::Tensor flag;
    if (!batch.list) {
      static const py::handle run = of_python("ampfast.backends.aten", "run").release();
      flag = tensor_of(run(batch.aside, std::make_shared<Pass>(here)).ptr());
    } else if (batch.launcher != nullptr) {
      flag = run_on(batch.launcher, *batch.list, std::move(here));
    } else {
      const bool is_turns = is_whole && pass.write && how.turn != nullptr;
      flag = run_on_cpu(*batch.list, here, is_turns ? how.turn->flag() : at::Tensor());
    }
    if (known == flags.end()) {
      flags.emplace_back(batch.device, flag);
    }
  }
  if (decides && how.sums == nullptr && !walk.shards.is_none() &&
      py::len(walk.shards.attr("partial")) != 0) {
    // All ranks reduce partial gradients, and check the sums as the optimizer uses them.
    const auto check = of_python("ampfast.gradients", "check_reduced");
    const py::dict checked =
        check(walk.shards, std::make_shared<Pass>(pass), dict_of(flags), how.rows, how.words);
    flags.clear();
    for (const auto& [device, flag] : checked) {
      flags.emplace_back(device.cast<at::Device>(), flag.cast<at::Tensor>());
    }
  }
  return flags;
}

std::pair<std::shared_ptr<Found>, std::shared_ptr<Found>> Found::split(
    const std::unordered_set<int64_t>& numbers) const {
  auto inside = std::make_shared<Found>(), outside = std::make_shared<Found>();
  inside->walk.owners = outside->walk.owners = walk.owners;
  const auto take = [](Found& half, const Batch& batch, std::optional<GradList> list,
                       const py::object& aside) {
    const bool is_empty = list ? list->elements() == 0 : py::len(aside.attr("groups")) == 0;
    if (!is_empty) {
      half.batches.push_back({batch.device, std::move(list), batch.launcher, aside});
    }
  };
  for (const Batch& batch : batches) {
    if (batch.list) {
      auto [in, out] = batch.list->split(numbers);
      take(*inside, batch, std::move(in), {});
      take(*outside, batch, std::move(out), {});
    } else {
      const py::tuple both = batch.aside.attr("split")(py::cast(numbers));
      take(*inside, batch, std::nullopt, both[0]);
      take(*outside, batch, std::nullopt, both[1]);
    }
  }
  return {inside, outside};
}

void Found::require(const char* name) const {
  for (const Batch& batch : batches) {
    if (!batch.list) {
      of_python("ampfast.backends.aten", name)(batch.aside);
    }
  }
}

bool Found::has_parameters(const py::tuple& known) const {
  const auto are_same = [](py::handle params, py::handle others) {
    PyObject** const items = PySequence_Fast_ITEMS(params.ptr());
    const Py_ssize_t count = PySequence_Fast_GET_SIZE(params.ptr());
    return count == PySequence_Fast_GET_SIZE(others.ptr()) &&
           std::equal(items, items + count, PySequence_Fast_ITEMS(others.ptr()));
  };
  const py::tuple mine = groups();
  return mine.size() == known.size() &&
         std::equal(mine.begin(), mine.end(), known.begin(), are_same);
}

py::tuple Found::groups() const {
  py::list groups;
  for (const py::object& params : walk.groups) {
    groups.append(py::tuple(params));
  }
  return groups;
}

py::object Found::layouts() const {
  return walk.shards.is_none() ? py::dict() : py::object(walk.shards.attr("layouts"));
}

std::optional<at::ScalarType> Found::dtype() const {
  Tensors grads;
  add_grads(grads);
  const bool is_plain = batches.size() == 1 && batches[0].list && !has_duplicates(grads);
  return is_plain ? std::optional(batches[0].list->dtype()) : std::nullopt;
}

bool has_duplicates(const Tensors& tensors) {
  size_t slots = 16;
  while (slots < 2 * tensors.size()) {
    slots *= 2;
  }
  Reused<const void*> seen;  // a hash table
  seen.assign(slots, nullptr);
  for (const at::Tensor* tensor : tensors) {
    const void* impl = tensor->unsafeGetTensorImpl();
    size_t slot = reinterpret_cast<uintptr_t>(impl) * uint64_t{0x9e3779b97f4a7c15} >> 32;
    while (seen[slot &= slots - 1] != nullptr) {
      if (seen[slot++] == impl) {
        return true;
      }
    }
    seen[slot] = impl;
  }
  return false;
}

void Found::add_grads(Tensors& grads) const {
  for (const GradRef& ref : walk.grads) {
    grads.push_back(ref.grad);
  }
  for (const SetAside& each : walk.set_aside) {
    grads.push_back(&std::get<1>(each));
  }
}

}  // namespace ampfast
