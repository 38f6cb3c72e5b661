// The forward pass of a decoder of the Llama family: every thread of a team walks through all of it.
#pragma once

#include "attention.h"
#include "glue.h"
#include "linear.h"

namespace tandem {

struct Layer {
  const float *input_norm;
  const float *qk_norm; // float32 [heads + kv_heads, head_dim] or null
  const float *mlp_norm;
  Linear qkv;
  Linear output;
  Linear gate_up;
  Linear down;
};

struct Model {
  Shape shape;
  int32_t num_positions;
  const float *embedding; // float32 [vocab, hidden]
  const float *rotations; // float32 [num_positions, head_dim]: cos, sin of every pair
  const float *final_norm;
  const Layer *layers;
  Linear head;
};

// Activations, kept from step to step.
struct Activations {
  std::vector<float> hidden, normed, qkv, attended, gate_up, gated;

  void fit(const Shape &shape, int64_t num_tokens) {
    const int64_t attention = int64_t(shape.num_heads) * shape.head_dim;
    grow(hidden, num_tokens * shape.hidden_size);
    grow(normed, num_tokens * shape.hidden_size);
    grow(qkv, num_tokens * (attention + 2 * int64_t(shape.num_kv_heads) * shape.head_dim));
    grow(attended, num_tokens * attention);
    grow(gate_up, num_tokens * 2 * shape.intermediate_size);
    grow(gated, num_tokens * shape.intermediate_size);
  }

private:
  static void grow(std::vector<float> &buffer, int64_t size) {
    if (static_cast<int64_t>(buffer.size()) < size)
      buffer.resize(size);
  }
};

class Forward {
public:
  Forward(Team &team, const Model &model, const Step &step, Activations &memory)
      : team_(team), model_(model), shape_(model.shape), step_(step), memory_(memory),
        tiles_(query_tiles(model.shape, step)) {
    memory.fit(shape_, step.num_tokens);
  }

  // Run by every thread of the team.
  void run() {
    embed();
    for (int index = 0; index < shape_.num_layers; ++index) {
      const Layer &layer = model_.layers[index];
      const bool is_last = index == shape_.num_layers - 1;
      attention(index, layer);
      const int num_rows = is_last ? step_.num_logit_rows : step_.num_tokens;
      if (is_last)
        keep_logit_rows(); // nothing reads the other rows any more
      multiply(team_, layer.output, memory_.attended.data(), num_rows, memory_.hidden.data(), Write::kAdd);
      mlp(layer, num_rows);
    }
    norm(model_.final_norm, step_.num_logit_rows);
    multiply(team_, model_.head, memory_.normed.data(), step_.num_logit_rows, step_.logits, Write::kStore);
  }

private:
  float *hidden(int64_t row) { return memory_.hidden.data() + row * shape_.hidden_size; }

  void embed() {
    team_.phase(step_.num_tokens, [&](int64_t row) {
      std::copy_n(model_.embedding + int64_t(step_.token_ids[row]) * shape_.hidden_size, shape_.hidden_size,
                  hidden(row));
    });
  }

  void norm(const float *weight, int num_rows) {
    team_.phase(num_rows, [&](int64_t row) {
      rms_norm(hidden(row), weight, shape_.hidden_size, shape_.rms_norm_eps,
               memory_.normed.data() + row * shape_.hidden_size);
    });
  }

  void attention(int index, const Layer &layer) {
    norm(layer.input_norm, step_.num_tokens);
    multiply(team_, layer.qkv, memory_.normed.data(), step_.num_tokens, memory_.qkv.data(), Write::kStore);
    team_.phase(step_.num_tokens, [&](int64_t row) { place(index, layer, row); });
    attend(team_, shape_, step_, index, tiles_, memory_.qkv.data(), memory_.attended.data());
  }

  // Normalises and rotates a token's queries and keys, and stores its keys and values in the pool.
  void place(int index, const Layer &layer, int64_t row) {
    const int dim = shape_.head_dim, num_rotated = shape_.num_heads + shape_.num_kv_heads;
    const int64_t kv_width = 2 * int64_t(shape_.num_kv_heads) * dim;
    float *qkv = memory_.qkv.data() + row * (shape_.num_heads * dim + kv_width);
    const float *rotations = model_.rotations + int64_t(step_.positions[row]) * dim;
    for (int head = 0; head < num_rotated; ++head) {
      float *numbers = qkv + head * dim;
      if (layer.qk_norm)
        rms_norm(numbers, layer.qk_norm + head * dim, dim, shape_.rms_norm_eps, numbers);
      rotate(numbers, rotations, dim);
    }
    const int64_t slot = step_.slot_mapping[row];
    const int64_t block = slot / shape_.block_size, offset = slot % shape_.block_size;
    const int64_t target = (block * shape_.num_layers + index) * shape_.block_size + offset;
    std::copy_n(qkv + shape_.num_heads * dim, kv_width, step_.pool + target * kv_width);
  }

  void keep_logit_rows() {
    if (step_.num_logit_rows == step_.num_tokens)
      return;
    const int64_t width = int64_t(shape_.num_heads) * shape_.head_dim;
    team_.phase(1, [&](int64_t) {
      for (int64_t row = 0; row < step_.num_logit_rows; ++row) { // ascending: a row moves down or stays
        const int64_t source = step_.logit_rows[row];
        std::memmove(hidden(row), hidden(source), shape_.hidden_size * sizeof(float));
        float *attended = memory_.attended.data();
        std::memmove(attended + row * width, attended + source * width, width * sizeof(float));
      }
    });
  }

  void mlp(const Layer &layer, int num_rows) {
    norm(layer.mlp_norm, num_rows);
    multiply(team_, layer.gate_up, memory_.normed.data(), num_rows, memory_.gate_up.data(), Write::kStore);
    const int size = shape_.intermediate_size;
    team_.phase(num_rows, [&](int64_t row) {
      const float *gates = memory_.gate_up.data() + row * 2 * size;
      gate(gates, gates + size, size, memory_.gated.data() + row * size);
    });
    multiply(team_, layer.down, memory_.gated.data(), num_rows, memory_.hidden.data(), Write::kAdd);
  }

  Team &team_;
  const Model &model_;
  const Shape &shape_;
  const Step &step_;
  Activations &memory_;
  const std::vector<QueryTile> tiles_;
};

} // namespace tandem
