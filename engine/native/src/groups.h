// Finds the codes, scales and offsets behind weights that a checkpoint stored in groups of 32: exactly or not
// at all. Nothing is quantised here.
#pragma once

#include "panels.h"

#include <algorithm>
#include <cmath>

namespace tandem {

inline uint16_t half_of(float value) { return _cvtss_sh(value, _MM_FROUND_TO_NEAREST_INT); }
inline float float_of(uint16_t half) { return _cvtsh_ss(half); }

struct FoundGroup {
  uint16_t scale = 0;
  uint16_t offset = 0;
  int codes[kGroup] = {};
};

// Do these scale and offset give every weight, to the last bit?
inline bool explains(const float *weights, int lowest, int highest, FoundGroup &group) {
  const float scale = float_of(group.scale), offset = float_of(group.offset);
  for (int i = 0; i < kGroup; ++i) {
    const float code = scale == 0.0f ? 0.0f : std::nearbyint((weights[i] - offset) / scale);
    if (!(code >= lowest && code <= highest) || std::fma(code, scale, offset) != weights[i])
      return false;
    group.codes[i] = static_cast<int>(code);
  }
  return true;
}

// 4 bits: the smallest weight has code `low`, the largest `high`; most groups use the outermost codes.
inline bool find4(const float *weights, FoundGroup &group) {
  const auto [least, most] = std::minmax_element(weights, weights + kGroup);
  for (int span = 15; span > 0; --span)
    for (int low = 0; low + span <= 15; ++low)
      for (const bool is_falling : {false, true}) { // a negative scale turns the codes around
        const float scale = (is_falling ? *least - *most : *most - *least) / span;
        group.scale = half_of(scale);
        group.offset = half_of((is_falling ? *most : *least) - low * float_of(group.scale));
        if (explains(weights, 0, 15, group))
          return true;
      }
  return false;
}

// 8 bits without an offset: the weight farthest from zero has code 127, or nearly so.
inline bool find8(const float *weights, FoundGroup &group) {
  float farthest = 0.0f;
  for (int i = 0; i < kGroup; ++i)
    farthest = std::max(farthest, std::fabs(weights[i]));
  for (int code = 128; code > 96; --code) {
    group.scale = half_of(farthest / code);
    if (explains(weights, -128, 127, group))
      return true;
  }
  return false;
}

inline void place(Int4Group *groups, int64_t lane, const FoundGroup &found) {
  groups->scales[lane] = found.scale;
  groups->offsets[lane] = found.offset;
  for (int i = 0; i < kGroup; ++i)
    groups->codes[i][lane % 8] |= found.codes[i] << (lane < 8 ? 0 : 4);
}

inline void place(Int8Group *groups, int64_t lane, const FoundGroup &found) {
  groups->scales[lane] = found.scale;
  for (int i = 0; i < kGroup; ++i)
    groups->codes[i][lane] = static_cast<int8_t>(found.codes[i]);
}

// weights float32 [num_outputs, num_inputs] -> panels of zeros; false where some group is of another kind.
template <class Group, class Find>
bool pack_groups(const float *weights, int64_t num_outputs, int64_t num_inputs, Find find, void *panels) {
  if (num_inputs % kGroup)
    return false;
  const int64_t num_groups = num_inputs / kGroup;
  for (int64_t output = 0; output < num_outputs; ++output)
    for (int64_t g = 0; g < num_groups; ++g) {
      FoundGroup found;
      if (!find(weights + output * num_inputs + g * kGroup, found))
        return false;
      place(static_cast<Group *>(panels) + output / kPanel * num_groups + g, output % kPanel, found);
    }
  return true;
}

} // namespace tandem
