// CUDA kernels over a table of gradients on the device, and their launches.
#pragma once

#include <cstdint>

#include "../scale.h"
#include "../table_layout.h"
#include "../track.h"

namespace ampfast::cuda {

// Threads of a program of the kernels over a table.
constexpr int kThreads = 128;

// Passes over a table.
enum Kind {
  kCheck,
  kCheckNorm,
  kUnscale,
  kUnscaleNorm,
  kClip,  // unscales and multiplies by the coefficient
  kRead,  // of one tensor, whose address and bytes are the `words`, to a row of kPeakWords: `sums`
  kKinds,
};

// What a program of a read takes at a time.
constexpr int64_t kReadBytes = 2 * kWindowBytes;

// One launch over a segment of a table. All pointers are to memory of the device; if one may be
// null, it says what that means.
struct Launch {
  Dtype dtype = Dtype::kFloat32;
  const int64_t* table = nullptr;  // the chunks' words; null: they are in `words`
  int chunks = 0;
  int first = 0;       // of these chunks among all segments'
  int all_chunks = 0;  // of all segments
  int64_t* header = nullptr;
  double* partials = nullptr;           // the sum of squares of each chunk of all segments
  Factor how = Factor::kNone;           // of a division neither products nor squares are defined
  const float* factor = nullptr;        // null with kNone alone
  const double* coefficient = nullptr;  // for kClip
  // The sum of squares and the largest magnitude of the used values of all segments, for kinds with
  // a norm. Given for all segments, written with the last.
  double* sums = nullptr;
  Clip clip;  // decided by these sums; without its own: none
  // Rows of kMarkWords by parameter, of the steps in which a used value is not finite; null: none.
  int64_t* marks = nullptr;
  const int64_t* now = nullptr;  // how many steps are complete; null without marks alone

  // Only with the last segment passes heed what follows.
  bool is_last = false;
  float* found_inf = nullptr;
  bool accumulate = false;       // leaves a flag that is set already, else 0 or 1 is written
  float* factor_copy = nullptr;  // gets the factor as it is before the update; null: none
  Update update;                 // without a scale: none
  const float* other_found_inf = nullptr;  // one more flag that the update heeds; null: none

  int64_t words[kWordsOfLaunch];
};

static_assert(sizeof(Launch) <= 4096, "more than the arguments of a kernel");

// An update of the scale alone. Of the flags, repeated where there are fewer, any that is not 0
// counts.
struct UpdateAlone {
  Update update;
  const float* found_infs[4];
};

// A device and a stream of it, a CUstream. All pointers of a launch are to the device's memory.
struct Place {
  int device;
  void* stream;
};

// Loads all kernels on a device from an image that its driver knows, a fatbin or PTX, so that
// launches may be captured from then on. As the launches, this throws if the driver refuses it, and
// Python's lock must be held.
void load_kernels(int device, const char* image);

// Queues a kernel over the chunks of a launch.
void launch(Kind kind, const Launch& launch, const Place& place);

void update_scale(const UpdateAlone& alone, const Place& place);

// Queues the coefficient of a clipping.
void clip_coefficient(const Clip& clip, const Place& place);

// Limits the grid to so many programs, for tests and measurements; 0: to as many as a device holds
// at once.
void limit_programs(int64_t programs);

}  // namespace ampfast::cuda
