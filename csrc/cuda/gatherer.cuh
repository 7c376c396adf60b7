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

// Gives `visit` the chunks of this program, from the words of a table: their number, first byte,
// length in bytes, parameter, and the float32 values of pairs, else null. `begin`, called while the
// first words are loaded, says whether to go on.
template <bool kPairs, class WordAt, class Visit, class Begin>
__device__ void for_chunks(const WordAt& word_at, int count, const Visit& visit,
                           const Begin& begin) {
  // In turn, so that all programs read one part of the list at a time.
  int chunk = static_cast<int>(blockIdx.x);
  const int step = static_cast<int>(gridDim.x);
  // Each thread loads one word. Were all to load the same, the compiler would want it in a register
  // for all, and wait for it.
  constexpr int kWords = kPairs ? kPairWords : kChunkWords;
  const int word = static_cast<int>(threadIdx.x % kWarp % kWords);
  int64_t field = word_at(int64_t{chunk} * kWords, word);
  if (!begin()) {
    return;
  }
  while (chunk < count) {
    const int64_t address = __shfl_sync(kAllLanes, field, kAddress);
    const int64_t extent = __shfl_sync(kAllLanes, field, kExtent);
    const int64_t wide = kPairs ? __shfl_sync(kAllLanes, field, kWide) : 0;
    // Needed when this chunk is done, and by then it is there.
    const int next = chunk + step < count ? chunk + step : chunk;
    field = word_at(int64_t{next} * kWords, word);
    visit(chunk, reinterpret_cast<char*>(address), static_cast<int>(extent),
          extent >> kParameterShift, reinterpret_cast<float*>(wide));
    chunk += step;
  }
}

__device__ inline uint4 load_vector(const char* place) {
  return *reinterpret_cast<const uint4*>(place);
}

__device__ inline void store_vector(char* place, uint4 value) {
  *reinterpret_cast<uint4*>(place) = value;
}

// Float32 values of a vector's elements, which are aligned for vectors or not.
template <class T, int kCount>
__device__ void store_floats(float* place, const T (&values)[kCount], bool is_aligned) {
  __builtin_assume(__isGlobal(place));
  if (is_aligned) {
    constexpr int kEach = kVectorBytes / sizeof(float);
#pragma unroll
    for (int i = 0; i < kCount; i += kEach) {
      uint4 vector;
      std::memcpy(&vector, values + i, kVectorBytes);
      store_vector(reinterpret_cast<char*>(place + i), vector);
    }
    return;
  }
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    place[i] = static_cast<float>(values[i]);
  }
}

// This thread's vectors of a window, of whose bytes `left` are in it: the others are 0.
__device__ inline void load_window(uint4 (&vectors)[kVectors], const char* place, int left) {
#pragma unroll
  for (int i = 0; i < kVectors; ++i) {
    vectors[i] = i * kStride < left ? load_vector(place + i * kStride) : uint4{};
  }
}

// Where the whole vectors of a chunk are, in bytes after its beginning, and the element outside of
// them that this thread takes: the first threads take the elements before, as many others the ones
// after.
template <class Format>
struct Parts {
  int head;
  int whole;
  int edge;
  bool has_edge;

  __device__ Parts(const char* address, int bytes) {
    constexpr int kSize = sizeof(typename Format::Element);
    constexpr int kElements = kVectorBytes / kSize;
    const int thread = static_cast<int>(threadIdx.x);
    const int to_aligned =
        static_cast<int>(-reinterpret_cast<intptr_t>(address)) & (kVectorBytes - 1);
    head = to_aligned < bytes ? to_aligned : bytes;
    whole = (bytes - head) / kVectorBytes * kVectorBytes;
    const bool is_head = thread < kElements;
    edge = is_head ? thread * kSize : head + whole + (thread - kElements) * kSize;
    has_edge = thread < 2 * kElements && edge < (is_head ? head : bytes);
  }
};

// Gives `taker` this thread's part of a chunk, with its places.
template <class Format, class Taker>
__device__ void take_chunk(Taker& taker, char* address, int bytes) {
  using Element = typename Format::Element;
  constexpr int kWindow = kVectors * kStride;
  // The table holds plain numbers; without this they would be accessed as generic addresses.
  __builtin_assume(__isGlobal(address));
  const Parts<Format> parts(address, bytes);
  // Loads cannot move above stores, so this one comes first.
  typename Format::Word edge_word = 0;
  if (parts.has_edge) {
    edge_word = *reinterpret_cast<const Element*>(address + parts.edge);
  }

  const int first = static_cast<int>(threadIdx.x) * kVectorBytes;
  char* place = address + parts.head + first;
  uint4 vectors[kVectors];
#pragma unroll 1
  for (int left = parts.whole - first; left > 0; left -= kWindow) {
    load_window(vectors, place, left);
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      if (i * kStride < left) {
        taker.vector(vectors[i], place + i * kStride);
      }
    }
    taker.end_window();
    place += kWindow;
  }
  if (parts.has_edge) {
    taker.edge(edge_word, address + parts.edge);
    taker.end_window();
  }
}

