// What a pass on the CPU notes of each parameter, apart from its result.
#pragma once

#include <c10/util/Exception.h>

#include <algorithm>
#include <cmath>
#include <vector>

#include "../element.h"
#include "../gradients.h"
#include "../track.h"
#include "instruction_set.h"

namespace ampfast::cpu {

// Where it is noted; rows by the number of the parameter.
struct Track {
  int64_t* marks = nullptr;
  int64_t* health = nullptr;  // null: only marks
  int64_t parameters = 0;     // rows of both
  int64_t step = 0;           // the number of this step, counted from 1
};

// The notes on one list. Threads note chunks, each its own; `write` then goes through them in
// order, so the result does not depend on how many threads there are.
class Notes {
 public:
  // With a null `track` nothing is noted.
  Notes(const Track* track, const DtypeList& list, const Loops& loops)
      : track_(track), list_(list), loops_(loops) {
    if (track_ == nullptr) {
      return;
    }
    peaks_.resize(list.chunks);
    if (track_->health != nullptr) {
      counts_.resize(list.chunks);
    }
  }

  // Looks at a chunk before it is written.
  void look(int64_t chunk, const void* address, int64_t numel) {
    if (!counts_.empty()) {
      counts_[chunk] = loops_.counts(address, numel);
    }
  }

  void peak(int64_t chunk, int64_t bits) {
    if (track_ != nullptr) {
      peaks_[chunk] = bits;
    }
  }

  // `as_double` gives the value that a magnitude has, and `as_used` the one that the optimizer
  // uses.
  template <class AsDouble, class AsUsed>
  void write(const AsDouble& as_double, const AsUsed& as_used, bool found) const {
    if (track_ == nullptr) {
      return;
    }
    for (const Span& span : list_.spans) {
      TORCH_CHECK(span.parameter < track_->parameters, "there are notes on ", track_->parameters,
                  " parameters, and a gradient is that of number ", span.parameter);
      if (found) {
        mark(span, as_used);
      }
      if (!counts_.empty()) {
        measure(span, as_double);
      }
    }
  }

 private:
  static void once(int64_t step, int64_t& last, int64_t& times) {
    times += last != step;
    last = step;
  }

  template <class AsUsed>
  void mark(const Span& span, const AsUsed& as_used) const {
    const auto first = peaks_.begin() + span.first_chunk;
    const double used = as_used(*std::max_element(first, first + chunk_count(span.numel)));
    int64_t* row = track_->marks + span.parameter * kMarkWords;
    if (!std::isfinite(used)) {
      once(track_->step, row[kLastNonFinite], row[kTimesNonFinite]);
    }
    if (std::isnan(used)) {
      once(track_->step, row[kLastNan], row[kTimesNan]);
    }
  }

  template <class AsDouble>
  void measure(const Span& span, const AsDouble& as_double) const {
    int64_t* row = track_->health + span.parameter * kHealthWords;
    row[kElements] = span.numel;
    for (int64_t i = 0; i < chunk_count(span.numel); ++i) {
      const Counts& counts = counts_[span.first_chunk + i];
      row[kNonzero] += counts.nonzero;
      row[kVanishing] += counts.vanishing;
      row[kSubnormal] += counts.subnormal;
      row[kOverflowing] += counts.overflowing;
      const int64_t largest = magnitude(as_double(counts.largest));
      const int64_t smallest = magnitude(as_double(counts.smallest));
      row[kLargest] = std::max(row[kLargest], largest);
      if (counts.smallest != 0) {
        row[kSmallest] = std::max(row[kSmallest], kComplement - smallest);
      }
    }
  }

  const Track* track_;
  const DtypeList& list_;
  const Loops& loops_;
  std::vector<int64_t> peaks_;
  std::vector<Counts> counts_;
};

}  // namespace ampfast::cpu
