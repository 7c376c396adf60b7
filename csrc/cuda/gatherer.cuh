// Windows of a tensor, which the threads of a program take together: whole vectors, and the edges
// one by one; and what a thread gathers while it unscales or checks them.
#pragma once

#include <cstring>

#include "formats.cuh"

namespace ampfast::cuda {

constexpr int kThreads = 128;
constexpr int kWarp = 32;
constexpr unsigned int kAllLanes = 0xffffffff;
constexpr int kVectorBytes = 16;
constexpr int kVectors = kWindowBytes / (kThreads * kVectorBytes);

constexpr int kNoEdge = -1;

// Place of the element outside of whole vectors that this thread takes. The first threads share the
// vector in which a tensor begins, those behind them the one in which it ends.
template <class Format>
AMPFAST_ELEMENT int edge_place(int begin, int end, int thread) {
  constexpr int kSize = sizeof(typename Format::Element);
  constexpr int kElements = kVectorBytes / kSize;
  const int last = end / kVectorBytes * kVectorBytes;
  const bool is_first = thread < kElements;
  // A tensor that begins and ends in one vector has one edge.
  const bool has_edge = is_first ? begin > 0 : last != end && (begin == 0 || last > 0);
  const int place = (is_first ? 0 : last) + thread % kElements * kSize;
  const bool is_inside = begin <= place && place < end;
  return thread < 2 * kElements && has_edge && is_inside ? place : kNoEdge;
}

// Gives `taker` this thread's part of the window at `base`, whose elements are the bytes from
// `begin` up to `end`, and with kWrite stores what it makes of them.
template <class Format, bool kWhole, bool kWrite, class Taker>
__device__ void take_window(Taker& taker, char* base, int begin, int end) {
  using Element = typename Format::Element;
  using Word = typename Format::Word;
  // The table holds plain numbers; without this they would be accessed as generic addresses.
  __builtin_assume(__isGlobal(base));
  constexpr int kWords = kVectorBytes / sizeof(Word);
  const int thread = static_cast<int>(threadIdx.x);
  const int place = thread * kVectorBytes;
  constexpr int kStride = kThreads * kVectorBytes;
  // Whether vector `i` of this thread is within. The beginning is in the window's first vector.
  const auto is_within = [begin, end, place](int i) {
    const bool is_begun = i > 0 || begin == 0 || place > 0;
    return kWhole || (is_begun && place <= end - kVectorBytes - i * kStride);
  };

  // Loads cannot move above stores, so all come first.
  uint4 vectors[kVectors] = {};
#pragma unroll
  for (int i = 0; i < kVectors; ++i) {
    if (is_within(i)) {
      vectors[i] = *reinterpret_cast<const uint4*>(base + place + i * kStride);
    }
  }
  const int edge = kWhole ? kNoEdge : edge_place<Format>(begin, end, thread);
  Word edge_word = 0;
  if (edge != kNoEdge) {
    edge_word = *reinterpret_cast<const Element*>(base + edge);
  }

#pragma unroll
  for (int i = 0; i < kVectors; ++i) {
    if (is_within(i)) {
      Word words[kWords];
      std::memcpy(words, &vectors[i], kVectorBytes);
#pragma unroll
      for (int k = 0; k < kWords; ++k) {
        taker.template take<Format::kPerWord>(words[k]);
      }
      taker.end_vector();
      if (kWrite) {
        std::memcpy(&vectors[i], words, kVectorBytes);
        *reinterpret_cast<uint4*>(base + place + i * kStride) = vectors[i];
      }
    }
  }
  if (edge != kNoEdge) {
    taker.template take<1>(edge_word);
    taker.end_vector();
    if (kWrite) {
      *reinterpret_cast<Element*>(base + edge) = static_cast<Element>(edge_word);
    }
  }
}

// Peak and squares that one thread gathers.
template <class Format, bool kWrite, bool kNorm, bool kCoefficient>
struct Gatherer {
  using Opmath = typename Format::Opmath;
  using Word = typename Format::Word;

  Opmath factor;
  Opmath coefficient;
  typename Format::Peak peak = 0;
  double squares = 0;
  // By vectors and then by windows, since the error of a sum grows with the number of its terms.
  Opmath vector_squares = 0;
  Opmath window_squares = 0;

  template <int kCount>
  __device__ void take(Word& word) {
    peak = larger(peak, Format::peak(word));
    word = unscaled<Format, kNorm, kCoefficient, kCount>(word, factor, coefficient, vector_squares);
  }

  __device__ void end_vector() {
    window_squares += vector_squares;
    vector_squares = 0;
  }

  template <bool kWhole>
  __device__ void window(char* base, int begin, int end) {
    window_squares = 0;
    take_window<Format, kWhole, kWrite>(*this, base, begin, end);
    squares += window_squares;
  }
};

}  // namespace ampfast::cuda
