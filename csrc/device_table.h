// Gradient lists as tables in the memory of their device, kept for as long as nothing in them
// changes.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <vector>

#include "gradients.h"
#include "table_layout.h"

namespace ampfast {

// The chunks of one dtype.
struct Segment {
  at::ScalarType dtype;
  int64_t word;  // at which its chunks begin
  int64_t chunks;
  int64_t partials;  // the word at which their sums of squares begin
  bool is_paired;    // with float32 values
  bool is_aligned;   // those of each chunk's first whole vector are, too
};

// One table, for launches on the stream on which it was uploaded.
struct DeviceTable {
  at::Tensor buffer;
  std::vector<Segment> segments;
};

// The table of `grads` for the current stream: one that is there already, if it has the same
// addresses, lengths, dtypes and parameters, else a new one. While the stream is `capturing` it is
// always new, in the memory of the graph, and every replay copies it again. Python's lock must be
// held.
std::shared_ptr<DeviceTable> table_of(const GradList& grads, bool capturing);

// Number of copies of tables to devices so far, by this process.
extern int64_t uploads;

// Forgets the tables that are not captured.
void clear_tables();

// From `enough` chunks on they become larger instead of more, up to `most_bytes`, or as usual if
// this is 0; for tests and measurements.
void set_chunks(int64_t most_bytes, int64_t enough);

}  // namespace ampfast
