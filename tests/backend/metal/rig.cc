#include "tests/backend/metal/rig.h"

#include <random>

#include "lily_metal_kernels.h"
#include "lily_metal_kernels_emulated.h"
#include "lily_metal_tensor_kernels.h"
#include "lily_metal_tensor_kernels_emulated.h"
#include "model/synth.h"
#include "tests/support/golden.h"
#include "tests/support/temp_folder.h"

namespace lily::test {

EmulatedMetal make_emulated_metal(const model::Checkpoint& checkpoint, const EmulatedOptions& options) {
  std::vector<const emulator::CompiledLibrary*> libraries =
      options.traced
          ? std::vector{&emulator::lily_metal_kernels_traced, &emulator::lily_metal_tensor_kernels_traced}
          : std::vector{&emulator::lily_metal_kernels_plain, &emulator::lily_metal_tensor_kernels_plain};
  emulator::Options emulated{.libraries = std::move(libraries),
                             .seed = options.seed,
                             .shuffle = options.seed != 0,
                             .max_delay_us = options.max_delay_us,
                             .keep_counters = options.keep_counters,
                             .keep_accesses = options.keep_accesses,
                             .on_finding = options.on_finding};
  if (options.tensor_ops) {
    emulated.limits.apple_family = 10;
    emulated.limits.tensor_ops = true;
  }
  auto gpu = emulator::make_emulated_device(std::move(emulated));
  EmulatedMetal metal;
  metal.gpu = gpu.get();
  metal.device =
      std::make_unique<metal::MetalDevice>(std::move(gpu), "metal-emulated", metal::lily_metal_kernels,
                                           metal::lily_metal_tensor_kernels, options.tensor_ops, 600'000);
  metal.device->load(checkpoint, {});
  metal.device->reserve({.n_state_slots = kSlots, .n_kv_blocks = kBlocks, .n_token_slots = 8},
                        metal.device->policy(checkpoint.dims()));
  return metal;
}

const model::Checkpoint& tiny_checkpoint() {
  static const model::Checkpoint checkpoint = model::Checkpoint::open(kTinyModel);
  return checkpoint;
}

const model::Checkpoint& small_checkpoint() {
  static const TempFolder folder;
  static const model::Checkpoint checkpoint = [] {
    model::Dims dims = model::lily_tiny();
    dims.n_layers = 5;
    dims.hidden = 128;
    dims.vocab = 512;
    dims.n_q_heads = 4;
    dims.n_experts = 16;
    dims.expert_width = dims.shared_width = 64;
    ThreadPool pool(1);
    model::write_synthetic(dims, folder.path() / "model", {}, pool, {});
    return model::Checkpoint::open(folder.path() / "model");
  }();
  return checkpoint;
}

Inputs::Inputs(const std::vector<Sequence>& sequences, int blocks_a_sequence, int n_tokens, bool all_outputs)
    : n_tokens_(n_tokens) {
  for (size_t i = 0; i < sequences.size(); ++i) {
    const Sequence& s = sequences[i];
    segments_.push_back({.first_row = static_cast<int32_t>(tokens_.size()),
                         .n_rows = static_cast<int32_t>(s.tokens.size()),
                         .position = s.position,
                         .src = s.src,
                         .dst = s.dst,
                         .first_block = static_cast<int32_t>(i) * blocks_a_sequence});
    tokens_.insert(tokens_.end(), s.tokens.begin(), s.tokens.end());
    // Blocks in an order of their own, so that a table that is not read shows.
    for (int b = blocks_a_sequence - 1; b >= 0; --b)
      blocks_.push_back(static_cast<int32_t>(i) * blocks_a_sequence + b);
    if (!all_outputs) output_rows_.push_back(static_cast<int32_t>(tokens_.size()) - 1);
  }
  if (all_outputs)
    for (size_t t = 0; t < tokens_.size(); ++t) output_rows_.push_back(static_cast<int32_t>(t));
}

std::vector<int32_t> random_tokens(int n, int vocab, uint64_t seed) {
  std::mt19937_64 random(seed);
  std::vector<int32_t> tokens(static_cast<size_t>(n));
  for (int32_t& t : tokens) t = static_cast<int32_t>(random() % static_cast<uint64_t>(vocab));
  return tokens;
}

}  // namespace lily::test
