#include "tests/backend/metal/delta_error.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <span>

#include "model/dims.h"

namespace lily::test {
namespace {

constexpr size_t kSide = model::kDeltaHeadDim;
using Vector = std::array<double, kSide>;

double dot(const Vector& a, const Vector& b) {
  double sum = 0;
  for (size_t i = 0; i < kSide; ++i) sum += a[i] * b[i];
  return sum;
}

// One row of a head, in exact arithmetic: S' = decay S, delta = beta (v - S'^T k), S = S' + k delta^T.
// Variances of roundings are in units of u^2 / 3, that of one rounding of a value of size 1, u = 2^-24.
struct Token {
  Vector q, k;
  double decay = 0, beta = 0;
  std::vector<double> decayed, state;  // S' and S: [dk][dv]
  Vector delta, delta_variance;        // [dv]; what computing delta from S' adds
  Vector o_variance;                   // and o from S
};

// Of sum_i a_i M_i as the kernel forms it: each product is rounded, then goes through three additions in its
// lane and five between lanes. Partial sums have the size of their terms or, where these agree in sign, of
// the result.
constexpr double kRoundingsOfSum = 9;
void sum_columns(const Vector& a, const std::vector<double>& m, Vector& sum, Vector& variance) {
  Vector squares{};
  sum.fill(0);
  for (size_t i = 0; i < kSide; ++i)
    for (size_t c = 0; c < kSide; ++c) {
      const double term = a[i] * m[i * kSide + c];
      sum[c] += term;
      squares[c] += term * term;
    }
  for (size_t c = 0; c < kSide; ++c) variance[c] = kRoundingsOfSum * (squares[c] + sum[c] * sum[c]);
}

void advance(Token& t, std::vector<double> state, std::span<const float> v) {
  for (double& x : state) x *= t.decay;
  t.decayed = state;
  Vector read, o;
  sum_columns(t.k, state, read, t.delta_variance);
  for (size_t c = 0; c < kSide; ++c) {
    t.delta[c] = t.beta * (static_cast<double>(v[c]) - read[c]);
    // The sum's, then those of the difference and of its product with beta.
    t.delta_variance[c] = t.beta * t.beta * t.delta_variance[c] + 2 * t.delta[c] * t.delta[c];
  }
  for (size_t i = 0; i < kSide; ++i)
    for (size_t c = 0; c < kSide; ++c) state[i * kSide + c] += t.k[i] * t.delta[c];
  sum_columns(t.q, state, o, t.o_variance);
  t.state = std::move(state);
}

// The variance of the last token's o: w says how o responds to a change of the state, first of that which the
// token read, then of each one before it; a token's roundings count with its w.
Vector variance_of(std::span<const Token> tokens) {
  constexpr double kDecayRoundings = 4;  // exp in fp32 is good to 2 u: the same error in all of a column
  Vector w = tokens.back().q, variance = tokens.back().o_variance;
  for (size_t s = tokens.size(); s-- > 0;) {
    const Token& t = tokens[s];
    const double along_k = dot(w, t.k);
    Vector before;  // as o responds to S': delta takes back beta k k^T of it
    for (size_t i = 0; i < kSide; ++i) before[i] = w[i] - t.beta * t.k[i] * along_k;
    Vector response{};
    double of_product = 0;
    for (size_t i = 0; i < kSide; ++i) {
      // The kernel's product and sum, the kernel's decay, and the two that the reference keeps in fp32.
      const double after2 = 2 * w[i] * w[i], before2 = 2 * before[i] * before[i];
      of_product += w[i] * w[i] * t.k[i] * t.k[i];
      for (size_t c = 0; c < kSide; ++c) {
        const double x = t.state[i * kSide + c], y = t.decayed[i * kSide + c];
        variance[c] += after2 * x * x + before2 * y * y;
        response[c] += before[i] * y;
      }
    }
    for (size_t c = 0; c < kSide; ++c)
      variance[c] += of_product * t.delta[c] * t.delta[c] + along_k * along_k * t.delta_variance[c] +
                     kDecayRoundings * response[c] * response[c];
    for (size_t i = 0; i < kSide; ++i) w[i] = t.decay * before[i];
  }
  return variance;
}

}  // namespace

std::vector<double> delta_rule_error(const plan::Plan& plan, const plan::DeltaRule& op,
                                     const backend::StepInputs& inputs, backend::Program& reference,
                                     backend::Device& device) {
  const auto q = reference.read(op.q), k = reference.read(op.k), v = reference.read(op.v.value),
             g = reference.read(op.g), beta = reference.read(op.beta);
  const auto n_heads = static_cast<size_t>(plan.dims.n_value_heads),
             keys = static_cast<size_t>(plan.dims.key_width()),
             v_stride = static_cast<size_t>(plan.value(op.v.value).cols),
             v_first = static_cast<size_t>(op.v.first_col);
  std::vector<double> error(inputs.tokens.size() * n_heads * kSide);
  for (const backend::Segment& s : inputs.segments) {
    std::vector<float> start(n_heads * kSide * kSide, 0.0f);
    if (s.src != backend::kNoState) start = device.read_delta_state(s.src, op.layer);
    for (size_t h = 0; h < n_heads; ++h) {
      std::vector<Token> tokens;
      for (auto row = static_cast<size_t>(s.first_row); row < static_cast<size_t>(s.first_row + s.n_rows);
           ++row) {
        Token t;
        const size_t key = row * keys + h / model::kValueHeadsPerKey * kSide;
        std::copy_n(q.begin() + static_cast<std::ptrdiff_t>(key), kSide, t.q.begin());
        std::copy_n(k.begin() + static_cast<std::ptrdiff_t>(key), kSide, t.k.begin());
        t.decay = std::exp(static_cast<double>(g[row * n_heads + h]));
        t.beta = beta[row * n_heads + h];
        const std::span<const float> first = std::span(start).subspan(h * kSide * kSide, kSide * kSide);
        advance(t, tokens.empty() ? std::vector<double>(first.begin(), first.end()) : tokens.back().state,
                std::span(v).subspan(row * v_stride + v_first + h * kSide, kSide));
        tokens.push_back(std::move(t));
        const Vector variance = variance_of(tokens);
        for (size_t c = 0; c < kSide; ++c)
          error[(row * n_heads + h) * kSide + c] = 6 / std::sqrt(3.0) * 0x1p-24 * std::sqrt(variance[c]);
      }
    }
  }
  return error;
}

}  // namespace lily::test