// Peak and squares of one thread. With kWrite the products are stored: in their place, or
// with kPairs as float32.
template <class Format, bool kWrite, bool kNorm, bool kCoefficient, bool kPairs>
struct Gatherer {
  using Opmath = typename Format::Opmath;
  using Word = typename Format::Word;
  static constexpr int kWords = kVectorBytes / sizeof(Word);
  static constexpr int kElements = kWords * Format::kPerWord;

  Opmath factor;
  Opmath coefficient;
  typename Format::Peak peak = 0;
  double squares = 0;
  // By vectors and then by windows, since the error of a sum grows with the number of its terms.
  Opmath vector_squares = 0;
  Opmath window_squares = 0;
  // Of pairs: where a chunk begins, its float32 values, and whether these are aligned for vectors.
  const char* chunk = nullptr;
  float* wide = nullptr;
  bool is_aligned = false;

  __device__ void vector(uint4 vector, char* place) {
    Word words[kWords];
    Opmath values[kElements];
    std::memcpy(words, &vector, kVectorBytes);
#pragma unroll
    for (int k = 0; k < kWords; ++k) {
      take<Format::kPerWord>(words[k], values + k * Format::kPerWord);
    }
    end_vector();
    if (kWrite && kPairs) {
      store_floats(wide + (place - chunk) / static_cast<int>(sizeof(typename Format::Element)),
                   values, is_aligned);
    } else if (kWrite) {
      std::memcpy(&vector, words, kVectorBytes);
      store_vector(place, vector);
    }
  }

  __device__ void edge(Word word, char* place) {
    using Element = typename Format::Element;
    Opmath values[Format::kPerWord];
    take<1>(word, values);
    end_vector();
    if (kWrite && kPairs) {
      float* target = wide + (place - chunk) / static_cast<int>(sizeof(Element));
      __builtin_assume(__isGlobal(target));
      *target = static_cast<float>(values[0]);
    } else if (kWrite) {
      *reinterpret_cast<Element*>(place) = static_cast<Element>(word);
    }
  }

  __device__ void end_window() {
    squares += window_squares;
    window_squares = 0;
  }

 private:
  // Takes the first `kCount` elements of a word: others are 0, which an infinite factor would turn
  // into NaN. Of pairs the products are in `values` then, else rounded in the word.
  template <int kCount>
  __device__ void take(Word& word, Opmath* values) {
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
      if (!kPairs) {
        // Rounded twice, as by an unscaling and then a multiplication.
        Format::widen(Format::narrow(values), values);
      }
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        values[i] = values[i] * coefficient;
      }
    }
    if (!kPairs) {
      word = Format::narrow(values);
    }
  }

  __device__ void end_vector() {
    window_squares += vector_squares;
    vector_squares = 0;
  }
};

// Rounds float32 values to a chunk of 16-bit elements.
template <class Format>
__device__ void narrow_chunk(char* address, int bytes, const float* wide, bool is_aligned) {
  using Word = typename Format::Word;
  using Element = typename Format::Element;
  constexpr int kSize = sizeof(Element);
  constexpr int kElements = kVectorBytes / kSize;
  constexpr int kEach = kVectorBytes / static_cast<int>(sizeof(float));
  __builtin_assume(__isGlobal(address));
  __builtin_assume(__isGlobal(wide));
  const Parts<Format> parts(address, bytes);
  float edge_values[Format::kPerWord] = {};
  if (parts.has_edge) {
    const float* source = wide + parts.edge / kSize;
    __builtin_assume(__isGlobal(source));
    edge_values[0] = *source;
  }
  for (int place = static_cast<int>(threadIdx.x) * kVectorBytes; place < parts.whole;
       place += kStride) {
    const float* source = wide + (parts.head + place) / kSize;
    __builtin_assume(__isGlobal(source));
    float values[kElements];
    if (is_aligned) {
#pragma unroll
      for (int i = 0; i < kElements; i += kEach) {
        const uint4 vector = load_vector(reinterpret_cast<const char*>(source + i));
        std::memcpy(values + i, &vector, kVectorBytes);
      }
    } else {
#pragma unroll
      for (int i = 0; i < kElements; ++i) {
        values[i] = source[i];
      }
    }
    Word words[kVectorBytes / sizeof(Word)];
#pragma unroll
    for (int k = 0; k < kElements / Format::kPerWord; ++k) {
      words[k] = Format::narrow(values + k * Format::kPerWord);
    }
    uint4 vector;
    std::memcpy(&vector, words, kVectorBytes);
    store_vector(address + parts.head + place, vector);
  }
  if (parts.has_edge) {
    *reinterpret_cast<Element*>(address + parts.edge) =
        static_cast<Element>(Format::narrow(edge_values));
  }
}

}  // namespace ampfast::cuda
