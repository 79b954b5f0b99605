// How a step ends: logits to a token or to candidates. All threads scan the logits for the largest of each
// chunk, and for sums of exponentials if they are asked for; then one thread a row reads the few chunks that
// matter. What is chosen is what plan/sample.h says, to the bit; logsumexp is, to fp32's rounding.
#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <span>
#include <utility>
#include <vector>

#include "backend/cpu/kernels/logits.h"
#include "backend/cpu/lower_parts.h"
#include "base/error.h"
#include "plan/sample.h"

namespace lily::backend::cpu {
namespace {

constexpr int64_t kUnitChunks = 16, kUnitLogits = kUnitChunks * kLogitChunk;

int64_t units_of(int64_t n_logits) { return (n_logits + kUnitLogits - 1) / kUnitLogits; }

// Maxima and sums of the rows of logits of a step, in the op's extra memory.
class LogitScan {
 public:
  LogitScan(const LowerContext& c, Lowered& op, plan::ValueId logits, bool sums)
      : logits_(logits), sums_(sums), most_units_(units_of(c.plan.value(logits).cols)) {
    const int64_t rows = std::max(c.plan.shape.outputs, 1);
    maxima_at_ = reserve_extra(c, op, rows * most_units_ * kUnitChunks * 4);
    sums_at_ = reserve_extra(c, op, sums ? rows * most_units_ * 8 : 0);
    op.phases.push_back({[=, *this](const Step& step) { return step.rows(logits_) * units_of(size(step)); },
                         [=, *this](const Step& step, Worker&, int64_t unit) {
                           const int64_t n_units = units_of(size(step));
                           scan(step, unit / n_units, unit % n_units);
                         },
                         {}});
  }

  // The logits of real tokens; the rows that pad the vocabulary take no part.
  std::span<const float> logits(const Step& step, int64_t row) const {
    return {step.data(logits_) + row * step.stride(logits_), static_cast<size_t>(size(step))};
  }
  std::span<const float> maxima(const Step& step, int64_t row) const {
    return {maxima_at(step, row), static_cast<size_t>((size(step) + kLogitChunk - 1) / kLogitChunk)};
  }

  int32_t greedy(const Step& step, int64_t row) const {
    const auto all = logits(step, row), largest = maxima(step, row);
    const auto chunk = std::max_element(largest.begin(), largest.end());  // the first of equals
    const auto first = (chunk - largest.begin()) * kLogitChunk;
    int64_t i = first;
    while (i < std::ssize(all) && plan::without_nan(all[static_cast<size_t>(i)]) != *chunk) ++i;
    LILY_CHECK(i < std::ssize(all), "no logit of {} is the largest of its chunk", all.size());
    return static_cast<int32_t>(i);
  }

  std::vector<plan::Candidate> top(const Step& step, int64_t row, int64_t n) const {
    const auto all = logits(step, row), largest = maxima(step, row);
    if (n <= 0 || n >= std::ssize(largest)) return plan::top_candidates(all, n);
    // n chunks have a logit of at least the n-th largest maximum, so none that is wanted lies below it.
    std::vector<float> sorted(largest.begin(), largest.end());
    std::nth_element(sorted.begin(), sorted.begin() + (n - 1), sorted.end(), std::greater<>());
    const float least = sorted[static_cast<size_t>(n - 1)];
    std::vector<plan::Candidate> found;
    for (int64_t chunk = 0; chunk < std::ssize(largest); ++chunk) {
      if (largest[static_cast<size_t>(chunk)] < least) continue;
      const int64_t end = std::min((chunk + 1) * kLogitChunk, std::ssize(all));
      for (int64_t i = chunk * kLogitChunk; i < end; ++i)
        if (const float x = plan::without_nan(all[static_cast<size_t>(i)]); x >= least)
          found.push_back({static_cast<int32_t>(i), x});
    }
    return plan::first_candidates(std::move(found), n);
  }

