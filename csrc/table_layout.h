// Layout of a table of gradients on a device, whose unit is the 64-bit word. The
// kernels of all backends read it.
#pragma once

#include <cstdint>

namespace ampfast {

constexpr int64_t kAddressAlignment = 16;

// Bytes that a program loads at once.
constexpr int64_t kWindowBytes = 8192;

// Programs take chunks in turn: parts of one tensor, usually of so many bytes; smaller in lists
// that have too few of them, else some programs would have a third more to do than others, and
// larger in lists with four times enough, whose sums of squares take time. A chunk begins at an
// aligned address unless its tensor begins with it.
constexpr int64_t kUsualChunkBytes = 8 * kWindowBytes;
constexpr int64_t kMostChunkBytes = 32 * kWindowBytes;
constexpr int64_t kEnoughChunks = 4096;

// Words by which the programs of a launch communicate; zero between launches.
enum HeaderWord : int64_t {
  kFinished,  // how many programs are done, plus kNotFinite for each that saw an inf or NaN
  kPeak,      // float64 bits of the largest magnitude that the optimizer would use
  kHeaderWords = 8,
};

constexpr int64_t kNotFinite = int64_t{1} << 32;

// The table has the chunks of each dtype: where one begins, and its bytes with the number of its
// parameter in the upper half.
enum ChunkWord : int64_t {
  kAddress,
  kExtent,
  kChunkWords,
};
constexpr int kParameterShift = 32;

// What a read of one tensor writes: the bits of a float64, the largest magnitude. The other words
// are zero between launches.
enum PeakWord : int64_t {
  kLargest,
  kRaised,    // what the programs that are done have seen
  kPrograms,  // how many they are
  kPeakWords,
};

// Words of a table that the arguments of a launch have room for, of 4 KB in all.
constexpr int64_t kWordsOfLaunch = 448;

}  // namespace ampfast
