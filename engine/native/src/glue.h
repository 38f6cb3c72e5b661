// What lies between the matrix products of a layer, one row at a time.
#pragma once

#include "simd.h"

#include <cmath>
#include <cstring>

namespace tandem {

// 1 / root mean square of `size` numbers, a multiple of 8.
inline float inverse_rms(const float *row, int size, float epsilon) {
  f8 squares = _mm256_setzero_ps();
  for (int at = 0; at < size; at += kLanes)
    squares = fma8(load8(row + at), load8(row + at), squares);
  return 1.0f / std::sqrt(sum8(squares) / size + epsilon);
}

inline void rms_norm(const float *row, const float *weight, int size, float epsilon, float *target) {
  const f8 factor = splat(inverse_rms(row, size, epsilon));
  for (int at = 0; at < size; at += kLanes)
    store8(target + at, _mm256_mul_ps(_mm256_mul_ps(load8(row + at), factor), load8(weight + at)));
}

// In place: neighbours (a, b) of a head become (a + bi) times the position's rotations (cos, sin).
inline void rotate(float *head, const float *rotations, int head_dim) {
  for (int at = 0; at < head_dim; at += kLanes) {
    const f8 pairs = load8(head + at), turn = load8(rotations + at);
    const f8 swapped = _mm256_permute_ps(pairs, 0b10110001);
    const f8 sines = _mm256_mul_ps(swapped, _mm256_movehdup_ps(turn));
    store8(head + at, _mm256_fmaddsub_ps(pairs, _mm256_moveldup_ps(turn), sines));
  }
}

// silu(gate) * up
inline void gate(const float *gates, const float *ups, int size, float *target) {
  for (int at = 0; at < size; at += kLanes) {
    const f8 x = load8(gates + at);
    const f8 negated = _mm256_xor_ps(x, splat(-0.0f));
    const f8 silu = _mm256_div_ps(x, _mm256_add_ps(splat(1.0f), exp8(negated)));
    store8(target + at, _mm256_mul_ps(silu, load8(ups + at)));
  }
}

} // namespace tandem
