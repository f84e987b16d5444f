// The random operators on the CPU, equal bit for bit to generator.py.
//
// Equality rests on three things. The bits are integers. The logarithm, sine and cosine are written out here and
// there in the same order of IEEE operations (+, -, *, /), never taken from a library, whose vector and scalar
// forms differ in the last bit. And the file is compiled with -ffp-contract=off, so that nothing is fused.
//
// The positions are never materialised: a block of them is added up from the broadcast vectors, then drawn.

#include <ATen/Parallel.h>

#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

namespace {

constexpr int64_t kBlock = 512;
constexpr int64_t kGrain = 16384;
constexpr uint64_t kGolden = 0x9e3779b97f4a7c15ULL;

// The finaliser of SplitMix64 (Steele, Lea, Flood 2014; constants by Stafford, variant 13).
inline uint64_t mix64(uint64_t z) {
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ULL;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebULL;
  return z ^ (z >> 31);
}

inline uint64_t make_key(uint64_t seed, uint64_t stream) {
  return mix64(mix64(seed + kGolden) + (stream + 1) * kGolden) | 1;
}

inline uint64_t rotate(uint64_t x) { return (x >> 32) | (x << 32); }

// squares64 (Widynski 2020, arXiv 2004.06278): five rounds of squaring.
inline uint64_t squares64(uint64_t counter, uint64_t key) {
  const uint64_t y = counter * key, z = y + key;
  uint64_t x = rotate(y * y + y);
  x = rotate(x * x + z);
  x = rotate(x * x + y);
  const uint64_t t = x * x + z;
  x = rotate(t);
  return t ^ ((x * x + y) >> 32);
}

// Natural logarithm of a positive normal number (fdlibm e_log.c), error below one unit in the last place.
inline double log_positive(double x) {
  int64_t bits;
  std::memcpy(&bits, &x, 8);
  bits += (int64_t{0x3ff00000} - 0x3fe6a09e) << 32;
  const double k = static_cast<double>((bits >> 52) - 1023);
  bits = (bits & 0x000fffffffffffffLL) + (int64_t{0x3fe6a09e} << 32);
  std::memcpy(&x, &bits, 8);
  const double f = x - 1.0;
  const double half = (f * f) * 0.5;
  const double s = f / (f + 2.0);
  const double z = s * s;
  const double w = z * z;
  const double even =
      w * (((w * 1.531383769920937332e-01) + 2.222219843214978396e-01) * w + 3.999999999940941908e-01);
  const double odd = z * ((((w * 1.479819860511658591e-01) + 1.818357216161805012e-01) * w + 2.857142874366239149e-01) *
                              w + 6.666666666666735130e-01);
  return (((half + (even + odd)) * s + k * 1.90821492927058770002e-10) - half + f) + k * 6.93147180369123816490e-01;
}

// Square root of a positive normal number: three Newton steps for 1/sqrt(x), one of Heron's. Written out because
// torch.sqrt on the CPU is a library's (MKL), which is not correctly rounded.
inline double square_root(double x) {
  int64_t bits;
  std::memcpy(&bits, &x, 8);
  bits = 0x5fe6eb50c7b537a9LL - (bits >> 1);
  double y;
  std::memcpy(&y, &bits, 8);
  const double half = x * 0.5;
  for (int i = 0; i < 3; ++i) y = y * (1.5 - half * y * y);
  const double root = x * y;
  return (root + x / root) * 0.5;
}

// Sine and cosine on [-pi/4, pi/4] (fdlibm k_sin.c, k_cos.c).
inline double sine(double x) {
  const double z = x * x;
  double p = z * 1.58969099521155010221e-10 + -2.50507602534068634195e-08;
  p = p * z + 2.75573137070700676789e-06;
  p = p * z + -1.98412698298579493134e-04;
  p = p * z + 8.33333333332248946124e-03;
  p = p * z + -1.66666666666666324348e-01;
  return p * z * x + x;
}

inline double cosine(double x) {
  const double z = x * x;
  double p = z * -1.13596475577881948265e-11 + 2.08757232129817482790e-09;
  p = p * z + -2.75573143513906633035e-07;
  p = p * z + 2.48015872894767294178e-05;
  p = p * z + -1.38888888888741095749e-03;
  p = p * z + 4.16666666666666019037e-02;
  return p * z * z - z * 0.5 + 1.0;
}

inline double exponential(uint64_t bits) {
  const double u = (static_cast<double>(static_cast<int64_t>(bits >> 12)) + 0.5) * 0x1p-52;
  return -log_positive(u);
}

// Box-Muller: the high half of the bits is the radius, the low half the angle.
inline double normal(uint64_t bits) {
  const double u = (static_cast<double>(static_cast<int64_t>(bits >> 32)) + 0.5) * 0x1p-32;
  const double radius = square_root(log_positive(u) * -2.0);
  const int64_t low = static_cast<int64_t>(bits & 0xffffffffULL);
  const double angle = (static_cast<double>(low & 0x3fffffff) + 0.5) * 0x1.921fb54442d18p-30 - 0x1.921fb54442d18p-1;
  const double side = (low & 0x40000000) ? sine(angle) : cosine(angle);
  return radius * ((low & 0x80000000LL) ? -side : side);
}

inline uint64_t high_product(uint64_t a, uint64_t b) {
  return static_cast<uint64_t>((static_cast<unsigned __int128>(a) * b) >> 64);
}

struct Positions {
  int64_t rank, count;
  const int64_t* sizes;
  const int64_t* const* data;
  const int64_t* strides;  // [count][rank], zero where a vector is broadcast

