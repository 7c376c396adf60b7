// The Python face of the compiled core: bindings only, no arithmetic.
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/version.h>

#include <algorithm>
#include <cmath>
#include <map>

#include "bindings.h"
#include "cpu/instruction_set.h"
#include "cpu/multi_tensor.h"
#include "device_table.h"
#include "master_weights.h"
#include "track.h"

namespace ampfast {
namespace {

std::optional<cpu::Rows> read_marks(const std::optional<Marks>& marks) {
  if (!marks) {
    return std::nullopt;
  }
  const auto& [rows, now] = *marks;
  const int64_t parameters = rows.size(0);
  return cpu::Rows{
      data_of<int64_t>(rows, "marks", at::kCPU, parameters * kMarkWords), parameters,
      *data_of<const int64_t>(now, "steps", at::kCPU, std::max<int64_t>(now.numel(), 1)) + 1};
}

float read_inverse(const at::Tensor& factor, bool is_scale) {
  const float value = *data_of<const float>(factor, "inv_scale", at::kCPU);
  return is_scale ? inverse_scale(value) : value;
}

// The flag of a pass, which returns the largest magnitude, with these marks: the given one
// accumulates. `norms`, if given, gets that magnitude as its second element.
template <class Pass>
at::Tensor flag_of(const GradList& grads, const OptionalTensor& found_inf,
                   const std::optional<Marks>& marks, const OptionalTensor& norms,
                   const Pass& pass) {
  const std::optional<cpu::Rows> rows = read_marks(marks);
  const at::Tensor flag = found_inf ? *found_inf : new_scalar<float>(0);
  float* written = data_of<float>(flag, "found_inf", at::kCPU);
  double* its_norms = data_of<double>(norms, "norms", at::kCPU, 2);
  const double largest = run(grads, [&] { return pass(rows ? &*rows : nullptr); });
  if (!std::isfinite(largest)) {
    *written = 1;
  }
  if (its_norms != nullptr) {
    its_norms[1] = largest;
  }
  return flag;
}

at::Tensor unscale_(const GradList& grads, const at::Tensor& factor, bool is_scale,
                    const OptionalTensor& found_inf, const std::optional<Marks>& marks,
                    const OptionalTensor& coefficient, const OptionalTensor& norms) {
  const float inv_scale = read_inverse(factor, is_scale);
  const double* second = data_of<const double>(coefficient, "coefficient", at::kCPU);
  return flag_of(grads, found_inf, marks, norms, [&](const cpu::Rows* rows) {
    return cpu::unscale(grads, inv_scale, rows, second != nullptr ? *second : 1);
  });
}

at::Tensor check_(const GradList& grads, const OptionalTensor& grad_scale,
                  const OptionalTensor& found_inf, const std::optional<Marks>& marks,
                  const OptionalTensor& norms) {
  const float* divisor = data_of<const float>(grad_scale, "grad_scale", at::kCPU);
  return flag_of(grads, found_inf, marks, norms, [&](const cpu::Rows* rows) {
    return divisor != nullptr ? cpu::check(grads, Use::kDivide, *divisor, rows)
                              : cpu::check(grads, Use::kNothing, 1, rows);
  });
}

at::Tensor norms(const GradList& grads, const at::Tensor& factor, bool is_scale,
                 const at::Tensor& norms, const std::optional<Marks>& marks) {
  const float inv_scale = read_inverse(factor, is_scale);
  double* written = data_of<double>(norms, "norms", at::kCPU, 2);
  return flag_of(grads, std::nullopt, marks, norms, [&](const cpu::Rows* rows) {
    const cpu::Norms total = cpu::norms(grads, inv_scale, rows);
    written[0] = total.sum_of_squares;
    return total.absolute_maximum;
  });
}

// Rounds pairs unless the flag is set; tells whether it did.
bool narrow_(const GradList& pairs, const OptionalTensor& found_inf) {
  const float* flag = data_of<const float>(found_inf, "found_inf", at::kCPU);
  if (flag != nullptr && *flag != 0) {
    return false;
  }
  run(pairs, [&] { cpu::narrow(pairs); });
  return true;
}

void measure_(const GradList& grads, const at::Tensor& health) {
  const int64_t parameters = health.size(0);
  const cpu::Rows rows{data_of<int64_t>(health, "health", at::kCPU, parameters * kHealthWords),
                       parameters};
  run(grads, [&] { cpu::measure(grads, rows); });
}

// False where the kernels do not know the tensors exactly; then torch's own op decides.
bool update_scale_(const at::Tensor& scale, const at::Tensor& growth_tracker,
                   const std::vector<at::Tensor>& found_infs, double growth_factor,
                   double backoff_factor, int64_t growth_interval, const OptionalTensor& state,
                   const OptionalTensor& norm) {
  const std::optional<Update> update =
      update_of(at::kCPU, scale, growth_tracker, state ? &*state : nullptr, norm ? &*norm : nullptr,
                growth_factor, backoff_factor, growth_interval);
  float sum = 0;  // as torch takes it
  for (const at::Tensor& flag : found_infs) {
    if (!is_scalar(flag, at::kFloat, device_bit(at::kCPU))) {
      return false;
    }
    sum += *flag.const_data_ptr<float>();
  }
  if (!update) {
    return false;
  }
  apply(*update, sum);
  scale.unsafeGetTensorImpl()->bump_version();  // as torch's op
  return true;
}

// Layout of a scaler's state, by name.
std::map<std::string, int64_t> state_layout() {
  return {{"STEPS", kSteps},
          {"SKIPPED", kSkipped},
          {"GROWTHS", kGrowths},
          {"BACKOFFS", kBackoffs},
          {"CONSECUTIVE_SKIPS", kConsecutiveSkips},
          {"SKIPS_AT_MINIMUM", kSkipsAtMinimum},
          {"TOLERATED", kTolerated},
          {"LAST_SKIPPED", kLastSkipped},
          {"SPIKES", kSpikes},
          {"COUNTERS", kCounters},
          {"BEFORE", kBefore},
          {"SCALE_BEFORE", kScaleBefore},
          {"TRACKER_BEFORE", kTrackerBefore},
          {"MIN_SCALE", kMinScale},
          {"MAX_SCALE", kMaxScale},
          {"MOST_TOLERATED", kMostTolerated},
          {"REFILLS_ON_FINITE_STEPS", kRefillsOnFiniteSteps},
          {"PROPOSAL", kProposal},
          {"RING", kRing},
          {"RING_STEPS", kRingSteps},
          {"RING_SCALE", kRingScale},
          {"RING_STATUS", kRingStatus},
          {"RING_NORM", kRingNorm},
          {"RING_WORDS", kRingWords},
          {"STATE_WORDS", kStateWords}};
}

std::map<std::string, std::string> build_info() {
#if defined(_OPENMP)
  const char* openmp = "yes";
#else
  const char* openmp = "no";
#endif
#if defined(__GNUC__) && !defined(__clang__)
  const char* compiler = "GCC " __VERSION__;
#elif defined(__VERSION__)
  const char* compiler = __VERSION__;  // begins with its name
#else
  const char* compiler = "unknown";
#endif
  return {{"torch", TORCH_VERSION}, {"compiler", compiler}, {"openmp", openmp}};
}

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
#if defined(AMPFAST_WITH_CUDA)
  m.attr("WITH_CUDA") = true;
  cuda::bind(m);
#else
  m.attr("WITH_CUDA") = false;
#endif
  bind_short_way(m);
  bind_master_weights(m);
  m.attr("CHUNK") = kChunk;
  m.attr("CPU") = device_bit(at::kCPU);
  m.attr("CUDA") = device_bit(at::kCUDA);
  m.attr("WINDOW_BYTES") = kWindowBytes;
  m.attr("MOST_CHUNK_BYTES") = kMostChunkBytes;
  m.attr("ENOUGH_CHUNKS") = kEnoughChunks;
  m.attr("MARK_WORDS") = static_cast<int64_t>(kMarkWords);
  m.attr("HEALTH_WORDS") = static_cast<int64_t>(kHealthWords);
  m.def("build_info", &build_info);
  m.def("state_layout", &state_layout);
  m.def("cpu_capability", &cpu::capability);
  m.def("cpu_capabilities", &cpu::capabilities);
  m.def("set_cpu_capability", &cpu::set_capability);
  m.def("set_grain", &cpu::set_grain);

