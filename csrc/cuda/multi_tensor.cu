// CUDA kernels over a table of gradients. Every program walks over windows that follow one another,
// and the last one to finish decides, sums up and updates the scale.
#include <cuda_runtime.h>

#include <vector>

#include "gatherer.cuh"
#include "multi_tensor.h"
#include "track.cuh"

namespace ampfast::cuda {

namespace {

// As many as sm_75 has threads for, and it leaves 64 registers to a thread.
constexpr int kProgramsPerSm = 8;

// A tensor of the table.
struct Span {
  int64_t address;
  int64_t bytes;

  AMPFAST_ELEMENT int head() const { return static_cast<int>(address & (kAddressAlignment - 1)); }
  AMPFAST_ELEMENT int windows() const {
    return static_cast<int>(static_cast<uint64_t>(head() + bytes + kWindowBytes - 1) /
                            kWindowBytes);
  }
};

struct Max {
  template <class T>
  __device__ T operator()(T a, T b) const {
    return larger(a, b);
  }
};

struct Sum {
  template <class T>
  __device__ T operator()(T a, T b) const {
    return a + b;
  }
};

// Combines the values of all threads, always in the same order.
template <class T, class Combine>
__device__ T reduced(T value, Combine combine) {
  __shared__ T of_warps[kThreads / kWarp];
#pragma unroll
  for (int distance = kWarp / 2; distance > 0; distance /= 2) {
    value = combine(value, __shfl_xor_sync(kAllLanes, value, distance));
  }
  if (threadIdx.x % kWarp == 0) {
    of_warps[threadIdx.x / kWarp] = value;
  }
  __syncthreads();
  value = of_warps[0];
#pragma unroll
  for (int i = 1; i < kThreads / kWarp; ++i) {
    value = combine(value, of_warps[i]);
  }
  __syncthreads();  // the next reduction writes there again
  return value;
}

// Epilogue of the last program, by all its threads. Other programs' results are read from where all
// multiprocessors see them.
__device__ void finish(const Launch& launch) {
  int64_t* header = launch.table;
  double squares = 0;
  if (launch.norms != nullptr) {
    const auto* partials = reinterpret_cast<const double*>(header + header[kPartials]);
    const int64_t count = header[kPrograms];
    for (int64_t i = threadIdx.x; i < count; i += kThreads) {
      squares += __ldcg(partials + i);
    }
    squares = reduced(squares, Sum{});
  }
  if (threadIdx.x != 0) {
    return;
  }
  const int64_t peak = __ldcg(header + kPeak);
  if (launch.norms != nullptr) {
    launch.norms[0] = squares;
    launch.norms[1] = bits_as<double>(peak);
  }
  const bool found = peak >= kInfinityBits;
  float flag = found ? 1.0f : 0.0f;
  if (launch.accumulate && !found) {
    flag = *launch.found_inf;
  } else {
    *launch.found_inf = flag;
  }
  if (launch.update.scale != nullptr) {
    const bool other = launch.other_found_inf != nullptr && *launch.other_found_inf != 0;
    apply(launch.update, flag != 0 || other);
  }
  header[kPeak] = 0;
}

__device__ void raise_peak(int64_t* header, double used) {
  atomicMax(reinterpret_cast<unsigned long long*>(header + kPeak),
            static_cast<unsigned long long>(magnitude(used)));
}

// Gives `visitor` the windows of this program, and calls `end_tensor(tensor, elements)` behind
// those of each tensor.
template <class Format, class Visitor, class EndTensor>
__device__ void walk(const int64_t* segment, Visitor& visitor, const EndTensor& end_tensor) {
  constexpr int64_t kSize = sizeof(typename Format::Element);
  const int64_t tensors = segment[kTensors];
  const int64_t* addresses = segment + kSegmentWords;
  const int64_t* start = addresses + 2 * (tensors + 1 + static_cast<int64_t>(blockIdx.x));
  // Threads of an even number load addresses and the others lengths. Were all to load the same, the
  // compiler would want it in a register for all, and wait for it.
  const int64_t* fields = addresses + threadIdx.x % 2 * (tensors + 1);
  // A card has memory for less than 2^31 windows, so for as many tensors.
  int tensor = static_cast<int>(start[0]);
  int window = static_cast<int>(start[1]);
  // Where the next program starts, this one ends.
  const bool is_end = blockIdx.x + 1 == gridDim.x;
  const int last_tensor = static_cast<int>(is_end ? tensors : start[2]);
  const int last_window = static_cast<int>(is_end ? 0 : start[3]);
  int64_t field = fields[tensor];
  while (true) {
    const bool is_last = tensor == last_tensor;
    const Span now{__shfl_sync(kAllLanes, field, 0), __shfl_sync(kAllLanes, field, 1) * kSize};
    // Needed when this tensor is done, and by then it is there. Behind the last one is padding.
    field = fields[is_last ? tensor : tensor + 1];
    const int end = is_last ? last_window : now.windows();
    const bool is_touched = window < end;
    const int64_t skipped = window * kWindowBytes;
    char* base = reinterpret_cast<char*>(now.address - now.head() + skipped);
    // The bytes of the window, which ends before `bytes` where it is not the tensor's last.
    int begin = window == 0 ? now.head() : 0;
    int64_t bytes = now.head() + now.bytes - skipped;
    for (int left = end - window; left > 0; --left) {
      if (begin == 0 && bytes >= kWindowBytes) {
        visitor.template window<true>(base, 0, kWindowBytes);
      } else {
        visitor.template window<false>(
            base, begin, static_cast<int>(bytes < kWindowBytes ? bytes : kWindowBytes));
      }
      base += kWindowBytes;
      begin = 0;
      bytes -= kWindowBytes;
    }
    if (is_touched) {
      end_tensor(tensor, now.bytes / kSize);
    }
    if (is_last) {
      return;
    }
    ++tensor;
    window = 0;
  }
}

template <class Format, bool kWrite, bool kNorm, bool kCoefficient>
__global__ void __launch_bounds__(kThreads, kProgramsPerSm) pass(const Launch launch) {
  __shared__ bool is_last;
  // Loaded first, to be there when the way through the table is known.
  float factor = launch.factor_use == kRaw ? 1.0f : *launch.factor;
  if (launch.factor_use == kScale) {
    factor = inverse_scale(factor);
  }

  using Opmath = typename Format::Opmath;
  int64_t* header = launch.table;
  const int64_t* segment = header + launch.segment;
  Gatherer<Format, kWrite, kNorm, kCoefficient> gatherer{
      factor, kCoefficient ? static_cast<Opmath>(*launch.coefficient) : 1};
  walk<Format>(segment, gatherer, [&](int tensor, int64_t /*elements*/) {
    if (launch.marks == nullptr) {
      return;
    }
    const auto used = used_peak<Format>(gatherer.peak, launch.factor_use, gatherer.factor);
    if (!std::isfinite(used)) {
      const int64_t parameter = header[segment[kParameters] + tensor];
      mark(launch.marks + parameter * kMarkWords, *launch.now + 1, std::isnan(used));
      // So that the next tensor is judged by itself; a peak that passes may stay.
      raise_peak(header, used);
      gatherer.peak = 0;
    }
  });

  const auto peak = reduced(gatherer.peak, Max{});
  const double squares = kNorm ? reduced(gatherer.squares, Sum{}) : 0;
  if (threadIdx.x == 0) {
    if (kNorm) {
      auto* partials = reinterpret_cast<double*>(header + header[kPartials]);
      partials[segment[kFirstProgram] + blockIdx.x] = squares;
    }
    raise_peak(header, used_peak<Format>(peak, launch.factor_use, gatherer.factor));
    is_last = false;
    if (launch.epilogue) {
      // Covers what other threads wrote too, which the barriers of `reduced` put before it. The
      // count starts anew by itself.
      __threadfence();
      auto* finished = reinterpret_cast<unsigned int*>(header + kFinished);
      is_last = atomicInc(finished, gridDim.x - 1) == gridDim.x - 1;
      if (is_last) {
        // The thread that saw the count fences; the barrier passes on to the others what it sees.
        __threadfence();
      }
    }
  }
  __syncthreads();
  if (is_last) {
    finish(launch);
  }
}

template <class Format>
__global__ void __launch_bounds__(kThreads, kProgramsPerSm)
    measure_alone(const int64_t* table, int64_t segment_word, int64_t* rows) {
  const int64_t* segment = table + segment_word;
  Health<Format> health;
  walk<Format>(segment, health, [&](int tensor, int64_t elements) {
    health.add_to(rows + table[segment[kParameters] + tensor] * kHealthWords, elements);
  });
}

__global__ void update_alone(const Update update, const Flags flags) {
  bool found_inf = false;
  for (const float* flag : flags.found_infs) {
    found_inf |= *flag != 0;
  }
  apply(update, found_inf);
}

__global__ void clip_alone(const Clip clip) { apply(clip); }

// All kernels over a table for one dtype.
struct Kernels {
  void (*pass[2][2])(Launch);  // by whether it writes, and whether it takes norms
  void (*clip)(Launch);        // writes with a coefficient
  void (*measure)(const int64_t*, int64_t, int64_t*);
};

template <class Format>
constexpr Kernels kernels() {
  return {{{pass<Format, false, false, false>, pass<Format, false, true, false>},
           {pass<Format, true, false, false>, pass<Format, true, true, false>}},
          pass<Format, true, false, true>,
          measure_alone<Format>};
}

const Kernels& kernels_of(Dtype dtype) {
  static const Kernels all[] = {kernels<Float32>(), kernels<Float64>(), kernels<Float16>(),
                                kernels<BFloat16>()};  // in the order of Dtype
  return all[static_cast<int>(dtype)];
}

const char* text_of(cudaError_t error) {
  return error == cudaSuccess ? nullptr : cudaGetErrorString(error);
}

// Loads all kernels on the current device, which otherwise happens at the first launch of each:
// amid a capture, perhaps.
cudaError_t load_kernels() {
  std::vector<const void*> all{reinterpret_cast<const void*>(update_alone),
                               reinterpret_cast<const void*>(clip_alone)};
  for (const Dtype dtype : {Dtype::kFloat32, Dtype::kFloat64, Dtype::kFloat16, Dtype::kBFloat16}) {
    const auto& [pass, clip, measure] = kernels_of(dtype);
    for (const auto kernel : {pass[0][0], pass[0][1], pass[1][0], pass[1][1], clip}) {
      all.push_back(reinterpret_cast<const void*>(kernel));
    }
    all.push_back(reinterpret_cast<const void*>(measure));
  }
  for (const void* kernel : all) {
    cudaFuncAttributes attributes;
    if (const cudaError_t status = cudaFuncGetAttributes(&attributes, kernel)) {
      return status;
    }
  }
  return cudaSuccess;
}

}  // namespace

const char* launch(const Launch& launch) {
  const Kernels& kernels = kernels_of(launch.dtype);
  const auto kernel = launch.coefficient != nullptr
                          ? kernels.clip
                          : kernels.pass[launch.write ? 1 : 0][launch.norms != nullptr ? 1 : 0];
  kernel<<<static_cast<unsigned int>(launch.programs), kThreads, 0,
           static_cast<cudaStream_t>(launch.stream)>>>(launch);
  return text_of(cudaGetLastError());
}

const char* measure(Dtype dtype, const int64_t* table, int64_t segment, int64_t programs,
                    int64_t* health, void* stream) {
  kernels_of(dtype)
      .measure<<<static_cast<unsigned int>(programs), kThreads, 0,
                 static_cast<cudaStream_t>(stream)>>>(table, segment, health);
  return text_of(cudaGetLastError());
}

const char* update_scale(const Update& update, const Flags& flags, void* stream) {
  update_alone<<<1, 1, 0, static_cast<cudaStream_t>(stream)>>>(update, flags);
  return text_of(cudaGetLastError());
}

const char* clip_coefficient(const Clip& clip, void* stream) {
  clip_alone<<<1, 1, 0, static_cast<cudaStream_t>(stream)>>>(clip);
  return text_of(cudaGetLastError());
}

int64_t max_programs(int device, const char** error) {
  int multiprocessors = 0;
  cudaError_t status =
      cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device);
  if (status == cudaSuccess) {
    status = load_kernels();
  }
  *error = text_of(status);
  return static_cast<int64_t>(multiprocessors) * kProgramsPerSm;
}

}  // namespace ampfast::cuda
