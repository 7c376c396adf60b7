// Reads by bulk copies, from compute capability 9.0 on.
#include <cstdint>
#include <cuda/barrier>
#include <utility>

namespace {

constexpr int kBulkBytes = 16384;
constexpr int kBulkVectors = kBulkBytes / sizeof(int4);
constexpr int kStages = 3;
constexpr int kBulkThreads = 256;

using Barrier = cuda::barrier<cuda::thread_scope_block>;

// The largest word of each program's pieces, which the copy engine brings to shared memory.
__global__ void __launch_bounds__(kBulkThreads)
    bulk_maximum(const char* memory, int64_t pieces, int* partials) {
#if __CUDA_ARCH__ >= 900
  extern __shared__ __align__(128) char shared[];
  __shared__ Barrier arrived[kStages];
  Barrier::arrival_token tokens[kStages];
  if (threadIdx.x == 0) {
    for (Barrier& barrier : arrived) {
      init(&barrier, kBulkThreads);
    }
    cuda::device::experimental::fence_proxy_async_shared_cta();
  }
  __syncthreads();
  const auto start = [&](int stage, int64_t piece) {
    if (threadIdx.x == 0) {
      cuda::device::experimental::cp_async_bulk_global_to_shared(
          shared + stage * kBulkBytes, memory + piece * kBulkBytes, kBulkBytes, arrived[stage]);
      return cuda::device::barrier_arrive_tx(arrived[stage], 1, kBulkBytes);
    }
    return arrived[stage].arrive();
  };
  int64_t next = blockIdx.x;
#pragma unroll
  for (int stage = 0; stage < kStages; ++stage, next += gridDim.x) {
    if (next < pieces) {
      tokens[stage] = start(stage, next);
    }
  }
  int largest = 0;
  for (int64_t piece = blockIdx.x; piece < pieces;) {
#pragma unroll
    for (int stage = 0; stage < kStages && piece < pieces; ++stage, piece += gridDim.x) {
      arrived[stage].wait(std::move(tokens[stage]));
      const auto* vectors = reinterpret_cast<const int4*>(shared + stage * kBulkBytes);
#pragma unroll
      for (int i = 0; i < kBulkVectors; i += kBulkThreads) {
        const int4 words = vectors[i + static_cast<int>(threadIdx.x)];
        largest = max(largest, max(max(words.x, words.y), max(words.z, words.w)));
      }
      // All have read this stage before it is filled again.
      __syncthreads();
      if (next < pieces) {
        tokens[stage] = start(stage, next);
        next += gridDim.x;
      }
    }
  }
  atomicMax(partials + blockIdx.x, largest);
#endif
}

}  // namespace

// Reads whole pieces of 16 KiB into one partial result for each program; these begin at 0.
extern "C" const char* bulk_read(const void* memory, int64_t bytes, int programs, void* partials,
                                 void* stream) {
  constexpr int kShared = kStages * kBulkBytes;
  cudaError_t status =
      cudaFuncSetAttribute(bulk_maximum, cudaFuncAttributeMaxDynamicSharedMemorySize, kShared);
  if (status == cudaSuccess) {
    bulk_maximum<<<programs, kBulkThreads, kShared, static_cast<cudaStream_t>(stream)>>>(
        static_cast<const char*>(memory), bytes / kBulkBytes, static_cast<int*>(partials));
    status = cudaGetLastError();
  }
  return status == cudaSuccess ? nullptr : cudaGetErrorString(status);
}
