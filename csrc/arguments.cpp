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

namespace {

// A named tuple's fields by their place.
class Fields {
 public:
  Fields(PyObject* tuple, Py_ssize_t count, const char* name) : tuple_(tuple) {
    if (!PyTuple_Check(tuple) || PyTuple_GET_SIZE(tuple) != count) {
      throw py::type_error(name);
    }
  }
  PyObject* operator[](int place) const { return PyTuple_GET_ITEM(tuple_, place); }
  const at::Tensor* tensor(int place) const { return tensor_of((*this)[place]); }
  bool is_true(int place) const { return (*this)[place] == Py_True; }

 private:
  PyObject* tuple_;
};

}  // namespace

Pass::Pass(PyObject* tuple) {
  enum { kWrite, kHow, kFactor, kFoundInf, kAccumulate, kCoefficient, kSums, kMarks, kNow };
  enum { kDivisor = kNow + 1, kUpdate, kFields };
  const Fields fields(tuple, kFields, "expected a Pass");
  write = fields.is_true(kWrite);
  how = static_cast<Factor>(PyLong_AsLong(fields[kHow]));
  factor = fields.tensor(kFactor);
  found_inf = fields.tensor(kFoundInf);
  accumulate = fields.is_true(kAccumulate);
  coefficient = fields.tensor(kCoefficient);
  sums = fields.tensor(kSums);
  marks = fields.tensor(kMarks);
  now = fields.tensor(kNow);
  divisor = fields.tensor(kDivisor);
  update = fields[kUpdate];
}

AcceptedNorms accepted_norms_of(const at::Tensor* words, at::Device device) {
  return words == nullptr ? AcceptedNorms{}
                          : AcceptedNorms{data_of<double>(words, "taken", device, words->numel()),
                                          words->numel() - 1};
}

Clip clip_of(PyObject* tuple, at::Device device) {
  enum { kSums, kMaxNorm, kLargest, kNorm, kCoefficient, kScale, kDivisor, kFoundInf, kSkipAbove };
  enum { kTaken = kSkipAbove + 1, kFields };
  const Fields fields(tuple, kFields, "expected a Clip");
  const at::Tensor* sums = fields.tensor(kSums);
  const at::Tensor* norm = fields.tensor(kNorm);
  if (sums == nullptr || norm == nullptr) {
    throw py::type_error("a Clip has sums and a norm");
  }
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
  clip.accepted_norms = accepted_norms_of(fields.tensor(kTaken), device);
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
  update.scale = scale->mutable_data_ptr<float>();
  update.growth_tracker = tracker->mutable_data_ptr<int32_t>();
  update.state = state != nullptr ? state->mutable_data_ptr<int64_t>() : nullptr;
  update.norm = norm != nullptr ? norm->const_data_ptr<float>() : nullptr;
  update.growth_factor = PyFloat_AS_DOUBLE(growth);
  update.backoff_factor = PyFloat_AS_DOUBLE(backoff);
  return update;
}

}  // namespace ampfast
