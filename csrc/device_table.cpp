#include "device_table.h"

#include <ATen/ops/empty.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/util/order_preserving_flat_hash_map.h>

#include <algorithm>
#include <cstring>
#include <utility>

namespace ampfast {

int64_t uploads = 0;

namespace {

// Tables kept for reuse, of those that were used last: two, 32 in so much memory of devices, and
// more in less. Optimizers that step in turn each have one, and for every stream another.
constexpr size_t kLeastTables = 2;
constexpr size_t kUsualTables = 32;
constexpr size_t kUsualBytes = size_t{1} << 26;
constexpr size_t kMoreBytes = size_t{1} << 23;

int64_t number_of(const void* address) {
  return static_cast<int64_t>(reinterpret_cast<uintptr_t>(address));
}

int64_t most_chunk_bytes = 0;
int64_t enough_chunks = kEnoughChunks;

// Depends on the list alone, and so does the order in which a norm is summed.
int64_t chunk_bytes(const DtypeList& list) {
  const int64_t bytes = list.elements * list.element_size();
  const auto share = [&](int64_t chunks) {
    return (bytes / chunks + kWindowBytes) & -kWindowBytes;
  };
  const int64_t most = most_chunk_bytes > 0 ? most_chunk_bytes
                                            : std::clamp(share(4 * enough_chunks), kUsualChunkBytes,
                                                         kMostChunkBytes);
  return std::min(share(enough_chunks), most);
}

// Adds the chunks of a list to a table.
Segment add(const DtypeList& list, std::vector<int64_t>& words) {
  const int64_t most = chunk_bytes(list);
  const int64_t size = list.element_size();
  const auto first = static_cast<int64_t>(words.size());
  Segment segment{list.dtype, first, 0, words[kChunks], list.is_paired, true};
  for (const Span& span : list.spans) {
    int64_t address = number_of(span.address);
    const int64_t end = address + span.numel * size;
    while (address < end) {
      const int64_t next = std::min((address & -kAddressAlignment) + most, end);
      words.push_back(address);
      words.push_back((span.parameter << kParameterShift) | (next - address));
      if (list.is_paired) {
        const float* wide = span.wide + (address - number_of(span.address)) / size;
        const int64_t head = (-address & (kAddressAlignment - 1)) / size;
        words.push_back(number_of(wide));
        segment.is_aligned &= number_of(wide + head) % kAddressAlignment == 0;
      }
      address = next;
      ++segment.chunks;
    }
  }
  words[kChunks] += segment.chunks;
  return segment;
}

// A new table, copied to its device on the current stream.
std::shared_ptr<DeviceTable> uploaded(const GradList& grads) {
  auto table = std::make_shared<DeviceTable>();
  std::vector<int64_t> words(kHeaderWords);
  for (const DtypeList& list : grads.lists()) {
    table->segments.push_back(add(list, words));
  }
  const auto count = static_cast<int64_t>(words.size());
  words[kPartials] = count;
  for (Segment& segment : table->segments) {
    segment.partials += count;
  }
  // torch's allocator does not hand pinned memory out again before the copy from it is over, nor
  // ever what a graph copies from, since each replay reads it again.
  const at::TensorOptions options(at::kLong);
  const at::Tensor source = at::empty({count}, options.pinned_memory(!grads.device().is_cpu()));
  std::memcpy(source.mutable_data_ptr(), words.data(), words.size() * sizeof(int64_t));
  table->buffer = at::empty({count + words[kChunks]}, options.device(grads.device()));
  table->buffer.narrow(0, 0, count).copy_(source, /*non_blocking=*/true);
  ++uploads;
  return table;
}

// All that the table of a list depends on, behind a fingerprint of it. Lists that share that would
// upload their tables in turn, so it must mix well.
std::vector<int64_t> content_of(const GradList& grads, c10::StreamId stream) {
  std::vector<int64_t> content(1);
  uint64_t hash = 0;
  // Four words at once: only one multiplication of them waits for those before.
  const auto add = [&](int64_t a, int64_t b = 0, int64_t c = 0, int64_t d = 0) {
    content.insert(content.end(), {a, b, c, d});
    const uint64_t mixed = static_cast<uint64_t>(a) * 0xff51afd7ed558ccd ^
                           static_cast<uint64_t>(b) * 0xc4ceb9fe1a85ec53 ^
                           static_cast<uint64_t>(c) * 0x87c37b91114253d5 ^
                           static_cast<uint64_t>(d) * 0x4cf5ad432745937f;
    hash = (hash ^ mixed ^ mixed >> 32) * 0x9e3779b97f4a7c15;
    hash ^= hash >> 32;
  };
  add(static_cast<int64_t>(grads.device().type()), grads.device().index(), stream);
  for (const DtypeList& list : grads.lists()) {
    content.reserve(content.size() + 4 + 4 * list.spans.size());
    add(static_cast<int64_t>(list.dtype));
    for (const Span& span : list.spans) {
      add(number_of(span.address), span.numel, span.parameter, number_of(span.wide));
    }
  }
  content.front() = static_cast<int64_t>(hash);
  return content;
}

struct Kept {
  std::vector<int64_t> content;
  std::shared_ptr<DeviceTable> table;
};

// Tables that may be used again, by fingerprint; the last used comes last. Adding one to many takes
// no longer than to few: where gradients move at every step, each step does.
struct Recent {
  ska_ordered::order_preserving_flat_hash_map<int64_t, Kept> tables;
  size_t bytes = 0;

  // Freeing a table may run Python, which may ask for tables: whoever drops it comes first.
  Kept take(decltype(tables)::iterator place) {
    Kept kept = std::move(place->second);
    bytes -= kept.table->buffer.nbytes();
    tables.erase(place);
    return kept;
  }
};

// Never destroyed: at the end of the process the device may be gone before it.
Recent& recent() {
  static Recent& recent = *new Recent;
  return recent;
}

}  // namespace

std::shared_ptr<DeviceTable> table_of(const GradList& grads, bool capturing) {
  if (capturing) {
    return uploaded(grads);
  }
  const c10::impl::VirtualGuardImpl guard(grads.device().type());
  auto content = content_of(grads, guard.getStream(grads.device()).id());
  const int64_t fingerprint = content.front();
  auto& [tables, bytes] = recent();
  auto known = tables.find(fingerprint);
  const bool holds = known != tables.end() && known->second.content == content;
  const std::shared_ptr<DeviceTable> table = holds ? known->second.table : uploaded(grads);
  std::vector<Kept> dropped;
  if ((known = tables.find(fingerprint)) != tables.end()) {
    dropped.push_back(recent().take(known));
  }
  tables.insert({fingerprint, {std::move(content), table}});
  bytes += table->buffer.nbytes();
  while (tables.size() > kLeastTables &&
         bytes > (tables.size() > kUsualTables ? kMoreBytes : kUsualBytes)) {
    dropped.push_back(recent().take(tables.begin()));
  }
  return table;
}

void clear_tables() { const Recent dropped = std::exchange(recent(), {}); }

void set_chunks(int64_t most_bytes, int64_t enough) {
  TORCH_CHECK(enough > 0, "the number of chunks must be positive, got ", enough);
  most_chunk_bytes = most_bytes;
  enough_chunks = enough;
  clear_tables();
}

}  // namespace ampfast
