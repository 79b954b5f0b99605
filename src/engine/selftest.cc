#include "engine/selftest.h"

#include <algorithm>
#include <random>

#include "base/error.h"
#include "base/thread_pool.h"
#include "model/synth.h"
#include "plan/uses.h"

namespace lily::engine {
namespace {

using backend::Device;
using backend::kKvBlockTokens;
using backend::StateSlot;
using plan::Ending;
using plan::Phase;

// Past the first of the fixed blocks that a backend splits the cache in, and not at the end of one.
constexpr int kLongPosition = 1100;
constexpr int kMaxSequences = 3;
constexpr int kLayers = 4;

struct Sequence {
  int position = 0, n_rows = 1;
};

struct SelftestStep {
  std::string name;
  Phase phase = Phase::decode;
  std::vector<Sequence> sequences;
  plan::Policy policy;
  Ending ending = Ending::logits;
  std::function<bool(const plan::Op&)> compares;
};

bool is_attention(const plan::Op& op) {
  return std::holds_alternative<plan::GatedAttention>(op) || std::holds_alternative<plan::Attention>(op) ||
         std::holds_alternative<plan::QkPrepare>(op) || std::holds_alternative<plan::KvAppend>(op);
}
bool is_ending(const plan::Op& op) {
  return std::holds_alternative<plan::GreedyToken>(op) || std::holds_alternative<plan::SampleToken>(op) ||
         std::holds_alternative<plan::TopCandidates>(op);
}

int layer_of(const plan::Plan& plan, const plan::Op& op) {
  int layer = model::kNoLayer;
  for (const plan::Use& use : plan::uses(op))
    if (use.resource == plan::Resource::value) {
      const std::string& name = plan.value(use.value).name;  // "layers.3.out"
      if (name.starts_with("layers.")) layer = std::max(layer, std::stoi(name.substr(7)));
    }
  return layer;
}

std::vector<SelftestStep> steps_of(const plan::Policy& policy) {
  std::vector<SelftestStep> steps;
  for (const int context : {1, 31, 32, 33})
    steps.push_back({.name = fmt::format("decode, 1 row at context {}", context),
                     .sequences = {{.position = context - 1}},
                     .policy = policy,
                     .compares = is_attention});
  steps[0].compares = nullptr;
  if (policy.has(plan::Mechanism::d7)) {
    constexpr int kContext = kLongPosition + 1;
    for (const int64_t from : {int64_t{1}, plan::kNever}) {  // both sides of the switch
      plan::Policy path = policy;
      path.fixed_blocks_from_context = from;
      steps.push_back({.name = fmt::format("decode, 1 row at context {}, {}", kContext,
                                           from == 1 ? "fixed blocks" : "general"),
                       .sequences = {{.position = kLongPosition}},
                       .policy = path,
                       .compares = is_attention});
    }
  }
  if (policy.max_decode_rows >= kMaxSequences)
    steps.push_back({.name = "decode, 3 sequences",
                     .sequences = {{.position = 5}, {.position = 0}, {.position = 130}},
                     .policy = policy});
  for (const auto& [name, ending] :
       {std::pair("greedy", Ending::greedy), std::pair("sampled", Ending::sampled),
        std::pair("candidates", Ending::candidates)})
    steps.push_back({.name = fmt::format("decode, {} ending", name),
                     .sequences = {{.position = 9}},
                     .policy = policy,
                     .ending = ending,
                     .compares = is_ending});
  steps.push_back({.name = "prefill, 17 rows",
                   .phase = Phase::prefill,
                   .sequences = {{.position = 0, .n_rows = 17}},
                   .policy = policy});
  steps.push_back({.name = "prefill, 11 rows of 3 sequences",
                   .phase = Phase::prefill,
                   .sequences = {{.position = 3, .n_rows = 2}, {.position = 0, .n_rows = 1}, {60, 8}},
                   .policy = policy});
  return steps;
}

// Random states and caches, on both devices what the candidate's types hold.
void fill_memory(Device& candidate, Device& reference, const model::Dims& dims, int n_blocks) {
  std::mt19937 random(7);
  // Not normal_distribution, whose values differ between libraries.
  const auto values = [&](size_t n, float scale) {
    std::vector<float> v(n);
    for (float& x : v) x = scale * (static_cast<float>(random() >> 8) * 0x1p-23f - 1);
    return v;
  };
  for (int layer = 0; layer < dims.n_layers; ++layer) {
    if (dims.mixer(layer) == model::Mixer::delta) {
      for (int s = 0; s < kMaxSequences; ++s) {
        const StateSlot slot{s};
        candidate.write_delta_state(
            slot, layer, values(static_cast<size_t>(dims.delta_state_bytes_per_layer() / 4), 0.2f));
        candidate.write_conv_state(slot, layer, values(static_cast<size_t>(3 * dims.conv_channels()), 2));
        reference.write_delta_state(slot, layer, candidate.read_delta_state(slot, layer));
        reference.write_conv_state(slot, layer, candidate.read_conv_state(slot, layer));
      }
      continue;
    }
    for (const auto which : {Device::Kv::k, Device::Kv::v})
      for (int block = 0; block < n_blocks; ++block) {
        candidate.write_kv(which, layer, block, kKvBlockTokens,
                           values(static_cast<size_t>(kKvBlockTokens * dims.kv_width()), 2));
        reference.write_kv(which, layer, block, kKvBlockTokens,
                           candidate.read_kv(which, layer, block, kKvBlockTokens));
      }
  }
}

DiffReport run_step(Device& candidate, Device& reference, const model::Dims& dims, const SelftestStep& step,
                    const std::function<void()>& between_ops) {
  std::vector<int32_t> tokens, blocks, output_rows;
  std::vector<backend::Segment> segments;
  int context = 0;
  for (const Sequence& s : step.sequences) {
    segments.push_back(
        {.first_row = static_cast<int32_t>(tokens.size()),
         .n_rows = s.n_rows,
         .position = s.position,
         .src = s.position == 0 ? backend::kNoState : StateSlot{static_cast<int>(segments.size())},
         .dst = StateSlot{static_cast<int>(kMaxSequences + segments.size())},
         .first_block = static_cast<int32_t>(blocks.size())});
    for (int r = 0; r < s.n_rows; ++r)
      tokens.push_back(static_cast<int32_t>((tokens.size() * 37 + 11) % static_cast<size_t>(dims.vocab)));
    const int n_blocks = (s.position + s.n_rows + kKvBlockTokens - 1) / kKvBlockTokens;
    const auto first = static_cast<int32_t>(blocks.size());
    for (int32_t b = n_blocks - 1; b >= 0; --b) blocks.push_back(first + b);  // a table that must be read
    output_rows.push_back(static_cast<int32_t>(tokens.size()) - 1);
    context = std::max(context, s.position + s.n_rows);
  }
  std::vector<backend::Sampling> sampling;
  if (step.ending == Ending::sampled)
    sampling.resize(output_rows.size(), {.top_k = 20, .seed = 5, .step = 3});
  const backend::MemorySpec memory{.n_state_slots = 2 * kMaxSequences,
                                   .n_kv_blocks = static_cast<int>(blocks.size()),
                                   .n_token_slots = 2,
                                   .max_rows = static_cast<int>(tokens.size())};
  candidate.reserve(memory, step.policy);
  reference.reserve(memory, reference.policy(dims));
  fill_memory(candidate, reference, dims, memory.n_kv_blocks);
  const plan::Plan plan = plan::forward(dims,
                                        {.phase = step.phase,
                                         .rows = static_cast<int>(tokens.size()),
                                         .outputs = static_cast<int>(output_rows.size()),
                                         .context = context,
                                         .ending = step.ending},
                                        step.policy, {.keep_values = true});
  // The first two layers are delta layers as the third is, of the same shapes.
  const auto compares = [&](const plan::Op& op) {
    const int layer = layer_of(plan, op);
    return (layer == model::kNoLayer || layer >= 2) && (!step.compares || step.compares(op));
  };
  return compare_step(candidate, reference, plan,
                      {.tokens = tokens,
                       .segments = segments,
                       .block_table = blocks,
                       .output_rows = output_rows,
                       .sampling = sampling,
                       .n_tokens = dims.vocab},
                      {.between_ops = between_ops, .compares = compares});
}

}  // namespace

model::Dims self_test_dims() {
  model::Dims dims = model::qwen36_35b_a3b();
  dims.n_layers = kLayers;
  dims.n_experts = 12;
  dims.vocab = 1024;
  return dims;
}

void write_self_test_checkpoint(const std::filesystem::path& folder) {
  ThreadPool pool(physical_cores());
  model::write_synthetic(self_test_dims(), folder, {}, pool, {});
}

std::vector<SelfTestResult> self_test(Device& device, Device& reference, model::Dims dims,
                                      const std::function<void()>& between_ops) {
  if (!device.info().keeps_values)
    fail(Fault::user, "backend '{}' cannot show the values between its ops, which selftest compares",
         device.info().backend);
  dims.n_layers = kLayers;
  std::vector<SelfTestResult> results;
  for (const SelftestStep& step : steps_of(device.policy(dims))) {
    const DiffReport report = run_step(device, reference, dims, step, between_ops);
    for (const auto& [op, of_kind] : report.by_op) results.push_back({step.name, op, of_kind});
  }
  return results;
}

}  // namespace lily::engine
