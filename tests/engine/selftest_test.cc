#include "engine/selftest.h"

#include <gtest/gtest.h>

#include <algorithm>

#include "base/thread_pool.h"
#include "model/checkpoint.h"
#include "model/synth.h"
#include "tests/support/cpu_backends.h"
#include "tests/support/temp_folder.h"

namespace lily::engine {
namespace {

model::Checkpoint synthetic(const std::filesystem::path& folder, uint64_t seed) {
  model::Dims dims = model::lily_tiny();
  dims.n_layers = 4;
  dims.vocab = 512;
  dims.n_experts = 12;
  ThreadPool pool(1);
  model::write_synthetic(dims, folder, {.seed = seed}, pool, {});
  return model::Checkpoint::open(folder);
}

std::unique_ptr<backend::Device> loaded(const std::string& backend, const model::Checkpoint& checkpoint) {
  auto device = backend::make_device(backend, {.threads = 1});
  device->load(checkpoint, {});
  return device;
}

class SelfTestOf : public testing::TestWithParam<std::string> {};
INSTANTIATE_TEST_SUITE_P(InstructionSets, SelfTestOf, testing::ValuesIn(test::cpu_backends()),
                         test::backend_test_name);

TEST_P(SelfTestOf, ADeviceThatWorksPassesEveryOpOfItsPlans) {
  const test::TempFolder folder;
  const model::Checkpoint checkpoint = synthetic(folder.path() / "model", 1);
  const auto cpu = loaded(GetParam(), checkpoint), reference = loaded("reference", checkpoint);
  const auto results = self_test(*cpu, *reference, checkpoint.dims());
  for (const SelfTestResult& r : results) {
    EXPECT_FALSE(r.report.first) << r.step << ": " << r.report.first->line();
    EXPECT_GT(r.report.n_ops, 0) << r.op;
  }
  const auto has = [&](const std::string& step, const std::string& op) {
    return std::any_of(results.begin(), results.end(), [&](const SelfTestResult& r) {
      return r.op == op && r.step.find(step) != std::string::npos && r.report.n_values > 0;
    });
  };
  for (const char* step : {"context 1", "context 31", "context 32", "context 33", "fixed blocks", "general"})
    EXPECT_TRUE(has(step, "gated_attention") || has(step, "attention")) << step;
  EXPECT_TRUE(has("greedy", "greedy_token"));
  EXPECT_TRUE(has("sampled", "sample_token"));
  EXPECT_TRUE(has("candidates", "top_candidates"));
}

// Other weights stand for a kernel that is wrong.
TEST(SelfTest, WrongProductsAreNamed) {
  const test::TempFolder folder, other;
  const model::Checkpoint checkpoint = synthetic(folder.path() / "model", 1);
  const auto cpu = loaded("cpu", synthetic(other.path() / "model", 2)),
             reference = loaded("reference", checkpoint);
  int n_wrong = 0;
  for (const SelfTestResult& r : self_test(*cpu, *reference, checkpoint.dims()))
    n_wrong += r.report.first.has_value();
  EXPECT_GT(n_wrong, 5);
}

}  // namespace
}  // namespace lily::engine
