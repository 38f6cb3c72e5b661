// Attention over the paged pool, in place. Queries of one sequence that share a key head are taken in tiles,
// keys in tiles that begin at fixed positions; a query's arithmetic does not depend on the tile it is in.
#pragma once

#include "simd.h"
#include "team.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

namespace tandem {

struct Shape {
  int32_t num_layers;
  int32_t hidden_size;
  int32_t intermediate_size;
  int32_t vocab_size;
  int32_t num_heads;
  int32_t num_kv_heads;
  int32_t head_dim;
  int32_t block_size;
  int32_t sliding_window; // 0: none
  float rms_norm_eps;
};

// One step: tokens of a sequence are consecutive rows, sequences in order.
struct Step {
  int32_t num_tokens;
  int32_t num_sequences;
  int32_t num_logit_rows;
  int32_t table_width;
  const int32_t *token_ids;
  const int32_t *positions;
  const int32_t *slot_mapping;
  const int32_t *seqlens_q;
  const int32_t *seqlens_k;
  const int32_t *block_tables; // [num_sequences, table_width]
  const int64_t *logit_rows;
  float *pool;   // [blocks, layers, block_size, 2, kv_heads, head_dim]
  float *logits; // [num_logit_rows, vocab]
};

constexpr int kKeys = 32;        // keys in a tile at most
constexpr int kQueryRows = 24;   // heads times tokens in a tile, about
constexpr int kMaxHeadDim = 256;

struct QueryTile {
  int32_t sequence;
  int32_t first_row; // of the step
  int32_t num_tokens;
  int32_t first_position;
};

inline std::vector<QueryTile> query_tiles(const Shape &shape, const Step &step) {
  const int num_heads = shape.num_heads / shape.num_kv_heads;
  const int most = std::max(1, kQueryRows / num_heads);
  std::vector<QueryTile> tiles;
  for (int sequence = 0, row = 0; sequence < step.num_sequences; ++sequence) {
    const int count = step.seqlens_q[sequence], before = step.seqlens_k[sequence] - count;
    for (int start = 0; start < count; start += most)
      tiles.push_back({sequence, row + start, std::min(most, count - start), before + start});
    row += count;
  }
  std::reverse(tiles.begin(), tiles.end()); // the longest of a prompt first
  return tiles;
}

// The keys and values of one tile: `count` tokens, `stride` floats apart.
struct KeyTile {
  const float *keys;
  const float *values;
  int64_t stride;
  int start; // position of the first
  int count;
};

// scores[R][kKeys] of R queries, `q_stride` apart.
template <int R>
void score(const float *queries, int64_t q_stride, const KeyTile &tile, int head_dim, float scale,
           float *scores) {
  for (int key = 0; key < tile.count; key += 4) {
    const float *rows[4];
    TANDEM_UNROLL
    for (int k = 0; k < 4; ++k)
      rows[k] = tile.keys + std::min(key + k, tile.count - 1) * tile.stride;
    f8 sums[R][4];
    TANDEM_UNROLL
    for (int row = 0; row < R; ++row)
      TANDEM_UNROLL
      for (int k = 0; k < 4; ++k)
        sums[row][k] = _mm256_setzero_ps();
    for (int at = 0; at < head_dim; at += kLanes) {
      f8 query[R];
      TANDEM_UNROLL
      for (int row = 0; row < R; ++row)
        query[row] = load8(queries + row * q_stride + at);
      TANDEM_UNROLL
      for (int k = 0; k < 4; ++k) {
        const f8 numbers = load8(rows[k] + at);
        TANDEM_UNROLL
        for (int row = 0; row < R; ++row)
          sums[row][k] = fma8(query[row], numbers, sums[row][k]);
      }
    }
    TANDEM_UNROLL
    for (int row = 0; row < R; ++row) {
      const __m128 four = sums4(sums[row][0], sums[row][1], sums[row][2], sums[row][3]);
      _mm_storeu_ps(scores + row * kKeys + key, _mm_mul_ps(four, _mm_set1_ps(scale)));
    }
  }
}

// sums[R][head_dim] += weights[R][kKeys] x values; C vectors of columns at a time.
template <int R, int C>
void add_values(const float *weights, const KeyTile &tile, int head_dim, int column, float *sums) {
  f8 value[R][C];
  TANDEM_UNROLL
  for (int row = 0; row < R; ++row)
    TANDEM_UNROLL
    for (int c = 0; c < C; ++c)
      value[row][c] = load8(sums + row * head_dim + column + c * kLanes);
  for (int key = 0; key < tile.count; ++key) {
    const float *numbers = tile.values + key * tile.stride + column;
    f8 weight[R];
    TANDEM_UNROLL
    for (int row = 0; row < R; ++row)
      weight[row] = _mm256_broadcast_ss(weights + row * kKeys + key);
    TANDEM_UNROLL
    for (int c = 0; c < C; ++c) {
      const f8 number = load8(numbers + c * kLanes);
      TANDEM_UNROLL
      for (int row = 0; row < R; ++row)
        value[row][c] = fma8(weight[row], number, value[row][c]);
    }
  }
  TANDEM_UNROLL
  for (int row = 0; row < R; ++row)
    TANDEM_UNROLL
    for (int c = 0; c < C; ++c)
      store8(sums + row * head_dim + column + c * kLanes, value[row][c]);
}

template <int R> void add_values(const float *weights, const KeyTile &tile, int head_dim, float *sums) {
  int column = 0;
  for (; column + 4 * kLanes <= head_dim; column += 4 * kLanes)
    add_values<R, 4>(weights, tile, head_dim, column, sums);
  for (; column < head_dim; column += kLanes)
    add_values<R, 1>(weights, tile, head_dim, column, sums);
}

// A softmax that takes its keys tile by tile.
struct Softmax {
  float largest = -std::numeric_limits<float>::infinity();
  float total = 0.0f;

