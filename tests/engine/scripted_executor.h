// An executor without a model: tokens on cue, failures on cue. A state slot holds the very tokens that were
// fed, a KV block the tokens of its positions; every step checks that both tell the same story, so that a
// wrong slot, block or position cannot go unnoticed. Where states and blocks share places, what is written to
// one kind is lost to the other.
#pragma once

#include <algorithm>
#include <array>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <limits>
#include <map>
#include <mutex>
#include <new>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "base/error.h"
#include "engine/executor.h"
#include "plan/sample.h"

namespace lily::engine {

inline uint64_t mix(uint64_t x) {  // splitmix64's finaliser
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ull;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebull;
  return x ^ (x >> 31);
}

// Logits that depend on every token of the prefix, in [-4, 4).
inline std::vector<float> logits_of(std::span<const int32_t> prefix, int vocab) {
  uint64_t h = 0x9e3779b97f4a7c15ull + prefix.size();
  for (const int32_t token : prefix) h = mix(h + static_cast<uint64_t>(token) * 0x2545f4914f6cdd1dull);
  std::vector<float> logits(static_cast<size_t>(vocab));
  for (size_t i = 0; i < logits.size(); ++i)
    logits[i] = static_cast<float>(mix(h + i) >> 40) * 0x1p-21f - 4.0f;
  return logits;
}

class ScriptedExecutor final : public Executor {
 public:
  explicit ScriptedExecutor(const Limits& limits)
      : limits_(limits),
        states_(static_cast<size_t>(limits.n_state_slots)),
        kv_(static_cast<size_t>(limits.n_kv_blocks)),
        tokens_(static_cast<size_t>(limits.n_token_slots), kPoison) {
    for (auto& block : kv_) block.fill(kPoison);
  }

  static Limits small() {
    return {.vocab = 104,
            .n_tokens = 100,
            .max_context = 512,
            .max_chunk_rows = 64,
            .max_decode_rows = 4,
            .n_candidates = 16,
            .depth = 1,
            .n_state_slots = 16,
            .n_kv_blocks = 32,
            .n_token_slots = 8};
  }
  static Limits pipelined() {
    Limits limits = small();
    limits.depth = 2;
    return limits;
  }

  // ---- The script. Set before the engine starts, or while it is held.

  std::function<std::vector<float>(std::span<const int32_t> prefix)> logits = [this](auto prefix) {
    return logits_of(prefix, limits_.vocab);
  };
  std::map<int, std::string> fail_submit, fail_wait;  // by index of the step
  int fail_every_wait_from = std::numeric_limits<int>::max();
  int out_of_memory_from = std::numeric_limits<int>::max();  // steps that wait() ends in std::bad_alloc

