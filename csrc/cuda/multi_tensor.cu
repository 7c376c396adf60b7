// CUDA kernels over a table of gradients. Programs take its chunks in turn, and the last one to
// finish decides, sums up and updates the scale. Compiled separately, to what kernels.cpp loads,
// which knows these names.
#include "gatherer.cuh"
#include "multi_tensor.h"
#include "track.cuh"

namespace ampfast::cuda {

namespace {

// sm_75 has threads for as many, and this leaves 64 registers to a thread.
constexpr int kLeastProgramsPerSm = 8;

__device__ double sum(double a, double b) { return a + b; }

// Combines the values of all threads, always in the same order.
template <class T>
__device__ T reduced(T value, T (*combine)(T, T)) {
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

// Epilogue of the last program, by all its threads, the first of which knows what was `found`.
// Other programs' results are read from where all multiprocessors see them.
__device__ void finish(const Launch& launch, bool found) {
  int64_t* header = launch.header;
  double squares = 0;
  if (launch.sums != nullptr) {
#pragma unroll 8
    for (int i = static_cast<int>(threadIdx.x); i < launch.all_chunks; i += kThreads) {
      squares += __ldcg(launch.partials + i);
    }
    squares = reduced(squares, sum);
  }
  if (threadIdx.x != 0) {
    return;
  }
  if (launch.sums != nullptr) {
    launch.sums[0] = squares;
    launch.sums[1] = bits_as<double>(__ldcg(header + kPeak));
    header[kPeak] = 0;
  }
  float flag = found ? 1.0f : 0.0f;
  if (launch.accumulate && !found) {
    flag = *launch.found_inf;
  } else {
    *launch.found_inf = flag;
  }
  if (launch.clip.sums != nullptr) {
    clip_coefficient(launch.clip);
  }
  if (launch.factor_copy != nullptr) {
    *launch.factor_copy = *launch.factor;
  }
  if (launch.update.scale != nullptr) {
    const float other = launch.other_found_inf != nullptr ? *launch.other_found_inf : 0;
    update_scale(launch.update, joint(flag, other));
  }
  header[kFinished] = 0;
}

template <class Format, bool kWrite, bool kNorm, bool kCoefficient>
__device__ void pass(const Launch& launch) {
  __shared__ bool is_last;
  using Opmath = typename Format::Opmath;
  int64_t* header = launch.header;
  Gatherer<Format, kWrite, kNorm, kCoefficient> gatherer{1, 1};
  // Read again where it is needed: registers are few.
  const auto factor_of_use = [&] {
    return kNorm && launch.how == Factor::kDivide ? static_cast<Opmath>(*launch.factor)
                                                  : gatherer.factor;
  };
  // Each thread loads one word. Were all to load the same, the compiler would want it in a register
  // for all, and wait for it.
  const int word = static_cast<int>(threadIdx.x % kChunkWords);
  const auto field_of = [&](int64_t chunk) {
    const int64_t first = chunk * kChunkWords;
    return launch.table == nullptr ? (launch.words + word)[first] : (launch.table + word)[first];
  };
  // Programs take turns, so that all read one part of the list at a time.
  int chunk = static_cast<int>(blockIdx.x);
  const int step = static_cast<int>(gridDim.x);
  int64_t field = field_of(chunk);
  if (kCoefficient) {
    gatherer.coefficient = static_cast<Opmath>(*launch.coefficient);
  }
  const float factor = launch.how == Factor::kNone ? 1.0f : *launch.factor;
  const bool inverts = kNorm || launch.how == Factor::kTimesReciprocal;
  gatherer.factor = inverts ? multiplier_of(launch.how, factor).of_values : factor;
  // Where nothing changes, nothing is read.
  const bool reads = !kCoefficient || gatherer.factor != 1 || gatherer.coefficient != 1;
  const int count = reads ? launch.chunks : 0;
  while (chunk < count) {
    const int64_t address = __shfl_sync(kAllLanes, field, kAddress);
    const int64_t extent = __shfl_sync(kAllLanes, field, kExtent);
    // Needed when this chunk is done, and by then it is there.
    field = field_of(chunk + step < count ? chunk + step : chunk);
    take_chunk<Format>(gatherer, reinterpret_cast<char*>(address), static_cast<int>(extent));
    double* partial = launch.partials + launch.first + chunk;
    if (kNorm) {
      const double squares = reduced(gatherer.squares, sum);
      gatherer.squares = 0;
      if (threadIdx.x == 0) {
        *partial =
            squares * multiplier_of(launch.how, static_cast<float>(factor_of_use())).of_squares;
      }
    }
    if (launch.marks != nullptr) {
      int64_t* row = launch.marks + (extent >> kParameterShift) * kMarkWords;
      if (kNorm && threadIdx.x == 0) {
        atomicAdd(reinterpret_cast<double*>(row + kSquares), *partial);
      }
      const auto used = used_peak<Format>(gatherer.peak, launch.how, factor_of_use());
      if (!std::isfinite(used)) {
        mark(row, *launch.now + 1, std::isnan(used));
        // So that the next tensor is judged alone; a peak that passes may stay.
        add(header + kFinished, kNotFinite);
        if (kNorm) {
          raise(header + kPeak, magnitude(static_cast<double>(used)));
        }
        gatherer.peak = 0;
      }
    }
    chunk += step;
  }

  bool found = false;
  const auto peak = reduced(gatherer.peak, larger);
  if (threadIdx.x == 0) {
    const auto used = used_peak<Format>(peak, launch.how, factor_of_use());
    if (kNorm) {
      raise(header + kPeak, magnitude(static_cast<double>(used)));
    }
    const int64_t seen = std::isfinite(used) ? 0 : kNotFinite;
    is_last = false;
    if (launch.is_last) {
      // Covers what other threads wrote, too, which the barriers of `reduced` put before it, and
      // the barrier below passes on to them what it sees.
      const int64_t before = add_in_order(header + kFinished, seen + 1);
      is_last = static_cast<unsigned int>(before) == gridDim.x - 1;
      found = before + seen >= kNotFinite;
    } else if (seen != 0) {
      add(header + kFinished, seen);
    }
  }
  __syncthreads();
  if (is_last) {
    finish(launch, found);
  }
}

// The largest magnitude of one tensor. The last program leaves the row ready for another launch.
template <class Format>
__device__ void read(const Launch& launch) {
  Gatherer<Format, false, false, false> gatherer{1, 1};
  for (int chunk = static_cast<int>(blockIdx.x); chunk < launch.chunks;
       chunk += static_cast<int>(gridDim.x)) {
    const int64_t first = chunk * kReadBytes;
    const int64_t left = launch.words[1] - first;
    take_chunk<Format>(gatherer, reinterpret_cast<char*>(launch.words[0] + first),
                       static_cast<int>(left < kReadBytes ? left : kReadBytes));
  }
  const auto peak = reduced(gatherer.peak, larger);
  if (threadIdx.x == 0) {
    auto* row = reinterpret_cast<int64_t*>(launch.sums);
    const auto used = used_peak<Format>(peak, Factor::kNone, 1);
    raise(row + kRaised, magnitude(static_cast<double>(used)));
    if (static_cast<unsigned int>(add_in_order(row + kPrograms, 1)) == gridDim.x - 1) {
      row[kLargest] = __ldcg(row + kRaised);
      row[kRaised] = row[kPrograms] = 0;
    }
  }
}

}  // namespace

#define AMPFAST_KERNEL(NAME, ...)                                             \
  extern "C" __global__ void __launch_bounds__(kThreads, kLeastProgramsPerSm) \
      ampfast_##NAME(const __grid_constant__ Launch launch) {                 \
    __VA_ARGS__(launch);                                                      \
  }

// The kernels over a table of one dtype.
#define AMPFAST_KERNELS(TABLE, FORMAT)                                  \
  AMPFAST_KERNEL(check_##TABLE, pass<FORMAT, false, false, false>)      \
  AMPFAST_KERNEL(check_norm_##TABLE, pass<FORMAT, false, true, false>)  \
  AMPFAST_KERNEL(unscale_##TABLE, pass<FORMAT, true, false, false>)     \
  AMPFAST_KERNEL(unscale_norm_##TABLE, pass<FORMAT, true, true, false>) \
  AMPFAST_KERNEL(clip_##TABLE, pass<FORMAT, true, false, true>)         \
  AMPFAST_KERNEL(read_##TABLE, read<FORMAT>)

AMPFAST_KERNELS(float32, Float32)
AMPFAST_KERNELS(float64, Float64)
AMPFAST_KERNELS(float16, Float16)
AMPFAST_KERNELS(bfloat16, BFloat16)

extern "C" __global__ void ampfast_update_scale(const UpdateAlone alone) {
  float found_inf = 0;
  for (const float* flag : alone.found_infs) {
    found_inf = joint(found_inf, *flag);
  }
  update_scale(alone.update, found_inf);
}

extern "C" __global__ void ampfast_clip_coefficient(const Clip clip) { clip_coefficient(clip); }

}  // namespace ampfast::cuda
