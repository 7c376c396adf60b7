#include "../bindings.h"

#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include "../device_table.h"
#include "multi_tensor.h"

namespace ampfast::cuda {

namespace {

using Factors = std::tuple<double, double, int64_t>;

template <class T>
T* data(const OptionalTensor& tensor) {
  return tensor ? static_cast<T*>(tensor->data_ptr()) : nullptr;
}

void require(const char* error) { TORCH_CHECK(error == nullptr, "ampfast: ", error); }

void* current_stream(at::Device device) {
  return c10::cuda::getCurrentCUDAStream(device.index()).stream();
}

Update update_of(const OptionalTensor& scale, const OptionalTensor& growth_tracker,
                 const OptionalTensor& state, const OptionalTensor& norm, const Factors& factors) {
  Update update;
  update.scale = data<float>(scale);
  update.growth_tracker = data<int32_t>(growth_tracker);
  update.state = data<int64_t>(state);
  update.norm = data<float>(norm);
  std::tie(update.growth_factor, update.backoff_factor, update.growth_interval) = factors;
  return update;
}

void launch_multi_tensor(const DeviceTable& table, const Segment& segment, bool write, int use,
                         const OptionalTensor& factor, const OptionalTensor& coefficient,
                         const OptionalTensor& norms, const std::optional<Marks>& marks,
                         bool epilogue, const at::Tensor& found_inf, bool accumulate,
                         const OptionalTensor& scale, const OptionalTensor& growth_tracker,
                         const OptionalTensor& state, const OptionalTensor& other_found_inf,
                         const Factors& factors, const OptionalTensor& divisor) {
  const at::Device device = table.buffer().device();
  const c10::cuda::CUDAGuard guard(device);
  Launch pass;
  pass.dtype = dtype_of(segment.dtype);
  pass.table = static_cast<int64_t*>(table.buffer().data_ptr());
  pass.segment = segment.word;
  pass.chunks = segment.chunks;
  pass.partials = segment.partials;
  pass.is_paired = segment.is_paired;
  pass.is_aligned = segment.is_aligned;
  pass.write = write;
  pass.factor_use = static_cast<Factor>(use);
  pass.factor = data<float>(factor);
  pass.coefficient = data<double>(coefficient);
  pass.norms = data<double>(norms);
  if (marks) {
    pass.marks = data<int64_t>(std::get<0>(*marks));
    pass.now = data<int64_t>(std::get<1>(*marks));
  }
  pass.epilogue = epilogue;
  pass.found_inf = static_cast<float*>(found_inf.data_ptr());
  pass.accumulate = accumulate;
  pass.update = update_of(scale, growth_tracker, state, std::nullopt, factors);
  pass.other_found_inf = data<float>(other_found_inf);
  pass.divisor = data<float>(divisor);
  pass.stream = current_stream(device);
  require(launch(pass));
}

void launch_measure(const DeviceTable& table, const Segment& segment, const at::Tensor& health) {
  const at::Device device = table.buffer().device();
  const c10::cuda::CUDAGuard guard(device);
  require(measure(dtype_of(segment.dtype), segment.is_paired, data<const int64_t>(table.buffer()),
                  segment.word, segment.chunks, data<int64_t>(health), current_stream(device)));
}

void launch_narrow(const DeviceTable& table, const Segment& segment,
                   const OptionalTensor& found_inf) {
  const at::Device device = table.buffer().device();
  const c10::cuda::CUDAGuard guard(device);
  require(narrow(dtype_of(segment.dtype), data<const int64_t>(table.buffer()), segment.word,
                 segment.chunks, data<const float>(found_inf), segment.is_aligned,
                 current_stream(device)));
}

void launch_update_scale(const at::Tensor& scale, const at::Tensor& growth_tracker,
                         const std::vector<at::Tensor>& found_infs, const Factors& factors,
                         const OptionalTensor& state, const OptionalTensor& norm) {
  const c10::cuda::CUDAGuard guard(scale.device());
  Flags flags;
  TORCH_CHECK(!found_infs.empty() && found_infs.size() <= std::size(flags.found_infs),
              "one to four flags at once, got ", found_infs.size());
  for (size_t i = 0; i < std::size(flags.found_infs); ++i) {
    flags.found_infs[i] = data<const float>(found_infs[i < found_infs.size() ? i : 0]);
  }
  const Update update = update_of(scale, growth_tracker, state, norm, factors);
  require(update_scale(update, flags, current_stream(scale.device())));
}

void launch_clip_coefficient(const py::args& arguments) {
  const auto given = arguments.cast<ClipArguments>();
  const at::Device device = std::get<0>(given).device();
  const c10::cuda::CUDAGuard guard(device);
  require(clip_coefficient(clip_of(given, device), current_stream(device)));
}

}  // namespace

void bind(py::module_& m) {
  m.def("cuda_load_kernels", [](int device) {
    const c10::cuda::CUDAGuard guard(at::Device(at::kCUDA, static_cast<c10::DeviceIndex>(device)));
    require(load_kernels());
  });
  m.def("cuda_limit_programs", &limit_programs);
  m.def("cuda_multi_tensor", &launch_multi_tensor, py::arg("table"), py::arg("segment"),
        py::kw_only(), py::arg("write"), py::arg("use"), py::arg("factor"), py::arg("coefficient"),
        py::arg("norms"), py::arg("marks"), py::arg("epilogue"), py::arg("found_inf"),
        py::arg("accumulate"), py::arg("scale"), py::arg("growth_tracker"), py::arg("state"),
        py::arg("other_found_inf"), py::arg("factors"), py::arg("divisor"));
  m.def("cuda_measure", &launch_measure);
  m.def("cuda_narrow", &launch_narrow);
  m.def("cuda_clip_coefficient", &launch_clip_coefficient);
  m.def("cuda_update_scale", &launch_update_scale);
}

}  // namespace ampfast::cuda
