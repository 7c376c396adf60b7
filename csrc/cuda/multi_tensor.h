// CUDA kernels over a table of gradients on the device. Plain C++, so that host code needs no CUDA
// headers.
#pragma once

#include <cstdint>

#include "../table_layout.h"

namespace ampfast::cuda {

enum class Dtype { kFloat32, kFloat64, kFloat16, kBFloat16 };

// What becomes of a value before it is looked at, with what stands at `Launch::factor`.
enum Factor {
  kRaw,      // nothing; there is no factor
  kInverse,  // it is multiplied by the factor
  kScale,    // it is multiplied by the reciprocal of the factor
  kDivide,   // it is divided by the factor, as fused optimizers do; read only and without norms
};

// One pass over a segment of a table. All pointers are to memory of the device; those that may be
// null say what that means.
struct Launch {
  Dtype dtype = Dtype::kFloat32;
  int64_t* table = nullptr;
  int64_t segment = 0;   // the word at which the segment begins
  int64_t programs = 0;  // of the segment: the size of the grid
  bool write = false;    // else the gradients are only read
  Factor factor_use = kRaw;
  const float* factor = nullptr;        // null with kRaw alone
  const double* coefficient = nullptr;  // multiplies what is written, without norms; null: nothing
  // The sum of squares and the largest magnitude of the used values of all segments; null: no sum.
  // Given for all segments, written by the one with the epilogue.
  double* norms = nullptr;
  // An entry for each tensor of the table, set to 1 if a used value is not finite; null: none.
  float* flags = nullptr;

  // Only the last segment has an epilogue; without it all that follows is ignored.
  bool epilogue = false;
  float* found_inf = nullptr;
  bool accumulate = false;  // leaves a flag that is set already, else 0 or 1 is written
  // The scale and tracker to update; null: no update.
  float* scale = nullptr;
  int32_t* growth_tracker = nullptr;
  const float* other_found_inf = nullptr;  // one more flag that the update heeds; null: none
  double growth_factor = 1;
  double backoff_factor = 1;
  int64_t growth_interval = 0;

  void* stream = nullptr;  // a cudaStream_t of the current device
};

// Queues the pass. Returns null, or why it was refused or failed.
const char* launch(const Launch& launch);

// A scale update by itself.
struct Update {
  float* scale = nullptr;
  int32_t* growth_tracker = nullptr;
  const float* found_infs[4] = {};  // repeated where there are fewer; any that is not 0 counts
  double growth_factor = 1;
  double backoff_factor = 1;
  int64_t growth_interval = 0;
  void* stream = nullptr;
};

// Queues the update. Returns null, or why it failed.
const char* update_scale(const Update& update);

// What a clipping multiplies by, from norms that passes left. All pointers are to memory of the
// device.
struct Clip {
  const double* norms = nullptr;  // a row for each pass: as `Launch::norms`
  int64_t rows = 0;
  double max_norm = 0;
  bool largest = false;         // takes the largest magnitude for the norm, else the 2-norm
  float* norm = nullptr;        // what the norm is written to, or
  double* wide_norm = nullptr;  // this
  double* coefficient = nullptr;
  // Where both are given, the scale over the coefficient is written.
  const float* scale = nullptr;
  float* divisor = nullptr;
  void* stream = nullptr;
};

// Queues it. Returns null, or why it failed.
const char* clip_coefficient(const Clip& clip);

// How many programs run at once on a device: the largest grid worth launching. Sets `error` to
// null, or to why the device could not tell.
int64_t max_programs(int device, const char** error);

}  // namespace ampfast::cuda
