// What the CPU backend takes from the system: what was planned and no more, weights in huge pages, loading
// within the weights and a little. A program of its own, so that nothing else uses memory.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <string>
#include <vector>

#include "backend/backend.h"
#include "backend/cpu/program.h"
#include "backend/cpu/weights.h"
#include "engine/device_executor.h"
#include "engine/load.h"
#include "tests/support/checkpoint_writer.h"
#include "tests/support/cpu_backends.h"
#include "tests/support/error_of.h"
#include "tests/support/golden.h"
#include "tests/support/peak_memory.h"
#include "tests/support/temp_folder.h"

namespace lily::engine {
namespace {

namespace cpu = backend::cpu;

constexpr int64_t kMiB = int64_t{1} << 20;

const model::Checkpoint& tiny() {
  static const auto* checkpoint = new model::Checkpoint(model::Checkpoint::open(test::kTinyModel));
  return *checkpoint;
}

Step step_of(plan::Phase phase, plan::Ending ending, int n_rows, int position, int n_sequences) {
  Step step{.phase = phase, .ending = ending};
  for (int s = 0; s < n_sequences; ++s) {
    step.segments.push_back({.first_row = s * n_rows, .n_rows = n_rows, .position = position});
    step.tokens.insert(step.tokens.end(), static_cast<size_t>(n_rows), 0);
    if (ending != plan::Ending::none) step.output_rows.push_back((s + 1) * n_rows - 1);
  }
  return step;
}

// Every class of steps that an engine makes.
std::vector<plan::Shape> shapes_of(const Limits& limits, const plan::Policy& policy) {
  using plan::Ending;
  std::vector<plan::Shape> shapes;
  const auto add = [&](const Step& step) {
    const plan::Shape shape = shape_class(step, limits, policy);
    if (std::find(shapes.begin(), shapes.end(), shape) == shapes.end()) shapes.push_back(shape);
  };
  for (const Ending ending :
       {Ending::none, Ending::logits, Ending::candidates, Ending::greedy, Ending::sampled})
    for (const int end : {1, 300, 511, 512, 4096, limits.max_context}) {
      for (int rows = 1; rows <= std::min(limits.max_chunk_rows, end); ++rows)
        add(step_of(plan::Phase::prefill, ending, rows, end - rows, 1));
      for (int n = 1; n <= limits.max_decode_rows && ending != Ending::none; ++n)
        add(step_of(plan::Phase::decode, ending, 1, end - 1, n));
    }
  return shapes;
}

class CpuMemory : public testing::TestWithParam<std::string> {};

TEST_P(CpuMemory, ProgramsReserveNoMoreThanIsPlanned) {
  const auto device = backend::make_device(GetParam(), {.threads = 3});
  const cpu::SimdTarget target =
      GetParam() == "cpu" ? cpu::runnable_targets().front() : cpu::SimdTarget::avx2;
  ThreadPool pool(3);
  const cpu::Weights weights(tiny(), pool, {});
  std::vector<plan::Policy> policies = {device->policy(tiny().dims())};
  for (const plan::Mechanism ablated : {plan::Mechanism::p1, plan::Mechanism::d4, plan::Mechanism::d7})
    policies.push_back(*plan::without(policies.front(), ablated));
  policies.push_back(policies.front());
  policies.back().kv = plan::KvType::f32;
  policies.push_back(policies.front());
  policies.back().kv = plan::KvType::int8;
  policies.push_back(policies.front());
  policies.back().activation_planes = 1;
  for (const plan::Policy& policy : policies) {
    const MemoryPlan planned = plan_memory(*device, tiny().dims(), policy, 0, {.context = 8192});
    const Limits limits{.max_context = planned.context,
                        .max_chunk_rows = planned.spec.max_rows,
                        .max_decode_rows = policy.max_decode_rows};
    cpu::Memory memory(tiny().dims(), {}, policy.kv);
    cpu::Scratch scratch(pool.n_threads());
    int64_t of_plans = 0;
    const auto shapes = shapes_of(limits, policy);
    EXPECT_GT(shapes.size(), 50u);
    for (const plan::Shape& shape : shapes) {
      plan::Plan plan = plan::forward(tiny().dims(), shape, policy);
      of_plans = std::max(of_plans, plan.scratch_bytes);
      const cpu::CpuProgram program(std::move(plan), weights, memory, target, pool, scratch);
    }
    EXPECT_LE(scratch.n_bytes(), planned.scratch_bytes);
    // What is planned is not a guess: nine tenths of it are used, and without the ops' own memory it would
    // not do.
    EXPECT_GE(scratch.n_bytes(), planned.scratch_bytes * 9 / 10);
    EXPECT_GT(scratch.n_bytes(), of_plans + kMiB);
  }
}

TEST_P(CpuMemory, AContextThatDoesNotFitIsRefusedWithTheNumberThatDoes) {
  const auto load = [&](int64_t budget, int context) {
    return LoadedModel(tiny(), 8000,
                       {.backend = GetParam(),
                        .threads = 2,
                        .memory = {.budget_bytes = budget, .context = context, .n_cached_states = 0}})
        .memory();
  };
  const int wanted = tiny().dims().max_positions / 64 * 64;
  const MemoryPlan whole = load(int64_t{8} << 30, wanted);
  ASSERT_EQ(whole.context, wanted);
  EXPECT_EQ(load(whole.total_bytes(), wanted).total_bytes(), whole.total_bytes());
  const int64_t budget = whole.total_bytes() - whole.kv_bytes / 4;
  const std::string message = test::error_of([&] { load(budget, wanted); });
  ASSERT_NE(message.find("does not fit"), std::string::npos) << message;
  const int fits = std::stoi(message.substr(message.find("one of ") + 7));
  EXPECT_LT(fits, wanted);
  EXPECT_GE(fits, wanted / 2);
  EXPECT_LE(load(budget, fits).total_bytes(), budget);
  EXPECT_NE(test::error_of([&] { load(budget, fits + wanted / 8); }), "");
  // Without room for the ops' own memory not even a block is left.
  const int64_t weights_and_state = whole.weight_bytes + whole.state_bytes;
  const std::string little = test::error_of([&] { load(weights_and_state + kMiB, 64); });
  EXPECT_NE(little.find("scratch memory"), std::string::npos) << little;
}

// At full size, before a byte is read: 24 GiB less the 8 % that stay the system's.
TEST_P(CpuMemory, A24GiBMachineHolds32KTokensOfTheRealModel) {
  const auto device = backend::make_device(GetParam(), {.threads = 2});
  const model::Dims dims = model::qwen36_35b_a3b();
  const auto budget = static_cast<int64_t>(0.92 * static_cast<double>(int64_t{24} << 30));
  const MemoryPlan plan = plan_memory(*device, dims, device->policy(dims), 19'508'787'456,
                                      {.budget_bytes = budget, .context = 32768});
  EXPECT_EQ(plan.context, 32768);
  EXPECT_LE(plan.total_bytes(), budget);
  std::printf("scratch memory of 32K tokens: %.0f MB\n", static_cast<double>(plan.scratch_bytes) / 1e6);
}

INSTANTIATE_TEST_SUITE_P(OnEach, CpuMemory, testing::ValuesIn(test::cpu_backends()), test::backend_test_name);

using test::reset_peak;
using test::status_bytes;

class CpuWeights : public testing::Test {
 protected:
  // 160 MB, most of it experts and embedding as in the real model.
  static void SetUpTestSuite() {
    folder_ = new test::TempFolder;
    test::CheckpointWriter writer({.dims = {.hidden = 1024,
                                            .n_layers = 4,
                                            .attention_interval = 4,
                                            .vocab = 32768,
                                            .n_q_heads = 4,
                                            .n_kv_heads = 1,
                                            .n_key_heads = 4,
                                            .n_value_heads = 8,
                                            .n_experts = 64,
                                            .expert_width = 256,
                                            .shared_width = 256,
                                            .rope_theta = 1e7,
                                            .max_positions = 4096},
                                   .n_shards = 3});
    writer.write(folder_->path());
  }
  static void TearDownTestSuite() { delete folder_; }

