#include "device_table.h"

#include <ATen/core/CachingHostAllocator.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <unordered_map>

namespace ampfast {

int64_t tables_made = 0;
int64_t uploads = 0;

namespace {

// Tables kept for reuse, the last ones that were used: two of any size, and so many in so much
// memory. Optimizers that step in turn each have one, and for every stream another.
constexpr size_t kLeastTables = 2;
constexpr size_t kMostTables = 512;
constexpr size_t kMostBytes = size_t{1} << 24;

// A table of so many words is not uploaded before it was asked for so often: by a norm that
// is asked for, and by norm and unscaling of a clip, in one step.
constexpr int64_t kSmallWords = 4096;
constexpr int kUsesOfStep = 3;

// Headers made at once.
constexpr int64_t kHeaders = 1024;

int64_t number_of(const void* address) {
  return static_cast<int64_t>(reinterpret_cast<uintptr_t>(address));
}

int64_t enough_chunks = kEnoughChunks;

// Depends on the list alone, and so does the order in which a norm is summed.
int64_t chunk_bytes(const DtypeList& list) {
  const int64_t bytes = list.elements * list.element_size();
  const auto bytes_for = [&](int64_t chunks) {
    return (bytes / chunks + kWindowBytes) & -kWindowBytes;
  };
  const int64_t most = std::clamp(bytes_for(4 * enough_chunks), kUsualChunkBytes, kMostChunkBytes);
  return std::min(bytes_for(enough_chunks), most);
}

// Adds the chunks of a list to a table, after the `first` ones of others.
Segment add(const DtypeList& list, int64_t first, std::vector<int64_t>& words) {
  const int64_t most = chunk_bytes(list);
  const int64_t size = list.element_size();
  const auto word = static_cast<int64_t>(words.size());
  Segment segment{list.dtype, word, 0, first};
  for (const Span& span : list.spans) {
    int64_t address = number_of(span.address);
    const int64_t end = address + span.numel * size;
    while (address < end) {
      const int64_t next = std::min((address & -kAddressAlignment) + most, end);
      words.push_back(address);
      words.push_back((span.parameter << kParameterShift) | (next - address));
      address = next;
      ++segment.chunks;
    }
  }
  return segment;
}

// Headers of a device: one for each stream, whose launches follow each other, and one for each
// captured pass, which may be replayed beside any other.
struct Headers {
  at::Tensor unused;  // rows
  std::unordered_map<c10::StreamId, at::Tensor> of_streams;
};

// Nobody tells when a graph ends.
void keep_for_graphs(const at::Tensor& memory) {
  static auto& kept = *new std::vector<at::Tensor>;
  kept.push_back(memory);
}

at::Tensor header_of(const c10::Stream& stream, bool capturing) {
  static auto& headers = *new std::unordered_map<at::Device, Headers>;  // as `recent()`
  auto& [unused, of_streams] = headers[stream.device()];
  if (!capturing && (!unused.defined() || unused.size(0) < kHeaders / 2)) {
    const at::TensorOptions options(at::kLong);
    unused = allocated({kHeaders, kHeaderWords}, options.device(stream.device())).zero_();
    keep_for_graphs(unused);
    // Any stream may be the first to take one.
    c10::impl::VirtualGuardImpl(stream.device_type()).synchronizeStream(stream);
  }
  TORCH_CHECK(unused.defined() && unused.size(0) > 0,
              "a CUDA graph cannot capture the first pass over gradients on ", stream.device(),
              ", nor many more than before: run one iteration without capturing first");
  at::Tensor captured;
  at::Tensor& header = capturing ? captured : of_streams[stream.id()];
  if (!header.defined()) {
    header = unused[0];
    unused = unused.narrow(0, 1, unused.size(0) - 1);
  }
  return header;
}

// A new table in pinned memory.
std::shared_ptr<DeviceTable> made(const GradList& grads, const at::Tensor& header) {
  auto table = std::make_shared<DeviceTable>();
  std::vector<int64_t> words;
  int64_t chunks = 0;
  for (const DtypeList& list : grads.lists()) {
    table->segments.push_back(add(list, chunks, words));
    chunks += table->segments.back().chunks;
  }
  const at::Device device = grads.device();
  table->header = header;
  const at::TensorOptions options(at::kLong);
  table->source = table->words =
      allocated({static_cast<int64_t>(words.size())}, options.pinned_memory(!device.is_cpu()));
  std::memcpy(table->words.mutable_data_ptr(), words.data(), words.size() * sizeof(int64_t));
  table->partials = allocated({chunks}, options.dtype(at::kDouble).device(device));
  ++tables_made;
  return table;
}

// Uploads a table in the order of its stream, which is the current one.
void upload(DeviceTable& table) {
  // torch's allocator does not hand pinned memory out again before the copy from it is over.
  table.words = table.words.to(table.header.device(), /*non_blocking=*/true, /*copy=*/true);
  if (table.source.numel() > kWordsOfLaunch) {
    table.source.reset();
  }
  ++uploads;
}

// All that the table of a list depends on, after a fingerprint of it.
std::vector<int64_t> content_of(const GradList& grads, c10::StreamId stream) {
  std::vector<int64_t> content{0, static_cast<int64_t>(grads.device().type()),
                               grads.device().index(), stream};
  uint64_t fingerprint = 0;
  for (const DtypeList& list : grads.lists()) {
    content.reserve(content.size() + 1 + 3 * list.spans.size());
    content.push_back(static_cast<int64_t>(list.dtype));
    for (const Span& span : list.spans) {
      const int64_t address = number_of(span.address);
      content.insert(content.end(), {address, span.numel, span.parameter});
      fingerprint = fingerprint * 0x9e3779b97f4a7c15 + static_cast<uint64_t>(address);
    }
  }
  content.front() = static_cast<int64_t>(fingerprint);
  return content;
}

// Tables that may be used again; the last used comes last.
struct Recent {
  std::vector<std::pair<int64_t, std::shared_ptr<DeviceTable>>> tables;  // after fingerprints
  size_t bytes = 0;
};

// Never destroyed: at the end of the process the device may be destroyed before it.
Recent& recent() {
  static Recent& recent = *new Recent;
  return recent;
}

}  // namespace

std::shared_ptr<DeviceTable> table_of(const GradList& grads, bool capturing) {
  const c10::impl::VirtualGuardImpl guard(grads.device().type());
  const c10::Stream stream = guard.getStream(grads.device());
  const at::Tensor header = header_of(stream, capturing);
  if (capturing) {
    const std::shared_ptr<DeviceTable> table = made(grads, header);
    keep_for_graphs(table->words);
    return table;
  }
  auto content = content_of(grads, stream.id());
  const int64_t fingerprint = content.front();
  auto& [tables, bytes] = recent();
  const auto known = std::find_if(tables.begin(), tables.end(), [&](const auto& each) {
    return each.first == fingerprint && each.second->content == content;
  });
  const bool holds = known != tables.end();
  if (holds) {
    std::rotate(known, known + 1, tables.end());
  } else {
    tables.emplace_back(fingerprint, made(grads, header));
    tables.back().second->content = std::move(content);
    bytes += tables.back().second->nbytes();
  }
  const std::shared_ptr<DeviceTable> table = tables.back().second;
  const bool is_small = table->words.numel() <= kSmallWords;
  if (++table->uses == (is_small ? kUsesOfStep + 1 : 1)) {
    upload(*table);
  } else if (!holds && !stream.device().is_cpu()) {
    // Without it torch's allocator would hand the memory out again while launches read it.
    const at::DataPtr& memory = table->words.storage().data_ptr();
    at::getHostAllocator(stream.device_type())
        ->record_event(memory.get(), memory.get_context(), stream);
  }
  // Freeing a table may run Python, which may ask for tables: that comes last.
  std::vector<std::shared_ptr<DeviceTable>> dropped;
  while (tables.size() > kLeastTables && (tables.size() > kMostTables || bytes > kMostBytes)) {
    bytes -= tables.front().second->nbytes();
    dropped.push_back(std::move(tables.front().second));
    tables.erase(tables.begin());
  }
  return table;
}

void clear_tables() { const Recent dropped = std::exchange(recent(), {}); }

void set_chunks(int64_t enough) {
  enough_chunks = enough;
  clear_tables();
}

}  // namespace ampfast
