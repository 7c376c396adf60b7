// The Python face of the compiled core: bindings only, no arithmetic.
#include <pybind11/stl.h>
#include <torch/version.h>

#include <map>

#include "bindings.h"
#include "cpu/instruction_set.h"
#include "cpu/multi_tensor.h"
#include "device_table.h"
#include "found.h"
#include "track.h"

namespace ampfast {

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  cuda::bind(m);
  m.attr("CHUNK") = kChunk;
  m.attr("CPU") = device_bit(at::kCPU);
  m.attr("CUDA") = device_bit(at::kCUDA);
  m.attr("WINDOW_BYTES") = kWindowBytes;
  m.attr("MOST_CHUNK_BYTES") = kMostChunkBytes;
  m.attr("ENOUGH_CHUNKS") = kEnoughChunks;
  m.attr("MARK_WORDS") = static_cast<int64_t>(kMarkWords);
  m.attr("MARK_SQUARES") = static_cast<int64_t>(kSquares);
  m.attr("CLIP_EPSILON") = kClipEpsilon;
  m.attr("TORCH") = TORCH_VERSION;
  m.attr("state_layout") = std::map<std::string, int64_t>{{"STEPS", kSteps},
                                                          {"SKIPPED", kSkipped},
                                                          {"GROWTHS", kGrowths},
                                                          {"BACKOFFS", kBackoffs},
                                                          {"CONSECUTIVE_SKIPS", kConsecutiveSkips},
                                                          {"TOLERATED", kTolerated},
                                                          {"SPIKES", kSpikes},
                                                          {"COUNTED", kCounted},
                                                          {"COUNTERS", kCounters},
                                                          {"BEFORE", kBefore},
                                                          {"SCALE_BEFORE", kScaleBefore},
                                                          {"TRACKER_BEFORE", kTrackerBefore},
                                                          {"MIN_SCALE", kMinScale},
                                                          {"MAX_SCALE", kMaxScale},
                                                          {"MOST_TOLERATED", kMostTolerated},
                                                          {"RING", kRing},
                                                          {"RING_STEPS", kRingSteps},
                                                          {"RING_SCALE", kRingScale},
                                                          {"RING_STATUS", kRingStatus},
                                                          {"RING_NORM", kRingNorm},
                                                          {"RING_WORDS", kRingWords},
                                                          {"STATE_WORDS", kStateWords}};
  m.attr("norm_layout") = std::map<std::string, int64_t>{{"COUNT", kNormCount},
                                                         {"SPIKES", kNormSpikes},
                                                         {"PATIENCE", kNormPatience},
                                                         {"RESTARTS", kNormRestarts},
                                                         {"RING", kNormRing}};
  m.attr("CPU_CAPABILITY") = cpu::capability();
  m.def("use_baseline", &cpu::use_baseline);

  py::class_<GradList>(m, "GradList", may_lack_memory(), py::is_final())
      .def_static("of", &regular_list);
  bind_arguments(m);
  bind_found(m);
  bind_steps(m);
  bind_device_kernels(m);
  bind_watch(m);

  py::class_<Segment>(m, "Segment", may_lack_memory(), py::is_final())
      .def_readonly("dtype", &Segment::dtype)
      .def_readonly("word", &Segment::word)
      .def_readonly("chunks", &Segment::chunks)
      .def_readonly("first", &Segment::first);
  py::class_<DeviceTable, std::shared_ptr<DeviceTable>>(m, "DeviceTable", may_lack_memory(),
                                                        py::is_final())
      .def_static("of", &table_of)
      .def_readonly("words", &DeviceTable::words)
      .def_readonly("partials", &DeviceTable::partials)
      .def_readonly("header", &DeviceTable::header)
      .def_readonly("segments", &DeviceTable::segments);
  m.def("tables_made", [] { return tables_made; });
  m.def("uploads", [] { return uploads; });
  m.def("clear_tables", &clear_tables);
  m.def("set_chunks", &set_chunks);

  m.def("is_scalar", &is_scalar, py::arg("tensor"), py::arg("dtype"),
        py::arg("devices") = kKernelDevices);
  m.attr("SPIKE") = kSpike;
  m.attr("SPIKE_BOUND") = kSpikeBound;
  m.attr("LEAST_DEVIATION") = kLeastDeviation;
  m.def("real_view", torch::wrap_pybind_function(real_view));
  m.def("kind_of", &kind_of);
  m.def("can_be_reused", &can_be_reused);
  m.def("looks_of", &looks_of);
}

}  // namespace ampfast
