// How Python's named tuples are read.
#include <torch/csrc/autograd/python_variable.h>

#include "bindings.h"

namespace ampfast {

const at::Tensor* tensor_of(PyObject* object) {
  if (object == Py_None) {
    return nullptr;
  }
  if (!THPVariable_Check(object)) {
    throw py::type_error("expected a tensor or None");
  }
  return &THPVariable_Unpack(object);
}

Pass::Pass(PyObject* tuple) {
  enum { kWrite, kHow, kFactor, kFoundInf, kAccumulate, kCoefficient, kSums, kMarks, kNow };
  enum { kDivisor = kNow + 1, kUpdate, kFields };
  if (!PyTuple_Check(tuple) || PyTuple_GET_SIZE(tuple) != kFields) {
    throw py::type_error("expected a Pass");
  }
  const auto item = [tuple](int place) { return PyTuple_GET_ITEM(tuple, place); };
  write = item(kWrite) == Py_True;
  how = static_cast<Factor>(PyLong_AsLong(item(kHow)));
  factor = tensor_of(item(kFactor));
  found_inf = tensor_of(item(kFoundInf));
  accumulate = item(kAccumulate) == Py_True;
  coefficient = tensor_of(item(kCoefficient));
  sums = tensor_of(item(kSums));
  marks = tensor_of(item(kMarks));
  now = tensor_of(item(kNow));
  divisor = tensor_of(item(kDivisor));
  update = item(kUpdate);
}

std::optional<Update> update_of(PyObject* tuple) {
  if (!PyTuple_Check(tuple) || PyTuple_GET_SIZE(tuple) != kNorm + 1) {
    throw py::type_error("expected an Update");
  }
  const auto item = [tuple](int place) { return PyTuple_GET_ITEM(tuple, place); };
  PyObject *growth = item(kGrowth), *backoff = item(kBackoff), *interval = item(kInterval);
  const at::Tensor* scale = tensor_of(item(kScale));
  const at::Tensor* tracker = tensor_of(item(kTracker));
  const at::Tensor* state = tensor_of(item(kState));
  const at::Tensor* norm = tensor_of(item(kNorm));
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
  update.scale = scale->mutable_data_ptr<float>();
  update.growth_tracker = tracker->mutable_data_ptr<int32_t>();
  update.state = state != nullptr ? state->mutable_data_ptr<int64_t>() : nullptr;
  update.norm = norm != nullptr ? norm->const_data_ptr<float>() : nullptr;
  update.growth_factor = PyFloat_AS_DOUBLE(growth);
  update.backoff_factor = PyFloat_AS_DOUBLE(backoff);
  return update;
}

}  // namespace ampfast
