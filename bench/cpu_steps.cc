// Whole steps of the cpu backend on the bundled model: tokens per second of decode and prefill.
#include <benchmark/benchmark.h>

#include <memory>
#include <vector>

#include "backend/backend.h"
#include "model/checkpoint.h"

namespace lily::backend {
namespace {

constexpr int kContext = 2048;

Device& loaded_device(int threads) {
  static std::unique_ptr<Device> device;
  static int n_threads = -1;
  if (n_threads != threads) {
    device = make_device("cpu", {.threads = threads});
    device->load(model::Checkpoint::open("models/lily-tiny"), {});
    n_threads = threads;
  }
  return *device;
}

// Rows of one sequence in one step, at a position that leaves as many behind it.
void steps(benchmark::State& state, plan::Phase phase) {
  const auto threads = static_cast<int>(state.range(0)), rows = static_cast<int>(state.range(1));
  const auto position = static_cast<int32_t>(state.range(2));
  Device& device = loaded_device(threads);
  const model::Dims dims = model::lily_tiny();
  const plan::Policy policy = device.policy(dims);
  device.reserve({.n_state_slots = 1, .n_kv_blocks = kContext / kKvBlockTokens}, policy);
  const auto program = device.compile(plan::forward(
      dims, {.phase = phase, .rows = rows, .outputs = 1, .context = kContext, .ending = plan::Ending::greedy},
      policy));
  std::vector<int32_t> tokens(static_cast<size_t>(rows)), table;
  for (size_t i = 0; i < tokens.size(); ++i) tokens[i] = static_cast<int32_t>(i * 37 % 8000);
  for (int32_t i = 0; i < kContext / kKvBlockTokens; ++i) table.push_back(i);
  const std::vector<int32_t> output = {rows - 1};
  const std::vector<Segment> segments = {
      {.n_rows = rows, .position = position, .src = kNoState, .dst = StateSlot{0}}};
  for (auto _ : state) {
    program->submit({.tokens = tokens,
                     .segments = segments,
                     .block_table = table,
                     .output_rows = output,
                     .n_tokens = 8000});
    benchmark::DoNotOptimize(program->wait().tokens[0]);
  }
  state.counters["tok/s"] =
      benchmark::Counter(static_cast<double>(state.iterations()) * rows, benchmark::Counter::kIsRate);
}

BENCHMARK_CAPTURE(steps, decode, plan::Phase::decode)
    ->Args({1, 1, 64})
    ->Args({2, 1, 64})
    ->Args({2, 1, 1024})
    ->Args({2, 8, 64})
    ->UseRealTime();
BENCHMARK_CAPTURE(steps, prefill, plan::Phase::prefill)
    ->Args({1, 512, 0})
    ->Args({2, 64, 0})
    ->Args({2, 512, 0})
    ->Args({2, 512, 1536})
    ->UseRealTime();

}  // namespace
}  // namespace lily::backend
