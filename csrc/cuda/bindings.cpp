#include "../bindings.h"

#include "../device_table.h"
#include "../track.h"
#include "multi_tensor.h"

namespace ampfast::cuda {

namespace {

// A device, which is the current one, and its current stream, asked for as Triton does: in C++,
// torch 2.10 does not tell its handle. That of the CPU, which an emulated driver has, is the first.
Place place_on(at::Device device) {
  if (device.is_cpu()) {
    return {0, nullptr};
  }
  static const py::handle current_stream =
      py::getattr(py::module_::import("torch._C"), "_cuda_getCurrentRawStream").release();
  const auto stream = current_stream(static_cast<int>(device.index()));
  return {device.index(), reinterpret_cast<void*>(stream.cast<uintptr_t>())};
}

// cuda_multi_tensor(pass, table, segment, is_last)
PyObject* launch_multi_tensor(PyObject* const* args) {
  const auto& pass = object_of<Pass>(args[0]);
  const auto& table = object_of<DeviceTable>(args[1]);
  const auto& segment = object_of<Segment>(args[2]);
  const bool is_last = args[3] == Py_True;
  const at::Device device = table.header.device();
  Launch work;
  work.dtype = dtype_of(segment.dtype);
  work.table = table.words.const_data_ptr<int64_t>() + segment.word;
  work.chunks = static_cast<int>(segment.chunks);
  work.first = static_cast<int>(segment.first);
  work.all_chunks = static_cast<int>(table.partials.numel());
  work.header = table.header.mutable_data_ptr<int64_t>();
  work.partials = table.partials.mutable_data_ptr<double>();
  if (table.source.defined() && table.source.numel() <= kWordsOfLaunch) {
    const auto* words = table.source.const_data_ptr<int64_t>() + segment.word;
    std::copy_n(words, segment.chunks * kChunkWords, work.words);
    work.table = nullptr;
  }
  work.how = pass.how;
  work.factor = data_of<float>(pass.factor, "the factor", device);
  work.coefficient = data_of<double>(pass.coefficient, "coefficient", device);
  work.sums = data_of<double>(pass.sums, "sums", device, 2);
  if (pass.clip) {
    work.clip = pass.clip->on(device);
  }
  const Marks marks = marks_of(pass, device);
  work.marks = marks.words;
  work.now = marks.now;
  work.is_last = is_last;
  work.found_inf = data_of<float>(pass.found_inf, "found_inf", device);
  work.accumulate = pass.accumulate;
  work.factor_copy = data_of<float>(pass.factor_copy, "factor_copy", device);
  if (is_last && pass.ending) {
    const std::vector<at::Tensor> flags = pass.ending->flags();
    work.update = pass.ending->known().value();
    work.other_found_inf = flags.empty() ? nullptr : flags.front().const_data_ptr<float>();
  }
  const int kind = (pass.write ? kUnscale : kCheck) + (work.sums != nullptr ? 1 : 0);
  launch(work.coefficient != nullptr ? kClip : static_cast<Kind>(kind), work, place_on(device));
  return nullptr;
}

// cuda_update_scale(update)
PyObject* launch_update_scale(PyObject* const* args) {
  const auto& update = object_of<UpdateObject>(args[0]);
  const std::vector<at::Tensor> flags = update.flags();
  UpdateAlone alone{update.known().value(), {}};
  for (size_t i = 0; i < std::size(alone.found_infs); ++i) {
    alone.found_infs[i] = flags[i < flags.size() ? i : 0].const_data_ptr<float>();
  }
  update_scale(alone, place_on(update.scale.device()));
  return nullptr;
}

void launch_clip_coefficient(const ClipObject& clip) {
  clip_coefficient(clip.on(clip.sums.device()), place_on(clip.sums.device()));
}

}  // namespace

void read_peak(const GradList& list, double* row) {
  const DtypeList& values = list.lists().front();
  const int64_t bytes = values.elements * values.element_size();
  Launch work;
  work.dtype = dtype_of(values.dtype);
  work.words[0] = reinterpret_cast<intptr_t>(values.spans.front().address);
  work.words[1] = bytes;
  work.chunks = static_cast<int>((bytes + kReadBytes - 1) / kReadBytes);
  work.sums = row;
  launch(kRead, work, place_on(list.device()));
}

void bind(py::module_& m) {
  m.def("cuda_load_kernels", [](int device, const py::bytes& image) {
    load_kernels(device, PyBytes_AS_STRING(image.ptr()));
  });
  m.def("cuda_limit_programs", &limit_programs);
  add_call<launch_multi_tensor, 4>(m, "cuda_multi_tensor");
  m.def("cuda_clip_coefficient", &launch_clip_coefficient);
  add_call<launch_update_scale, 1>(m, "cuda_update_scale");
}

}  // namespace ampfast::cuda
