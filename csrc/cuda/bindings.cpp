#include "../bindings.h"

#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include <algorithm>

#include "../device_table.h"
#include "multi_tensor.h"

namespace ampfast::cuda {

namespace {

template <class T>
T* data(const at::Tensor* tensor) {
  return tensor != nullptr ? static_cast<T*>(tensor->data_ptr()) : nullptr;
}

// Python has made the device of each launch current.
void* current_stream() { return c10::cuda::getCurrentCUDAStream().stream(); }

// A launch over a segment on the current stream.
Launch launch_over(const DeviceTable& table, const Segment& segment) {
  Launch work;
  work.dtype = dtype_of(segment.dtype);
  work.table = data<const int64_t>(&table.words) + segment.word;
  work.chunks = static_cast<int>(segment.chunks);
  work.first = static_cast<int>(segment.first);
  work.all_chunks = static_cast<int>(table.partials.numel());
  work.header = data<int64_t>(&table.header);
  work.partials = data<double>(&table.partials);
  work.is_paired = segment.is_paired;
  work.is_aligned = segment.is_aligned;
  work.stream = current_stream();
  return work;
}

// cuda_multi_tensor(pass, table, segment, is_last)
PyObject* launch_multi_tensor(PyObject* const* args) {
  const Pass pass(args[0]);
  const auto& table = py::cast<const DeviceTable&>(py::handle(args[1]));
  const auto& segment = py::cast<const Segment&>(py::handle(args[2]));
  const bool is_last = args[3] == Py_True;
  Launch work = launch_over(table, segment);
  if (table.source.defined() && table.source.numel() <= kWordsOfLaunch) {
    const auto* words = table.source.const_data_ptr<int64_t>() + segment.word;
    std::copy_n(words, segment.chunks * (segment.is_paired ? kPairWords : kChunkWords), work.words);
    work.table = nullptr;
  }
  work.how = pass.how;
  work.factor = data<float>(pass.tensor(Pass::kFactor));
  work.coefficient = data<double>(pass.tensor(Pass::kCoefficient));
  if (pass[Pass::kClip] != Py_None) {
    work.clip = clip_of(pass[Pass::kClip], table.header.device());
  }
  work.sums = data<double>(pass.tensor(Pass::kSums));
  work.marks = data<int64_t>(pass.tensor(Pass::kMarks));
  work.now = data<int64_t>(pass.tensor(Pass::kNow));
  work.is_last = is_last;
  work.found_inf = data<float>(pass.tensor(Pass::kFoundInf));
  work.accumulate = pass.accumulate;
  work.divisor = data<float>(pass.tensor(Pass::kFactorCopy));
  py::object update = py::none();
  if (is_last && pass[Pass::kEnding] != Py_None) {
    update = py::handle(pass[Pass::kEnding]).attr("update");
  }
  if (!update.is_none()) {
    work.update = update_of(update.ptr()).value();
    const py::sequence flags = py::handle(update)[py::int_(static_cast<int>(kFlags))];
    work.other_found_inf =
        flags.size() == 0 ? nullptr : data<float>(tensor_of(py::object(flags[0]).ptr()));
  }
  Kind kind = pass.write ? (work.sums != nullptr ? kUnscaleNorm : kUnscale)
                         : (work.sums != nullptr ? kCheckNorm : kCheck);
  if (work.clip.sums != nullptr) {
    kind = kClipBy;
  } else if (work.coefficient != nullptr) {
    kind = kClip;
  }
  launch(kind, work);
  return nullptr;
}

void launch_measure(const DeviceTable& table, const Segment& segment, const at::Tensor& health) {
  Launch work = launch_over(table, segment);
  work.health = data<int64_t>(&health);
  launch(kMeasure, work);
}

void launch_narrow(const DeviceTable& table, const Segment& segment, const py::object& found_inf) {
  Launch work = launch_over(table, segment);
  work.found_inf = data<float>(tensor_of(found_inf.ptr()));
  launch(kNarrow, work);
}

// cuda_update_scale(update)
PyObject* launch_update_scale(PyObject* const* args) {
  const auto found_infs =
      py::cast<std::vector<at::Tensor>>(py::handle(PyTuple_GET_ITEM(args[0], kFlags)));
  Flags flags;
  TORCH_CHECK(!found_infs.empty() && found_infs.size() <= std::size(flags.found_infs),
              "one to four flags at once, got ", found_infs.size());
  for (size_t i = 0; i < std::size(flags.found_infs); ++i) {
    flags.found_infs[i] = data<const float>(&found_infs[i < found_infs.size() ? i : 0]);
  }
  update_scale(update_of(args[0]).value(), flags, current_stream());
  return nullptr;
}

void launch_clip_coefficient(const py::tuple& given) {
  clip_coefficient(clip_of(given.ptr(), given[0].cast<at::Tensor>().device()), current_stream());
}

}  // namespace

void bind(py::module_& m) {
  m.def("cuda_load_kernels", [](int device) {
    const c10::cuda::CUDAGuard guard(at::Device(at::kCUDA, static_cast<c10::DeviceIndex>(device)));
    load_kernels();
  });
  m.def("cuda_limit_programs", &limit_programs);
  add_call<launch_multi_tensor, 4>(m, "cuda_multi_tensor");
  m.def("cuda_measure", &launch_measure);
  m.def("cuda_narrow", &launch_narrow);
  m.def("cuda_clip_coefficient", &launch_clip_coefficient);
  add_call<launch_update_scale, 1>(m, "cuda_update_scale");
}

}  // namespace ampfast::cuda
