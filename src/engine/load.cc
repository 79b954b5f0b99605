#include "engine/load.h"

#include "base/error.h"

namespace lily::engine {

plan::Policy policy_of(const backend::Device& device, const model::Dims& dims,
                       std::optional<plan::FloatType> kv, std::span<const plan::Mechanism> disable) {
  return policy_of(device.policy(dims), device.info().backend, kv, disable);
}

plan::Policy policy_of(const plan::Policy& published, std::string_view backend,
                       std::optional<plan::FloatType> kv, std::span<const plan::Mechanism> disable) {
  plan::Policy policy = published;
  // The reference computes and keeps everything in fp32, whatever is asked for.
  if (kv && backend != "reference") policy.kv = *kv;
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
      device_(backend::make_device(options.backend,
                                   {.threads = options.threads, .tensor_ops = options.tensor_ops})),
      policy_(policy_of(*device_, checkpoint.dims(), options.kv, options.disable)) {
  if (n_tokens < 1 || n_tokens > checkpoint.dims().vocab)
    fail(Fault::model,
         "the tokenizer has {} tokens and the model's vocabulary {} rows; they do not belong together",
         n_tokens, checkpoint.dims().vocab);
  memory_ = plan_memory(checkpoint.dims(), policy_, device_->info().memory_bytes,
                        checkpoint.report().text_bytes, options.memory);
}

void LoadedModel::load(const backend::Progress& progress) { device_->load(checkpoint_, progress); }

std::unique_ptr<DeviceExecutor> LoadedModel::make_executor() {
  return std::make_unique<DeviceExecutor>(*device_, dims(), policy_, memory_, n_tokens_);
}

}  // namespace lily::engine
