// CUDA kernels over a table of gradients. Every program walks over windows that follow one another,
// and the last one to finish decides, sums up and updates the scale.
#include <cuda_runtime.h>

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

// What the last program does, with all its threads. Other programs' results are read from where
// all multiprocessors see them.
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

using Kernel = void (*)(Launch);
using MeasureKernel = void (*)(const int64_t*, int64_t, int64_t*);

template <class Format>
Kernel kernel_of(bool write, bool norm, bool coefficient) {
  if (coefficient) {
    return pass<Format, true, false, true>;
  }
  if (write) {
    return norm ? pass<Format, true, true, false> : pass<Format, true, false, false>;
  }
  return norm ? pass<Format, false, true, false> : pass<Format, false, false, false>;
}

Kernel kernel_of(Dtype dtype, bool write, bool norm, bool coefficient) {
  switch (dtype) {
    case Dtype::kFloat32:
      return kernel_of<Float32>(write, norm, coefficient);
    case Dtype::kFloat64:
      return kernel_of<Float64>(write, norm, coefficient);
    case Dtype::kFloat16:
      return kernel_of<Float16>(write, norm, coefficient);
    default:
      return kernel_of<BFloat16>(write, norm, coefficient);
  }
}

MeasureKernel measure_kernel_of(Dtype dtype) {
  switch (dtype) {
    case Dtype::kFloat32:
      return measure_alone<Float32>;
    case Dtype::kFloat64:
      return measure_alone<Float64>;
    case Dtype::kFloat16:
      return measure_alone<Float16>;
    default:
      return measure_alone<BFloat16>;
  }
}

// Why no kernel does what is asked, or null.
const char* refusal(const Launch& launch) {
  constexpr int64_t kLargestGrid = 0x7fffffff;
  if (launch.programs < 1 || launch.programs > kLargestGrid) {
    return "a launch needs from 1 to 2^31 - 1 programs";
  }
  if (launch.factor_use != kRaw && launch.factor == nullptr) {
    return "a launch that uses a factor needs one";
  }
  if (launch.write && (launch.factor_use == kRaw || launch.factor_use == kDivide)) {
    return "gradients are written multiplied by a factor, not as they are or divided";
  }
  if (launch.norms != nullptr && launch.factor_use == kDivide) {
    return "norms are of values multiplied by a factor, not divided";
  }
  if (launch.coefficient != nullptr && !launch.write) {
    return "a coefficient is for gradients that are written";
  }
  if (launch.coefficient != nullptr && launch.norms != nullptr) {
    return "norms come from the pass before the one with a coefficient";
  }
  if (launch.marks != nullptr && launch.now == nullptr) {
    return "marks need the number of steps";
  }
  if (launch.epilogue && launch.found_inf == nullptr) {
    return "an epilogue needs a flag to write";
  }
  const Update& update = launch.update;
  if (launch.epilogue && (update.scale == nullptr) != (update.growth_tracker == nullptr)) {
    return "an update needs both a scale and a growth tracker";
  }
  return nullptr;
}

const char* text_of(cudaError_t error) {
  return error == cudaSuccess ? nullptr : cudaGetErrorString(error);
}

// Loads all kernels on the current device, which otherwise happens at the first launch of each:
// amid a capture, perhaps.
cudaError_t load_kernels() {
  cudaFuncAttributes attributes;
  cudaError_t status = cudaFuncGetAttributes(&attributes, update_alone);
  if (status == cudaSuccess) {
    status = cudaFuncGetAttributes(&attributes, clip_alone);
  }
  for (const Dtype dtype : {Dtype::kFloat32, Dtype::kFloat64, Dtype::kFloat16, Dtype::kBFloat16}) {
    for (unsigned int switches = 0; switches < 8 && status == cudaSuccess; ++switches) {
      const Kernel kernel =
          kernel_of(dtype, (switches & 1) != 0, (switches & 2) != 0, (switches & 4) != 0);
      status = cudaFuncGetAttributes(&attributes, kernel);
    }
    if (status == cudaSuccess) {
      status = cudaFuncGetAttributes(&attributes, measure_kernel_of(dtype));
    }
  }
  return status;
}

}  // namespace

const char* launch(const Launch& launch) {
  if (const char* why_not = refusal(launch)) {
    return why_not;
  }
  const Kernel kernel =
      kernel_of(launch.dtype, launch.write, launch.norms != nullptr, launch.coefficient != nullptr);
  kernel<<<static_cast<unsigned int>(launch.programs), kThreads, 0,
           static_cast<cudaStream_t>(launch.stream)>>>(launch);
  return text_of(cudaGetLastError());
}

const char* measure(Dtype dtype, const int64_t* table, int64_t segment, int64_t programs,
                    int64_t* health, void* stream) {
  measure_kernel_of(dtype)<<<static_cast<unsigned int>(programs), kThreads, 0,
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
