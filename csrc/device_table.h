// Gradient lists as tables that the kernels of their device read, kept for as long as nothing in
// them changes.
#pragma once

#include <ATen/core/Tensor.h>

#include "gradients.h"
#include "table_layout.h"

namespace ampfast {

// The chunks of one dtype.
struct Segment {
  at::ScalarType dtype;
  int64_t word;  // at which its chunks begin
  int64_t chunks;
  int64_t first;  // of its chunks among all dtypes'
};

// One table, for launches on the stream for which it was made.
struct DeviceTable {
  at::Tensor source;    // pinned memory, kept until it is uploaded or if a launch has room for it
  at::Tensor words;     // the source until it is uploaded, which devices read over the bus
  at::Tensor partials;  // float64: the sum of squares of each chunk
  at::Tensor header;
  std::vector<Segment> segments;
  std::vector<int64_t> content;  // of the list, as a fingerprint and what it is of
  int64_t uses = 0;

  size_t nbytes() const { return words.nbytes() + partials.nbytes(); }
};

// The table of `grads` for the current stream: one that is there already, if it has the same
// addresses, lengths, dtypes and parameters, else a new one. A small one is uploaded where it is
// asked for more often than a step does, since many lists move at every step. While the stream is
// `capturing` it is always new and never uploaded: replays read what the host has written, and copy
// nothing. Python's lock must be held.
std::shared_ptr<DeviceTable> table_of(const GradList& grads, bool capturing);

// Numbers of tables made and of copies of them to devices so far, by this process.
extern int64_t tables_made;
extern int64_t uploads;

// Forgets the tables that are not captured.
void clear_tables();

// From `enough` chunks on they become larger instead of more; for tests.
void set_chunks(int64_t enough);

}  // namespace ampfast
