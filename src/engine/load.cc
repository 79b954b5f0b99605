#include "engine/load.h"

#include <algorithm>
#include <cmath>

#include "base/error.h"
#include "base/memory_limit.h"

namespace lily::engine {
namespace {

constexpr int kProbeTokens = 8;

// Weights may be finite and so large that what is computed with them is not. A token that a device chooses
// from such logits looks like any other, so a short text of tokens from all over the vocabulary is read once,
// before the first sequence. State slot 0 and KV block 0 are nobody's yet.
void check_logits(Executor& executor, int32_t n_tokens) {
  const Limits& limits = executor.limits();
  const int n = std::min({kProbeTokens, limits.max_chunk_rows, limits.max_context});
  Step step{.phase = plan::Phase::prefill,
            .ending = plan::Ending::logits,
            .block_table = {0},
            .output_rows = {n - 1}};
  for (int64_t i = 0; i < n; ++i) step.tokens.push_back(static_cast<int32_t>(i * n_tokens / n));
  step.segments.push_back({.n_rows = n, .dst = backend::StateSlot{0}});
  executor.submit(step);
  const auto logits = executor.wait().logits.first(static_cast<size_t>(n_tokens));
  const auto bad = std::find_if_not(logits.begin(), logits.end(), [](float x) { return std::isfinite(x); });
  if (bad != logits.end())
    fail(Fault::model,
         "after {} tokens the logit of token {} is {}: weights of this checkpoint are so large that sums "
         "overflow; "
         "download it again, or convert it again from the original",
         n, bad - logits.begin(), *bad);
}

}  // namespace

plan::Policy policy_of(const backend::Device& device, const model::Dims& dims, std::optional<plan::KvType> kv,
                       std::span<const plan::Mechanism> disable, std::optional<int> activation_planes) {
  return policy_of(device.policy(dims), device.info().backend, kv, disable, activation_planes);
}

plan::Policy policy_of(const plan::Policy& published, std::string_view backend,
                       std::optional<plan::KvType> kv, std::span<const plan::Mechanism> disable,
                       std::optional<int> activation_planes) {
  plan::Policy policy = published;
  // The reference keeps all floats in fp32, whatever is asked for.
  const bool is_widened = backend == "reference" && kv == plan::KvType::bf16;
  if (kv && !is_widened) {
    if (!published.has(*kv))
      fail(Fault::user, "--kv {}: backend '{}' keeps keys and values as {}; leave --kv out, or choose {}",
           plan::name(*kv), backend, plan::kv_type_names(published),
           *kv == plan::KvType::int8 ? "backend cpu, metal or reference" : "another backend");
    policy.kv = *kv;
  }
  if (activation_planes) {
    if (!backend.starts_with("cpu"))
      fail(Fault::user,
           "--activations: backend '{}' does not take activations as integers, those on the CPU do; leave it "
           "out",
           backend);
    policy.activation_planes = *activation_planes;
  }
  for (const plan::Mechanism mechanism : disable) {
    if (!published.has(mechanism))
      fail(Fault::user, "--disable {}: not applicable on backend '{}'; leave it out", plan::name(mechanism),
           backend);
    if (const auto ablated = plan::without(policy, mechanism)) policy = *ablated;  // else named before
  }
  return policy;
}

LoadedModel::LoadedModel(const model::Checkpoint& checkpoint, int32_t n_tokens, const LoadOptions& options)
    : checkpoint_(checkpoint),
      n_tokens_(n_tokens),
      trace_(options.trace),
      device_(backend::make_device(
          options.backend,
          {.threads = options.threads, .tensor_ops = options.tensor_ops, .trace = trace_.get()})),
      policy_(
          policy_of(*device_, checkpoint.dims(), options.kv, options.disable, options.activation_planes)) {
  if (n_tokens < 1 || n_tokens > checkpoint.dims().vocab)
    fail(Fault::model,
         "the tokenizer has {} tokens and the model's vocabulary {} rows; they do not belong together",
         n_tokens, checkpoint.dims().vocab);
  MemoryOptions memory = options.memory;
  memory.shared_pool = memory.shared_pool && device_->gives_back();
  // A device that does not say how to give memory back has its own, or leaves room for the program itself. So
  // does the budget that is the machine's.
  memory.program_bytes =
      memory.shared_pool && memory.budget_bytes > 0 ? memory.program_bytes + resident_memory() : 0;
  memory_ = plan_memory(*device_, checkpoint.dims(), policy_, checkpoint.report().text_bytes, memory);
}

void LoadedModel::load(const backend::Progress& progress) { device_->load(checkpoint_, progress); }

std::unique_ptr<DeviceExecutor> LoadedModel::make_executor() {
  auto executor =
      std::make_unique<DeviceExecutor>(*device_, dims(), policy_, memory_, n_tokens_, trace_.get());
  check_logits(*executor, n_tokens_);
  return executor;
}

}  // namespace lily::engine
