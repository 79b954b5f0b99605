#include "engine/phase_runs.h"

#include <algorithm>
#include <chrono>
#include <numeric>
#include <random>
#include <utility>
#include <vector>

#include "base/error.h"

namespace lily::engine {
namespace {

using backend::kKvBlockTokens;
using backend::StateSlot;
using backend::TokenSlot;

double now_s() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

int32_t blocks_for(int64_t n_tokens) {
  return static_cast<int32_t>((n_tokens + kKvBlockTokens - 1) / kKvBlockTokens);
}

// One sequence that starts in block 0, as a series of steps with up to `depth` of them in flight.
class Series {
 public:
  explicit Series(Executor& executor) : executor_(executor), limits_(executor.limits()) {}

  // Rows at `position`; the last one chooses a token if asked to.
  void submit(plan::Phase phase, std::span<const int32_t> tokens, int32_t position, bool choose) {
    if (n_in_flight_ == limits_.depth) wait();
    const bool in_place = limits_.writes_in_place(phase) && state_ != backend::kNoState;
    const StateSlot next = in_place ? state_ : StateSlot{n_steps_ % (limits_.depth + 1)};
    const auto n = static_cast<int32_t>(tokens.size());
    step_.clear();
    step_.phase = phase;
    step_.ending = choose ? plan::Ending::greedy : plan::Ending::none;
    step_.tokens.assign(tokens.begin(), tokens.end());
    backend::Segment segment{
        .n_rows = n, .position = position, .src = std::exchange(state_, next), .dst = next};
    if (step_.tokens[0] == backend::kTokenFromSlot) segment.token_in = TokenSlot{position % 2};
    if (choose && limits_.depth > 1) segment.token_out = TokenSlot{(position + n) % 2};
    step_.segments = {segment};
    step_.block_table.resize(static_cast<size_t>(blocks_for(position + n)));
    std::iota(step_.block_table.begin(), step_.block_table.end(), 0);
    if (choose) step_.output_rows = {n - 1};
    executor_.submit(step_);
    ++n_steps_;
    ++n_in_flight_;
  }

  // Ends the oldest step; the token it chose, if it was to.
  int32_t wait() {
    const backend::StepOutputs out = executor_.wait();
    --n_in_flight_;
    return out.tokens.empty() ? 0 : out.tokens[0];
  }
  void drain() {
    while (n_in_flight_ > 0) wait();
  }

 private:
  Executor& executor_;
  const Limits& limits_;
  Step step_;
  StateSlot state_ = backend::kNoState;  // after all steps submitted
  int n_steps_ = 0, n_in_flight_ = 0;
};

}  // namespace

void fill_cache(backend::Device& device, const model::Dims& dims, int n_blocks) {
  std::mt19937 random(1);
  std::vector<float> values(static_cast<size_t>(kKvBlockTokens) * static_cast<size_t>(dims.kv_width()));
  for (float& value : values) value = static_cast<float>(random() % 2001) / 1000.0f - 1.0f;
  for (int layer = 0; layer < dims.n_layers; ++layer) {
    if (dims.mixer(layer) != model::Mixer::attention) continue;
    for (int block = 0; block < n_blocks; ++block)
      for (const auto which : {backend::Device::Kv::k, backend::Device::Kv::v})
        device.write_kv(which, layer, block, kKvBlockTokens, values);
  }
}

double time_prompt(Executor& executor, std::span<const int32_t> prompt) {
  const auto n = static_cast<int32_t>(prompt.size());
  const int32_t rows = executor.limits().max_chunk_rows;
  LILY_CHECK(n > 0 && n <= executor.limits().max_context, "a prompt of {} tokens", n);
  Series series(executor);
  const double start_s = now_s();
  for (int32_t first = 0; first < n; first += rows) {
    const int32_t n_rows = std::min(rows, n - first);
    series.submit(plan::Phase::prefill,
                  prompt.subspan(static_cast<size_t>(first), static_cast<size_t>(n_rows)), first,
                  first + n_rows == n);
  }
  series.drain();
  return now_s() - start_s;
}

double time_tokens(Executor& executor, int32_t context, int n_tokens) {
  LILY_CHECK(context + n_tokens <= executor.limits().max_context, "{} tokens behind {}", n_tokens, context);
  Series series(executor);
  int32_t token = 0;
  const double start_s = now_s();
  for (int i = 0; i < n_tokens; ++i) {
    series.submit(plan::Phase::decode, {&token, 1}, context + i, true);
    if (executor.limits().depth > 1) token = backend::kTokenFromSlot;
    else token = series.wait();
  }
  series.drain();
  return now_s() - start_s;
}

}  // namespace lily::engine
