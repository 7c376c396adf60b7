// How Python's named tuples are read.
#include <torch/csrc/autograd/python_variable.h>

#include "bindings.h"

namespace ampfast {

const at::Tensor* tensor_of(PyObject* object) {
  TORCH_CHECK_TYPE(object == Py_None || THPVariable_Check(object), "expected a tensor or None");
  return object == Py_None ? nullptr : &THPVariable_Unpack(object);
}

AcceptedNorms accepted_norms_of(const at::Tensor* words, at::Device device) {
  if (words == nullptr) {
    return {};
  }
  const int64_t size = words->numel();
  auto* data = data_of<double>(words, "accepted_norms", device, size);
  TORCH_CHECK_VALUE(size >= kNormRing + 2, "accepted_norms has no window of 2 or more norms");
  TORCH_CHECK_VALUE(!device.is_cpu() || (data[kNormCount] >= 0 && data[kNormCount] < 0x1p53),
                    "accepted_norms has no count of norms");
  return {data, size - kNormRing};
}

Clip clip_of(PyObject* tuple, at::Device device) {
  enum { kSums, kMaxNorm, kLargest, kNorm, kCoefficient, kScale, kDivisor, kFoundInf, kSkipAbove };
  enum { kAcceptedNorms = kSkipAbove + 1, kFields };
  const Fields fields(tuple, kFields, "expected a Clip");
  const at::Tensor* sums = fields.tensor(kSums);
  const at::Tensor* norm = fields.tensor(kNorm);
  TORCH_CHECK_TYPE(sums != nullptr && norm != nullptr, "a Clip has sums and a norm");
  Clip clip;
  clip.rows = sums->numel() / 2;
  clip.sums = data_of<const double>(sums, "sums", device, 2 * clip.rows);
  clip.max_norm = PyFloat_AsDouble(fields[kMaxNorm]);
  clip.largest = fields.is_true(kLargest);
  if (norm->scalar_type() == at::kDouble) {
    clip.wide_norm = data_of<double>(norm, "norm", device);
  } else {
    clip.norm = data_of<float>(norm, "norm", device);
  }
  clip.coefficient = data_of<double>(fields.tensor(kCoefficient), "coefficient", device);
  clip.scale = data_of<const float>(fields.tensor(kScale), "scale", device);
  clip.divisor = data_of<float>(fields.tensor(kDivisor), "divisor", device);
  clip.found_inf = data_of<float>(fields.tensor(kFoundInf), "found_inf", device);
  clip.skip_above = PyFloat_AsDouble(fields[kSkipAbove]);
  clip.accepted_norms = accepted_norms_of(fields.tensor(kAcceptedNorms), device);
  if (PyErr_Occurred() != nullptr) {
    throw py::error_already_set();
  }
  return clip;
}

std::optional<Update> update_of(PyObject* tuple) {
  const Fields fields(tuple, kNorm + 1, "expected an Update");
  PyObject *growth = fields[kGrowth], *backoff = fields[kBackoff], *interval = fields[kInterval];
  const at::Tensor* scale = fields.tensor(kScale);
  const at::Tensor* tracker = fields.tensor(kTracker);
  const at::Tensor* state = fields.tensor(kState);
  const at::Tensor* norm = fields.tensor(kNorm);
  if (scale == nullptr || tracker == nullptr || !PyFloat_CheckExact(growth) ||
      !PyFloat_CheckExact(backoff) || !PyLong_CheckExact(interval)) {
    return std::nullopt;
  }
  const at::Device device = scale->device();
  const uint64_t devices = kKernelDevices;
  const auto is_scalar_there = [=](const at::Tensor& tensor, at::ScalarType dtype) {
    return is_scalar(tensor, dtype, devices) && tensor.device() == device;
  };
  int overflow = 0;
  Update update;
  update.growth_interval = PyLong_AsLongLongAndOverflow(interval, &overflow);
  if (overflow != 0 || !is_scalar_there(*scale, at::kFloat) || scale->is_inference() ||
      scale->requires_grad() || !is_scalar_there(*tracker, at::kInt) ||
      (norm != nullptr && !is_scalar_there(*norm, at::kFloat)) ||
      (state != nullptr && (state->scalar_type() != at::kLong || state->numel() != kStateWords ||
                            !is_plain(*state, devices) || state->device() != device))) {
    return std::nullopt;
  }
  for (const py::handle flag : py::handle(fields[kFlags])) {
    if (!THPVariable_Check(flag.ptr()) ||
        !is_scalar_there(THPVariable_Unpack(flag.ptr()), at::kFloat)) {
      return std::nullopt;
    }
  }
  update.scale = scale->mutable_data_ptr<float>();
  update.growth_tracker = tracker->mutable_data_ptr<int32_t>();
  update.state = state != nullptr ? state->mutable_data_ptr<int64_t>() : nullptr;
  update.norm = norm != nullptr ? norm->const_data_ptr<float>() : nullptr;
  update.growth_factor = PyFloat_AS_DOUBLE(growth);
  update.backoff_factor = PyFloat_AS_DOUBLE(backoff);
  return update;
}

}  // namespace ampfast
