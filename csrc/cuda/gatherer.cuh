// How the threads of a program take a window together: in whole vectors, and its edges one by one.
#pragma once

#include <cstring>

#include "formats.cuh"
#include "track.cuh"

namespace ampfast::cuda {

constexpr int kThreads = 128;
constexpr int kVectorBytes = 16;
constexpr int kVectors = kWindowBytes / (kThreads * kVectorBytes);

// What one of them gathers.
template <class Format, bool kWrite, bool kNorm, bool kCoefficient, bool kHealth>
struct Gatherer {
  using Opmath = typename Format::Opmath;
  using Element = typename Format::Element;
  using Word = typename Format::Word;

  Opmath factor;
  Opmath coefficient;
  typename Format::Peak peak = 0;
  double squares = 0;
  Health<Format> health;

  template <int kCount>
  __device__ Word take(Word word, Opmath& window_squares) {
    if (kHealth) {
      health.template count<kCount>(word);
    } else {
      peak = larger(peak, Format::peak(word));
    }
    return unscaled<Format, kNorm, kCoefficient, kCount>(word, factor, coefficient, window_squares);
  }

  // Takes this thread's part of the window at `base`, whose elements are the bytes from `begin` up
  // to `end`: vectors, and where a tensor begins or ends amid one, the elements there one by one.
  template <bool kWhole>
  __device__ void window(char* base, int begin, int end) {
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
    const int edge = kWhole ? kNoEdge : edge_place(begin, end, thread);
    Word edge_word = 0;
    if (edge != kNoEdge) {
      edge_word = *reinterpret_cast<const Element*>(base + edge);
    }

    Opmath window_squares = 0;
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      if (is_within(i)) {
        Word words[kWords];
        std::memcpy(words, &vectors[i], kVectorBytes);
        // By vectors, since the error of a sum grows with the number of its terms.
        Opmath vector_squares = 0;
#pragma unroll
        for (int k = 0; k < kWords; ++k) {
          words[k] = take<Format::kPerWord>(words[k], vector_squares);
        }
        window_squares += vector_squares;
        if (kWrite) {
          std::memcpy(&vectors[i], words, kVectorBytes);
          *reinterpret_cast<uint4*>(base + place + i * kStride) = vectors[i];
        }
      }
    }
    if (edge != kNoEdge) {
      edge_word = take<1>(edge_word, window_squares);
      if (kWrite) {
        *reinterpret_cast<Element*>(base + edge) = static_cast<Element>(edge_word);
      }
    }
    squares += window_squares;
  }

  static constexpr int kNoEdge = -1;

  // Where the element outside of whole vectors is that this thread takes. The first threads share
  // the vector in which a tensor begins, those behind them the one in which it ends.
  AMPFAST_ELEMENT static int edge_place(int begin, int end, int thread) {
    constexpr int kSize = sizeof(Element);
    constexpr int kElements = kVectorBytes / kSize;
    const int last = end / kVectorBytes * kVectorBytes;
    const bool is_first = thread < kElements;
    // A tensor that begins and ends in one vector has one edge.
    const bool has_edge = is_first ? begin > 0 : last != end && (begin == 0 || last > 0);
    const int place = (is_first ? 0 : last) + thread % kElements * kSize;
    const bool is_inside = begin <= place && place < end;
    return thread < 2 * kElements && has_edge && is_inside ? place : kNoEdge;
  }
};

}  // namespace ampfast::cuda
