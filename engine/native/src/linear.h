// Matrix products with packed weights. An output is one chain of multiply-adds over the inputs in order,
// whatever rows, panels and threads are computed together: equal rows give equal bits in any batch.
#pragma once

#include "panels.h"
#include "team.h"

#include <algorithm>

namespace tandem {

struct Linear {
  const void *panels;
  const float *bias; // float32 [num_panels * kPanel] or null
  int32_t num_outputs;
  int32_t num_inputs;
  int32_t format;
};

enum class Write { kStore, kAdd };

constexpr int kRows = 6;       // rows x 16 outputs fit the registers
constexpr int kFewRows = 3;    // up to here two panels do
constexpr int kDirectRows = 12; // beyond that a panel's codes are worth unpacking once
constexpr int kRowChunk = 96;  // rows whose inputs stay in the L2 cache

template <int R, int P> struct Sums {
  f8 value[R][2 * P];

  TANDEM_INLINE explicit Sums(const float *bias) {
    TANDEM_UNROLL
    for (int column = 0; column < 2 * P; ++column)
      TANDEM_UNROLL
      for (int row = 0; row < R; ++row)
        value[row][column] = bias ? load8(bias + column * kLanes) : _mm256_setzero_ps();
  }

  TANDEM_INLINE void add(int panel, const f8 *weights, const float *inputs, int64_t stride) {
    TANDEM_UNROLL
    for (int row = 0; row < R; ++row) {
      const f8 input = _mm256_broadcast_ss(inputs + row * stride);
      value[row][2 * panel] = fma8(weights[0], input, value[row][2 * panel]);
      value[row][2 * panel + 1] = fma8(weights[1], input, value[row][2 * panel + 1]);
    }
  }

  TANDEM_INLINE void write(float *outputs, int64_t stride, int num_columns, Write write) const {
    TANDEM_UNROLL
    for (int row = 0; row < R; ++row)
      TANDEM_UNROLL
      for (int column = 0; column < 2 * P; ++column) {
        float *target = outputs + row * stride + column * kLanes;
        const int left = num_columns - column * kLanes;
        if (left >= kLanes) {
          store8(target, write == Write::kAdd ? _mm256_add_ps(load8(target), value[row][column])
                                              : value[row][column]);
          continue;
        }
        float values[kLanes];
        store8(values, value[row][column]);
        for (int lane = 0; lane < left; ++lane)
          target[lane] = write == Write::kAdd ? target[lane] + values[lane] : values[lane];
      }
  }
};

template <class W, int R, int P>
TANDEM_INLINE void multiply_plain(const typename W::Value *panel, const float *inputs, int64_t stride, int num_inputs,
                           Sums<R, P> &sums) {
  const int64_t panel_size = int64_t(num_inputs) * kPanel;
  for (int input = 0; input < num_inputs; ++input)
    TANDEM_UNROLL
    for (int p = 0; p < P; ++p) {
      const typename W::Value *source = panel + p * panel_size + int64_t(input) * kPanel;
      const f8 weights[2] = {W::load(source), W::load(source + kLanes)};
      sums.add(p, weights, inputs + input, stride);
    }
}

template <class W, int R, int P>
TANDEM_INLINE void multiply_groups(const typename W::Group *panel, const float *inputs, int64_t stride, int num_inputs,
                            Sums<R, P> &sums) {
  const int num_groups = num_inputs / kGroup;
  for (int g = 0; g < num_groups; ++g)
    TANDEM_UNROLL
    for (int p = 0; p < P; ++p) {
      const typename W::Group &group = panel[p * num_groups + g];
      const W codes(group);
      for (int input = 0; input < kGroup; ++input) {
        f8 weights[2];
        codes.weights(group, input, weights);
        sums.add(p, weights, inputs + g * kGroup + input, stride);
      }
    }
}

template <int R, int P>
void multiply(const Linear &linear, const void *panel, Format format, int first_panel, const float *inputs,
              float *outputs, Write write) {
  Sums<R, P> sums(linear.bias ? linear.bias + first_panel * kPanel : nullptr);
  const int64_t stride = linear.num_inputs;
  switch (format) {
  case kFloat32:
    multiply_plain<Single>(static_cast<const float *>(panel), inputs, stride, linear.num_inputs, sums);
    break;
  case kFloat16:
    multiply_plain<Half>(static_cast<const uint16_t *>(panel), inputs, stride, linear.num_inputs, sums);
    break;
  case kInt4:
    multiply_groups<Int4>(static_cast<const Int4Group *>(panel), inputs, stride, linear.num_inputs, sums);
    break;
  case kInt8:
    multiply_groups<Int8>(static_cast<const Int8Group *>(panel), inputs, stride, linear.num_inputs, sums);
    break;
  }
  const int column = first_panel * kPanel;
  sums.write(outputs + column, linear.num_outputs, linear.num_outputs - column, write);
}

// The weights of one panel as float32, in its order.
template <class W> void unpack_groups(const typename W::Group *panel, int num_inputs, float *target) {
  for (int g = 0; g < num_inputs / kGroup; ++g) {
    const W codes(panel[g]);
    for (int input = 0; input < kGroup; ++input, target += kPanel) {
      f8 weights[2];
      codes.weights(panel[g], input, weights);
      store8(target, weights[0]);
      store8(target + kLanes, weights[1]);
    }
  }
}

inline void unpack(const void *panel, Format format, int num_inputs, float *target) {
  if (format == kInt4)
    unpack_groups<Int4>(static_cast<const Int4Group *>(panel), num_inputs, target);
  else
    unpack_groups<Int8>(static_cast<const Int8Group *>(panel), num_inputs, target);
}

// All `num_rows` rows of one panel, or of two where there are few rows.
inline void multiply_rows(const Linear &linear, const void *panel, Format format, int first_panel,
                          bool is_pair, const float *inputs, int num_rows, float *outputs, Write write) {
  balanced_parts(num_rows, kRows, [&](int start, int size) {
    const float *in = inputs + int64_t(start) * linear.num_inputs;
    float *out = outputs + int64_t(start) * linear.num_outputs;
    const auto call = [&](auto kernel) { kernel(linear, panel, format, first_panel, in, out, write); };
    switch (size) {
    case 1:
      return is_pair ? call(multiply<1, 2>) : call(multiply<1, 1>);
    case 2:
      return is_pair ? call(multiply<2, 2>) : call(multiply<2, 1>);
    case 3:
      return is_pair ? call(multiply<3, 2>) : call(multiply<3, 1>);
    case 4:
      return call(multiply<4, 1>);
    case 5:
      return call(multiply<5, 1>);
    default:
      return call(multiply<6, 1>);
    }
  });
}

// outputs[num_rows, num_outputs] = or += inputs[num_rows, num_inputs] x weights, by all threads of a team.
inline void multiply(Team &team, const Linear &linear, const float *inputs, int num_rows, float *outputs,
                     Write write) {
  const Format format = static_cast<Format>(linear.format);
  const int64_t bytes = panel_bytes(format, linear.num_inputs);
  const int all_panels = static_cast<int>(num_panels(linear.num_outputs));
  const int width = num_rows <= kFewRows ? 2 : 1;
  const int num_groups = (all_panels + width - 1) / width;
  const int num_chunks = (num_rows + kRowChunk - 1) / kRowChunk;
  team.phase(int64_t(num_groups) * num_chunks, [&](int64_t item) {
    const int first_panel = static_cast<int>(item % num_groups) * width;
    const int first_row = static_cast<int>(item / num_groups) * kRowChunk;
    const int rows = std::min(kRowChunk, num_rows - first_row);
    const void *panel = static_cast<const char *>(linear.panels) + first_panel * bytes;
    Format used = format;
    if (num_rows > kDirectRows && (format == kInt4 || format == kInt8)) {
      thread_local std::vector<float> unpacked;
      unpacked.resize(int64_t(linear.num_inputs) * kPanel);
      unpack(panel, format, linear.num_inputs, unpacked.data());
      panel = unpacked.data();
      used = kFloat32;
    }
    multiply_rows(linear, panel, used, first_panel, width == 2 && first_panel + 1 < all_panels,
                  inputs + int64_t(first_row) * linear.num_inputs, rows,
                  outputs + int64_t(first_row) * linear.num_outputs, write);
  });
}

} // namespace tandem