  float logsumexp(const Step& step, int64_t row) const {
    const auto largest = maxima(step, row);
    const float top = *std::max_element(largest.begin(), largest.end());
    if (std::isinf(top)) return top;
    double sum = 0;
    for (int64_t unit = 0; unit < units_of(size(step)); ++unit)
      sum += sums_at(step, row)[unit] *
             std::exp(static_cast<double>(unit_maximum(step, row, unit)) - static_cast<double>(top));
    return static_cast<float>(top + std::log(sum));
  }

 private:
  int64_t size(const Step& step) const {
    return std::min<int64_t>(step.inputs().n_tokens, step.stride(logits_));
  }
  float* maxima_at(const Step& step, int64_t row) const {
    return reinterpret_cast<float*>(step.extra(maxima_at_)) + row * most_units_ * kUnitChunks;
  }
  double* sums_at(const Step& step, int64_t row) const {
    return reinterpret_cast<double*>(step.extra(sums_at_)) + row * most_units_;
  }
  float unit_maximum(const Step& step, int64_t row, int64_t unit) const {
    const auto all = maxima(step, row);
    const auto first = all.begin() + unit * kUnitChunks;
    return *std::max_element(first, first + std::min(kUnitChunks, all.end() - first));
  }
  void scan(const Step& step, int64_t row, int64_t unit) const {
    const auto all = logits(step, row);
    const float* from = all.data() + unit * kUnitLogits;
    const int64_t n = std::min(kUnitLogits, std::ssize(all) - unit * kUnitLogits);
    chunk_maxima(from, n, maxima_at(step, row) + unit * kUnitChunks);
    if (sums_) sums_at(step, row)[unit] = sum_of_exponentials(from, n, unit_maximum(step, row, unit));
  }

  plan::ValueId logits_;
  bool sums_;
  int64_t most_units_, maxima_at_ = 0, sums_at_ = 0;
};

void write_token(const Step& step, plan::ValueId token, int64_t row, int32_t id) {
  step.data<int32_t>(token)[row] = id;
  const backend::Segment& segment = step.segment_of(step.inputs().output_rows[static_cast<size_t>(row)]);
  if (segment.token_out != backend::kNoToken) step.memory().token(segment.token_out) = id;
}

}  // namespace

Lowered lower_op(const plan::GreedyToken& o, const LowerContext& c) {
  Lowered op;
  const LogitScan scan(c, op, o.logits, false);
  add_row_phase(op, o.logits, [=](const Step& step, Worker&, int64_t row) {
    write_token(step, o.token, row, scan.greedy(step, row));
  });
  return op;
}

Lowered lower_op(const plan::SampleToken& o, const LowerContext& c) {
  Lowered op;
  const LogitScan scan(c, op, o.logits, false);
  add_row_phase(op, o.logits, [=](const Step& step, Worker&, int64_t row) {
    const backend::Sampling& s = step.inputs().sampling[static_cast<size_t>(row)];
    const plan::SampleSettings settings{s.temperature, s.top_p, s.min_p, s.top_k};
    const float u = plan::uniform(s.seed, s.sequence, s.step);
    int32_t id;
    if (settings.temperature <= 0) id = scan.greedy(step, row);
    else if (settings.top_k > 0) id = plan::sample(scan.top(step, row, settings.top_k), settings, u);
    else id = plan::sample_token(scan.logits(step, row), settings, u);
    write_token(step, o.token, row, id);
  });
  return op;
}

Lowered lower_op(const plan::TopCandidates& o, const LowerContext& c) {
  Lowered op;
  const LogitScan scan(c, op, o.logits, true);
  add_row_phase(op, o.logits, [=](const Step& step, Worker&, int64_t row) {
    const auto top = scan.top(step, row, o.n_candidates);
    int32_t* ids = step.data<int32_t>(o.ids) + row * o.n_candidates;
    float* values = step.data(o.values) + row * o.n_candidates;
    for (int i = 0; i < o.n_candidates; ++i) {
      const bool exists = i < std::ssize(top);
      ids[i] = exists ? top[static_cast<size_t>(i)].id : -1;
      values[i] = exists ? top[static_cast<size_t>(i)].logit : -std::numeric_limits<float>::infinity();
    }
    step.data(o.logsumexp)[row] = scan.logsumexp(step, row);
  });
  return op;
}

}  // namespace lily::backend::cpu
