// An engine over a scripted executor, with and without a step that runs ahead of the host, and what its
// answers should be.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <memory>
#include <thread>
#include <utility>
#include <variant>
#include <vector>

#include "engine/engine.h"
#include "engine/sampler.h"
#include "tests/engine/scripted_executor.h"

namespace lily::engine {

inline std::vector<int32_t> prompt_of(int n, uint64_t seed) {
  std::vector<int32_t> prompt;
  for (int i = 0; i < n; ++i)
    prompt.push_back(static_cast<int32_t>(mix(seed * 1000 + static_cast<uint64_t>(i)) % 100));
  return prompt;
}

inline GenerateRequest greedy(std::vector<int32_t> prompt, int max_tokens) {
  return {.prompt = std::move(prompt), .sampling = {.temperature = 0}, .max_tokens = max_tokens};
}

// What a model without engine would write.
inline std::vector<int32_t> expected_tokens(const GenerateRequest& request, int max_context = 512) {
  std::vector<int32_t> tokens = request.prompt, output;
  Sampler sampler(request.sampling, request.prompt, 100);
  const int limit =
      request.max_tokens > 0 ? static_cast<int>(tokens.size()) + request.max_tokens : max_context;
  while (static_cast<int>(tokens.size()) < limit) {
    const int32_t id = sampler.choose(logits_of(tokens, 104), nullptr, static_cast<uint32_t>(output.size()));
    sampler.accept(id);
    if (std::count(request.stop_ids.begin(), request.stop_ids.end(), id) > 0) break;
    tokens.push_back(id);
    output.push_back(id);
  }
  return output;
}

struct Answer {
  std::vector<int32_t> ids;
  std::vector<Token> tokens;
  Finished finished;
  int n_progress = 0;
};

inline Answer read_all(Generation& generation) {
  Answer answer;
  while (auto event = generation.next()) {
    if (auto* token = std::get_if<Token>(&*event)) {
      answer.ids.push_back(token->id);
      answer.tokens.push_back(*token);
    } else if (auto* finished = std::get_if<Finished>(&*event)) {
      answer.finished = *finished;
    } else {
      ++answer.n_progress;
    }
  }
  return answer;
}

// A place is given back a moment after the reader has its last event.
inline void await_idle(const Engine& engine) {
  while (engine.stats().n_running + engine.stats().n_waiting > 0)
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
}

inline Answer read_all(Generation&& generation) { return read_all(generation); }

// Both with and without a step that runs ahead of the host.
class EngineOf : public testing::TestWithParam<int> {
 protected:
  Limits limits() const {
    Limits limits = ScriptedExecutor::small();
    limits.depth = GetParam();
    return limits;
  }
  // Keeps a pointer to the executor that the engine owns.
  std::unique_ptr<Engine> make(const Limits& limits, const EngineOptions& options = {}) {
    auto executor = std::make_unique<ScriptedExecutor>(limits);
    script = executor.get();
    return std::make_unique<Engine>(std::move(executor), options);
  }
  std::unique_ptr<Engine> make() { return make(limits()); }

  ScriptedExecutor* script = nullptr;
};

}  // namespace lily::engine
