#include "engine/evaluate.h"

#include <algorithm>
#include <cmath>
#include <deque>
#include <limits>
#include <numeric>
#include <utility>

#include "base/error.h"
#include "base/printable.h"
#include "plan/sample.h"

namespace lily::engine {
namespace {

using backend::kKvBlockTokens;

// Logits of one step take at most this much (floats).
constexpr int64_t kMaxLogitsPerStep = int64_t{64} << 20;
constexpr size_t kAskedAhead = 16;  // prompts that wait in the engine's queue

double logsumexp(std::span<const float> logits) {
  const double largest = *std::max_element(logits.begin(), logits.end());
  double sum = 0;
  for (const float x : logits) sum += std::exp(static_cast<double>(x) - largest);
  return largest + std::log(sum);
}

}  // namespace

void read_forced(Executor& executor, std::span<const int32_t> ids, int chunk_rows, int64_t first,
                 const std::function<void(int64_t, std::span<const float>)>& row) {
  const Limits& limits = executor.limits();
  const auto n = static_cast<int64_t>(ids.size());
  if (n > limits.max_context)
    fail(Fault::user, "the text has {} tokens and the context holds {}; take fewer, or a larger --ctx", n,
         limits.max_context);
  int64_t rows = chunk_rows > 0 ? std::min(chunk_rows, limits.max_chunk_rows) : limits.max_chunk_rows;
  rows = std::clamp<int64_t>(kMaxLogitsPerStep / limits.vocab, 1, rows);
  Step step;
  for (int64_t begin = 0; begin < n; begin += rows) {
    const int64_t end = std::min(n, begin + rows);
    step.clear();
    step.phase = plan::Phase::prefill;
    step.tokens.assign(ids.begin() + begin, ids.begin() + end);
    step.segments = {{.n_rows = static_cast<int32_t>(end - begin),
                      .position = static_cast<int32_t>(begin),
                      .src = begin == 0 ? backend::kNoState : backend::StateSlot{0},
                      .dst = backend::StateSlot{0}}};
    for (int32_t block = 0; int64_t{block} * kKvBlockTokens < end; ++block) step.block_table.push_back(block);
    for (int64_t p = std::max(begin, first); p < end; ++p)
      step.output_rows.push_back(static_cast<int32_t>(p - begin));
    step.ending = step.output_rows.empty() ? plan::Ending::none : plan::Ending::logits;
    executor.submit(step);
    const backend::StepOutputs out = executor.wait();
    for (size_t i = 0; i < step.output_rows.size(); ++i)
      row(begin + step.output_rows[i],
          out.logits.subspan(i * static_cast<size_t>(limits.vocab), static_cast<size_t>(limits.vocab)));
  }
}

double ForcedScore::perplexity() const {
  return std::exp(std::accumulate(nll.begin(), nll.end(), 0.0) / static_cast<double>(nll.size()));
}

ForcedScore score(Executor& executor, std::span<const int32_t> ids, std::span<const int32_t> positions,
                  int chunk_rows, const EvalProgress& progress) {
  if (ids.size() < 2)
    fail(Fault::user, "a text of {} has no predictions; it needs at least 2",
         counted(std::ssize(ids), "token"));
  ForcedScore result{.positions = {positions.begin(), positions.end()}};
  const auto n = static_cast<int64_t>(ids.size());
  const auto n_tokens = static_cast<size_t>(executor.limits().n_tokens);
  read_forced(executor, ids.first(ids.size() - 1), chunk_rows, 0,
              [&](int64_t p, std::span<const float> logits) {
                const int32_t next = ids[static_cast<size_t>(p) + 1];
                result.nll.push_back(logsumexp(logits.first(n_tokens)) - logits[static_cast<size_t>(next)]);
                if (std::binary_search(positions.begin(), positions.end(), static_cast<int32_t>(p)))
                  result.rows.emplace_back(logits.begin(), logits.end());
                if (progress) progress(p + 1, n - 1);
              });
  LILY_CHECK(result.rows.size() == positions.size(), "{} of {} positions", result.rows.size(),
             positions.size());
  return result;
}

ForcedReport compare(const ForcedScore& score, const GoldenForced& golden) {
  ForcedReport report{.predictions = static_cast<int64_t>(score.nll.size()),
                      .positions = static_cast<int64_t>(score.rows.size()),
                      .perplexity = score.perplexity(),
                      .reference_perplexity = golden.perplexity};
  for (size_t i = 0; i < score.rows.size(); ++i) {
    const std::vector<float>& row = score.rows[i];
    const size_t first = i * static_cast<size_t>(golden.n_top);
    report.top1_agreement += plan::greedy_token(row) == golden.top_ids[first];
    for (size_t j = first; j < first + static_cast<size_t>(golden.n_top); ++j)
      report.max_abs_logit_error = std::max(
          report.max_abs_logit_error,
          std::abs(static_cast<double>(row[static_cast<size_t>(golden.top_ids[j])]) - golden.top_logits[j]));
  }
  return report;
}

ForcedReport compare(const ForcedScore& score, const ForcedScore& reference, int32_t n_tokens) {
  LILY_CHECK(score.positions == reference.positions);
  ForcedReport report{.predictions = static_cast<int64_t>(score.nll.size()),
                      .positions = static_cast<int64_t>(score.rows.size()),
                      .perplexity = score.perplexity(),
                      .reference_perplexity = reference.perplexity()};
  for (size_t i = 0; i < score.rows.size(); ++i) {
    const auto a = std::span(score.rows[i]).first(static_cast<size_t>(n_tokens));
    const auto b = std::span(reference.rows[i]).first(static_cast<size_t>(n_tokens));
    report.top1_agreement += plan::greedy_token(a) == plan::greedy_token(b);
    for (size_t j = 0; j < a.size(); ++j)
      report.max_abs_logit_error = std::max(report.max_abs_logit_error,
                                            std::abs(static_cast<double>(a[j]) - static_cast<double>(b[j])));
  }
  return report;
}

GreedyComparison compare(std::span<const int32_t> output, const GoldenPrompt& golden) {
  const auto parted = std::mismatch(output.begin(), output.end(), golden.output.begin(), golden.output.end());
  GreedyComparison c{.n_agreed = parted.first - output.begin()};
  c.exact = parted.first == output.end() && parted.second == golden.output.end();
  // An answer that goes on where the golden one ends has no margin there.
  if (!c.exact)
    c.divergence_margin = c.n_agreed < static_cast<int64_t>(golden.margins.size())
                              ? golden.margins[static_cast<size_t>(c.n_agreed)]
                              : std::numeric_limits<float>::infinity();
  return c;
}

std::vector<int32_t> greedy_output(Generation generation, const std::function<void()>& on_token) {
  std::vector<int32_t> ids;
  while (auto event = generation.next()) {
    if (const auto* token = std::get_if<Token>(&*event)) {
      ids.push_back(token->id);
      if (on_token) on_token();
    }
    const auto* end = std::get_if<Finished>(&*event);
    if (end == nullptr) continue;
    if (end->finish == Finish::error) throw Error(end->fault, end->error);
    if (end->stop_id >= 0) ids.push_back(end->stop_id);
  }
  return ids;
}

GreedyReport run_greedy(Engine& engine, std::span<const GoldenPrompt> prompts,
                        const std::vector<int32_t>& stop_ids, const EvalProgress& progress) {
  GreedyReport report{.prompts = static_cast<int64_t>(prompts.size())};
  uint64_t hash = 0xcbf29ce484222325;  // FNV-1a over token ids
  const auto add_to_hash = [&](int32_t v) { hash = (hash ^ static_cast<uint32_t>(v)) * 0x100000001b3; };
  int64_t n_done = 0, n_total = 0;
  for (const GoldenPrompt& golden : prompts) n_total += std::ssize(golden.output);
  const auto show = [&] {
    if (progress) progress(n_done, n_total);
  };
  show();
  std::deque<Generation> ahead;
  size_t n_asked = 0;
  for (size_t i = 0; i < prompts.size(); ++i) {
    for (; n_asked < prompts.size() && ahead.size() < kAskedAhead; ++n_asked) {
      const GoldenPrompt& golden = prompts[n_asked];
      ahead.push_back(engine.generate({.prompt = golden.prompt,
                                       .sampling = {.temperature = 0},
                                       .stop_ids = stop_ids,
                                       .max_tokens = static_cast<int32_t>(golden.output.size()),
                                       .keep_states = false}));
    }
    const std::vector<int32_t> output = greedy_output(std::move(ahead.front()), [&] {
      ++n_done;
      show();
    });
    for (const int32_t token : output) add_to_hash(token);
    add_to_hash(-1);
    report.each.push_back(compare(output, prompts[i]));
    ahead.pop_front();
    report.exact += report.each.back().exact;
    report.first_divergence_margin_max =
        std::max(report.first_divergence_margin_max, report.each.back().divergence_margin);
  }
  report.tokens_hash = hash;
  return report;
}

}  // namespace lily::engine
