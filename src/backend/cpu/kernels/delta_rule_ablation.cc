// P4's ablation: the delta rule in blocks of tokens (docs/numerics.md, b1-b7), so that most of the work is
// matrix products. Per value head and block of n <= 32 rows, with the incoming state S:
//   A = strict_lower(diag(beta) (K K') * D), Rhs = diag(beta) (V - diag(e^gamma) K S), (I + A) X = Rhs
//   O = diag(e^gamma) Q S + lower((Q K') * D) X, S = e^gamma_n S + (diag(e^(gamma_n - gamma)) K)' X
// D_ij = exp(gamma_i - gamma_j) for i >= j: every exponent used is at most 0. gamma is summed in double
// precision. Unlike the scan's, the result's rounding depends on where the blocks begin.
#include <algorithm>
#include <array>
#include <cmath>

#include "backend/cpu/kernels/activation.h"
#include "backend/cpu/kernels/delta_rule.h"
#include "model/dims.h"

namespace lily::backend::cpu {
namespace {

constexpr int kDim = model::kDeltaHeadDim;
constexpr int kBlock = 32;

using Row = std::array<float, kDim>;

float dot(const float* a, const float* b) {
  float sum = 0;
  for (int i = 0; i < kDim; ++i) sum += a[i] * b[i];
  return sum;
}

// x S for one row x.
Row times_state(const float* x, const float* s) {
  Row y{};
  for (int i = 0; i < kDim; ++i) multiply_add(s + i * kDim, x[i], y.data(), kDim);
  return y;
}

void block(const DeltaArgs& a, int64_t first, int n, float* s) {
  std::array<double, kBlock> gamma;
  double total = 0;
  for (int i = 0; i < n; ++i) gamma[i] = total += a.g[(first + i) * a.gate_stride];
  const auto decay = [&](int i, int j) { return static_cast<float>(std::exp(gamma[i] - gamma[j])); };
  const auto q = [&](int i) { return a.q + (first + i) * a.qk_stride; };
  const auto k = [&](int i) { return a.k + (first + i) * a.qk_stride; };

  std::array<Row, kBlock> x;  // rows of X: the delta of each token
  for (int i = 0; i < n; ++i) {
    const float beta = a.beta[(first + i) * a.gate_stride];
    const float* v = a.v + (first + i) * a.v_stride;
    const auto carried = static_cast<float>(std::exp(gamma[i]));
    const Row ks = times_state(k(i), s);
    for (int c = 0; c < kDim; ++c) x[i][c] = beta * (v[c] - carried * ks[c]);
    for (int j = 0; j < i; ++j)
      multiply_add(x[j].data(), -beta * dot(k(i), k(j)) * decay(i, j), x[i].data(), kDim);
  }
  for (int i = 0; i < n; ++i) {
    const auto carried = static_cast<float>(std::exp(gamma[i]));
    Row o = times_state(q(i), s);
    for (float& value : o) value *= carried;
    for (int j = 0; j <= i; ++j) multiply_add(x[j].data(), dot(q(i), k(j)) * decay(i, j), o.data(), kDim);
    std::copy(o.begin(), o.end(), a.o + (first + i) * a.o_stride);
  }
  const auto carried = static_cast<float>(std::exp(total));
  for (int r = 0; r < kDim; ++r) {
    float* row = s + r * kDim;
    for (int c = 0; c < kDim; ++c) row[c] *= carried;
    for (int i = 0; i < n; ++i) multiply_add(x[i].data(), k(i)[r] * decay(n - 1, i), row, kDim);
  }
}

}  // namespace

void delta_rule_blocks(const DeltaArgs& args) {
  float* s = args.state_out;
  if (args.state_in == nullptr) std::fill_n(s, kDim * kDim, 0.0f);
  else if (args.state_in != s) std::copy_n(args.state_in, kDim * kDim, s);
  for (int64_t first = 0; first < args.n_rows; first += kBlock)
    block(args, first, static_cast<int>(std::min<int64_t>(kBlock, args.n_rows - first)), s);
}

}  // namespace lily::backend::cpu