  // The positions of the elements begin .. begin + n of the result in row-major order.
  void fill(int64_t begin, int64_t n, uint64_t* out) const {
    int64_t index[64];
    for (int64_t d = rank - 1, rest = begin; d >= 0; --d) {
      index[d] = rest % sizes[d];
      rest /= sizes[d];
    }
    const int64_t last = rank - 1;
    while (n > 0) {
      const int64_t length = std::min(n, sizes[last] - index[last]);
      uint64_t base = 0;
      for (int64_t t = 0; t < count; ++t) {
        if (strides[t * rank + last] == 0) base += static_cast<uint64_t>(*at(t, index));
      }
      for (int64_t i = 0; i < length; ++i) out[i] = base;
      for (int64_t t = 0; t < count; ++t) {
        const int64_t step = strides[t * rank + last];
        if (step == 0) continue;
        const int64_t* from = at(t, index);
        for (int64_t i = 0; i < length; ++i) out[i] += static_cast<uint64_t>(from[i * step]);
      }
      out += length;
      n -= length;
      index[last] = 0;
      for (int64_t d = last - 1; d >= 0 && ++index[d] == sizes[d]; --d) index[d] = 0;
    }
  }

  const int64_t* at(int64_t t, const int64_t* index) const {
    int64_t offset = 0;
    for (int64_t d = 0; d < rank; ++d) offset += index[d] * strides[t * rank + d];
    return data[t] + offset;
  }
};

template <typename T, typename Draw>
void draw_all(const Positions& positions, int64_t numel, void* out, const Draw& draw) {
  at::parallel_for(0, numel, kGrain, [&](int64_t begin, int64_t end) {
    uint64_t block[kBlock];
    for (int64_t i = begin; i < end; i += kBlock) {
      const int64_t n = std::min(kBlock, end - i);
      positions.fill(i, n, block);
      T* to = static_cast<T*>(out) + i;
      for (int64_t j = 0; j < n; ++j) to[j] = draw(block[j]);
    }
  });
}

}  // namespace

// kind: 0 bits, 1 uniform, 2 bernoulli, 3 normal, 4 exponential, 5 integer.
// a, b: uniform: the number of random bits; bernoulli: the signed threshold; integer: low and the range.
// Results: int64 for 0 and 5, bool for 2, else float (is_double = 0) or double. Returns 0, or 1 on an unknown kind.
extern "C" int shardwise_random(int kind, int is_double, int64_t seed, int64_t stream, int64_t a, int64_t b,
                                int64_t rank, int64_t count, const int64_t* sizes, const int64_t* const* data,
                                const int64_t* strides, int64_t numel, void* out) {
  const Positions positions{rank, count, sizes, data, strides};
  const uint64_t key = make_key(static_cast<uint64_t>(seed), static_cast<uint64_t>(stream));
  auto floating = [&](auto&& draw) {
    if (is_double) {
      draw_all<double>(positions, numel, out, [=](uint64_t p) { return draw(squares64(p, key)); });
    } else {
      draw_all<float>(positions, numel, out, [=](uint64_t p) { return static_cast<float>(draw(squares64(p, key))); });
    }
  };
  switch (kind) {
    case 0:
      draw_all<uint64_t>(positions, numel, out, [=](uint64_t p) { return squares64(p, key); });
      return 0;
    case 1: {
      const double scale = std::ldexp(1.0, static_cast<int>(-a));
      const int shift = static_cast<int>(64 - a);
      floating([=](uint64_t bits) { return static_cast<double>(static_cast<int64_t>(bits >> shift)) * scale; });
      return 0;
    }
    case 2:
      draw_all<bool>(positions, numel, out,
                     [=](uint64_t p) { return static_cast<int64_t>(squares64(p, key)) < a; });
      return 0;
    case 3:
      floating([](uint64_t bits) { return normal(bits); });
      return 0;
    case 4:
      floating([](uint64_t bits) { return exponential(bits); });
      return 0;
    case 5: {
      const uint64_t low = static_cast<uint64_t>(a), range = static_cast<uint64_t>(b);
      if (range <= (uint64_t{1} << 32)) {
        draw_all<uint64_t>(positions, numel, out,
                           [=](uint64_t p) { return low + high_product(squares64(p, key), range); });
      } else {  // 128 random bits, so that the bias stays below 2^-64
        const uint64_t second = mix64(key + kGolden) | 1;
        draw_all<uint64_t>(positions, numel, out, [=](uint64_t p) {
          const uint64_t word = squares64(p, key);
          const uint64_t sum = word * range + high_product(squares64(p, second), range);
          return low + high_product(word, range) + (sum < word * range ? 1 : 0);
        });
      }
      return 0;
    }
    default:
      return 1;
  }
}