  static test::TempFolder* folder_;
};
test::TempFolder* CpuWeights::folder_ = nullptr;

TEST_F(CpuWeights, LoadingTakesTheirMemoryAndLittleMore) {
  const model::Checkpoint checkpoint = model::Checkpoint::open(folder_->path());
  if (!reset_peak() || !status_bytes("VmHWM")) GTEST_SKIP() << "this system does not tell peak memory";
  ThreadPool pool(4);
  const int64_t before = *status_bytes("VmRSS");
  const cpu::Weights weights(checkpoint, pool, {});
  const int64_t growth = *status_bytes("VmHWM") - before;
  std::printf("weights %lld bytes, peak growth %lld\n", static_cast<long long>(weights.n_bytes()),
              static_cast<long long>(growth));
  EXPECT_GE(weights.n_bytes(), checkpoint.report().text_bytes);
  EXPECT_GE(growth, weights.n_bytes() * 9 / 10);  // otherwise this measures nothing
  EXPECT_LE(growth, weights.n_bytes() + 64 * kMiB);
}

// The flags of the mapping that holds an address, from /proc/self/smaps.
std::string mapping_flags(const void* address) {
  const auto wanted = reinterpret_cast<uintptr_t>(address);
  std::ifstream in("/proc/self/smaps");
  bool is_inside = false;
  for (std::string line; std::getline(in, line);) {
    uintptr_t begin = 0, end = 0;
    char dash = 0;
    std::istringstream range(line);
    if (range >> std::hex >> begin >> dash >> end && dash == '-') is_inside = begin <= wanted && wanted < end;
    if (is_inside && line.starts_with("VmFlags:")) return line.substr(8) + ' ';
  }
  return {};
}

TEST_F(CpuWeights, AskForHugePages) {
  if (!std::filesystem::exists("/sys/kernel/mm/transparent_hugepage/enabled"))
    GTEST_SKIP() << "this system has no transparent huge pages";
  const model::Checkpoint checkpoint = model::Checkpoint::open(folder_->path());
  ThreadPool pool(2);
  const cpu::Weights weights(checkpoint, pool, {});
  int n_checked = 0;
  for (const model::WeightSpec& spec : model::catalogue(checkpoint.dims())) {
    if (!spec.quantisable) continue;
    const std::string flags = mapping_flags(weights.linear(spec.id).first.tiles);
    ASSERT_NE(flags, "") << spec.name;
    EXPECT_NE(flags.find(" hg "), std::string::npos) << spec.name << ":" << flags;
    ++n_checked;
  }
  EXPECT_GT(n_checked, 40);
  // A mapping that did not ask has no such flag.
  const auto heap = std::make_unique<int>();
  EXPECT_EQ(mapping_flags(heap.get()).find(" hg "), std::string::npos);
}

}  // namespace
}  // namespace lily::engine
