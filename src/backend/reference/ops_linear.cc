// Embedding, norms and linear maps.
#include <algorithm>
#include <cmath>

#include "backend/reference/machine.h"
#include "base/error.h"

namespace lily::backend::reference {

using model::LinearView;
using model::Storage;

std::vector<float> weight_row(const LinearView& weight, int64_t matrix, int64_t out) {
  const int64_t row = matrix * weight.out + out;
  std::vector<float> w(static_cast<size_t>(weight.in));
  if (weight.storage == Storage::bf16) {
    for (int64_t j = 0; j < weight.in; ++j)
      w[static_cast<size_t>(j)] = to_float(weight.values[row * weight.in + j]);
    return w;
  }
  LILY_CHECK(weight.storage == Storage::q4 || weight.storage == Storage::q8);
  const int bits = weight.storage == Storage::q4 ? 4 : 8;
  for (int64_t j = 0; j < weight.in; ++j) {
    const int64_t element = row * weight.in + j;
    const int64_t group = element / model::kQuantGroup;
    const int code =
        bits == 8 ? weight.codes[element] : (weight.codes[element / 2] >> (4 * (element % 2))) & 15;
    w[static_cast<size_t>(j)] =
        to_float(weight.scales[group]) * static_cast<float>(code) + to_float(weight.biases[group]);
  }
  return w;
}

namespace {

double dot(std::span<const float> a, std::span<const float> b) {
  double sum = 0;
  for (size_t j = 0; j < a.size(); ++j) sum += static_cast<double>(a[j]) * b[j];
  return sum;
}

}  // namespace

void rms_norm(std::span<const float> x, std::span<const float> w, std::span<float> y) {
  const double mean_square = dot(x, x) / static_cast<double>(x.size());
  const double r = 1.0 / std::sqrt(mean_square + model::kNormEpsilon);
  for (size_t j = 0; j < x.size(); ++j) y[j] = static_cast<float>(x[j] * r * w[j]);
}

float sigmoid(double x) { return static_cast<float>(1.0 / (1.0 + std::exp(-x))); }
float silu(double x) { return static_cast<float>(x / (1.0 + std::exp(-x))); }

void run(const Machine& m, const plan::Embed& op) {
  const LinearView embed = m.weights.linear({model::Weight::embed, model::kNoLayer});
  for (int t = 0; t < m.step.n_rows(); ++t) {
    int32_t token = m.step.tokens[static_cast<size_t>(t)];
    if (token == kTokenFromSlot) {
      const Segment& segment =
          m.step.segments[static_cast<size_t>(m.step.segment_of_row[static_cast<size_t>(t)])];
      token = m.memory.tokens.at(static_cast<size_t>(segment.token_in));
    }
    LILY_CHECK(token >= 0 && token < m.dims().vocab, "token {}", token);
    const std::vector<float> w = weight_row(embed, 0, token);
    std::copy(w.begin(), w.end(), m.row(op.y, t).begin());
  }
}

void run(const Machine& m, const plan::RmsNorm& op) {
  const std::span<const float> w = m.weights.vector(op.weight);
  for (int64_t t = 0; t < m.n_rows(op.y); ++t) rms_norm(m.row(op.x, t), w, m.row(op.y, t));
}

void run(const Machine& m, const plan::Linear& op) {
  int64_t first_col = 0;
  for (const model::WeightId id : op.weights) {
    const LinearView weight = m.weights.linear(id);
    m.parallel(weight.out, [&](int64_t out) {
      const std::vector<float> w = weight_row(weight, 0, out);
      for (int64_t t = 0; t < m.n_rows(op.y); ++t)
        m.row(op.y, t)[static_cast<size_t>(first_col + out)] = static_cast<float>(dot(m.row(op.x, t), w));
    });
    first_col += weight.out;
  }
}

void run(const Machine& m, const plan::Add& op) {
  for (int64_t t = 0; t < m.n_rows(op.x); ++t)
    for (int64_t j = 0; j < m.dims().hidden; ++j) {
      const auto c = static_cast<size_t>(j);
      m.row(op.residual_out, t)[c] = m.row(op.residual_in, t)[c] + m.row(op.x, t)[c];
    }
}

void run(const Machine& m, const plan::SwiGlu& op) {
  for (int64_t t = 0; t < m.n_rows(op.y); ++t) {
    const auto gate = m.row(op.gate, t), up = m.row(op.up, t), y = m.row(op.y, t);
    for (size_t j = 0; j < y.size(); ++j)
      y[j] = static_cast<float>(static_cast<double>(silu(gate[j])) * up[j]);
  }
}

void run(const Machine& m, const plan::GatherRows& op) {
  for (int o = 0; o < m.step.n_outputs(); ++o) {
    const auto from = m.row(op.x, m.step.output_rows[static_cast<size_t>(o)]);
    std::copy(from.begin(), from.end(), m.row(op.y, o).begin());
  }
}

}  // namespace lily::backend::reference
