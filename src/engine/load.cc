#include "engine/load.h"

#include "base/error.h"

namespace lily::engine {

LoadedModel::LoadedModel(const model::Checkpoint& checkpoint, int32_t n_tokens, const LoadOptions& options)
    : checkpoint_(checkpoint),
      n_tokens_(n_tokens),
      device_(backend::make_device(options.backend, {.threads = options.threads})),
      policy_(device_->policy(checkpoint.dims())) {
  if (n_tokens < 1 || n_tokens > checkpoint.dims().vocab)
    fail(Fault::model,
         "the tokenizer has {} tokens and the model's vocabulary {} rows; they do not belong together",
         n_tokens, checkpoint.dims().vocab);
  if (options.kv) policy_.kv = *options.kv;
  for (const plan::Mechanism mechanism : options.disable)
    if (const auto without = plan::without(policy_, mechanism)) policy_ = *without;
  memory_ = plan_memory(checkpoint.dims(), policy_, device_->info().memory_bytes,
                        checkpoint.report().text_bytes, options.memory);
}

void LoadedModel::load(const backend::Progress& progress) { device_->load(checkpoint_, progress); }

std::unique_ptr<DeviceExecutor> LoadedModel::make_executor() {
  return std::make_unique<DeviceExecutor>(*device_, dims(), policy_, memory_, n_tokens_);
}

}  // namespace lily::engine
