// Chunks of a list, which the threads of a program take together: whole vectors, and the edges one
// by one; and what a thread gathers while it unscales or checks them.
#pragma once

#include <cstring>

#include "formats.cuh"

namespace ampfast::cuda {

constexpr int kWarp = 32;
constexpr unsigned int kAllLanes = 0xffffffff;
constexpr int kVectorBytes = 16;
// Vectors that a thread loads at once.
constexpr int kVectors = kWindowBytes / (kThreads * kVectorBytes);
constexpr int kStride = kThreads * kVectorBytes;

// Gives `taker` this thread's part of a chunk, with its places: whole vectors, and an element
// outside of them. The first threads take the elements before, as many others the ones after.
template <class Format, class Taker>
__device__ void take_chunk(Taker& taker, char* address, int bytes) {
  using Element = typename Format::Element;
  constexpr int kWindow = kVectors * kStride;
  constexpr int kSize = sizeof(Element);
  constexpr int kElements = kVectorBytes / kSize;
  // The table holds plain numbers; without this they would be accessed as generic addresses.
  __builtin_assume(__isGlobal(address));
  const int thread = static_cast<int>(threadIdx.x);
  const int to_aligned =
      static_cast<int>(-reinterpret_cast<intptr_t>(address)) & (kVectorBytes - 1);
  const int head = to_aligned < bytes ? to_aligned : bytes;
  const int whole = (bytes - head) / kVectorBytes * kVectorBytes;
  const bool is_head = thread < kElements;
  const int edge = is_head ? thread * kSize : head + whole + (thread - kElements) * kSize;
  const bool has_edge = thread < 2 * kElements && edge < (is_head ? head : bytes);
  // Loads cannot move above stores, so this one comes first.
  typename Format::Word edge_word = 0;
  if (has_edge) {
    edge_word = *reinterpret_cast<const Element*>(address + edge);
  }

  const int first = thread * kVectorBytes;
  char* place = address + head + first;
  uint4 vectors[kVectors];
#pragma unroll 1
  for (int left = whole - first; left > 0; left -= kWindow) {
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      const auto* vector = reinterpret_cast<const uint4*>(place + i * kStride);
      vectors[i] = i * kStride < left ? *vector : uint4{};
    }
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      if (i * kStride < left) {
        taker.vector(vectors[i], place + i * kStride);
      }
    }
    taker.end_window();
    place += kWindow;
  }
  if (has_edge) {
    taker.edge(edge_word, address + edge);
    taker.end_window();
  }
}

// Peak and squares of one thread. With kWrite the products are stored in their place.
template <class Format, bool kWrite, bool kNorm, bool kCoefficient>
struct Gatherer {
  using Opmath = typename Format::Opmath;
  using Word = typename Format::Word;
  static constexpr int kWords = kVectorBytes / sizeof(Word);

  Opmath factor;
  Opmath coefficient;
  typename Format::Peak peak = 0;
  double squares = 0;
  // Sums go by vectors and then by windows, as the error of a sum grows with the number of terms.
  Opmath vector_squares = 0;
  Opmath window_squares = 0;

  __device__ void vector(uint4 vector, char* place) {
    Word words[kWords];
    std::memcpy(words, &vector, kVectorBytes);
#pragma unroll
    for (int k = 0; k < kWords; ++k) {
      take<Format::kPerWord>(words[k]);
    }
    end_vector();
    if (kWrite) {
      std::memcpy(&vector, words, kVectorBytes);
      *reinterpret_cast<uint4*>(place) = vector;
    }
  }

  __device__ void edge(Word word, char* place) {
    using Element = typename Format::Element;
    take<1>(word);
    end_vector();
    if (kWrite) {
      *reinterpret_cast<Element*>(place) = static_cast<Element>(word);
    }
  }

  __device__ void end_window() {
    squares += window_squares;
    window_squares = 0;
  }

 private:
  // Takes the first `kCount` elements of a word: others are 0, which an infinite factor would turn
  // into NaN. Rounded products are in the word then.
  template <int kCount>
  __device__ void take(Word& word) {
    Opmath values[Format::kPerWord];
    peak = larger(peak, Format::peak(word));
    Format::widen(word, values);
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      values[i] = values[i] * factor;
      if (kNorm) {
        vector_squares += values[i] * values[i];
      }
    }
    if (kCoefficient) {
      // Rounded twice, as by an unscaling and then a multiplication.
      Format::widen(Format::narrow(values), values);
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        values[i] = values[i] * coefficient;
      }
    }
    word = Format::narrow(values);
  }

  __device__ void end_vector() {
    window_squares += vector_squares;
    vector_squares = 0;
  }
};

}  // namespace ampfast::cuda
