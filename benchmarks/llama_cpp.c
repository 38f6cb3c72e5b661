// What benchmarks/llama_cpp.py calls of llama.cpp. Compiled against the headers of the very build that is
// measured, because its structures differ from one version to the next.
#include "llama.h"

struct row {
  int32_t token, position, sequence, wants_logits;
};

static void quiet(enum ggml_log_level level, const char *text, void *data) {
  (void)level, (void)text, (void)data;
}

struct llama_model *bench_model(const char *path) {
  llama_log_set(quiet, NULL);
  llama_backend_init();
  struct llama_model_params parameters = llama_model_default_params();
  parameters.n_gpu_layers = 0;
  return llama_model_load_from_file(path, parameters);
}

struct llama_context *bench_context(struct llama_model *model, int num_tokens, int num_sequences,
                                    int batch_tokens, int num_threads) {
  struct llama_context_params parameters = llama_context_default_params();
  parameters.n_ctx = num_tokens, parameters.n_seq_max = num_sequences;
  parameters.n_batch = parameters.n_ubatch = batch_tokens;
  parameters.n_threads = parameters.n_threads_batch = num_threads;
  return llama_init_from_model(model, parameters);
}

void bench_free(struct llama_context *context) { llama_free(context); }

void bench_copy(struct llama_context *context, int from, int to) {
  llama_memory_seq_cp(llama_get_memory(context), from, to, -1, -1);
}

int bench_decode(struct llama_context *context, const struct row *rows, int num_rows) {
  struct llama_batch batch = llama_batch_init(num_rows, 0, 1);
  for (int i = 0; i < num_rows; ++i) {
    batch.token[i] = rows[i].token, batch.pos[i] = rows[i].position;
    batch.n_seq_id[i] = 1, batch.seq_id[i][0] = rows[i].sequence;
    batch.logits[i] = (int8_t)rows[i].wants_logits;
  }
  batch.n_tokens = num_rows;
  const int code = llama_decode(context, batch);
  llama_synchronize(context);
  llama_batch_free(batch);
  return code;
}

const char *bench_system(void) { return llama_print_system_info(); }
