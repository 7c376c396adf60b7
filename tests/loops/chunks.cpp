// Walks chunks of lists whose spans lie between redzones of AddressSanitizer; fails where a chunk
// is missed, taken twice or at another place, or by another thread than the one to begin with it.
// Includes the file that it tests, for what is local there.
#include <chrono>
#include <cstdio>
#include <thread>

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

// Tells whether two threads begin with a half of a tensor each, and one of them takes all that the
// other, which is held up, has not begun.
bool are_shared() {
  constexpr int64_t kChunks = 64;
  std::vector<char> data(kChunks * kChunk * 2);
  DtypeList list{at::kHalf};
  list.spans.push_back({data.data(), kChunks * kChunk, 0, 0});
  list.chunks = kChunks;
  list.elements = kChunks * kChunk;
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(20);
  const auto is_over = [=] { return std::chrono::steady_clock::now() > deadline; };
  std::atomic<int64_t> first[2] = {-1, -1};
  std::atomic<int64_t> count{0};
  at::set_num_threads(2);
  for_each_chunk(list, Writes::kNothing, [&](char*, int64_t, int64_t chunk, const float*) {
    const int thread = at::get_thread_num();
    if (first[thread] < 0) {
      first[thread] = chunk;
      while (!is_over() && (first[0] < 0 || first[1] < 0 || (thread == 1 && count < kChunks - 1))) {
        std::this_thread::yield();
      }
    }
    ++count;
  });
  return first[0] == 0 && first[1] == kChunks / 2 && !is_over();
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
  if (!ampfast::cpu::are_shared()) {
    std::printf("a tensor is not shared by its halves\n");
  }
}