  // pybind11 takes it for granted that an object gets memory.
  const py::custom_type_setup checked_alloc([](PyHeapTypeObject* type) {
    type->ht_type.tp_alloc = [](PyTypeObject* kind, Py_ssize_t count) {
      PyObject* made = PyType_GenericAlloc(kind, count);
      if (made == nullptr) {
        throw py::error_already_set();
      }
      return made;
    };
  });
  py::class_<GradList>(m, "GradList", checked_alloc)
      .def_static("of", &regular_list, py::arg("tensors"), py::arg("device"),
                  py::arg("parameters") = std::nullopt, py::arg("wide") = std::nullopt)
      .def("split", &GradList::split, py::arg("parameters"))
      .def("pairs", &GradList::pairs)
      .def_property_readonly("device", &GradList::device)
      .def_property_readonly("has_float64", &GradList::has_float64)
      .def_property_readonly("chunks", &GradList::chunks);

  py::class_<Segment>(m, "Segment")
      .def_readonly("dtype", &Segment::dtype)
      .def_readonly("word", &Segment::word)
      .def_readonly("chunks", &Segment::chunks)
      .def_readonly("partials", &Segment::partials)
      .def_readonly("is_paired", &Segment::is_paired)
      .def_readonly("is_aligned", &Segment::is_aligned);
  py::class_<DeviceTable, std::shared_ptr<DeviceTable>>(m, "DeviceTable")
      .def_static("of",
                  [](const GradList& grads, bool capturing) {
                    return std::const_pointer_cast<DeviceTable>(table_of(grads, capturing));
                  })
      .def_property_readonly("buffer", &DeviceTable::buffer)
      .def_property_readonly("segments", &DeviceTable::segments);
  m.def("uploads", [] { return uploads(); });
  m.def("clear_tables", &clear_tables);
  m.def("set_enough_chunks", &set_enough_chunks);

  m.def("is_scalar", [](const at::Tensor& tensor, at::ScalarType dtype) {
    return is_scalar(tensor, dtype, kKernelDevices);
  });
  m.attr("SPIKE") = kSpike;
  m.attr("SPIKE_BOUND") = kSpikeBound;
  m.def("update_scale_", &update_scale_);
  m.def("require_storage", &require_storage);
  m.def("lacks_state", &lacks_state);
  m.def("walk", &walk_gradients, py::arg("param_groups"), py::arg("allow_fp16"), py::arg("writes"),
        py::arg("devices"), py::arg("bumps_versions") = false,
        py::arg("local_shard_of") = py::none(), py::arg("casts") = nullptr);
  m.def("unscale_", &unscale_);
  m.def("check_", &check_);
  m.def("norms", &norms);
  m.def("measure_", &measure_);
  m.def("narrow_", &narrow_);
  m.def("clip_coefficient", [](const py::args& arguments) {
    apply(clip_of(arguments.cast<ClipArguments>(), at::kCPU));
  });
}

}  // namespace ampfast
