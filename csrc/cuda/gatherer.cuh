// Chunks of a list, which the threads of a program take together: whole vectors, and the edges one
// by one; and what a thread gathers while it unscales or checks them.
#pragma once

#include <cstring>

#include "formats.cuh"

// Switches that change no result, for measurements.
#ifndef AMPFAST_VECTORS  // that a thread loads at once
#define AMPFAST_VECTORS (kWindowBytes / (kThreads * kVectorBytes))
#endif
#ifndef AMPFAST_PREFETCH  // loads the next window before it writes one
#define AMPFAST_PREFETCH false
#endif
#ifndef AMPFAST_CONTIGUOUS  // gives each program chunks that follow one another
#define AMPFAST_CONTIGUOUS false
#endif
#ifndef AMPFAST_STREAM  // marks gradients as used once, for the caches
#define AMPFAST_STREAM false
#endif

namespace ampfast::cuda {

constexpr int kThreads = 128;
constexpr int kWarp = 32;
constexpr unsigned int kAllLanes = 0xffffffff;
constexpr int kVectorBytes = 16;
constexpr int kVectors = AMPFAST_VECTORS;
constexpr int kStride = kThreads * kVectorBytes;

// Gives `visit` the chunks of this program: their number, first byte, length in bytes, parameter.
template <class Visit>
__device__ void for_chunks(const int64_t* chunks, int count, const Visit& visit) {
  const int program = static_cast<int>(blockIdx.x);
  const int programs = static_cast<int>(gridDim.x);
  // In turn, so that all read one part of the list at a time.
  int chunk = program;
  int end = count;
  int step = programs;
  if (AMPFAST_CONTIGUOUS) {
    chunk = static_cast<int>(int64_t{program} * count / programs);
    end = static_cast<int>((int64_t{program} + 1) * count / programs);
    step = 1;
  }
  // Threads of an even number load addresses and the others extents. Were all to load the same, the
  // compiler would want it in a register for all, and wait for it.
  const int64_t* fields = chunks + threadIdx.x % kChunkWords;
  int64_t field = fields[int64_t{chunk} * kChunkWords];
  while (chunk < end) {
    const int64_t address = __shfl_sync(kAllLanes, field, kAddress);
    const int64_t extent = __shfl_sync(kAllLanes, field, kExtent);
    // Needed when this chunk is done, and by then it is there.
    const int next = chunk + step < count ? chunk + step : chunk;
    field = fields[int64_t{next} * kChunkWords];
    visit(chunk, reinterpret_cast<char*>(address), static_cast<int>(extent),
          extent >> kParameterShift);
    chunk += step;
  }
}

__device__ inline uint4 load_vector(const char* place) {
  const auto* vector = reinterpret_cast<const uint4*>(place);
  return AMPFAST_STREAM ? __ldcs(vector) : *vector;
}

__device__ inline void store_vector(char* place, uint4 value) {
  auto* vector = reinterpret_cast<uint4*>(place);
  if (AMPFAST_STREAM) {
    __stcs(vector, value);
  } else {
    *vector = value;
  }
}

// This thread's vectors of a window, of whose bytes `left` are in it: those that are not are 0.
__device__ inline void load_window(uint4 (&vectors)[kVectors], const char* place, int left) {
#pragma unroll
  for (int i = 0; i < kVectors; ++i) {
    vectors[i] = i * kStride < left ? load_vector(place + i * kStride) : uint4{};
  }
}

// Gives `taker` this thread's part of a chunk, and with kWrite stores what it makes of it.
template <class Format, bool kWrite, class Taker>
__device__ void take_chunk(Taker& taker, char* address, int bytes) {
  using Element = typename Format::Element;
  using Word = typename Format::Word;
  constexpr int kSize = sizeof(Element);
  constexpr int kElements = kVectorBytes / kSize;
  constexpr int kWords = kVectorBytes / sizeof(Word);
  constexpr int kWindow = kVectors * kStride;
  // The table holds plain numbers; without this they would be accessed as generic addresses.
  __builtin_assume(__isGlobal(address));
  const int thread = static_cast<int>(threadIdx.x);
  const int to_aligned =
      static_cast<int>(-reinterpret_cast<intptr_t>(address)) & (kVectorBytes - 1);
  const int head = to_aligned < bytes ? to_aligned : bytes;
  const int whole = (bytes - head) / kVectorBytes * kVectorBytes;

  // The first threads take the elements before the whole vectors, as many others those behind.
  // Loads cannot move above stores, so this one comes first.
  const bool is_head = thread < kElements;
  const int edge = is_head ? thread * kSize : head + whole + (thread - kElements) * kSize;
  const bool has_edge = thread < 2 * kElements && edge < (is_head ? head : bytes);
  Word edge_word = 0;
  if (has_edge) {
    edge_word = *reinterpret_cast<const Element*>(address + edge);
  }

  char* place = address + head + thread * kVectorBytes;
  uint4 vectors[kVectors];
  uint4 ahead[kVectors];
  if (AMPFAST_PREFETCH) {
    load_window(ahead, place, whole - thread * kVectorBytes);
  }
#pragma unroll 1
  for (int left = whole - thread * kVectorBytes; left > 0; left -= kWindow) {
    if (AMPFAST_PREFETCH) {
      std::memcpy(vectors, ahead, sizeof(vectors));
      load_window(ahead, place + kWindow, left - kWindow);
    } else {
      load_window(vectors, place, left);
    }
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      if (i * kStride < left) {
        Word words[kWords];
        std::memcpy(words, &vectors[i], kVectorBytes);
#pragma unroll
        for (int k = 0; k < kWords; ++k) {
          taker.template take<Format::kPerWord>(words[k]);
        }
        taker.end_vector();
        if (kWrite) {
          std::memcpy(&vectors[i], words, kVectorBytes);
          store_vector(place + i * kStride, vectors[i]);
        }
      }
    }
    taker.end_window();
    place += kWindow;
  }
  if (has_edge) {
    taker.template take<1>(edge_word);
    taker.end_vector();
    taker.end_window();
    if (kWrite) {
      *reinterpret_cast<Element*>(address + edge) = static_cast<Element>(edge_word);
    }
  }
}

// Peak and squares that one thread gathers.
template <class Format, bool kNorm, bool kCoefficient>
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

  __device__ void end_window() {
    squares += window_squares;
    window_squares = 0;
  }
};

}  // namespace ampfast::cuda
