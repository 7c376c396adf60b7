// The CUDA kernels with other switches, as a library of plain functions.
#include "../csrc/cuda/multi_tensor.cu"

// One pass with an epilogue, as `launch` of csrc/cuda/multi_tensor.h.
extern "C" const char* sweep_launch(int dtype, void* table, int64_t segment, int64_t chunks,
                                    int64_t partials, int write, int use, const void* factor,
                                    void* found_inf, void* stream) {
  ampfast::cuda::Launch launch;
  launch.dtype = static_cast<ampfast::Dtype>(dtype);
  launch.table = static_cast<int64_t*>(table);
  launch.segment = segment;
  launch.chunks = chunks;
  launch.partials = partials;
  launch.write = write != 0;
  launch.factor_use = static_cast<ampfast::cuda::Factor>(use);
  launch.factor = static_cast<const float*>(factor);
  launch.epilogue = true;
  launch.accumulate = true;
  launch.found_inf = static_cast<float*>(found_inf);
  launch.stream = stream;
  return ampfast::cuda::launch(launch);
}

extern "C" void sweep_limit(int64_t programs) { ampfast::cuda::limit_programs(programs); }
