// Walks chunks of lists whose spans lie between redzones of AddressSanitizer; fails where a chunk
// is missed, taken twice or at another place. Includes the file that it tests, for what is local
// there.
#include <cstdio>

#include "cpu/multi_tensor.cpp"

namespace ampfast {

// Where the walk defines it, there is all of Python.
Dtype dtype_of(at::ScalarType /*type*/) { return Dtype::kFloat16; }

namespace cpu {
namespace {

bool are_all_taken(int64_t spans, int64_t numel, bool is_paired) {
  DtypeList list{at::kHalf};
  list.is_paired = is_paired;
  std::vector<char> data(spans * numel * 2);
  std::vector<float> wide(spans * numel);
  for (int64_t i = 0; i < spans; ++i) {
    float* values = is_paired ? wide.data() + i * numel : nullptr;
    list.spans.push_back({data.data() + i * numel * 2, numel, list.chunks, i, values});
    list.chunks += chunk_count(numel);
    list.elements += numel;
  }
  list.spans.shrink_to_fit();
  std::vector<std::atomic<int64_t>> taken(list.chunks);
  for_each_chunk(list, Writes::kNothing,
                 [&](char* address, int64_t length, int64_t chunk, const float* values) {
                   const int64_t first = (address - data.data()) / 2;
                   const bool fits = is_paired ? values == wide.data() + first : values == nullptr;
                   taken[chunk] += fits ? length * list.chunks + first : -1;
                 });
  for (int64_t chunk = 0, first = 0; chunk < list.chunks; ++chunk) {
    const int64_t length = std::min(kChunk, numel - first % numel);
    if (taken[chunk] != length * list.chunks + first) {
      return false;
    }
    first += length;
  }
  return true;
}

}  // namespace
}  // namespace cpu
}  // namespace ampfast

int main() {
  for (const int64_t grain : {int64_t{1} << 40, int64_t{64}}) {
    ampfast::cpu::set_grain(grain);
    for (const int64_t spans : {1, 7, 8, 9, 100}) {
      for (const int64_t numel : {int64_t{1}, ampfast::kChunk, 5 * ampfast::kChunk + 1}) {
        for (const bool is_paired : {false, true}) {
          if (!ampfast::cpu::are_all_taken(spans, numel, is_paired)) {
            std::printf("%ld spans of %ld\n", static_cast<long>(spans), static_cast<long>(numel));
          }
        }
      }
    }
  }
}