  // scores[kKeys] of the keys from `low` up to `high` become weights, all others 0.
  void take(float *scores, int low, int high, float *sums, int head_dim) {
    for (int key = 0; key < kKeys; ++key)
      if (key < low || key >= high)
        scores[key] = -std::numeric_limits<float>::infinity();
    if (low >= high) {
      std::fill(scores, scores + kKeys, 0.0f);
      return;
    }
    f8 most = load8(scores);
    for (int at = kLanes; at < kKeys; at += kLanes)
      most = _mm256_max_ps(most, load8(scores + at));
    if (const float peak = max8(most); peak > largest) {
      rescale(exp1(largest - peak), sums, head_dim);
      largest = peak;
    }
    f8 sum = _mm256_setzero_ps();
    for (int at = 0; at < kKeys; at += kLanes) {
      const f8 weight = exp8(_mm256_sub_ps(load8(scores + at), splat(largest)));
      store8(scores + at, weight);
      sum = _mm256_add_ps(sum, weight);
    }
    total += sum8(sum);
  }

  void rescale(float factor, float *sums, int head_dim) {
    total *= factor;
    for (int at = 0; at < head_dim; at += kLanes)
      store8(sums + at, _mm256_mul_ps(load8(sums + at), splat(factor)));
  }
};

class TileAttention {
public:
  TileAttention(const Shape &shape, const Step &step, int layer, const QueryTile &tile, int kv_head)
      : shape_(shape), step_(step), layer_(layer), tile_(tile), kv_head_(kv_head),
        group_(shape.num_heads / shape.num_kv_heads), num_rows_(tile.num_tokens * group_) {}

  // qkv [T, (heads + 2 kv_heads) * D] -> output [T, heads * D], the tile's part.
  void run(const float *qkv, float *output) {
    gather_queries(qkv);
    const int end = tile_.first_position + tile_.num_tokens;
    const int begin =
        shape_.sliding_window ? std::max(0, tile_.first_position + 1 - shape_.sliding_window) : 0;
    for (int block = begin / shape_.block_size; block * shape_.block_size < end; ++block)
      for (int offset = 0; offset < shape_.block_size; offset += kKeys) {
        const int start = block * shape_.block_size + offset;
        const int count = std::min({kKeys, shape_.block_size - offset, end - start});
        if (count > 0 && start + count > begin)
          take(keys_of(block, offset, start, count));
      }
    write(output);
  }

private:
  float *queries() { return memory_.data(); }
  float *sums() { return queries() + num_rows_ * shape_.head_dim; }
  float *scores() { return sums() + num_rows_ * shape_.head_dim; }

