// Prints a digest of all that each loop reads, writes and returns, for every instruction set that
// machine and binary share: a line "<set> <dtype> <loop> <digest>".
#include <cmath>
#include <cstdio>
#include <cstring>
#include <limits>
#include <random>
#include <vector>

#include "cpu/instruction_set.h"

namespace {

using ampfast::Dtype;
using ampfast::cpu::Loops;

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
const float kFactors[] = {1,        0.5f, 1.0f / 3, 3,       -0.75f,    0x1p-16f,
                          0x1p100f, 0.0f, 0x1p-30f, 0x1p10f, kInfinity, kNan};
const double kCoefficients[] = {1, 1.0 / 3, 0.999, 0x1p-20, 0, std::nan("")};

// FNV-1a.
class Digest {
 public:
  template <class T>
  void add(const T* values, size_t count) {
    const auto* bytes = reinterpret_cast<const unsigned char*>(values);
    for (size_t i = 0; i < count * sizeof(T); ++i) {
      state_ = (state_ ^ bytes[i]) * 0x100000001b3;
    }
  }
  template <class T>
  void add(T value) {
    add(&value, 1);
  }
  uint64_t state() const { return state_; }

 private:
  uint64_t state_ = 0xcbf29ce484222325;
};

// All NaNs are equal: instruction sets disagree on their bits.
double canonical(double value) { return std::isnan(value) ? std::nan("") : value; }

struct Format {
  const char* name;
  size_t size;
  uint64_t infinity;

  // A NaN becomes the largest magnitude.
  void add(Digest& digest, const std::vector<char>& data) const {
    const uint64_t mask = (uint64_t{1} << (8 * size - 1)) - 1;
    for (size_t i = 0; i < data.size(); i += size) {
      uint64_t bits = 0;
      std::memcpy(&bits, data.data() + i, size);
      digest.add((bits & mask) > infinity ? mask : bits);
    }
  }
};

constexpr Format kFormats[] = {{"float32", 4, 0x7f800000},
                               {"float64", 8, 0x7ff0000000000000},
                               {"float16", 2, 0x7c00},
                               {"bfloat16", 2, 0x7f80}};

// Blocks of every small size, and longer ones: every pattern of 16 bits, random ones, and values
// around each power of two, without infinities.
std::vector<std::vector<char>> blocks(const Format& format) {
  std::mt19937_64 random(format.infinity);
  std::vector<std::vector<char>> made;
  const auto block = [&](size_t count, const auto& bits_of) {
    made.emplace_back(count * format.size);
    for (size_t i = 0; i < count; ++i) {
      const uint64_t bits = bits_of(i);
      std::memcpy(made.back().data() + i * format.size, &bits, format.size);
    }
  };
  block(0xffff, [](size_t i) { return i; });
  block(0xffff, [](size_t i) { return i + 1; });
  block(16384 + 17, [&](size_t) { return random(); });
  const int width = static_cast<int>(8 * format.size);
  for (uint64_t step = 0; step < 64; ++step) {
    const uint64_t start = format.infinity / 64 * step;
    const uint64_t span = format.infinity / 32;
    const auto finite = [&](size_t) {
      const uint64_t magnitude = start + random() % span;
      return (magnitude < format.infinity ? magnitude : start) | (random() & 1) << (width - 1);
    };
    block(step < 4 ? 16384 : 3 * step, finite);
    block(step, finite);
  }
  return made;
}

void print(const Format& format, const Loops& loops, const std::string& set) {
  Digest peaks, products, norms;
  for (const std::vector<char>& data : blocks(format)) {
    const auto numel = static_cast<int64_t>(data.size() / format.size);
    peaks.add(canonical(loops.peak(data.data(), numel)));
    for (const float factor : kFactors) {
      double peak = 0;
      norms.add(canonical(loops.squares(data.data(), numel, factor, &peak)));
      norms.add(canonical(peak));
      for (const double coefficient : kCoefficients) {
        std::vector<char> copy = data;
        products.add(canonical(loops.unscale(copy.data(), numel, factor, coefficient)));
        format.add(products, copy);
      }
    }
  }
  const std::pair<const char*, const Digest*> all[] = {
      {"peak", &peaks}, {"unscale", &products}, {"squares", &norms}};
  for (const auto& [name, digest] : all) {
    std::printf("%s %s %s %016llx\n", set.c_str(), format.name, name,
                static_cast<unsigned long long>(digest->state()));
  }
}

}  // namespace

int main() {
  for (const std::string& set : {ampfast::cpu::capability(), std::string("baseline")}) {
    ampfast::cpu::use_baseline(set == "baseline");
    for (int dtype = 0; dtype < 4; ++dtype) {
      print(kFormats[dtype], ampfast::cpu::loops_for(static_cast<Dtype>(dtype)), set);
    }
  }
}
