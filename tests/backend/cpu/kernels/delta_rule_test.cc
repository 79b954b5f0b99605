#include "backend/cpu/kernels/delta_rule.h"

#include "backend/cpu/kernels/norm.h"
#include "tests/backend/cpu/kernels/kernel_test.h"

namespace lily::backend::cpu {
namespace {

constexpr int kDim = 128;

class DeltaRule : public PerTarget {};

struct Rows {
  int64_t n;
  std::vector<float> q, k, v, g, beta, o;
  Rows(int64_t n_rows, float decay, std::mt19937& random)
      : n(n_rows),
        q(random_floats(n * kDim, random)),
        k(random_floats(n * kDim, random)),
        v(random_floats(n * kDim, random)),
        g(random_floats(n, random)),
        beta(random_floats(n, random)),
        o(static_cast<size_t>(n * kDim), kPoison) {
    for (int64_t t = 0; t < n; ++t) {
      l2_norm(q.data() + t * kDim, 0.088388348f, q.data() + t * kDim, kDim);
      l2_norm(k.data() + t * kDim, 1, k.data() + t * kDim, kDim);
      g[static_cast<size_t>(t)] = -decay * std::abs(g[static_cast<size_t>(t)]);
      beta[static_cast<size_t>(t)] = 1 / (1 + std::exp(-beta[static_cast<size_t>(t)]));
    }
  }
  DeltaArgs args(int64_t first, int64_t count, const float* in, float* out) {
    return {q.data() + first * kDim,
            k.data() + first * kDim,
            kDim,
            v.data() + first * kDim,
            kDim,
            g.data() + first,
            beta.data() + first,
            1,
            o.data() + first * kDim,
            kDim,
            count,
            in,
            out};
  }
};

// Equation (19) as it stands.
struct Oracle {
  std::vector<double> s, o;
  double largest = 0;
  Oracle(const Rows& r, const float* in) : s(kDim * kDim, 0.0), o(static_cast<size_t>(r.n * kDim), 0.0) {
    if (in != nullptr) s.assign(in, in + kDim * kDim);
    for (int64_t t = 0; t < r.n; ++t) {
      const auto at = static_cast<size_t>(t);
      const double decay = std::exp(double{r.g[at]});
      for (double& x : s) x *= decay;
      for (size_t c = 0; c < kDim; ++c) {
        double read = 0;
        for (size_t i = 0; i < kDim; ++i) read += r.k[at * kDim + i] * s[i * kDim + c];
        const double delta = r.beta[at] * (r.v[at * kDim + c] - read);
        for (size_t i = 0; i < kDim; ++i) {
          s[i * kDim + c] += r.k[at * kDim + i] * delta;
          o[at * kDim + c] += r.q[at * kDim + i] * s[i * kDim + c];
          largest = std::max(largest, std::abs(s[i * kDim + c]));
        }
      }
    }
  }
};

void check(void (*rule)(const DeltaArgs&), int64_t n, float decay, bool has_state, double units) {
  SCOPED_TRACE(testing::Message() << n << " rows, decay " << decay << (has_state ? ", with state" : ""));
  std::mt19937 random(static_cast<uint32_t>(n) + 100);
  Rows rows(n, decay, random);
  const auto in = random_floats(kDim * kDim, random, 0.5f);
  std::vector<float> out(kDim * kDim, kPoison);
  rule(rows.args(0, n, has_state ? in.data() : nullptr, out.data()));
  const Oracle oracle(rows, has_state ? in.data() : nullptr);
  // |q| = 128^-0.5 and |k| = 1 bound each sum over 128 key dims by sqrt(128) times the largest element of the
  // state; its rounding by 128 units of that. A step adds its own rounding and never amplifies an earlier one
  // (|I - beta k k'| <= 1).
  const double unit = units * kEps * (oracle.largest + 4) * std::sqrt(128.0);
  Worst worst_o, worst_s;
  for (size_t i = 0; i < oracle.o.size(); ++i)
    worst_o.see(static_cast<int64_t>(i), rows.o[i], oracle.o[i], unit * (1 + static_cast<double>(n)));
  for (size_t i = 0; i < oracle.s.size(); ++i)
    worst_s.see(static_cast<int64_t>(i), out[i], oracle.s[i], unit * (1 + static_cast<double>(n)));
  LILY_EXPECT_CLOSE(worst_o);
  LILY_EXPECT_CLOSE(worst_s);
}

TEST_P(DeltaRule, ScanAgreesWithDoublePrecision) {
  for (int64_t n : {1, 2, 3, 33}) {
    for (float decay : {0.01f, 1.0f, 10000.0f}) {
      check(delta_rule_scan, n, decay, false, 4);
      check(delta_rule_scan, n, decay, true, 4);
    }
  }
}

TEST_P(DeltaRule, BlocksAgreeWithDoublePrecision) {
  for (int64_t n : {1, 31, 32, 33, 80}) {
    for (float decay : {0.01f, 1.0f, 10000.0f}) {
      check(delta_rule_blocks, n, decay, false, 16);
      check(delta_rule_blocks, n, decay, true, 16);
    }
  }
}

TEST_P(DeltaRule, ScanDoesNotDependOnTheChunking) {
  std::mt19937 random(3);
  Rows whole(12, 0.3f, random);
  Rows parts = whole;
  std::vector<float> s1(kDim * kDim), s2(kDim * kDim);
  delta_rule_scan(whole.args(0, 12, nullptr, s1.data()));
  delta_rule_scan(parts.args(0, 5, nullptr, s2.data()));
  delta_rule_scan(parts.args(5, 1, s2.data(), s2.data()));
  delta_rule_scan(parts.args(6, 6, s2.data(), s2.data()));
  EXPECT_EQ(whole.o, parts.o);
  EXPECT_EQ(s1, s2);
}

TEST_P(DeltaRule, NoRowsCopyTheState) {
  std::mt19937 random(4);
  Rows none(0, 1, random);
  const auto in = random_floats(kDim * kDim, random);
  std::vector<float> out(kDim * kDim, kPoison);
  delta_rule_scan(none.args(0, 0, in.data(), out.data()));
  EXPECT_EQ(in, out);
}

LILY_FOR_EACH_TARGET(DeltaRule);

}  // namespace
}  // namespace lily::backend::cpu
