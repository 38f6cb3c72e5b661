// Eight floats at a time: AVX2, FMA and F16C. Every sum below has one fixed order, so that what a row or a
// query is given never depends on what it is computed beside.
#pragma once

#include <immintrin.h>

#include <cstdint>
#include <initializer_list>

namespace tandem {

// Loops over registers are unrolled before the compiler decides what lives in memory.
#define TANDEM_UNROLL _Pragma("GCC unroll 16")
#define TANDEM_INLINE inline __attribute__((always_inline))

using f8 = __m256;
constexpr int kLanes = 8;

inline f8 load8(const float *source) { return _mm256_loadu_ps(source); }
inline void store8(float *target, f8 value) { _mm256_storeu_ps(target, value); }
inline f8 splat(float value) { return _mm256_set1_ps(value); }
inline f8 fma8(f8 a, f8 b, f8 c) { return _mm256_fmadd_ps(a, b, c); }

// Sums of the lanes of four vectors, each in the order ((0+1)+(2+3))+((4+5)+(6+7)).
inline __m128 sums4(f8 a, f8 b, f8 c, f8 d) {
  const f8 pairs = _mm256_hadd_ps(_mm256_hadd_ps(a, b), _mm256_hadd_ps(c, d));
  return _mm_add_ps(_mm256_castps256_ps128(pairs), _mm256_extractf128_ps(pairs, 1));
}

inline float sum8(f8 value) { return _mm_cvtss_f32(sums4(value, value, value, value)); }

inline float max8(f8 value) {
  __m128 four = _mm_max_ps(_mm256_castps256_ps128(value), _mm256_extractf128_ps(value, 1));
  four = _mm_max_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_max_ss(four, _mm_movehdup_ps(four)));
}

// e^x to about 1e-7; exactly 0 below the smallest normal result, -infinity included.
inline f8 exp8(f8 x) {
  const f8 smallest = splat(-87.33654f);
  const f8 is_normal = _mm256_cmp_ps(x, smallest, _CMP_GE_OQ);
  const f8 bounded = _mm256_min_ps(_mm256_max_ps(x, smallest), splat(88.37626f));
  const f8 exponent = _mm256_round_ps(_mm256_mul_ps(bounded, splat(1.44269504f)),
                                      _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  f8 rest = _mm256_fnmadd_ps(exponent, splat(0.693359375f), bounded);
  rest = _mm256_fnmadd_ps(exponent, splat(-2.12194440e-4f), rest);
  f8 series = splat(1.9875691500e-4f);
  for (const float coefficient :
       {1.3981999507e-3f, 8.3334519073e-3f, 4.1665795894e-2f, 1.6666665459e-1f, 5.0000001201e-1f})
    series = fma8(series, rest, splat(coefficient));
  series = fma8(series, _mm256_mul_ps(rest, rest), _mm256_add_ps(rest, splat(1.0f)));
  const __m256i power = _mm256_slli_epi32(
      _mm256_add_epi32(_mm256_cvtps_epi32(exponent), _mm256_set1_epi32(127)), 23);
  return _mm256_and_ps(_mm256_mul_ps(series, _mm256_castsi256_ps(power)), is_normal);
}

inline float exp1(float x) { return _mm256_cvtss_f32(exp8(splat(x))); }

// Cuts `count` into parts of at most `largest`, as equal as possible, and calls visit(start, size) for each.
template <class Visit> inline void balanced_parts(int count, int largest, Visit visit) {
  const int num_parts = (count + largest - 1) / largest;
  for (int part = 0, start = 0; part < num_parts; ++part) {
    const int size = count / num_parts + (part < count % num_parts);
    visit(start, size);
    start += size;
  }
}

} // namespace tandem