  // Steps wait for permission: n more may finish.
  void hold() {
    const std::lock_guard lock(mutex_);
    allowed_ = 0;
  }
  void allow(int n) {
    {
      const std::lock_guard lock(mutex_);
      allowed_ = n < 0 ? -1 : (allowed_ < 0 ? n : allowed_ + n);
    }
    changed_.notify_all();
  }
  // Until a step waits for permission.
  void await_held() {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return n_held_ > 0; });
  }

  // ---- The record

  struct Record {
    plan::Phase phase;
    plan::Ending ending;
    std::vector<int> rows;       // of each segment
    std::vector<bool> in_place;  // of each segment: the state is written where it was read
  };
  std::vector<Record> steps() const {
    const std::lock_guard lock(mutex_);
    return steps_;
  }
  int n_copies() const {
    const std::lock_guard lock(mutex_);
    return n_copies_;
  }

  int n_given_back() const {
    const std::lock_guard lock(mutex_);
    return n_given_back_;
  }

  // ---- Executor

  const Limits& limits() const override { return limits_; }

  void submit(const Step& step) override {
    LILY_CHECK(static_cast<int>(flights_.size()) < limits_.depth, "too many steps in flight");
    int index = 0;
    {
      const std::lock_guard lock(mutex_);
      index = static_cast<int>(steps_.size());
      Record record{step.phase, step.ending, {}, {}};
      for (const backend::Segment& s : step.segments) {
        record.rows.push_back(s.n_rows);
        record.in_place.push_back(s.src == s.dst);
      }
      steps_.push_back(std::move(record));
    }
    if (fail_submit.contains(index)) throw Error(Fault::device, fail_submit.at(index));
    check_bounds(step);
    Flight flight{.index = index};
    const bool fails = fail_wait.contains(index) || index >= fail_every_wait_from;
    size_t output = 0;
    for (const backend::Segment& s : step.segments) run(step, s, fails, flight, output);
    LILY_CHECK(output == step.output_rows.size(), "{} outputs of {}", output, step.output_rows.size());
    flights_.push_back(std::move(flight));
  }

  backend::StepOutputs wait() override {
    LILY_CHECK(!flights_.empty());
    {
      std::unique_lock lock(mutex_);
      ++n_held_;
      changed_.notify_all();
      changed_.wait(lock, [&] { return allowed_ != 0; });
      --n_held_;
      if (allowed_ > 0) --allowed_;
    }
    delivered_.push_back(std::move(flights_.front()));
    flights_.pop_front();
    if (delivered_.size() > 2) delivered_.pop_front();
    const Flight& f = delivered_.back();
    if (f.index >= out_of_memory_from) throw std::bad_alloc();
    if (f.index >= fail_every_wait_from) throw Error(Fault::device, "the device is gone");
    if (fail_wait.contains(f.index)) throw Error(Fault::device, fail_wait.at(f.index));
    return {.logits = f.logits,
            .tokens = f.tokens,
            .candidate_ids = f.candidate_ids,
            .candidate_logits = f.candidate_logits,
            .logsumexp = f.logsumexp};
  }

  void copy_kv(int32_t from, int32_t to, int n_tokens) override {
    LILY_CHECK(flights_.empty(), "a step is in flight");
    auto& target = begin_block(to);
    for (int i = 0; i < n_tokens; ++i)
      target[static_cast<size_t>(i)] = kv_.at(static_cast<size_t>(from))[static_cast<size_t>(i)];
    const std::lock_guard lock(mutex_);
    ++n_copies_;
  }

  // What was given back must not be relied on.
  void give_back_state(backend::StateSlot slot) override {
    states_.at(static_cast<size_t>(slot)).reset();
    const std::lock_guard lock(mutex_);
    ++n_given_back_;
  }
  void give_back_kv(int32_t block) override {
    kv_.at(static_cast<size_t>(block)).fill(kPoison);
    const std::lock_guard lock(mutex_);
    ++n_given_back_;
  }

  // A state is saved as its length and its tokens, KV as its tokens.
  SavedLayout saved_layout() const override {
    return {.state_floats = {1, static_cast<uint32_t>(limits_.max_context)}, .kv_floats = 1};
  }
  std::vector<float> read_state(backend::StateSlot slot, int piece) override {
    LILY_CHECK(flights_.empty(), "a step is in flight");
    const auto& state = states_.at(static_cast<size_t>(slot));
    LILY_CHECK(state.has_value(), "state slot {} is undefined", static_cast<int>(slot));
    if (piece == 0) return {static_cast<float>(state->size())};
    std::vector<float> values(state->begin(), state->end());
    values.resize(static_cast<size_t>(limits_.max_context));
    return values;
  }
  void write_state(backend::StateSlot slot, int piece, std::span<const float> values) override {
    LILY_CHECK(flights_.empty(), "a step is in flight");
    auto& state = begin_state(slot);
    if (piece == 0) state.emplace(static_cast<size_t>(values[0]), kPoison);
    else std::copy_n(values.begin(), state->size(), state->begin());
  }
  std::vector<float> read_kv(int32_t block, int n_tokens) override {
    LILY_CHECK(flights_.empty(), "a step is in flight");
    const auto& from = kv_.at(static_cast<size_t>(block));
    return {from.begin(), from.begin() + n_tokens};
  }
  void write_kv(int32_t block, int n_tokens, std::span<const float> values) override {
    LILY_CHECK(flights_.empty(), "a step is in flight");
    auto& to = begin_block(block);
    std::copy_n(values.begin(), n_tokens, to.begin());
  }

 private:
  static constexpr int32_t kPoison = -77;
  using History = std::vector<int32_t>;

  using Block = std::array<int32_t, backend::kKvBlockTokens>;

  // To be written. What lay in the same place is lost.
  std::optional<History>& begin_state(backend::StateSlot slot) {
    const auto place = static_cast<size_t>(slot);
    const auto n = static_cast<size_t>(limits_.blocks_per_state);
    for (size_t block = place * n; block < (place + 1) * n; ++block) kv_.at(block).fill(kPoison);
    return states_.at(place);
  }
  Block& begin_block(int32_t block) {
    if (limits_.blocks_per_state > 0)
      states_.at(static_cast<size_t>(block / limits_.blocks_per_state)).reset();
    Block& target = kv_.at(static_cast<size_t>(block));
    target.fill(kPoison);
    return target;
  }
  // From its first position on nothing in it is old.
  Block& written_block(const Step& step, const backend::Segment& s, int position) {
    const int32_t id = block(step, s, position / backend::kKvBlockTokens);
    return position % backend::kKvBlockTokens == 0 ? begin_block(id) : kv_.at(static_cast<size_t>(id));
  }

  struct Flight {
    int index = 0;
    std::vector<float> logits, candidate_logits, logsumexp;
    std::vector<int32_t> tokens, candidate_ids;
  };

  void check_bounds(const Step& step) const {
    const bool decode = step.phase == plan::Phase::decode;
    LILY_CHECK(
        step.n_rows() > 0 && step.n_rows() <= (decode ? limits_.max_decode_rows : limits_.max_chunk_rows),
        "{} rows", step.n_rows());
    LILY_CHECK(step.context() <= limits_.max_context, "context {}", step.context());
    LILY_CHECK(step.output_rows.empty() == (step.ending == plan::Ending::none), "outputs");
    LILY_CHECK(step.sampling.size() == (step.ending == plan::Ending::sampled ? step.output_rows.size() : 0));
    for (const backend::Segment& a : step.segments)
      for (const backend::Segment& b : step.segments) {
        if (&a == &b) continue;
        LILY_CHECK(a.dst != b.dst && a.dst != b.src, "one step writes what another part of it uses");
        for (int i = a.position / 64; i <= (a.position + a.n_rows - 1) / 64; ++i)
          for (int j = 0; j <= (b.position + b.n_rows - 1) / 64; ++j)
            LILY_CHECK(block(step, a, i) != block(step, b, j), "a written block is shared");
      }
  }

  static int32_t block(const Step& step, const backend::Segment& s, int i) {
    return step.block_table.at(static_cast<size_t>(s.first_block + i));
  }

  void run(const Step& step, const backend::Segment& s, bool fails, Flight& flight, size_t& output) {
    History history;
    if (s.src != backend::kNoState) {
      const auto& state = states_.at(static_cast<size_t>(s.src));
      if (!state && failure_in_flight()) return run_lost(step, s, flight, output);
      LILY_CHECK(state.has_value(), "state slot {} is undefined", static_cast<int>(s.src));
      history = *state;
    }
    LILY_CHECK(static_cast<int>(history.size()) == s.position, "a state after {} tokens at position {}",
               history.size(), s.position);
    for (int p = 0; p < s.position; ++p)
      LILY_CHECK(kv_.at(static_cast<size_t>(block(step, s, p / 64)))[static_cast<size_t>(p % 64)] ==
                     history[static_cast<size_t>(p)],
                 "KV of position {} is not this sequence's", p);
    for (int r = 0; r < s.n_rows; ++r) {
      int32_t token = step.tokens.at(static_cast<size_t>(s.first_row + r));
      if (token == backend::kTokenFromSlot) token = tokens_.at(static_cast<size_t>(s.token_in));
      LILY_CHECK(token >= 0 && token < limits_.n_tokens, "token {}", token);
      const int p = s.position + r;
      written_block(step, s, p)[static_cast<size_t>(p % 64)] = fails ? kPoison : token;
      history.push_back(token);
      const bool wanted = output < step.output_rows.size() && step.output_rows[output] == s.first_row + r;
      if (wanted) write_output(step, s, history, flight, output++);
    }
    auto& target = begin_state(s.dst);
    target.reset();
    if (!fails) target = std::move(history);
  }

  bool failure_in_flight() const {
    for (const Flight& f : flights_)
      if (f.index >= fail_every_wait_from || fail_wait.contains(f.index)) return true;
    return false;
  }

  // Nobody knows yet that the step before has failed: this one computes nonsense.
  void run_lost(const Step& step, const backend::Segment& s, Flight& flight, size_t& output) {
    for (int p = s.position; p < s.position + s.n_rows; ++p)
      written_block(step, s, p)[static_cast<size_t>(p % 64)] = kPoison;
    begin_state(s.dst).reset();
    while (output < step.output_rows.size() && step.output_rows[output] < s.first_row + s.n_rows)
      write_output(step, s, {}, flight, output++);
  }

  void write_output(const Step& step, const backend::Segment& s, const History& history, Flight& flight,
                    size_t output) {
    std::vector<float> row = logits(history);
    for (int i = limits_.n_tokens; i < limits_.vocab; ++i)
      row[static_cast<size_t>(i)] = -std::numeric_limits<float>::infinity();
    switch (step.ending) {
      case plan::Ending::none:
        break;
      case plan::Ending::logits:
        flight.logits.insert(flight.logits.end(), row.begin(), row.end());
        break;
      case plan::Ending::candidates:
        for (const plan::Candidate& c : plan::top_candidates(row, limits_.n_candidates)) {
          flight.candidate_ids.push_back(c.id);
          flight.candidate_logits.push_back(c.logit);
        }
        flight.logsumexp.push_back(plan::logsumexp(row));
        break;
      case plan::Ending::greedy:
      case plan::Ending::sampled: {
        int32_t token = plan::greedy_token(row);
        if (step.ending == plan::Ending::sampled) {
          const backend::Sampling& how = step.sampling.at(output);
          token = plan::sample_token(
              row,
              {.temperature = how.temperature, .top_p = how.top_p, .min_p = how.min_p, .top_k = how.top_k},
              plan::uniform(how.seed, how.sequence, how.step));
        }
        flight.tokens.push_back(token);
        if (s.token_out != backend::kNoToken) tokens_.at(static_cast<size_t>(s.token_out)) = token;
        break;
      }
    }
  }

  const Limits limits_;
  std::vector<std::optional<History>> states_;
  std::vector<std::array<int32_t, backend::kKvBlockTokens>> kv_;
  std::vector<int32_t> tokens_;
  std::deque<Flight> flights_, delivered_;

  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<Record> steps_;
  int allowed_ = -1;  // steps that may finish; -1: all
  int n_held_ = 0;
  int n_copies_ = 0, n_given_back_ = 0;
};

}  // namespace lily::engine
