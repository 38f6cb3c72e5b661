// The C interface that engine/native/library.py loads.
#include "decoder.h"
#include "groups.h"

#include <exception>

#define TANDEM_EXPORT extern "C" __attribute__((visibility("default")))

using namespace tandem;

namespace {

constexpr int64_t kInterface = 2;

struct Runtime {
  explicit Runtime(int num_threads) : team(num_threads) {}
  Team team;
  Activations memory;
};

} // namespace

// Differs where this file and library.py do not belong together.
TANDEM_EXPORT int64_t tandem_interface() {
  return kInterface * 1'000'000 + sizeof(Model) * 1'000 + sizeof(Layer) + sizeof(Step);
}

// The digest of the files that this was compiled from (setup.py).
TANDEM_EXPORT uint64_t tandem_sources() { return TANDEM_SOURCES; }

// Null where the threads cannot be had.
TANDEM_EXPORT void *tandem_runtime(int32_t num_threads) {
  try {
    return new Runtime(num_threads);
  } catch (const std::exception &) {
    return nullptr;
  }
}

TANDEM_EXPORT void tandem_close(void *runtime) { delete static_cast<Runtime *>(runtime); }

TANDEM_EXPORT int64_t tandem_packed_bytes(int32_t format, int64_t num_outputs, int64_t num_inputs) {
  return num_panels(num_outputs) * panel_bytes(static_cast<Format>(format), num_inputs);
}

// `panels` are zeros. 0 where the weights are not of this format: 4 and 8 bits are found again, not made.
TANDEM_EXPORT int32_t tandem_pack(int32_t format, const float *weights, int64_t num_outputs,
                                  int64_t num_inputs, void *panels) {
  switch (static_cast<Format>(format)) {
  case kInt4:
    return pack_groups<Int4Group>(weights, num_outputs, num_inputs, find4, panels);
  case kInt8:
    return pack_groups<Int8Group>(weights, num_outputs, num_inputs, find8, panels);
  default:
    pack_floats(static_cast<Format>(format), weights, num_outputs, num_inputs, panels);
    return 1;
  }
}

TANDEM_EXPORT void tandem_linear(void *runtime, const Linear *linear, const float *inputs, int32_t num_rows,
                                 float *outputs) {
  Team &team = static_cast<Runtime *>(runtime)->team;
  team.run([&] { multiply(team, *linear, inputs, num_rows, outputs, Write::kStore); });
}

TANDEM_EXPORT void tandem_attend(void *runtime, const Shape *shape, const Step *step, int32_t layer,
                                 const float *qkv, float *output) {
  Team &team = static_cast<Runtime *>(runtime)->team;
  const std::vector<QueryTile> tiles = query_tiles(*shape, *step);
  team.run([&] { attend(team, *shape, *step, layer, tiles, qkv, output); });
}

TANDEM_EXPORT void tandem_forward(void *runtime, const Model *model, const Step *step) {
  Runtime &all = *static_cast<Runtime *>(runtime);
  Forward forward(all.team, *model, *step, all.memory);
  all.team.run([&] { forward.run(); });
}
