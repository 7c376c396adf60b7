// How Python's named tuples are read.

#include "bindings.h"
#include "track.h"

namespace ampfast {

const at::Tensor* tensor_of(PyObject* object) {
  TORCH_CHECK_TYPE(object == Py_None || THPVariable_Check(object), "expected a tensor or None");
  return object == Py_None ? nullptr : &THPVariable_Unpack(object);
}

double float_of(PyObject* object) {
  const double number = PyFloat_AsDouble(object);
  if (PyErr_Occurred() != nullptr) {
    throw py::error_already_set();
  }
  return number;
}

int64_t int_of(PyObject* object) {
  const int64_t number = PyLong_AsLongLong(object);
  if (PyErr_Occurred() != nullptr) {
    throw py::error_already_set();
  }
  return number;
}

const GradList& list_of(PyObject* object, std::optional<at::Device> device) {
  py::detail::make_caster<GradList> caster;
  TORCH_CHECK_TYPE(caster.load(object, false), "expected a GradList");
  const auto& list = py::detail::cast_op<const GradList&>(caster);
  TORCH_CHECK(!device || list.device() == *device, "the gradients are on ", list.device(),
              ", not on ", *device);
  return list;
}

void require_tuple(PyObject* object, const char* name) {
  TORCH_CHECK_TYPE(PyTuple_Check(object), name, " must be a tuple");
}

Factor Pass::factor_of(PyObject* object) {
  const int64_t number = int_of(object);
  TORCH_CHECK_VALUE(number >= 0 && number <= static_cast<int64_t>(Factor::kDivide),
                    "a pass has no factor of kind ", number);
  return static_cast<Factor>(number);
}

Marks marks_of(const Pass& pass, at::Device device) {
  const at::Tensor* marks = pass.tensor(Pass::kMarks);
  if (marks == nullptr) {
    return {};
  }
  const at::Tensor* steps = pass.tensor(Pass::kNow);
  TORCH_CHECK_TYPE(steps != nullptr, "a pass with marks needs the number of steps");
  const int64_t parameters = marks->dim() == 2 ? marks->size(0) : 0;
  return {data_of<int64_t>(marks, "marks", device, parameters * kMarkWords), parameters,
          data_of<int64_t>(steps, "steps", device, std::max<int64_t>(steps->numel(), 1))};
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
  const ClipTuple fields(tuple);
  const at::Tensor* sums = fields.tensor(ClipTuple::kSums);
  const at::Tensor* norm = fields.tensor(ClipTuple::kNorm);
  TORCH_CHECK_TYPE(sums != nullptr && norm != nullptr, "a Clip has sums and a norm");
  Clip clip;
  clip.rows = sums->numel() / 2;
  clip.sums = data_of<const double>(sums, "sums", device, 2 * clip.rows);
  clip.max_norm = float_of(fields[ClipTuple::kMaxNorm]);
  clip.largest = fields.is_true(ClipTuple::kLargest);
  if (norm->scalar_type() == at::kDouble) {
    clip.wide_norm = data_of<double>(norm, "norm", device);
  } else {
    clip.norm = data_of<float>(norm, "norm", device);
  }
  clip.coefficient = data_of<double>(fields.tensor(ClipTuple::kCoefficient), "coefficient", device);
  clip.scale = data_of<const float>(fields.tensor(ClipTuple::kScale), "scale", device);
  clip.divisor = data_of<float>(fields.tensor(ClipTuple::kDivisor), "divisor", device);
  clip.found_inf = data_of<float>(fields.tensor(ClipTuple::kFoundInf), "found_inf", device);
  clip.skip_above = float_of(fields[ClipTuple::kSkipAbove]);
  clip.accepted_norms = accepted_norms_of(fields.tensor(ClipTuple::kAcceptedNorms), device);
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
  PyObject* flags = fields[kFlags];
  TORCH_CHECK_TYPE(PyList_Check(flags) || PyTuple_Check(flags), "flags must be a list or tuple");
  for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(flags); ++i) {
    PyObject* flag = PySequence_Fast_GET_ITEM(flags, i);
    if (!THPVariable_Check(flag) || !is_scalar_there(THPVariable_Unpack(flag), at::kFloat)) {
      return std::nullopt;
    }
  }
  update.scale = scale->mutable_data_ptr<float>();
  update.growth_tracker = tracker->mutable_data_ptr<int32_t>();
  update.state = data_of<int64_t>(state, "state", device, kStateWords);
  update.norm = norm != nullptr ? norm->const_data_ptr<float>() : nullptr;
  update.growth_factor = PyFloat_AS_DOUBLE(growth);
  update.backoff_factor = PyFloat_AS_DOUBLE(backoff);
  return update;
}

}  // namespace ampfast
