#include "backend/cuda/prefill_attention.h"

#include <algorithm>
#include <cstdio>
#include <numeric>

#include "tests/backend/cuda/kv_bytes.h"
#include "tests/backend/cuda_prefill/support.h"

namespace lily::cuda::test {
namespace {

constexpr double kTheta = 1e7;

struct Shape {
  int n_tokens, position, n_kv_heads;
};

struct Case {
  Shape shape;
  int n_q, n_blocks;
  std::vector<uint16_t> q_gate, k, v;
  std::vector<float> cache_k, cache_v;  // tests/backend/cuda/kv_bytes.h
  std::vector<float> q_norm, k_norm;
  std::vector<int32_t> table;

  Case(Random& random, const Shape& s)
      : shape(s), n_q(8 * s.n_kv_heads), n_blocks((s.position + s.n_tokens + 63) / 64 + 2) {
    q_gate = random.normals(static_cast<size_t>(s.n_tokens) * n_q * 512);
    k = random.normals(static_cast<size_t>(s.n_tokens) * s.n_kv_heads * 256);
    v = random.normals(k.size());
    for (int i = 0; i < 256; ++i)
      q_norm.push_back(value(bits(1.5f + random.normal(0.3f)))),
          k_norm.push_back(value(bits(1 + random.normal(0.3f))));
    table.resize(n_blocks);
    std::iota(table.begin(), table.end(), 0);
    std::shuffle(table.begin(), table.end(), std::mt19937(7));
    // What lies past the sequence's end is NaN.
    cache_k.assign(static_cast<size_t>(n_blocks) * s.n_kv_heads * 64 * 256, NAN);
    cache_v = cache_k;
    for (int p = 0; p < s.position; ++p)
      for (int h = 0; h < s.n_kv_heads; ++h)
        for (int i = 0; i < 256; ++i) {
          cache_k[at(p, h) + i] = value(bits(random.normal()));
          cache_v[at(p, h) + i] = value(bits(random.normal()));
        }
  }
  size_t at(int p, int head) const {
    return ((static_cast<size_t>(table[p / 64]) * 64 + p % 64) * shape.n_kv_heads + head) * 256;
  }
};

std::vector<double> normed_and_rotated(const uint16_t* x, const std::vector<float>& weight, int position) {
  double squares = 0;
  for (int i = 0; i < 256; ++i) squares += std::pow(value(x[i]), 2);
  std::vector<double> y(256);
  for (int i = 0; i < 256; ++i) y[i] = value(x[i]) / std::sqrt(squares / 256 + 1e-6) * weight[i];
  for (int i = 0; i < 32; ++i) {
    const double angle = position * std::pow(kTheta, -i / 32.0), a = y[i], b = y[i + 32];
    y[i] = a * std::cos(angle) - b * std::sin(angle);
    y[i + 32] = a * std::sin(angle) + b * std::cos(angle);
  }
  return y;
}

class Attention : public ::testing::TestWithParam<std::tuple<Shape, KvForm>> {};

TEST_P(Attention, PreparesAppendsAndAttends) {
  const auto [shape, form] = GetParam();
  Random random(80 + static_cast<uint64_t>(shape.n_tokens));
  const Case c(random, shape);
  const int n = shape.n_tokens, n_kv = shape.n_kv_heads, n_q = c.n_q;
  const DeviceArray<uint16_t> q_gate(c.q_gate), k(c.k), v(c.v);
  const std::vector<std::byte> k_before = kv_bytes(c.cache_k, form, n_kv),
                               v_before = kv_bytes(c.cache_v, form, n_kv);
  const DeviceArray<std::byte> cache_k(k_before), cache_v(v_before);
  const DeviceArray<float> q_norm(c.q_norm), k_norm(c.k_norm);
  const DeviceArray<int32_t> table(c.table);
  DeviceArray<float2> rope(static_cast<size_t>(n) * 32);
  DeviceArray<uint16_t> q(static_cast<size_t>(n) * n_q * 256), y(q.size());
  const AttentionArgs args{n,
                           shape.position,
                           n_q,
                           q_gate.get(),
                           k.get(),
                           v.get(),
                           n_q * 512,
                           n_kv * 256,
                           q_norm.get(),
                           k_norm.get(),
                           rope.get(),
                           kv_apart(cache_k.get(), cache_v.get(), n_kv, form),
                           table.get(),
                           q.get(),
                           y.get()};
  rope_table_prefill(rope.get(), n, shape.position, kTheta, nullptr);
  qk_prepare_prefill(args, nullptr);
  finish();
  // A row's largest error: bf16 of the result, fp32 of norm and rotation.
  std::vector<double> want;
  for (int t = 0; t < n; ++t)
    for (int h = 0; h < n_q; ++h) {
      const auto row = normed_and_rotated(&c.q_gate[(static_cast<size_t>(t) * n_q + h) * 512], c.q_norm,
                                          shape.position + t);
      want.insert(want.end(), row.begin(), row.end());
    }
  expect_close(values(q.download()), want, 0x1p-8, {3e-6 * 8}, n_q * 256, "q");
  const auto got_k = kv_floats(cache_k.download(), form, n_kv),
             got_v = kv_floats(cache_v.download(), form, n_kv);
  std::vector<float> without_k = got_k, wanted_v = c.cache_v;
  for (int t = 0; t < n; ++t)
    for (int h = 0; h < n_kv; ++h)
      for (int i = 0; i < 256; ++i)
        wanted_v[c.at(shape.position + t, h) + i] = value(c.v[(static_cast<size_t>(t) * n_kv + h) * 256 + i]);
  EXPECT_EQ(cache_v.download(), kv_bytes(wanted_v, form, n_kv)) << "values, bit for bit";
  for (int t = 0; t < n; ++t)
    for (int h = 0; h < n_kv; ++h) {
      const size_t at = c.at(shape.position + t, h);
      const auto row =
          normed_and_rotated(&c.k[(static_cast<size_t>(t) * n_kv + h) * 256], c.k_norm, shape.position + t);
      for (int i = 0; i < 256; ++i) {
        double largest = 0;
        for (int j = i / 64 * 64; j < i / 64 * 64 + 64; ++j) largest = std::max(largest, std::abs(row[j]));
        ASSERT_NEAR(got_k[at + i], row[i], std::abs(row[i]) * 0x1p-8 + 3e-5 + kv_error(form, largest))
            << "key of token " << t << ", column " << i;
        without_k[at + i] = NAN;
      }
    }
  EXPECT_EQ(kv_bytes(without_k, form, n_kv), k_before) << "the append wrote elsewhere";
  // Codes times their scale enter the products as bf16.
  const auto operand = [](float x) { return static_cast<double>(bf16_rounded(x)); };

  for (const auto attend : {attention_prefill, attention_mma_prefill}) {
    y.poison();
    attend(args, nullptr);
    finish();
    const auto got = values(y.download());
    const auto q_bits = q.download();
    std::vector<int> tokens;  // all of few, else every 7th: kernels take 8, 16 or 64 at a time
    for (int t = 0; t < n; ++t)
      if (n <= 64 || t % 7 == 0 || t == n - 1) tokens.push_back(t);
    const auto row_of = [&](size_t i) {
      return static_cast<size_t>(tokens[i / n_q]) * n_q + i % n_q;  // token and head
    };
    std::vector<double> expected(tokens.size() * n_q * 256), tolerance(expected.size());
    for_each_index(tokens.size() * n_q, [&](size_t i_row) {
      const int t = tokens[i_row / n_q], h = static_cast<int>(i_row % n_q);
      const int n_keys = shape.position + t + 1;
      std::vector<double> weight(n_keys);
      double top = -1e300, sum = 0;
      for (int p = 0; p < n_keys; ++p) {
        double dot = 0;
        const size_t at = c.at(p, h / 8);
        for (int i = 0; i < 256; ++i)
          dot += static_cast<double>(value(q_bits[(static_cast<size_t>(t) * n_q + h) * 256 + i])) *
                 operand(got_k[at + i]);
        weight[p] = dot / 16;
        top = std::max(top, weight[p]);
      }
      for (auto& w : weight) w = std::exp(w - top), sum += w;
      double o[256] = {}, size[256] = {};
      for (int p = 0; p < n_keys; ++p) {
        const size_t at = c.at(p, h / 8);
        const double share = weight[p] / sum;
        for (int i = 0; i < 256; ++i) {
          const double term = share * operand(got_v[at + i]);
          o[i] += term, size[i] += std::abs(term);
        }
      }
      for (int i = 0; i < 256; ++i) {
        const double gate = 1 / (1 + std::exp(-static_cast<double>(value(
                                         c.q_gate[(static_cast<size_t>(t) * n_q + h) * 512 + 256 + i]))));
        expected[i_row * 256 + i] = o[i] * gate;
        // Probabilities are bf16 operands (2^-9 of sum |p v|), output and gated output are rounded to bf16.
        tolerance[i_row * 256 + i] = gate * (size[i] * 0x1p-8 + 2 * std::abs(o[i]) * 0x1p-8) + 1e-6;
      }
    });
    double error = 0, norm = 0, worst = 0;
    for (size_t i = 0; i < expected.size(); ++i) {
      const double actual = got[row_of(i / 256) * 256 + i % 256];
      error += std::pow(actual - expected[i], 2), norm += expected[i] * expected[i];
      const double excess = std::isfinite(actual) ? std::abs(actual - expected[i]) / tolerance[i] : INFINITY;
      worst = std::max(worst, excess);
      ASSERT_LE(excess, 1.0) << "token " << row_of(i / 256) / n_q << " head " << i / 256 % n_q << " column "
                             << i % 256 << ": got " << actual << ", want " << expected[i];
    }
    std::printf("tokens %d after %d: relative error %.2e, worst %.2f of the tolerance\n", n, shape.position,
                std::sqrt(error / norm), worst);
    const auto first = y.download();
    y.poison();
    attend(args, nullptr);
    EXPECT_EQ(y.download(), first) << "two runs differ";
  }
}

#ifdef LILY_CUDA_EMULATED
INSTANTIATE_TEST_SUITE_P(Shapes, Attention,
                         ::testing::Combine(::testing::Values(Shape{1, 0, 1}, Shape{17, 100, 1},
                                                              Shape{20, 60, 2}, Shape{32, 31, 1},
                                                              Shape{1, 64, 2}),
                                            ::testing::Values(KvForm::bf16, KvForm::int8)));
#else
INSTANTIATE_TEST_SUITE_P(
    Shapes, Attention,
    ::testing::Combine(::testing::Values(Shape{1, 0, 1}, Shape{15, 0, 2}, Shape{16, 63, 2}, Shape{17, 64, 2},
                                         Shape{64, 1, 1}, Shape{200, 300, 2}, Shape{700, 0, 2},
                                         Shape{100, 5000, 1}, Shape{31, 0, 1}, Shape{32, 31, 2},
                                         Shape{33, 31, 1}, Shape{1, 64, 2}),
                       ::testing::Values(KvForm::bf16, KvForm::int8)));
#endif

}  // namespace
}  // namespace lily::cuda::test
