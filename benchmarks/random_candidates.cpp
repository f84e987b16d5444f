// Published counter-based generators, each drawing a dropout mask from 64 bits of its own for every position.
// Compiled by random_numbers.py with the flags of the package's kernel; one thread.

#include <cstdint>

namespace {

inline uint64_t mix64(uint64_t z) {
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ULL;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebULL;
  return z ^ (z >> 31);
}

inline uint64_t rotate(uint64_t x, int n) { return (x << n) | (x >> (64 - n)); }

// SplitMix64: Steele, Lea, Flood 2014.
struct SplitMix64 {
  static uint64_t draw(uint64_t counter, uint64_t key) { return mix64(key + counter * 0x9e3779b97f4a7c15ULL); }
};

// squares32 twice would be needed for 64 bits; squares64: Widynski 2020.
struct Squares64 {
  static uint64_t draw(uint64_t counter, uint64_t key) {
    const uint64_t y = counter * key, z = y + key;
    uint64_t x = rotate(y * y + y, 32);
    x = rotate(x * x + z, 32);
    x = rotate(x * x + y, 32);
    const uint64_t t = x * x + z;
    x = rotate(t, 32);
    return t ^ ((x * x + y) >> 32);
  }
};

// Philox4x32-10: Salmon, Moraes, Dror, Shaw 2011. 128 bits a counter: two elements share one.
inline void philox(uint64_t counter, uint64_t key, uint64_t* out) {
  uint32_t c0 = counter, c1 = counter >> 32, c2 = 0, c3 = 0, k0 = key, k1 = key >> 32;
  for (int round = 0; round < 10; ++round) {
    const uint64_t p0 = uint64_t{0xD2511F53u} * c0, p1 = uint64_t{0xCD9E8D57u} * c2;
    const uint32_t n0 = static_cast<uint32_t>(p1 >> 32) ^ c1 ^ k0, n2 = static_cast<uint32_t>(p0 >> 32) ^ c3 ^ k1;
    c1 = p1;
    c3 = p0;
    c0 = n0;
    c2 = n2;
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  out[0] = c0 | uint64_t{c1} << 32;
  out[1] = c2 | uint64_t{c3} << 32;
}

struct Philox {  // one counter an element, half of the bits unused: elementwise for any positions
  static uint64_t draw(uint64_t counter, uint64_t key) {
    uint64_t out[2];
    philox(counter, key, out);
    return out[0];
  }
};

// Threefry2x64-20: Salmon et al. 2011.
struct Threefry {
  static uint64_t draw(uint64_t counter, uint64_t key) {
    const uint64_t k[3] = {key, 0, 0x1BD11BDAA9FC1A22ULL ^ key};
    uint64_t a = counter + k[0], b = k[1];
#define ROUND(n) a += b, b = rotate(b, n) ^ a
#define INJECT(i) a += k[(i) % 3], b += k[((i) + 1) % 3] + (i)
    ROUND(16), ROUND(42), ROUND(12), ROUND(31), INJECT(1);
    ROUND(16), ROUND(32), ROUND(24), ROUND(21), INJECT(2);
    ROUND(16), ROUND(42), ROUND(12), ROUND(31), INJECT(3);
    ROUND(16), ROUND(32), ROUND(24), ROUND(21), INJECT(4);
    ROUND(16), ROUND(42), ROUND(12), ROUND(31), INJECT(5);
#undef ROUND
#undef INJECT
    return a;
  }
};

template <typename Generator>
void mask(uint64_t key, int64_t threshold, int64_t n, bool* out) {
  for (int64_t i = 0; i < n; ++i) out[i] = static_cast<int64_t>(Generator::draw(i, key)) < threshold;
}

}  // namespace

extern "C" {
void splitmix64(uint64_t key, int64_t threshold, int64_t n, bool* out) { mask<SplitMix64>(key, threshold, n, out); }
void squares64(uint64_t key, int64_t threshold, int64_t n, bool* out) { mask<Squares64>(key, threshold, n, out); }
void philox4x32_10(uint64_t key, int64_t threshold, int64_t n, bool* out) { mask<Philox>(key, threshold, n, out); }
void threefry2x64_20(uint64_t key, int64_t threshold, int64_t n, bool* out) { mask<Threefry>(key, threshold, n, out); }
void philox4x32_10_paired(uint64_t key, int64_t threshold, int64_t n, bool* out) {
  for (int64_t i = 0; i + 1 < n; i += 2) {
    uint64_t bits[2];
    philox(i / 2, key, bits);
    out[i] = static_cast<int64_t>(bits[0]) < threshold;
    out[i + 1] = static_cast<int64_t>(bits[1]) < threshold;
  }
}
// The speed of numbers one after another says nothing without their price: an empty generator.
void nothing(uint64_t key, int64_t threshold, int64_t n, bool* out) {
  for (int64_t i = 0; i < n; ++i) out[i] = static_cast<int64_t>(i ^ key) < threshold;
}
}
