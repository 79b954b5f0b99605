// Routing and experts, equations (22)-(26).
#include <algorithm>
#include <cmath>
#include <numeric>

#include "backend/reference/machine.h"

namespace lily::backend::reference {

using model::kExpertsPerToken;
using model::LinearView;

void run(const Machine& m, const plan::RouterTop& op) {
  for (int64_t t = 0; t < m.step.n_rows(); ++t) {
    const auto logits = m.row(op.logits, t);
    const double largest = *std::max_element(logits.begin(), logits.end());
    double denominator = 0;
    for (const float x : logits) denominator += std::exp(x - largest);
    std::vector<int32_t> order(logits.size());
    std::iota(order.begin(), order.end(), 0);
    // p is monotone in the logit: larger p, then lower index.
    std::stable_sort(order.begin(), order.end(), [&](int32_t a, int32_t b) {
      return logits[static_cast<size_t>(a)] > logits[static_cast<size_t>(b)];
    });
    double chosen = 0;
    for (size_t j = 0; j < kExpertsPerToken; ++j)
      chosen += std::exp(logits[static_cast<size_t>(order[j])] - largest) / denominator;
    for (size_t j = 0; j < kExpertsPerToken; ++j) {
      m.value(op.ids).index_row(t)[j] = order[j];
      m.row(op.weights, t)[j] = static_cast<float>(std::exp(logits[static_cast<size_t>(order[j])] - largest) /
                                                   denominator / chosen);
    }
  }
}

void run(const Machine& m, const plan::ExpertGroups& op) {
  const int n_experts = m.dims().n_experts;
  std::vector<std::vector<int32_t>> assignments(static_cast<size_t>(n_experts));
  for (int t = 0; t < m.step.n_rows(); ++t)
    for (int j = 0; j < kExpertsPerToken; ++j) {
      const int32_t expert = m.value(op.ids).index_row(t)[static_cast<size_t>(j)];
      assignments.at(static_cast<size_t>(expert)).push_back(t * kExpertsPerToken + j);
    }
  std::vector<int32_t>& offsets = m.value(op.offsets).i;
  int32_t position = 0;
  for (int e = 0; e < n_experts; ++e) {
    offsets[static_cast<size_t>(e)] = position;
    for (const int32_t a : assignments[static_cast<size_t>(e)]) {
      m.value(op.order).i[static_cast<size_t>(position)] = a;
      m.value(op.position).i[static_cast<size_t>(a)] = position++;
    }
  }
  offsets[static_cast<size_t>(n_experts)] = position;

  std::vector<int32_t> heavy_first(static_cast<size_t>(n_experts));
  std::iota(heavy_first.begin(), heavy_first.end(), 0);
  const auto load = [&](int32_t e) {
    return static_cast<int32_t>(assignments[static_cast<size_t>(e)].size());
  };
  std::stable_sort(heavy_first.begin(), heavy_first.end(),
                   [&](int32_t a, int32_t b) { return load(a) > load(b); });
  int32_t n_blocks = 0;
  for (const int32_t e : heavy_first) {
    const int32_t tile = load(e) >= op.tile.large_from ? op.tile.large : op.tile.small;
    for (int32_t first = 0; first < load(e); first += tile) {
      const auto block = m.value(op.blocks).index_row(n_blocks++);
      block[0] = e;
      block[1] = offsets[static_cast<size_t>(e)] + first;
      block[2] = std::min(tile, load(e) - first);
      block[3] = 0;
    }
  }
  m.value(op.n_blocks).i = {n_blocks, 1, 1, 0};
}

// Nothing to do: ExpertsLinear below reads the weight itself, dequantised in fp32, whether or not it was
// expanded.
void run(const Machine&, const plan::ExpandWeight&) {}

void run(const Machine& m, const plan::ExpertsLinear& op) {
  const LinearView weight = m.weights.linear(op.weight);
  const bool from_tokens = op.weight.weight != model::Weight::expert_down;
  // Rows of each expert, and the row of x that each one reads.
  struct Row {
    int64_t x, y;
  };
  std::vector<std::vector<Row>> rows(static_cast<size_t>(m.dims().n_experts));
  for (int64_t a = 0; a < int64_t{m.step.n_rows()} * kExpertsPerToken; ++a) {
    const int64_t t = a / kExpertsPerToken;
    const int32_t expert = m.value(op.routing.ids).index_row(t)[static_cast<size_t>(a % kExpertsPerToken)];
    const int64_t y = op.routing.grouped() ? m.value(op.routing.position).i[static_cast<size_t>(a)] : a;
    rows.at(static_cast<size_t>(expert)).push_back({from_tokens ? t : y, y});
  }
  m.parallel(m.dims().n_experts, [&](int64_t expert) {
    const auto& mine = rows[static_cast<size_t>(expert)];
    if (mine.empty()) return;
    for (int64_t out = 0; out < weight.out; ++out) {
      const std::vector<float> w = weight_row(weight, expert, out);
      for (const Row& row : mine) {
        const auto x = m.row(op.x, row.x);
        double sum = 0;
        for (size_t j = 0; j < x.size(); ++j) sum += static_cast<double>(x[j]) * w[j];
        m.row(op.y, row.y)[static_cast<size_t>(out)] = static_cast<float>(sum);
      }
    }
  });
}

void run(const Machine& m, const plan::ExpertsCombine& op) {
  for (int64_t t = 0; t < m.step.n_rows(); ++t) {
    const double gate = sigmoid(m.row(op.shared_gate, t)[0]);
    for (size_t c = 0; c < static_cast<size_t>(m.dims().hidden); ++c) {
      double sum = 0;
      for (int j = 0; j < kExpertsPerToken; ++j) {
        const int64_t a = t * kExpertsPerToken + j;
        const int64_t row = op.routing.grouped() ? m.value(op.routing.position).i[static_cast<size_t>(a)] : a;
        sum += static_cast<double>(m.row(op.weights, t)[static_cast<size_t>(j)]) * m.row(op.experts, row)[c];
      }
      sum += gate * m.row(op.shared, t)[c];
      m.row(op.residual_out, t)[c] = static_cast<float>(m.row(op.residual_in, t)[c] + sum);
    }
  }
}

}  // namespace lily::backend::reference
