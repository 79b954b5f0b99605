// Gated DeltaNet, equations (14)-(20).
#include <algorithm>
#include <cmath>

#include "backend/reference/machine.h"

namespace lily::backend::reference {

using model::kConvTaps;
using model::kDeltaHeadDim;
using model::Weight;

void run(const Machine& m, const plan::ShortConv& op) {
  const std::span<const float> taps = m.weights.vector({Weight::conv, op.layer});  // [channels, 4]
  const auto channels = static_cast<size_t>(m.dims().conv_channels());
  for (const Segment& s : m.step.segments) {
    // The last three rows before the step, then the step's own.
    std::vector<float> x((kConvTaps - 1) * channels, 0.0f);
    if (s.src != kNoState) x = m.memory.conv(s.src, op.layer);
    for (int t = s.first_row; t < s.first_row + s.n_rows; ++t) {
      const auto row = m.row(op.x, t);
      x.insert(x.end(), row.begin(), row.end());
      const auto y = m.row(op.y, t);
      for (size_t ch = 0; ch < channels; ++ch) {
        double sum = 0;
        for (size_t tap = 0; tap < kConvTaps; ++tap)
          sum += static_cast<double>(taps[ch * kConvTaps + tap]) *
                 x[(static_cast<size_t>(t - s.first_row) + tap) * channels + ch];
        y[ch] = silu(sum);
      }
    }
    m.memory.write_conv(s.dst, op.layer, std::span(x).last((kConvTaps - 1) * channels));
  }
}

void run(const Machine& m, const plan::DeltaPrepare& op) {
  const std::span<const float> a_log = m.weights.vector({Weight::a_log, op.layer});
  const std::span<const float> dt_bias = m.weights.vector({Weight::dt_bias, op.layer});
  // x / sqrt(sum(x^2) + eps): the epsilon is inside the sum, not the mean.
  const auto l2_norm = [](std::span<const float> x, double scale, std::span<float> y) {
    double sum = 0;
    for (const float v : x) sum += static_cast<double>(v) * v;
    for (size_t j = 0; j < x.size(); ++j)
      y[j] = static_cast<float>(x[j] / std::sqrt(sum + model::kNormEpsilon) * scale);
  };
  for (int64_t t = 0; t < m.step.n_rows(); ++t) {
    for (int64_t h = 0; h < m.dims().n_key_heads; ++h) {
      const auto first = static_cast<size_t>(h * kDeltaHeadDim);
      l2_norm(m.row(op.q_in, t).subspan(first, kDeltaHeadDim), 1.0 / std::sqrt(kDeltaHeadDim),
              m.row(op.q, t).subspan(first, kDeltaHeadDim));
      l2_norm(m.row(op.k_in, t).subspan(first, kDeltaHeadDim), 1.0,
              m.row(op.k, t).subspan(first, kDeltaHeadDim));
    }
    for (size_t h = 0; h < static_cast<size_t>(m.dims().n_value_heads); ++h) {
      const double y = static_cast<double>(m.row(op.a, t)[h]) + dt_bias[h];
      const double softplus = std::max(y, 0.0) + std::log1p(std::exp(-std::abs(y)));
      m.row(op.g, t)[h] = static_cast<float>(-std::exp(static_cast<double>(a_log[h])) * softplus);
      m.row(op.beta, t)[h] = sigmoid(m.row(op.b, t)[h]);
    }
  }
}

void run(const Machine& m, const plan::DeltaRule& op) {
  constexpr size_t kDim = kDeltaHeadDim;
  for (const Segment& s : m.step.segments) {
    const auto size = static_cast<size_t>(m.dims().n_value_heads) * kDim * kDim;
    std::vector<float> state(size, 0.0f);  // [value head][dk][dv]
    if (s.src != kNoState) state = m.memory.delta(s.src, op.layer);
    m.parallel(m.dims().n_value_heads, [&](int64_t head) {
      const auto h = static_cast<size_t>(head);
      const std::span<float> S = std::span(state).subspan(h * kDim * kDim, kDim * kDim);
      for (int t = s.first_row; t < s.first_row + s.n_rows; ++t) {
        const size_t key_head = h / model::kValueHeadsPerKey;
        const auto q = m.row(op.q, t).subspan(key_head * kDim, kDim);
        const auto k = m.row(op.k, t).subspan(key_head * kDim, kDim);
        const auto v = m.row(op.v, t).subspan(h * kDim, kDim);
        const double decay = std::exp(static_cast<double>(m.row(op.g, t)[h]));
        const double beta = m.row(op.beta, t)[h];
        for (float& x : S) x = static_cast<float>(decay * x);
        for (size_t c = 0; c < kDim; ++c) {  // columns are independent
          double read = 0;
          for (size_t i = 0; i < kDim; ++i) read += static_cast<double>(k[i]) * S[i * kDim + c];
          const double delta = beta * (v[c] - read);
          double out = 0;
          for (size_t i = 0; i < kDim; ++i) {
            S[i * kDim + c] = static_cast<float>(S[i * kDim + c] + k[i] * delta);
            out += static_cast<double>(q[i]) * S[i * kDim + c];
          }
          m.row(op.o, t)[h * kDim + c] = static_cast<float>(out);
        }
      }
    });
    m.memory.write_delta(s.dst, op.layer, state);
  }
}

void run(const Machine& m, const plan::GatedNorm& op) {
  const std::span<const float> w = m.weights.vector({Weight::delta_norm, op.layer});
  for (int64_t t = 0; t < m.step.n_rows(); ++t)
    for (int64_t h = 0; h < m.dims().n_value_heads; ++h) {
      const auto first = static_cast<size_t>(h * kDeltaHeadDim);
      const auto y = m.row(op.y, t).subspan(first, kDeltaHeadDim);
      const auto z = m.row(op.z, t).subspan(first, kDeltaHeadDim);
      rms_norm(m.row(op.o, t).subspan(first, kDeltaHeadDim), w, y);  // norm first, gate second
      for (size_t j = 0; j < y.size(); ++j) y[j] = static_cast<float>(static_cast<double>(y[j]) * silu(z[j]));
    }
}

}  // namespace lily::backend::reference
