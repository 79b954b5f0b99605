// lily bench --session: how soon a turn of a long conversation is answered, beside a cold read of the same
// prompt.
//
// A conversation of random tokens grows by an answer and by new tokens each turn, until the last turn's
// prompt has the length asked for. Every prompt is handed to the engine whole, as a client sends it; a state
// is kept before the last tokens, where a chat's generation prompt would be. Then the last prompt is read
// once more by an engine that has forgotten everything.
#include <algorithm>
#include <cstdio>
#include <random>

#include "base/error.h"
#include "cli/bench.h"
#include "engine/engine.h"

namespace lily::cli {
namespace {

using Json = nlohmann::ordered_json;

constexpr int kGenerationPrompt = 4;  // tokens

struct Answered {
  std::vector<int32_t> ids;
  engine::Usage usage;
  engine::Timings timings;
};

Answered ask(engine::Engine& engine, const std::vector<int32_t>& prompt, int n_answer) {
  engine::GenerateRequest request{
      .prompt = prompt,
      .session = "bench",
      .n_stable = std::max(0, static_cast<int>(prompt.size()) - kGenerationPrompt),
      .max_tokens = n_answer};
  request.sampling.temperature = 0;
  engine::Generation generation = engine.generate(std::move(request));
  Answered answered;
  while (!generation.done()) {
    if (interrupted()) generation.cancel();
    const auto event = generation.next_for(std::chrono::milliseconds(100));
    if (!event) continue;
    if (const auto* token = std::get_if<engine::Token>(&*event)) answered.ids.push_back(token->id);
    const auto* finished = std::get_if<engine::Finished>(&*event);
    if (finished == nullptr) continue;
    check_interrupted();
    if (finished->finish == engine::Finish::error) throw Error(finished->fault, finished->error);
    answered.usage = finished->usage;
    answered.timings = finished->timings;
  }
  return answered;
}

void say(const BenchOptions& o, int round, const std::string& what, const Answered& a) {
  if (!o.json)
    fmt::print("{:>5} {:8} {:>8} {:>8} {:>14.1f}\n", round + 1, what, a.usage.prompt_tokens,
               a.usage.cached_tokens, a.timings.ttft_ms);
  std::fflush(stdout);
}

}  // namespace

Json measure_session(engine::Engine& engine, int length, const BenchOptions& o) {
  const int n_growth = o.tokens + o.new_tokens;  // a turn's
  const int n_first = length - (o.session - 1) * n_growth;
  if (n_first < 1)
    fail(Fault::user, "--session {}: {} turns that add {} tokens each are more than the length {}", o.session,
         o.session, n_growth, length);
  std::mt19937 random(1);
  std::uniform_int_distribution<int32_t> token(0, engine.limits().n_tokens - 1);
  if (!o.json)
    fmt::print("{:>5} {:8} {:>8} {:>8} {:>14}\n", "round", "turn", "prompt", "cached", "first token ms");
  std::vector<double> warm_ms, cold_ms, ratio;
  int n_cached = 0;
  for (int round = 0; round < o.rounds; ++round) {
    engine.clear_cache();
    std::vector<int32_t> prompt;
    Answered warm;
    for (int turn = 1; turn <= o.session; ++turn) {
      const int n_new = turn == 1 ? n_first : o.new_tokens;
      for (int i = 0; i < n_new; ++i) prompt.push_back(token(random));
      warm = ask(engine, prompt, o.tokens);
      say(o, round, std::to_string(turn), warm);
      if (turn < o.session) prompt.insert(prompt.end(), warm.ids.begin(), warm.ids.end());
    }
    engine.clear_cache();
    const Answered cold = ask(engine, prompt, o.tokens);
    say(o, round, "cold", cold);
    n_cached = warm.usage.cached_tokens;
    warm_ms.push_back(warm.timings.ttft_ms);
    cold_ms.push_back(cold.timings.ttft_ms);
    ratio.push_back(cold.timings.ttft_ms / warm.timings.ttft_ms);
  }
  if (!o.json) {
    const auto shown = [](const std::vector<double>& values, int digits) {
      const Spread s = spread_of(values);
      return fmt::format("{:.{}f} ({:.{}f} .. {:.{}f})", s.median, digits, s.min, digits, s.max, digits);
    };
    fmt::print(
        "turn {} of a session of {} tokens, {} of them new: first token after {} ms; after a cold read of "
        "the "
        "same prompt {} ms; {} times sooner\n",
        o.session, length, o.new_tokens, shown(warm_ms, 1), shown(cold_ms, 1), shown(ratio, 1));
  }
  return {{"phase", "session"},
          {"length", length},
          {"turn", o.session},
          {"new_tokens", o.new_tokens},
          {"cached_tokens", n_cached},
          {"warm_ttft_ms", spread_json(spread_of(warm_ms))},
          {"cold_ttft_ms", spread_json(spread_of(cold_ms))},
          {"ratio", spread_json(spread_of(ratio))}};
}

}  // namespace lily::cli
