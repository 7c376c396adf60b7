// The Python face of the compiled core: bindings only, no arithmetic.
#include <ATen/ops/empty.h>
#include <pybind11/stl.h>
#include <torch/csrc/Dtype.h>
#include <torch/csrc/DynamicTypes.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/version.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <optional>
#include <tuple>

#include "cpu/instruction_set.h"
#include "cpu/multi_tensor.h"
#include "device_table.h"
#include "scale.h"
#include "short_way.h"
#include "track.h"

#if defined(AMPFAST_WITH_CUDA)
#include "cuda/bindings.h"
#endif

namespace ampfast {
namespace {

// Below this many chunks a kernel is over sooner than another thread could take the interpreter.
constexpr int64_t kChunksWorthReleasing = 8;

template <class Kernel>
bool run(const GradList& grads, const Kernel& kernel) {
  if (grads.chunks() < kChunksWorthReleasing) {
    return kernel();
  }
  const py::gil_scoped_release release;
  return kernel();
}

float read_scalar(const at::Tensor& tensor, const char* name) {
  TORCH_CHECK(tensor.numel() == 1, name, " must be a 1-element tensor.");
  TORCH_CHECK(tensor.scalar_type() == at::kFloat, name, " must be a float tensor.");
  TORCH_CHECK(tensor.is_cpu(), name, " must be a CPU tensor.");
  return *tensor.const_data_ptr<float>();
}

// A flag that the caller gave accumulates, a new one is assigned.
at::Tensor write_flag(std::optional<at::Tensor> found_inf, bool found) {
  if (!found_inf) {
    found_inf = at::empty({}, at::kFloat);
    *found_inf->mutable_data_ptr<float>() = found ? 1 : 0;
  } else if (found) {
    *found_inf->mutable_data_ptr<float>() = 1;
  }
  return *found_inf;
}

// Rows of marks, and the number of completed steps.
using Marks = std::tuple<at::Tensor, at::Tensor>;

int64_t* rows_of(const at::Tensor& tensor, int64_t words, const char* name) {
  TORCH_CHECK(tensor.is_cpu() && tensor.scalar_type() == at::kLong && tensor.is_contiguous() &&
                  tensor.dim() == 2 && tensor.size(1) == words,
              name, " must be a contiguous int64 tensor on the CPU with rows of ", words);
  return tensor.mutable_data_ptr<int64_t>();
}

std::optional<cpu::Marks> read_marks(const std::optional<Marks>& given) {
  if (!given) {
    return std::nullopt;
  }
  const auto& [rows, now] = *given;
  TORCH_CHECK(now.is_cpu() && now.scalar_type() == at::kLong && now.numel() >= 1,
              "the number of steps must be an int64 tensor on the CPU");
  return cpu::Marks{rows_of(rows, kMarkWords, "marks"), rows.size(0),
                    *now.const_data_ptr<int64_t>() + 1};
}

float read_inverse(const at::Tensor& factor, bool is_scale) {
  const float value = read_scalar(factor, "inv_scale");
  return is_scale ? inverse_scale(value) : value;
}

template <class T>
T* float64_data(const at::Tensor& tensor, const char* name, int64_t numel) {
  TORCH_CHECK(tensor.scalar_type() == at::kDouble && tensor.numel() == numel &&
                  tensor.is_contiguous() && is_plain(tensor, device_bit(at::kCPU)),
              name, " must be a contiguous float64 CPU tensor of ", numel, " elements.");
  return static_cast<T*>(tensor.data_ptr());
}

at::Tensor unscale_(const GradList& grads, const at::Tensor& factor, bool is_scale,
                    std::optional<at::Tensor> found_inf, const std::optional<Marks>& marks,
                    const std::optional<at::Tensor>& coefficient) {
  const std::optional<cpu::Marks> marked = read_marks(marks);
  if (found_inf) {
    read_scalar(*found_inf, "found_inf");
  }
  const float inv_scale = read_inverse(factor, is_scale);
  const double second =
      coefficient ? *float64_data<const double>(*coefficient, "coefficient", 1) : 1;
  const bool found = run(
      grads, [&] { return cpu::unscale(grads, inv_scale, marked ? &*marked : nullptr, second); });
  return write_flag(std::move(found_inf), found);
}

at::Tensor norms(const GradList& grads, const at::Tensor& factor, bool is_scale,
                 const at::Tensor& norms, const std::optional<Marks>& marks) {
  const std::optional<cpu::Marks> marked = read_marks(marks);
  const float inv_scale = read_inverse(factor, is_scale);
  double* written = float64_data<double>(norms, "norms", 2);
  const bool found = run(grads, [&] {
    const cpu::Norms total = cpu::norms(grads, inv_scale, marked ? &*marked : nullptr);
    written[0] = total.sum_of_squares;
    written[1] = total.absolute_maximum;
    return !std::isfinite(total.absolute_maximum);
  });
  return write_flag(std::nullopt, found);
}

void measure_(const GradList& grads, const at::Tensor& health) {
  int64_t* rows = rows_of(health, kHealthWords, "health");
  run(grads, [&] {
    cpu::measure(grads, rows, health.size(0));
    return true;
  });
}

// `norms` has a row for each list: its sum of squares and its largest magnitude. Without a scale
// no divisor is written.
void write_clip_coefficient(const at::Tensor& norms, double max_norm, bool largest,
                            const at::Tensor& norm, const at::Tensor& coefficient,
                            const std::optional<at::Tensor>& scale,
                            const std::optional<at::Tensor>& divisor) {
  Clip clip;
  clip.rows = norms.numel() / 2;
  clip.norms = float64_data<const double>(norms, "norms", 2 * clip.rows);
  clip.max_norm = max_norm;
  clip.largest = largest;
  if (norm.scalar_type() == at::kDouble) {
    clip.wide_norm = float64_data<double>(norm, "norm", 1);
  } else {
    read_scalar(norm, "norm");
    clip.norm = norm.mutable_data_ptr<float>();
  }
  clip.coefficient = float64_data<double>(coefficient, "coefficient", 1);
  if (scale && divisor) {
    read_scalar(*scale, "scale");
    read_scalar(*divisor, "divisor");
    clip.scale = scale->const_data_ptr<float>();
    clip.divisor = divisor->mutable_data_ptr<float>();
  }
  apply(clip);
}

at::Tensor check_(const GradList& grads, const std::optional<at::Tensor>& grad_scale,
                  std::optional<at::Tensor> found_inf, const std::optional<Marks>& marks) {
  const std::optional<cpu::Marks> marked = read_marks(marks);
  if (found_inf) {
    read_scalar(*found_inf, "found_inf");
  }
  const Use use = grad_scale ? Use::kDivide : Use::kNothing;
  const float factor = grad_scale ? read_scalar(*grad_scale, "grad_scale") : 1;
  const bool found =
      run(grads, [&] { return cpu::check(grads, use, factor, marked ? &*marked : nullptr); });
  return write_flag(std::move(found_inf), found);
}

bool is_state(const at::Tensor& tensor) {
  return tensor.scalar_type() == at::kLong && tensor.numel() == kStateWords &&
         is_plain(tensor, device_bit(at::kCPU)) && !is_observed();
}

// False where the kernels do not know the tensors exactly; then torch's own op decides.
bool update_scale_(const at::Tensor& scale, const at::Tensor& growth_tracker,
                   const std::vector<at::Tensor>& found_infs, double growth_factor,
                   double backoff_factor, int64_t growth_interval,
                   const std::optional<at::Tensor>& state, const std::optional<at::Tensor>& norm) {
  const uint64_t cpu = device_bit(at::kCPU);
  bool known = is_scalar(scale, at::kFloat, cpu) && is_scalar(growth_tracker, at::kInt, cpu) &&
               !scale.is_inference() && !scale.requires_grad() && (!state || is_state(*state)) &&
               (!norm || is_scalar(*norm, at::kFloat, cpu));
  for (const at::Tensor& flag : found_infs) {
    known = known && is_scalar(flag, at::kFloat, cpu);
  }
  if (!known) {
    return false;
  }
  bool found_inf = false;
  for (const at::Tensor& flag : found_infs) {
    found_inf |= *flag.const_data_ptr<float>() != 0;
  }
  Update update;
  update.scale = scale.mutable_data_ptr<float>();
  update.growth_tracker = growth_tracker.mutable_data_ptr<int32_t>();
  update.state = state ? state->mutable_data_ptr<int64_t>() : nullptr;
  update.norm = norm ? norm->const_data_ptr<float>() : nullptr;
  update.growth_factor = growth_factor;
  update.backoff_factor = backoff_factor;
  update.growth_interval = growth_interval;
  apply(update, found_inf);
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
          {"COUNTERS", kCounters},
          {"BEFORE", kBefore},
          {"SCALE_BEFORE", kScaleBefore},
          {"TRACKER_BEFORE", kTrackerBefore},
          {"MIN_SCALE", kMinScale},
          {"MAX_SCALE", kMaxScale},
          {"MOST_TOLERATED", kMostTolerated},
          {"REFILLS_ON_FINITE_STEPS", kRefillsOnFiniteSteps},
          {"RING", kRing},
          {"RING_STEPS", kRingSteps},
          {"RING_SCALE", kRingScale},
          {"RING_STATUS", kRingStatus},
          {"RING_NORM", kRingNorm},
          {"RING_WORDS", kRingWords},
          {"STATE_WORDS", kStateWords}};
}

std::map<std::string, std::string> build_info() {
  return {
      {"torch", TORCH_VERSION},
#if defined(__clang__)
      {"compiler", __VERSION__},  // begins with its name
#elif defined(__GNUC__)
      {"compiler", "GCC " __VERSION__},
#elif defined(_MSC_VER)
      {"compiler", "MSVC " + std::to_string(_MSC_VER)},
#else
      {"compiler", "unknown"},
#endif
#if defined(_OPENMP)
      {"openmp", "yes"},
#else
      {"openmp", "no"},
#endif
  };
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
  m.attr("CHUNK") = kChunk;
  m.attr("CPU") = device_bit(at::kCPU);
  m.attr("CUDA") = device_bit(at::kCUDA);
  m.attr("WINDOW_BYTES") = kWindowBytes;
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
      .def(py::init([](const py::sequence& tensors) {
        std::optional<GradList> list = regular_list(tensors, at::kCPU);
        TORCH_CHECK_VALUE(list, "every tensor must be a regular one on the CPU");
        return *std::move(list);
      }))
      .def_static("of", &regular_list, py::arg("tensors"), py::arg("device"),
                  py::arg("parameters") = std::nullopt)
      .def("split", &GradList::split, py::arg("parameters"))
      .def_property_readonly("device", [](const GradList& list) { return py::cast(list.device()); })
      .def_property_readonly("has_float64", &GradList::has_float64)
      .def_property_readonly("chunks", &GradList::chunks)
      .def_property_readonly("table_bytes", &GradList::table_bytes);

  py::class_<Segment>(m, "Segment")
      .def_property_readonly("dtype",
                             [](const Segment& segment) {
                               PyObject* dtype =
                                   reinterpret_cast<PyObject*>(torch::getTHPDtype(segment.dtype));
                               return py::reinterpret_borrow<py::object>(dtype);
                             })
      .def_readonly("word", &Segment::word)
      .def_readonly("tensors", &Segment::tensors)
      .def_readonly("windows", &Segment::windows)
      .def_readonly("programs", &Segment::programs);
  py::class_<DeviceTable, std::shared_ptr<DeviceTable>>(m, "DeviceTable")
      .def_static(
          "of",
          [](const GradList& grads, int64_t max_programs, bool capturing) {
            return std::const_pointer_cast<DeviceTable>(table_of(grads, max_programs, capturing));
          },
          py::arg("grads"), py::arg("max_programs"), py::arg("capturing"))
      .def_property_readonly("buffer", &DeviceTable::buffer)
      .def_property_readonly("segments", &DeviceTable::segments);
  m.def("uploads", [] { return std::pair(uploads().count, uploads().bytes); });
  m.def("clear_tables", &clear_tables);

  m.def("is_scalar", [](const at::Tensor& tensor, const py::object& dtype) {
    return is_scalar(tensor, reinterpret_cast<THPDtype*>(dtype.ptr())->scalar_type,
                     device_bit(at::kCPU) | device_bit(at::kCUDA));
  });
  m.def("update_scale_", &update_scale_, py::arg("scale"), py::arg("growth_tracker"),
        py::arg("found_infs"), py::arg("growth_factor"), py::arg("backoff_factor"),
        py::arg("growth_interval"), py::arg("state") = std::nullopt,
        py::arg("norm") = std::nullopt);
  m.def("require_storage", &require_storage);
  m.def("lacks_state", &lacks_state, py::arg("params"), py::arg("state"), py::arg("name"));
  m.def(
      "walk",
      [](const py::object& param_groups, bool allow_fp16, bool writes, uint64_t devices,
         bool bumps_versions, const py::object& local_shard_of) {
        Walk walk = walk_gradients(param_groups, allow_fp16, writes, bumps_versions, devices,
                                   local_shard_of);
        py::object refused = py::none();
        if (walk.refused) {
          refused = py::make_tuple(walk.refused->group, walk.refused->index, walk.refused->param);
        }
        return py::make_tuple(py::cast(std::move(walk.lists)), py::cast(std::move(walk.set_aside)),
                              refused);
      },
      py::arg("param_groups"), py::arg("allow_fp16"), py::arg("writes"), py::arg("devices"),
      py::arg("bumps_versions") = false, py::arg("local_shard_of") = py::none());
  m.def("unscale_", &unscale_, py::arg("grads"), py::arg("factor"), py::arg("is_scale"),
        py::arg("found_inf") = std::nullopt, py::arg("marks") = std::nullopt,
        py::arg("coefficient") = std::nullopt);
  m.def("norms", &norms, py::arg("grads"), py::arg("factor"), py::arg("is_scale"), py::arg("norms"),
        py::arg("marks") = std::nullopt);
  m.def("measure_", &measure_, py::arg("grads"), py::arg("health"));
  m.def("clip_coefficient", &write_clip_coefficient, py::arg("norms"), py::arg("max_norm"),
        py::arg("largest"), py::arg("norm"), py::arg("coefficient"), py::arg("scale"),
        py::arg("divisor"));
  m.def("check_", &check_, py::arg("grads"), py::arg("grad_scale") = std::nullopt,
        py::arg("found_inf") = std::nullopt, py::arg("marks") = std::nullopt);
}

}  // namespace ampfast
