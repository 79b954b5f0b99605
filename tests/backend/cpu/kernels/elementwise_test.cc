#include <algorithm>
#include <numeric>

#include "backend/cpu/kernels/activation.h"
#include "backend/cpu/kernels/dot_rate.h"
#include "backend/cpu/kernels/embed.h"
#include "backend/cpu/kernels/norm.h"
#include "backend/cpu/kernels/rope.h"
#include "backend/cpu/kernels/router.h"
#include "backend/cpu/kernels/short_conv.h"
#include "tests/backend/cpu/kernels/kernel_test.h"

namespace lily::backend::cpu {
namespace {

class Norm : public PerTarget {};
class Activation : public PerTarget {};
class Router : public PerTarget {};
class Rope : public PerTarget {};
class ShortConv : public PerTarget {};
class ReadRate : public PerTarget {};

double silu(double x) { return x / (1 + std::exp(-x)); }

// Relative error of a norm: a sum of n squares, a root, a quotient and two products.
double norm_tolerance(double want, int64_t n) {
  return (static_cast<double>(n) / 16 + 16) * kEps * std::abs(want) + 1e-38;
}

TEST_P(Norm, RmsNormAgreesWithDoublePrecision) {
  std::mt19937 random(1);
  for (int64_t n : {16, 128, 256, 2048}) {
    for (float size : {1e-3f, 1.0f, 1e3f}) {
      const auto x = random_floats(n, random, size), w = random_floats(n, random);
      std::vector<float> y(x);
      rms_norm(y.data(), w.data(), y.data(), n);  // in place
      double squares = 0;
      for (float v : x) squares += double{v} * v;
      Worst worst;
      for (int64_t i = 0; i < n; ++i) {
        const auto at = static_cast<size_t>(i);
        const double want = x[at] / std::sqrt(squares / static_cast<double>(n) + 1e-6) * w[at];
        worst.see(i, y[at], want, norm_tolerance(want, n));
      }
      LILY_EXPECT_CLOSE(worst);
    }
  }
}

TEST_P(Norm, TheLengthsEpsilonIsAddedToTheSumAndNotToTheMean) {
  std::mt19937 random(2);
  const auto x = random_floats(128, random, 1e-3f);  // sum of squares 1.28e-4
  std::vector<float> y(128, kPoison);
  l2_norm(x.data(), 0.5f, y.data(), 128);
  double squares = 0;
  for (float v : x) squares += double{v} * v;
  Worst worst;
  for (size_t i = 0; i < 128; ++i) {
    const double want = 0.5 * x[i] / std::sqrt(squares + 1e-6);
    worst.see(static_cast<int64_t>(i), y[i], want, norm_tolerance(want, 128));
  }
  LILY_EXPECT_CLOSE(worst);
}

TEST_P(Norm, TheGateComesAfterTheNorm) {
  std::mt19937 random(3);
  const auto o = random_floats(128, random, 5), w = random_floats(128, random),
             z = random_floats(128, random, 3);
  std::vector<float> y(128, kPoison);
  gated_norm(o.data(), w.data(), z.data(), y.data(), 128);
  double squares = 0;
  for (float v : o) squares += double{v} * v;
  Worst worst;
  for (size_t i = 0; i < 128; ++i) {
    const double want = o[i] / std::sqrt(squares / 128 + 1e-6) * w[i] * silu(z[i]);
    worst.see(static_cast<int64_t>(i), y[i], want, norm_tolerance(want, 128));
  }
  LILY_EXPECT_CLOSE(worst);
}

TEST_P(Activation, SigmoidsAgreeAndSaturate) {
  std::vector<float> x = {0,    1,    -1,    20,    -20,    87,     -87,   100,
                          -100, 1e4f, -1e4f, 3e38f, -3e38f, 1e-30f, -0.0f, 5};
  const std::vector<float> ones(16, 1.0f);
  std::vector<float> gated(16, kPoison), swished(16, kPoison);
  sigmoid_gate(ones.data(), x.data(), gated.data(), 16);
  swiglu(x.data(), ones.data(), swished.data(), 16);
  for (size_t i = 0; i < 16; ++i) {
    const double s = 1 / (1 + std::exp(-double{x[i]}));
    // exp is good to 4 units in the last place, the quotient to half a one.
    EXPECT_NEAR(gated[i], s, 12 * kEps * s + 1e-37) << x[i];
    EXPECT_NEAR(swished[i], s * x[i], 12 * kEps * std::abs(s * x[i]) + std::abs(x[i]) * 1e-37) << x[i];
  }
}

TEST_P(Activation, SumsAndProductsOfRows) {
  std::mt19937 random(4);
  const auto a = random_floats(64, random), b = random_floats(64, random);
  std::vector<float> sum(64), fused(b);
  add_rows(a.data(), b.data(), sum.data(), 64);
  multiply_add(a.data(), 3.0f, fused.data(), 64);
  for (size_t i = 0; i < 64; ++i) {
    EXPECT_EQ(sum[i], b[i] + a[i]);
    EXPECT_NEAR(fused[i], b[i] + 3.0 * a[i], 4 * kEps * (std::abs(b[i]) + 3 * std::abs(a[i])));
  }
}

TEST(ActivationScalars, DecayIsBetweenZeroAndOneForAnyGate) {
  for (float a : {-1e4f, -30.0f, -1.0f, 0.0f, 1.0f, 30.0f, 1e4f}) {
    const double soft = std::max(double{a} + 0.5, 0.0) + std::log1p(std::exp(-std::abs(double{a} + 0.5)));
    const double want = -std::exp(0.7) * soft;
    EXPECT_NEAR(log_decay(0.7f, a, 0.5f), want, 16 * kEps * std::abs(want) + 1e-30) << a;
  }
  EXPECT_EQ(sigmoid(-1e4f), 0.0f);
  EXPECT_EQ(sigmoid(1e4f), 1.0f);
}

TEST_P(Router, ChoosesTheEightLargestInFallingOrder) {
  std::mt19937 random(5);
  for (int n_experts : {8, 9, 31, 32, 256}) {
    const auto logits = random_floats(n_experts, random, 3);
    std::vector<float> p(static_cast<size_t>(n_experts + 15));
    std::vector<int32_t> ids(8, -1);
    std::vector<float> weights(8, kPoison);
    router_top(logits.data(), n_experts, p.data(), ids.data(), weights.data());
    std::vector<int32_t> order(static_cast<size_t>(n_experts));
    std::iota(order.begin(), order.end(), 0);
    std::ranges::stable_sort(order, [&](int32_t a, int32_t b) {
      return logits[static_cast<size_t>(a)] > logits[static_cast<size_t>(b)];
    });
    double total = 0;
    for (size_t j = 0; j < 8; ++j) total += std::exp(double{logits[static_cast<size_t>(order[j])]});
    for (size_t j = 0; j < 8; ++j) {
      EXPECT_EQ(ids[j], order[j]);
      const double want = std::exp(double{logits[static_cast<size_t>(order[j])]}) / total;
      // The logits' distance to the largest rounds once; exp, the sum of 8 and the quotient follow.
      EXPECT_NEAR(weights[j], want, 64 * kEps * want);
    }
  }
}

TEST_P(Router, TiesKeepTheLowerIndex) {
  std::vector<float> logits(32, 1.0f), p(47), weights(8);
  logits[30] = 2;
  std::vector<int32_t> ids(8);
  router_top(logits.data(), 32, p.data(), ids.data(), weights.data());
  EXPECT_EQ(ids, (std::vector<int32_t>{30, 0, 1, 2, 3, 4, 5, 6}));
  logits.assign(32, kPoison);
  router_top(logits.data(), 32, p.data(), ids.data(), weights.data());
  for (int32_t id : ids) EXPECT_TRUE(id >= 0 && id < 32);
}

TEST_P(Rope, TurnsTheFirstSixtyFourValuesInPairs) {
  std::mt19937 random(6);
  const auto frequencies = rope_frequencies(1e7);
  for (int64_t position : {0, 1, 4095, 262143}) {
    const auto x = random_floats(256, random), w = random_floats(256, random);
    std::vector<float> normed(256), y(256, kPoison);
    rms_norm(x.data(), w.data(), normed.data(), 256);
    head_norm_rope(x.data(), w.data(), rope_row(frequencies, position), y.data());
    for (size_t i = 0; i < 32; ++i) {
      const double angle = static_cast<double>(position) * std::pow(1e7, -static_cast<double>(i) / 32);
      const double a = normed[i], b = normed[i + 32], size = std::abs(a) + std::abs(b);
      EXPECT_NEAR(y[i], a * std::cos(angle) - b * std::sin(angle), 4 * kEps * size);
      EXPECT_NEAR(y[i + 32], a * std::sin(angle) + b * std::cos(angle), 4 * kEps * size);
    }
    for (size_t i = 64; i < 256; ++i) EXPECT_EQ(y[i], normed[i]);
  }
}

TEST_P(ShortConv, AgreesWithDoublePrecisionAndKeepsTheLastThreeRows) {
  std::mt19937 random(7);
  constexpr int64_t c = 64;
  for (int64_t n_rows : {1, 2, 3, 7}) {
    for (bool has_state : {false, true}) {
      const auto x = random_floats(n_rows * c, random), w = random_floats(4 * c, random),
                 state = random_floats(3 * c, random);
      std::vector<float> y(static_cast<size_t>(n_rows * c), kPoison), out(3 * c, kPoison);
      ConvArgs args{x.data(),  c, y.data(), c, n_rows, c, w.data(), has_state ? state.data() : nullptr,
                    out.data()};
      short_conv(args, 0, 32);
      short_conv(args, 32, 64);
      const auto row = [&](int64_t t, int64_t ch) -> double {
        if (t >= 0) return x[static_cast<size_t>(t * c + ch)];
        return has_state ? state[static_cast<size_t>((t + 3) * c + ch)] : 0;
      };
      Worst worst;
      for (int64_t t = 0; t < n_rows; ++t) {
        for (int64_t ch = 0; ch < c; ++ch) {
          double sum = 0, size = 0;
          for (int64_t j = 0; j < 4; ++j) {
            const double term = w[static_cast<size_t>(j * c + ch)] * row(t - 3 + j, ch);
            sum += term;
            size += std::abs(term);
          }
          // |silu'| < 1.1
          worst.see(t * c + ch, y[static_cast<size_t>(t * c + ch)], silu(sum),
                    1.1 * 4 * kEps * size + 12 * kEps * std::abs(silu(sum)));
        }
      }
      LILY_EXPECT_CLOSE(worst);
      for (int64_t j = 0; j < 3; ++j)
        for (int64_t ch = 0; ch < c; ++ch)
          EXPECT_EQ(out[static_cast<size_t>(j * c + ch)], row(n_rows - 3 + j, ch));
    }
  }
}

TEST_P(ShortConv, OneChunkEqualsTwoAndStateMayStayInPlace) {
  std::mt19937 random(8);
  constexpr int64_t c = 32;
  const auto x = random_floats(9 * c, random), w = random_floats(4 * c, random);
  std::vector<float> whole(9 * c), parts(9 * c), state(3 * c), state2(3 * c);
  short_conv({x.data(), c, whole.data(), c, 9, c, w.data(), nullptr, state.data()}, 0, c);
  short_conv({x.data(), c, parts.data(), c, 2, c, w.data(), nullptr, state2.data()}, 0, c);
  short_conv({x.data() + 2 * c, c, parts.data() + 2 * c, c, 7, c, w.data(), state2.data(), state2.data()}, 0,
             c);
  EXPECT_EQ(whole, parts);
  EXPECT_EQ(state, state2);
}

TEST(EmbedRow, IsTheWeightsRowInEveryStorage) {
  std::mt19937 random(9);
  for (auto storage : {model::Storage::q4, model::Storage::q8, model::Storage::bf16}) {
    const TestWeight w(storage, 37, 128, random);
    for (int64_t row : {0, 15, 16, 36}) {
      std::vector<float> y(128, kPoison);
      embed_row(w.matrix(), row, y.data());
      for (int64_t c = 0; c < 128; ++c) {
        const double want = w.at(row, c);
        EXPECT_NEAR(y[static_cast<size_t>(c)], want, 2 * kEps * (std::abs(want) + 2)) << row << "," << c;
      }
    }
  }
}

TEST_P(ReadRate, TheSumIsOfAllWords) {
  std::mt19937_64 random(8);
  for (const size_t n : {0, 1, 15, 16, 63, 64, 65, 1000}) {
    std::vector<uint64_t> words(n);
    for (uint64_t& word : words) word = random();
    const uint64_t sum = std::accumulate(words.begin(), words.end(), uint64_t{0});
    EXPECT_EQ(sum_words(words, false), sum) << n;
    EXPECT_EQ(sum_words(words, true), sum) << n;
  }
}

LILY_FOR_EACH_TARGET(Norm);
LILY_FOR_EACH_TARGET(Activation);
LILY_FOR_EACH_TARGET(Router);
LILY_FOR_EACH_TARGET(Rope);
LILY_FOR_EACH_TARGET(ShortConv);
LILY_FOR_EACH_TARGET(ReadRate);

}  // namespace
}  // namespace lily::backend::cpu