  void gather_queries(const float *qkv) {
    const int dim = shape_.head_dim;
    const int64_t width = int64_t(shape_.num_heads + 2 * shape_.num_kv_heads) * dim;
    memory_.resize(int64_t(num_rows_) * (2 * dim + kKeys));
    softmax_.assign(num_rows_, Softmax());
    for (int token = 0; token < tile_.num_tokens; ++token)
      std::copy_n(qkv + (tile_.first_row + token) * width + kv_head_ * group_ * dim, group_ * dim,
                  queries() + token * group_ * dim);
    std::fill_n(sums(), num_rows_ * dim, 0.0f);
  }

  KeyTile keys_of(int block, int offset, int start, int count) const {
    const int64_t key_width = int64_t(shape_.num_kv_heads) * shape_.head_dim;
    const int64_t block_id = step_.block_tables[int64_t(tile_.sequence) * step_.table_width + block];
    const int64_t row = (block_id * shape_.num_layers + layer_) * shape_.block_size + offset;
    const float *keys = step_.pool + row * 2 * key_width + int64_t(kv_head_) * shape_.head_dim;
    return {keys, keys + key_width, 2 * key_width, start, count};
  }

  void take(const KeyTile &tile) {
    const int dim = shape_.head_dim;
    const float scale = 1.0f / std::sqrt(static_cast<float>(dim));
    balanced_parts(num_rows_, 3, [&](int row, int size) {
      const float *q = queries() + row * dim;
      float *target = scores() + row * kKeys;
      size == 1   ? score<1>(q, dim, tile, dim, scale, target)
      : size == 2 ? score<2>(q, dim, tile, dim, scale, target)
                  : score<3>(q, dim, tile, dim, scale, target);
    });
    for (int row = 0; row < num_rows_; ++row) {
      const int position = tile_.first_position + row / group_;
      const int first = shape_.sliding_window ? position + 1 - shape_.sliding_window : 0;
      softmax_[row].take(scores() + row * kKeys, std::max(0, first - tile.start),
                         std::min(tile.count, position + 1 - tile.start), sums() + row * dim, dim);
    }
    balanced_parts(num_rows_, 3, [&](int row, int size) {
      const float *weights = scores() + row * kKeys;
      float *target = sums() + row * dim;
      size == 1   ? add_values<1>(weights, tile, dim, target)
      : size == 2 ? add_values<2>(weights, tile, dim, target)
                  : add_values<3>(weights, tile, dim, target);
    });
  }

  void write(float *output) {
    const int dim = shape_.head_dim;
    for (int row = 0; row < num_rows_; ++row) {
      const int64_t token = tile_.first_row + row / group_;
      float *target = output + (token * shape_.num_heads + kv_head_ * group_ + row % group_) * dim;
      const f8 total = splat(softmax_[row].total);
      for (int at = 0; at < dim; at += kLanes)
        store8(target + at, _mm256_div_ps(load8(sums() + row * dim + at), total));
    }
  }

  static thread_local std::vector<float> memory_;
  static thread_local std::vector<Softmax> softmax_;
  const Shape &shape_;
  const Step &step_;
  const int layer_;
  const QueryTile &tile_;
  const int kv_head_;
  const int group_;
  const int num_rows_;
};

inline thread_local std::vector<float> TileAttention::memory_;
inline thread_local std::vector<Softmax> TileAttention::softmax_;

inline void attend(Team &team, const Shape &shape, const Step &step, int layer,
                   const std::vector<QueryTile> &tiles, const float *qkv, float *output) {
  team.phase(int64_t(tiles.size()) * shape.num_kv_heads, [&](int64_t item) {
    TileAttention(shape, step, layer, tiles[item / shape.num_kv_heads],
                  static_cast<int>(item % shape.num_kv_heads))
        .run(qkv, output);
  });
}

} // namespace tandem
