#include "tests/backend/metal/rig.h"

#include <fmt/format.h>

#include <cmath>
#include <map>
#include <random>
#include <string_view>

#include "backend/metal/lower.h"
#include "base/half.h"
#include "engine/selftest.h"
#include "lily_metal_kernels.h"
#include "lily_metal_kernels_emulated.h"
#include "lily_metal_tensor_kernels.h"
#include "lily_metal_tensor_kernels_emulated.h"
#include "model/synth.h"
#include "tests/support/checkpoint_writer.h"
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
  plan::Policy policy = metal.device->policy(checkpoint.dims());
  policy.kv = options.kv;
  backend::MemorySpec memory{.n_state_slots = kSlots, .n_kv_blocks = kBlocks, .n_token_slots = 8};
  if (options.shared_places) {
    memory.shared_places = true;
    memory.n_kv_blocks = kSlots * metal.device->shared_places(checkpoint.dims(), policy).blocks_per_state;
  }
  metal.device->reserve(memory, policy);
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

namespace {

// Quantised weights around zero, as trained ones are: tolerances know the sizes of results, which say little
// of the sizes of sums whose terms cancel.
void centre(CheckpointWriter& writer) {
  constexpr std::string_view kBiases = ".biases";
  for (Tensor& biases : writer.tensors) {
    if (!biases.name.ends_with(kBiases)) continue;
    const std::string module = biases.name.substr(0, biases.name.size() - kBiases.size());
    const Tensor& scales = writer.tensor(module + ".scales");
    const int64_t bits = 32 * writer.tensor(module + ".weight").shape.back() / (64 * scales.shape.back());
    const std::vector<double> values = values_of(scales);
    auto* to = reinterpret_cast<Bf16*>(biases.data.data());
    for (size_t i = 0; i < values.size(); ++i)
      to[i] = to_bf16(static_cast<float>(-values[i] * (std::ldexp(1.0, static_cast<int>(bits)) - 1) / 2));
  }
}

model::Dims narrow_dims(int n_experts) {
  model::Dims dims = small_dims();
  dims.hidden = 128;
  dims.vocab = 512;
  dims.n_q_heads = 4;
  dims.n_key_heads = 2;
  dims.n_value_heads = 4;
  dims.n_experts = n_experts;
  dims.expert_width = dims.shared_width = 128;
  return dims;
}

// Without the middle layers, the second and third of the delta layers are as published: random bf16 values
// take time.
CheckpointWriter stored_as(model::Storage storage, const model::Dims& dims, bool middle_layers = true) {
  CheckpointWriter::Options options;
  if (storage != model::Storage::q4)
    options.storage = [storage, middle_layers](model::WeightId id) {
      const bool is_middle = id.layer == 1 || id.layer == 2;
      return is_middle && !middle_layers ? model::published_storage(id.weight) : storage;
    };
  options.dims = dims;
  CheckpointWriter writer(options);
  if (storage == model::Storage::q8)
    for (const char* key : {"quantization", "quantization_config"}) writer.config[key]["bits"] = 8;
  return writer;
}

// A quarter of every linear weight's scales, or of its values where it is not quantised, so that sums of 2048
// terms have the size of sums of 128.
void quarter(CheckpointWriter& writer) {
  for (Tensor& tensor : writer.tensors) {
    const bool is_linear =
        tensor.name.ends_with(".scales") ||
        (tensor.name.ends_with(".weight") && tensor.dtype == "BF16" && tensor.shape.size() == 2);
    if (!is_linear) continue;
    auto* values = reinterpret_cast<Bf16*>(tensor.data.data());
    for (size_t i = 0; i < tensor.data.size() / sizeof(Bf16); ++i)
      values[i] = to_bf16(to_float(values[i]) / 4);
  }
}

}  // namespace

