// Checkpoints that this backend has no kernels for: one line that names the tensor or the key, what was
// found, what is needed, and the way out (docs/models.md). Nothing is computed, so it runs on the emulation.
#include <gtest/gtest.h>

#include "backend/backend.h"
#include "model/checkpoint.h"
#include "tests/support/checkpoint_writer.h"
#include "tests/support/error_of.h"
#include "tests/support/temp_folder.h"

namespace lily::backend {

std::unique_ptr<Device> make_cuda_device(const DeviceOptions& options);
bool cuda_device_present();

namespace {

using model::Storage;
using model::Weight;
using model::WeightId;

// The smallest model with all kinds of layers that the backend takes.
model::Dims small() {
  model::Dims d = test::small_dims();
  d.hidden = d.expert_width = d.shared_width = 128;
  d.n_experts = 32;
  d.n_q_heads = 8 * d.n_kv_heads;
  return d;
}

std::string refusal_of(const test::CheckpointWriter& writer) {
  const test::TempFolder folder;
  writer.write(folder.path());
  return test::error_of([&] {
    const auto checkpoint = model::Checkpoint::open(folder.path().string());
    make_cuda_device({.threads = 1})->load(checkpoint, {});
  });
}

void expect_all_of(const std::string& message, std::initializer_list<const char*> parts) {
  for (const char* part : parts) EXPECT_NE(message.find(part), std::string::npos) << part << ": " << message;
}

TEST(CudaRefusals, AWeightOfAnotherFormNamesTensorFormAndWayOut) {
  if (!cuda_device_present()) GTEST_SKIP() << "no CUDA device that the backend runs on";
  const struct {
    WeightId weight;
    Storage storage;
    const char *module, *name, *found, *wanted;
  } cases[] = {
      {{Weight::embed, model::kNoLayer}, Storage::q8, "model.embed_tokens", "embed", "8-bit", "takes 4-bit"},
      {{Weight::lm_head, model::kNoLayer}, Storage::bf16, "", "lm_head", "bf16", "takes 4-bit"},
      {{Weight::router, 0}, Storage::q4, "layers.0.mlp.gate", "layers.0.router", "4-bit", "takes 8-bit"},
      {{Weight::shared_gate, 0}, Storage::bf16, "", "layers.0.shared_gate", "bf16", "takes 8-bit"},
      {{Weight::expert_up, 0},
       Storage::q8,
       "layers.0.mlp.switch_mlp.up_proj",
       "layers.0.expert_up",
       "8-bit",
       "takes 4-bit"},
      {{Weight::delta_qkv, 0},
       Storage::q8,
       "layers.0.linear_attn.in_proj_qkv",
       "layers.0.delta_qkv",
       "8-bit",
       "takes 4-bit"},
  };
  for (const auto& c : cases) {
    const auto storage = [&](WeightId id) {
      return id == c.weight ? c.storage : model::published_storage(id.weight);
    };
    test::CheckpointWriter writer({.dims = small(), .storage = storage});
    const std::string module = c.module;
    if (!module.empty())
      for (const char* block : {"quantization", "quantization_config"})
        writer.config[block][module.starts_with("model.") ? module : "language_model.model." + module] = {
            {"group_size", 64}, {"bits", c.storage == Storage::q8 ? 8 : 4}};
    expect_all_of(refusal_of(writer), {c.name, c.found, c.wanted, "use --backend cpu"});
  }
}

TEST(CudaRefusals, AWholeModelOfEightBitsIsRefusedByItsFirstTensor) {
  if (!cuda_device_present()) GTEST_SKIP() << "no CUDA device that the backend runs on";
  test::CheckpointWriter writer({.dims = small(), .storage = [](WeightId) { return Storage::q8; }});
  for (const char* block : {"quantization", "quantization_config"})
    writer.config[block] = {{"group_size", 64}, {"bits", 8}, {"mode", "affine"}};
  expect_all_of(refusal_of(writer), {"stored as 8-bit", "takes 4-bit", "use --backend cpu"});
}

TEST(CudaRefusals, OtherDimensionsNameTheKeyOfTheConfiguration) {
  if (!cuda_device_present()) GTEST_SKIP() << "no CUDA device that the backend runs on";
  model::Dims d = small();
  d.n_experts = 40;
  expect_all_of(refusal_of(test::CheckpointWriter({.dims = d})),
                {"num_experts is 40", "a multiple of 32", "use --backend cpu"});
  d = small();
  d.hidden = 192;
  expect_all_of(refusal_of(test::CheckpointWriter({.dims = d})),
                {"hidden_size is 192", "a multiple of 128", "use --backend cpu"});
}

TEST(CudaRefusals, ACacheOfAnotherTypeNamesThoseThatThereAre) {
  if (!cuda_device_present()) GTEST_SKIP() << "no CUDA device that the backend runs on";
  const test::TempFolder folder;
  test::CheckpointWriter({.dims = small()}).write(folder.path());
  const auto checkpoint = model::Checkpoint::open(folder.path().string());
  const auto device = make_cuda_device({.threads = 1});
  device->load(checkpoint, {});
  plan::Policy policy = device->policy(checkpoint.dims());
  EXPECT_EQ(plan::kv_type_names(policy), "bf16, int8");
  policy.kv = plan::KvType::f32;
  expect_all_of(test::error_of([&] { device->reserve({}, policy); }), {"bf16, int8", "not f32", "--kv"});
  for (const auto type : {plan::KvType::bf16, plan::KvType::int8}) {
    policy.kv = type;
    device->reserve({}, policy);
  }
}

}  // namespace
}  // namespace lily::backend
