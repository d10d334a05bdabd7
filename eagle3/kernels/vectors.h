// Vectors of floats, what can be loaded into them, and room for floats.
#pragma once
#include <cstdint>
#include <cstdlib>
#include <cstring>
#ifdef __AVX2__
#include <immintrin.h>
#endif

namespace {

constexpr int LANES = 8;
#ifdef __AVX512F__
constexpr int WIDE = 16;
#else
constexpr int WIDE = 8;
#endif
typedef float Vector __attribute__((vector_size(LANES * sizeof(float)), aligned(4)));
typedef uint32_t Word __attribute__((vector_size(LANES * sizeof(uint32_t))));
typedef int32_t Integer __attribute__((vector_size(LANES * sizeof(int32_t))));
// What linear layers are computed in.
typedef float WideVector __attribute__((vector_size(WIDE * sizeof(float)), aligned(4)));
typedef uint16_t WideHalf __attribute__((vector_size(WIDE * sizeof(uint16_t)), aligned(2)));
typedef uint32_t WideWord __attribute__((vector_size(WIDE * sizeof(uint32_t))));
typedef int8_t WideByte __attribute__((vector_size(WIDE * sizeof(int8_t)), aligned(1)));
typedef int32_t WideInteger __attribute__((vector_size(WIDE * sizeof(int32_t))));

inline Vector load(const float* p) { return *reinterpret_cast<const Vector*>(p); }

inline WideVector load_wide(const float* p) { return *reinterpret_cast<const WideVector*>(p); }

// bfloat16 is the upper half of a float32: widening is exact.
inline WideVector load_wide(const uint16_t* p) {
  return (WideVector)(__builtin_convertvector(*reinterpret_cast<const WideHalf*>(p), WideWord) << 16);
}

inline WideVector load_wide(const int8_t* p) {
#if defined(__AVX512F__)  // g++ 12 takes the bytes apart one by one
  const WideInteger integers = (WideInteger)_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
#elif defined(__AVX2__)
  const WideInteger integers = (WideInteger)_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
#else
  const WideInteger integers = __builtin_convertvector(*reinterpret_cast<const WideByte*>(p), WideInteger);
#endif
  return __builtin_convertvector(integers, WideVector);
}

// Room for `count` floats, not set to anything.
struct Floats {
  float* data;
  explicit Floats(int64_t count) : data(static_cast<float*>(std::malloc(count * sizeof(float)))) {}
  ~Floats() { std::free(data); }
  Floats(const Floats&) = delete;
  Floats& operator=(const Floats&) = delete;
};

inline float sum_lanes(Vector v) {
  return ((v[0] + v[4]) + (v[2] + v[6])) + ((v[1] + v[5]) + (v[3] + v[7]));
}

#ifdef __clang__
#define SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define SHUFFLE(a, b, ...) __builtin_shuffle(a, b, (Word){__VA_ARGS__})
#endif

// sum_lanes of eight vectors at once, by the same additions in the same order.
inline Vector sum_lanes_of_each(const Vector (&v)[LANES]) {
  Vector halves[4];  // of vectors r and r + 4: lanes i + (i + 4), side by side
  for (int r = 0; r < 4; r++)
    halves[r] = SHUFFLE(v[r], v[r + 4], 0, 1, 2, 3, 8, 9, 10, 11) + SHUFFLE(v[r], v[r + 4], 4, 5, 6, 7, 12, 13, 14, 15);
  Vector quarters[2];  // of vectors r, r + 1, r + 4, r + 5
  for (int r = 0; r < 2; r++)
    quarters[r] = SHUFFLE(halves[2 * r], halves[2 * r + 1], 0, 1, 8, 9, 4, 5, 12, 13) +
                  SHUFFLE(halves[2 * r], halves[2 * r + 1], 2, 3, 10, 11, 6, 7, 14, 15);
  return SHUFFLE(quarters[0], quarters[1], 0, 2, 8, 10, 4, 6, 12, 14) +
         SHUFFLE(quarters[0], quarters[1], 1, 3, 9, 11, 5, 7, 13, 15);
}

// exp by range reduction and a degree-5 polynomial (Cephes expf); below -87 it is zero. Relative error about 1e-7.
// Arguments of at most 88: beyond, the exponent bits overflow.
inline Vector exponential(Vector x) {
  const auto underflow = x < -87.0f;
  const Vector clipped = underflow ? Vector{} - 87.0f : x;
  const Vector shifted = clipped * 1.44269504088896341f + 12582912.0f;  // adding 1.5 * 2^23 rounds to an integer
  const Vector n = shifted - 12582912.0f;
  Vector r = clipped - n * 0.693359375f;
  r = r + n * 2.12194440e-4f;
  Vector p = r * 1.9875691500e-4f + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
  Integer exponent = (__builtin_convertvector(n, Integer) + 127) << 23;
  return underflow ? Vector{} : p * (Vector)exponent;
}

}  // namespace
