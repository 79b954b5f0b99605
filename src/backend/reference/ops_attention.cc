// Gated full attention, equations (7)-(12).
#include <algorithm>
#include <cmath>
#include <limits>

#include "backend/reference/machine.h"

namespace lily::backend::reference {

using model::kHeadDim;
using model::kRotaryDim;

void run(const Machine& m, const plan::HeadNormRope& op) {
  const std::span<const float> w = m.weights.vector(op.weight);
  const int64_t n_heads = m.value(op.y).n_cols / kHeadDim;
  for (int64_t t = 0; t < m.step.n_rows(); ++t) {
    const double position = m.step.position_of_row[static_cast<size_t>(t)];
    for (int64_t h = 0; h < n_heads; ++h) {
      const auto x = m.row(op.x, t).subspan(static_cast<size_t>(h * op.head_stride), kHeadDim);
      const auto y = m.row(op.y, t).subspan(static_cast<size_t>(h * kHeadDim), kHeadDim);
      rms_norm(x, w, y);
      for (int i = 0; i < kRotaryDim / 2; ++i) {  // pairs (i, i + 32)
        const double angle = position * std::pow(m.dims().rope_theta, -2.0 * i / kRotaryDim);
        const auto lo = static_cast<size_t>(i), hi = static_cast<size_t>(i + kRotaryDim / 2);
        const double a = y[lo], b = y[hi];
        y[lo] = static_cast<float>(a * std::cos(angle) - b * std::sin(angle));
        y[hi] = static_cast<float>(a * std::sin(angle) + b * std::cos(angle));
      }
    }
  }
}

void run(const Machine& m, const plan::KvAppend& op) {
  for (const Segment& s : m.step.segments)
    for (int t = s.first_row; t < s.first_row + s.n_rows; ++t) {
      const int position = m.step.position_of_row[static_cast<size_t>(t)];
      const int block = m.step.block_of(s, position);
      const auto at = static_cast<size_t>(position % kKvBlockTokens * m.dims().kv_width());
      KvRows k = m.memory.k_rows(block, op.layer), v = m.memory.v_rows(block, op.layer);
      if (at == 0) k.clear(), v.clear();  // begun anew
      k.write(at, m.row(op.k, t));
      v.write(at, m.row(op.v, t));
    }
}

void run(const Machine& m, const plan::Attention& op) {
  const int64_t heads_per_kv = m.dims().n_q_heads / m.dims().n_kv_heads;
  const double scale = 1.0 / std::sqrt(static_cast<double>(kHeadDim));
  m.parallel(int64_t{m.step.n_rows()} * m.dims().n_q_heads, [&](int64_t item) {
    const int64_t t = item / m.dims().n_q_heads, h = item % m.dims().n_q_heads;
    const Segment& s = m.step.segments[static_cast<size_t>(m.step.segment_of_row[static_cast<size_t>(t)])];
    const int n_keys = m.step.position_of_row[static_cast<size_t>(t)] + 1;
    const auto q = m.row(op.q, t).subspan(static_cast<size_t>(h * kHeadDim), kHeadDim);
    const auto o = m.row(op.o, t).subspan(static_cast<size_t>(h * kHeadDim), kHeadDim);
    // Where the head's values of a position begin in its block.
    const auto at = [&](int p) {
      return static_cast<size_t>(p % kKvBlockTokens * m.dims().kv_width() + h / heads_per_kv * kHeadDim);
    };
    std::vector<float> k(kHeadDim), v(kHeadDim);
    std::vector<double> score(static_cast<size_t>(n_keys));
    double largest = -std::numeric_limits<double>::infinity();
    for (int p = 0; p < n_keys; ++p) {
      m.memory.k_rows(m.step.block_of(s, p), op.layer).read(at(p), k);
      double sum = 0;
      for (size_t j = 0; j < kHeadDim; ++j) sum += static_cast<double>(q[j]) * k[j];
      score[static_cast<size_t>(p)] = sum * scale;
      largest = std::max(largest, sum * scale);
    }
    std::vector<double> sum(kHeadDim, 0.0);
    double denominator = 0;
    for (int p = 0; p < n_keys; ++p) {
      const double weight = std::exp(score[static_cast<size_t>(p)] - largest);
      denominator += weight;
      m.memory.v_rows(m.step.block_of(s, p), op.layer).read(at(p), v);
      for (size_t j = 0; j < kHeadDim; ++j) sum[j] += weight * v[j];
    }
    for (size_t j = 0; j < kHeadDim; ++j) o[j] = static_cast<float>(sum[j] / denominator);
  });
}

void run(const Machine& m, const plan::AttentionGate& op) {
  for (int64_t t = 0; t < m.step.n_rows(); ++t)
    for (int64_t h = 0; h < m.dims().n_q_heads; ++h)
      for (int64_t j = 0; j < kHeadDim; ++j) {
        const auto c = static_cast<size_t>(h * kHeadDim + j);
        const float gate = m.row(op.gate, t)[static_cast<size_t>(h * 2 * kHeadDim + kHeadDim + j)];
        m.row(op.y, t)[c] = static_cast<float>(static_cast<double>(m.row(op.o, t)[c]) * sigmoid(gate));
      }
}

}  // namespace lily::backend::reference
