#include "backend/cuda/prefill_routing.h"

#include <algorithm>
#include <numeric>

#include "tests/backend/cuda_prefill/support.h"

namespace lily::cuda::test {
namespace {

constexpr double kFloatEpsilon = 0x1p-24, kBf16Epsilon = 0x1p-8;

struct Q8 {
  std::vector<uint8_t> codes;
  std::vector<uint16_t> scales, biases;
  Q8(Random& random, int n_rows, int n_cols)
      : codes(static_cast<size_t>(n_rows) * n_cols), scales(codes.size() / 64), biases(codes.size() / 64) {
    for (auto& c : codes) c = static_cast<uint8_t>(random.below(256));
    for (auto& s : scales) s = bits(random.normal(0.001f));
    for (size_t i = 0; i < biases.size(); ++i)
      biases[i] = bits(-127.5f * value(scales[i]) + random.normal(0.01f));
  }
  double weight(size_t row, size_t col, int n_cols) const {
    const size_t i = row * n_cols + col;
    return static_cast<double>(value(scales[i / 64])) * codes[i] + value(biases[i / 64]);
  }
};

struct Shape {
  int n_tokens, hidden, n_experts;
};
class Router : public ::testing::TestWithParam<Shape> {};

TEST_P(Router, ChoosesTheEightLargestAndNormalises) {
  const auto [n, hidden, n_experts] = GetParam();
  Random random(3 + static_cast<uint64_t>(n));
  const auto u = random.normals(static_cast<size_t>(n) * hidden);
  const Q8 router(random, n_experts, hidden), shared(random, 1, hidden);
  const DeviceArray<uint16_t> d_u(u), rs(router.scales), rb(router.biases), ss(shared.scales),
      sb(shared.biases);
  const DeviceArray<uint8_t> rc(router.codes), sc(shared.codes);
  DeviceArray<int32_t> chosen(static_cast<size_t>(n) * 8);
  DeviceArray<float> weight(static_cast<size_t>(n) * 8), shared_weight(n),
      logits(static_cast<size_t>(n) * n_experts);
  const RouterArgs args{d_u.get(),
                        n,
                        hidden,
                        n_experts,
                        {rc.get(), rs.get(), rb.get()},
                        {sc.get(), ss.get(), sb.get()},
                        chosen.get(),
                        weight.get(),
                        shared_weight.get(),
                        logits.get()};
  router_q8_prefill(args, nullptr);
  finish();
  const auto got_logits = logits.download();
  const auto got = chosen.download();
  const auto got_weight = weight.download();
  const auto got_shared = shared_weight.download();
  std::vector<double> want, error;
  for (int t = 0; t < n; ++t) {
    const auto dot = [&](const Q8& w, int row, double* magnitude) {
      double sum = 0;
      *magnitude = 0;
      for (int k = 0; k < hidden; ++k) {
        const double x = value(u[static_cast<size_t>(t) * hidden + k]);
        sum += x * w.weight(row, k, hidden);
        // scale * code and bias are summed apart, so each counts by its own size
        const size_t i = (static_cast<size_t>(row) * hidden + k) / 64;
        *magnitude += std::abs(x) * (std::abs(value(w.scales[i])) * 255 + std::abs(value(w.biases[i])));
      }
      return sum;
    };
    double magnitude;
    for (int e = 0; e < n_experts; ++e) {
      want.push_back(dot(router, e, &magnitude));
      error.push_back(2 * (64 + hidden / 64) * kFloatEpsilon * magnitude);
    }
    const double gate = 1 / (1 + std::exp(-dot(shared, 0, &magnitude)));
    EXPECT_NEAR(got_shared[t], gate, 2 * (64 + hidden / 64) * kFloatEpsilon * magnitude + 1e-6)
        << "token " << t;
    // The choice must be exact for the logits that the kernel itself wrote.
    std::vector<int> order(n_experts);
    std::iota(order.begin(), order.end(), 0);
    const float* l = &got_logits[static_cast<size_t>(t) * n_experts];
    std::stable_sort(order.begin(), order.end(), [&](int a, int b) { return l[a] > l[b]; });
    double sum = 0;
    for (int j = 0; j < 8; ++j) sum += std::exp(static_cast<double>(l[order[j]]) - l[order[0]]);
    for (int j = 0; j < 8; ++j) {
      EXPECT_EQ(got[static_cast<size_t>(t) * 8 + j], order[j]) << "token " << t << " choice " << j;
      EXPECT_NEAR(got_weight[static_cast<size_t>(t) * 8 + j],
                  std::exp(static_cast<double>(l[order[j]]) - l[order[0]]) / sum, 3e-6);
    }
  }
  expect_close(got_logits, want, 0, error, n_experts, "logits");
}

TEST(Router, TiesGoToTheLowerIndex) {
  constexpr int kHidden = 64, kExperts = 32;
  Random random(9);
  Q8 router(random, kExperts, kHidden);
  const Q8 shared(random, 1, kHidden);
  for (size_t e = 1; e < kExperts; ++e) {  // all rows equal
    std::copy_n(router.codes.begin(), kHidden,
                router.codes.begin() + static_cast<std::ptrdiff_t>(e) * kHidden);
    router.scales[e] = router.scales[0], router.biases[e] = router.biases[0];
  }
  const DeviceArray<uint16_t> u(random.normals(kHidden)), rs(router.scales), rb(router.biases),
      ss(shared.scales), sb(shared.biases);
  const DeviceArray<uint8_t> rc(router.codes), sc(shared.codes);
  DeviceArray<int32_t> chosen(8);
  DeviceArray<float> weight(8), shared_weight(1);
  router_q8_prefill({u.get(),
                     1,
                     kHidden,
                     kExperts,
                     {rc.get(), rs.get(), rb.get()},
                     {sc.get(), ss.get(), sb.get()},
                     chosen.get(),
                     weight.get(),
                     shared_weight.get(),
                     nullptr},
                    nullptr);
  EXPECT_EQ(chosen.download(), (std::vector<int32_t>{0, 1, 2, 3, 4, 5, 6, 7}));
  for (float w : weight.download()) EXPECT_EQ(w, 0.125f);
}

class Grouping : public ::testing::TestWithParam<Shape> {};

TEST_P(Grouping, ListsEveryRowOnceInOrder) {
  const auto [n, skew, n_experts] = GetParam();  // skew: percent of tokens that want experts 0 .. 7
  Random random(21 + static_cast<uint64_t>(n));
  std::vector<int32_t> chosen;
  std::vector<float> weight, shared(n);
  for (int t = 0; t < n; ++t) {
    std::vector<int> all(n_experts);
    std::iota(all.begin(), all.end(), 0);
    if (random.below(100) >= skew)
      for (int j = 0; j < 8; ++j) std::swap(all[j], all[j + random.below(n_experts - j)]);
    chosen.insert(chosen.end(), all.begin(), all.begin() + 8);
    for (int j = 0; j < 8; ++j) weight.push_back(random.uniform(0, 1));
    shared[t] = random.uniform(0, 1);
  }
  const size_t n_rows = static_cast<size_t>(n) * 9;
  const DeviceArray<int32_t> d_chosen(chosen);
  const DeviceArray<float> d_weight(weight), d_shared(shared);
  DeviceArray<int32_t> expert_rows(n_experts), token_of_row(n_rows), row_of_choice(chosen.size()), n_tiles(1);
  DeviceArray<float> row_weight(n_rows);
  DeviceArray<ExpertTile> tiles(static_cast<size_t>(max_expert_tiles(n, n_experts)));
  group_by_expert_prefill({d_chosen.get(), d_weight.get(), d_shared.get(), n, n_experts, true,
                           expert_rows.get(), token_of_row.get(), row_weight.get(), row_of_choice.get(),
                           tiles.get(), n_tiles.get(), expert_tile_rows(n, n_experts)},
                          nullptr);
  finish();
  std::vector<int32_t> want_token, want_inverse(chosen.size()), want_rows;
  std::vector<float> want_weight;
  for (int e = 0; e < n_experts; ++e) {
    const size_t before = want_token.size();
    for (size_t i = 0; i < chosen.size(); ++i)
      if (chosen[i] == e) {
        want_inverse[i] = static_cast<int32_t>(want_token.size());
        want_token.push_back(static_cast<int32_t>(i / 8));
        want_weight.push_back(weight[i]);
      }
    want_rows.push_back(static_cast<int32_t>(want_token.size() - before));
  }
  for (int t = 0; t < n; ++t) want_token.push_back(t), want_weight.push_back(shared[t]);
  EXPECT_EQ(expert_rows.download(), want_rows);
  EXPECT_EQ(token_of_row.download(), want_token);
  EXPECT_EQ(row_weight.download(), want_weight);
  EXPECT_EQ(row_of_choice.download(), want_inverse);
  const auto list = tiles.download();
  const int count = n_tiles.download()[0];
  ASSERT_LE(count, max_expert_tiles(n, n_experts));
  std::vector<int> covered(n_rows, 0);
  want_rows.push_back(n);
  for (int i = 0; i < count; ++i) {
    ASSERT_GE(list[i].n_rows, 1);
    ASSERT_LE(list[i].n_rows, expert_tile_rows(n, n_experts));
    if (i > 0) {
      EXPECT_GE(want_rows[list[i - 1].expert], want_rows[list[i].expert]) << "heavy experts come first";
    }
    const int first = std::accumulate(want_rows.begin(), want_rows.begin() + list[i].expert, 0);
    EXPECT_GE(list[i].first_row, first);
    EXPECT_LE(list[i].first_row + list[i].n_rows, first + want_rows[list[i].expert]);
    for (int r = 0; r < list[i].n_rows; ++r) ++covered[list[i].first_row + r];
  }
  EXPECT_EQ(covered, std::vector<int>(n_rows, 1));
}

class Rows : public ::testing::TestWithParam<Shape> {};

TEST_P(Rows, CombineSumsAndNorms) {
  const auto [n, hidden, unused] = GetParam();
  Random random(40 + static_cast<uint64_t>(hidden));
  const auto y = random.normals(static_cast<size_t>(n) * 9 * hidden);
  const auto residual = values(random.normals(static_cast<size_t>(n) * hidden)),
             norm = values(random.normals(hidden));
  std::vector<int32_t> rows(static_cast<size_t>(n) * 8);
  std::iota(rows.begin(), rows.end(), 0);
  for (size_t i = rows.size() - 1; i > 0; --i)
    std::swap(rows[i], rows[static_cast<size_t>(random.below(static_cast<int>(i) + 1))]);
  const DeviceArray<uint16_t> d_y(y);
  const DeviceArray<float> d_norm(norm);
  const DeviceArray<int32_t> d_rows(rows);
  DeviceArray<float> x(residual);
  DeviceArray<uint16_t> normed(static_cast<size_t>(n) * hidden), plain(static_cast<size_t>(n) * hidden);
  combine_experts_prefill({d_y.get(), d_y.get() + static_cast<size_t>(n) * 8 * hidden, d_rows.get(), x.get(),
                           n, hidden, x.get(), d_norm.get(), normed.get()},
                          nullptr);
  rms_norm_prefill(x.get(), d_norm.get(), plain.get(), n, hidden, nullptr);
  finish();
  const auto got = x.download();
  std::vector<double> want, error, want_normed;
  for (int t = 0; t < n; ++t)
    for (int h = 0; h < hidden; ++h) {
      double sum = residual[static_cast<size_t>(t) * hidden + h], magnitude = std::abs(sum);
      for (int j = 0; j < 9; ++j) {
        const size_t row = j < 8 ? static_cast<size_t>(rows[static_cast<size_t>(t) * 8 + j])
                                 : static_cast<size_t>(n) * 8 + t;
        sum += value(y[row * hidden + h]);
        magnitude += std::abs(value(y[row * hidden + h]));
      }
      want.push_back(sum);
      error.push_back(9 * kFloatEpsilon * magnitude + 1e-30);
    }
  expect_close(got, want, kFloatEpsilon, error, hidden, "combine");
  for (int t = 0; t < n; ++t) {
    double squares = 0;
    for (int h = 0; h < hidden; ++h) squares += std::pow(got[static_cast<size_t>(t) * hidden + h], 2);
    for (int h = 0; h < hidden; ++h)
      want_normed.push_back(got[static_cast<size_t>(t) * hidden + h] / std::sqrt(squares / hidden + 1e-6) *
                            norm[h]);
  }
  expect_close(values(normed.download()), want_normed, kBf16Epsilon + 1e-5, {1e-30}, hidden,
               "norm after combine");
  EXPECT_EQ(normed.download(), plain.download());
}

TEST_P(Rows, EmbeddingGathersAndNorms) {
  const auto [n, hidden, vocab] = GetParam();
  Random random(50 + static_cast<uint64_t>(hidden));
  std::vector<uint32_t> codes(static_cast<size_t>(vocab) * hidden / 8);
  for (auto& c : codes)
    c = static_cast<uint32_t>(random.below(1 << 30)) * 4u + static_cast<uint32_t>(random.below(4));
  const auto scales = random.normals(codes.size() / 8, 0.01f),
             biases = random.normals(codes.size() / 8, 0.1f);
  const auto norm = values(random.normals(hidden));
  std::vector<int32_t> ids(n);
  for (auto& id : ids) id = random.below(vocab);
  ids[0] = vocab - 1;
  const DeviceArray<int32_t> d_ids(ids);
  const DeviceArray<uint32_t> d_codes(codes);
  const DeviceArray<uint16_t> d_scales(scales), d_biases(biases);
  const DeviceArray<float> d_norm(norm);
  DeviceArray<float> x(static_cast<size_t>(n) * hidden);
  DeviceArray<uint16_t> normed(x.size()), plain(x.size());
  embedding_q4_prefill({d_ids.get(), d_codes.get(), d_scales.get(), d_biases.get(), n, hidden, x.get(),
                        d_norm.get(), normed.get()},
                       nullptr);
  rms_norm_prefill(x.get(), d_norm.get(), plain.get(), n, hidden, nullptr);
  finish();
  std::vector<double> want;
  for (int t = 0; t < n; ++t)
    for (int h = 0; h < hidden; ++h) {
      const size_t i = static_cast<size_t>(ids[t]) * hidden + h;
      want.push_back(static_cast<double>(value(scales[i / 64])) * (codes[i / 8] >> (4 * (i % 8)) & 15u) +
                     value(biases[i / 64]));
    }
  expect_close(x.download(), want, 4 * kFloatEpsilon, {1e-7}, hidden, "embedding");
  EXPECT_EQ(normed.download(), plain.download());
}

INSTANTIATE_TEST_SUITE_P(Shapes, Router,
                         ::testing::Values(Shape{1, 64, 16}, Shape{33, 256, 32},
                                           Shape{kEmulated ? 5 : 300, kEmulated ? 128 : 2048, 256},
                                           Shape{2, 64, 512}, Shape{3, 4096, 16}));
INSTANTIATE_TEST_SUITE_P(Shapes, Grouping,
                         ::testing::Values(Shape{1, 0, 16}, Shape{130, 40, 32}, Shape{300, 100, 32},
                                           Shape{kEmulated ? 40 : 5000, 20, 256}, Shape{700, 10, 300}));
INSTANTIATE_TEST_SUITE_P(Shapes, Rows,
                         ::testing::Values(Shape{1, 64, 7}, Shape{5, 256, 100}, Shape{3, 2048, 50},
                                           Shape{2, 4160, 9}));

}  // namespace
}  // namespace lily::cuda::test