const model::Checkpoint& checkpoint_of(model::Storage storage, int n_experts) {
  static const TempFolder folder;
  static std::map<std::pair<model::Storage, int>, model::Checkpoint> made;
  const auto found = made.find({storage, n_experts});
  if (found != made.end()) return found->second;
  const auto path = folder.path() / fmt::format("{}-{}", static_cast<int>(storage), n_experts);
  CheckpointWriter writer = stored_as(storage, narrow_dims(n_experts));
  centre(writer);
  writer.write(path);
  return made.emplace(std::pair(storage, n_experts), model::Checkpoint::open(path)).first->second;
}

const model::Checkpoint& wide_checkpoint() {
  static const TempFolder folder;
  static const model::Checkpoint checkpoint = [] {
    engine::write_self_test_checkpoint(folder.path() / "model");
    return model::Checkpoint::open(folder.path() / "model");
  }();
  return checkpoint;
}

const model::Checkpoint& wide_checkpoint_of(model::Storage storage) {
  static const TempFolder folder;
  static std::map<model::Storage, model::Checkpoint> made;
  const auto found = made.find(storage);
  if (found != made.end()) return found->second;
  model::Dims dims = engine::self_test_dims();
  dims.n_experts = 10;
  const auto path = folder.path() / fmt::format("{}", static_cast<int>(storage));
  CheckpointWriter writer = stored_as(storage, dims, storage != model::Storage::bf16);
  quarter(writer);
  centre(writer);
  writer.write(path);
  return made.emplace(storage, model::Checkpoint::open(path)).first->second;
}

const model::Checkpoint& vocabulary_checkpoint() {
  static const TempFolder folder;
  static const model::Checkpoint checkpoint = [] {
    model::Dims dims = narrow_dims(12);
    dims.hidden = model::qwen36_35b_a3b().hidden;
    dims.vocab = model::qwen36_35b_a3b().vocab;
    ThreadPool pool(physical_cores());
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
      blocks_.push_back(cache_block(static_cast<int>(i) * blocks_a_sequence + b));
    if (!all_outputs) output_rows_.push_back(static_cast<int32_t>(tokens_.size()) - 1);
  }
  if (all_outputs)
    for (size_t t = 0; t < tokens_.size(); ++t) output_rows_.push_back(static_cast<int32_t>(t));
}

plan::Plan ending_plan(plan::Ending ending, int vocab, int n_outputs, int n_candidates) {
  plan::Plan plan{.dims = small_checkpoint().dims(),
                  .shape = {.rows = n_outputs, .outputs = n_outputs, .context = 128, .ending = ending},
                  .policy = metal::default_policy(),
                  .options = {.keep_values = true, .n_candidates = n_candidates}};
  plan.dims.vocab = vocab;
  const auto value = [&](const char* name, int64_t cols, plan::Type type) {
    plan.values.push_back({.name = name, .rows = plan::RowSpace::outputs, .cols = cols, .type = type});
    return plan::ValueId{static_cast<int>(plan.values.size()) - 1};
  };
  const plan::ValueId logits = value("logits", vocab, plan::Type::f32);
  if (ending == plan::Ending::greedy)
    plan.ops = {plan::GreedyToken{logits, value("token", 1, plan::Type::i32)}};
  if (ending == plan::Ending::sampled)
    plan.ops = {plan::SampleToken{logits, value("token", 1, plan::Type::i32)}};
  if (ending == plan::Ending::candidates)
    plan.ops = {plan::TopCandidates{n_candidates, logits, value("ids", n_candidates, plan::Type::i32),
                                    value("values", n_candidates, plan::Type::f32),
                                    value("sum", 1, plan::Type::f32)}};
  plan::schedule(plan);
  return plan;
}

std::vector<int32_t> random_tokens(int n, int vocab, uint64_t seed) {
  std::mt19937_64 random(seed);
  std::vector<int32_t> tokens(static_cast<size_t>(n));
  for (int32_t& t : tokens) t = static_cast<int32_t>(random() % static_cast<uint64_t>(vocab));
  return tokens;
}

}  // namespace lily::test
