// Weights in panels of 16 outputs. A panel holds, input by input, one weight of each of its outputs:
// float32 or float16 as they are, or 4 bits in groups of 32 inputs with a scale and an offset per output.
#pragma once

#include "simd.h"

#include <cstring>

namespace tandem {

constexpr int kPanel = 16;
constexpr int kGroup = 32;

enum Format : int32_t { kFloat32 = 0, kFloat16 = 1, kInt4 = 2, kInt8 = 3 };

struct Single {
  using Value = float;
  static f8 load(const float *source) { return load8(source); }
};

struct Half {
  using Value = uint16_t;
  static f8 load(const uint16_t *source) {
    return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i *>(source)));
  }
};

// 32 inputs of 16 outputs: weight = scale * code + offset. Byte j of an input holds outputs j and j + 8.
struct Int4Group {
  uint16_t scales[kPanel];
  uint16_t offsets[kPanel];
  uint8_t codes[kGroup][kPanel / 2];
};

// 32 inputs of 16 outputs: weight = scale * code.
struct Int8Group {
  uint16_t scales[kPanel];
  int8_t codes[kGroup][kPanel];
};

struct Int4 {
  using Group = Int4Group;
  f8 scale[2], offset[2];

  explicit Int4(const Group &group)
      : scale{Half::load(group.scales), Half::load(group.scales + kLanes)},
        offset{Half::load(group.offsets), Half::load(group.offsets + kLanes)} {}

  TANDEM_INLINE void weights(const Group &group, int input, f8 *out) const {
    const __m256i codes =
        _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i *>(group.codes[input])));
    const __m256i low = _mm256_and_si256(codes, _mm256_set1_epi32(15));
    out[0] = fma8(_mm256_cvtepi32_ps(low), scale[0], offset[0]);
    out[1] = fma8(_mm256_cvtepi32_ps(_mm256_srli_epi32(codes, 4)), scale[1], offset[1]);
  }
};

struct Int8 {
  using Group = Int8Group;
  f8 scale[2];

  explicit Int8(const Group &group)
      : scale{Half::load(group.scales), Half::load(group.scales + kLanes)} {}

  TANDEM_INLINE void weights(const Group &group, int input, f8 *out) const {
    TANDEM_UNROLL
    for (int half = 0; half < 2; ++half) {
      const __m128i codes =
          _mm_loadl_epi64(reinterpret_cast<const __m128i *>(group.codes[input] + half * kLanes));
      out[half] = _mm256_mul_ps(_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(codes)), scale[half]);
    }
  }
};

inline int64_t num_panels(int64_t num_outputs) { return (num_outputs + kPanel - 1) / kPanel; }

inline int64_t panel_bytes(Format format, int64_t num_inputs) {
  switch (format) {
  case kFloat32:
    return num_inputs * kPanel * sizeof(float);
  case kFloat16:
    return num_inputs * kPanel * sizeof(uint16_t);
  case kInt4:
    return num_inputs / kGroup * sizeof(Int4Group);
  case kInt8:
    return num_inputs / kGroup * sizeof(Int8Group);
  }
  return 0;
}

// weights float32 [num_outputs, num_inputs] -> panels; outputs beyond the last are zeros.
inline void pack_floats(Format format, const float *weights, int64_t num_outputs, int64_t num_inputs,
                        void *panels) {
  for (int64_t panel = 0; panel < num_panels(num_outputs); ++panel)
    for (int64_t input = 0; input < num_inputs; ++input) {
      float values[kPanel] = {};
      for (int64_t lane = 0; lane < kPanel && panel * kPanel + lane < num_outputs; ++lane)
        values[lane] = weights[(panel * kPanel + lane) * num_inputs + input];
      const int64_t at = (panel * num_inputs + input) * kPanel;
      if (format == kFloat32) {
        std::memcpy(static_cast<float *>(panels) + at, values, sizeof values);
        continue;
      }
      uint16_t *target = static_cast<uint16_t *>(panels) + at;
      for (int half = 0; half < kPanel; half += kLanes)
        _mm_storeu_si128(reinterpret_cast<__m128i *>(target + half),
                         _mm256_cvtps_ph(load8(values + half), _MM_FROUND_TO_NEAREST_INT));
    }
}

} // namespace tandem
