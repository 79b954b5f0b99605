#include "backend/cpu/kernels/linear.h"

#include <set>
#include <tuple>

#include "backend/cpu/kernels/matrix_unit.h"
#include "model/dims.h"
#include "tests/backend/cpu/kernels/kernel_test.h"

namespace lily::backend::cpu {
namespace {

using model::Storage;

class Quantise : public PerTarget {};
class LinearTiles : public PerTarget {};

// The column of each byte of a plane, as quantise.h says.
int64_t column_of(int64_t byte) {
  constexpr int kOrder[8] = {0, 2, 4, 6, 1, 3, 5, 7};
  return byte / 8 * 8 + kOrder[byte % 8];
}

// The integer that stands for byte `i` of a group.
int64_t code_of(const QuantisedRows& rows, int64_t row, int64_t group, int64_t i) {
  const int8_t* p = rows.row_planes(row) + group * rows.group_bytes();
  return rows.n_planes == 1 ? p[i] : 256 * p[i] + p[64 + i];
}

// The values that the planes of rows stand for.
std::vector<double> held(const TestRows& rows) {
  std::vector<double> x(static_cast<size_t>(rows.rows * rows.cols));
  for (int64_t r = 0; r < rows.rows; ++r)
    for (int64_t i = 0; i < rows.cols; ++i)
      x[static_cast<size_t>(r * rows.cols + i / 64 * 64 + column_of(i % 64))] =
          static_cast<double>(rows.quantised.row_scales(r)[i / 64].scale) *
          static_cast<double>(code_of(rows.quantised, r, i / 64, i % 64));
  return x;
}

TEST_P(Quantise, OnePlaneErrsByAtMostHalfAStepOfTheGroup) {
  std::mt19937 random(19);
  const TestRows rows(3, 256, random_floats(3 * 256, random, 3), 1);
  const std::vector<double> x = held(rows);
  for (int64_t r = 0; r < rows.rows; ++r)
    for (int64_t g = 0; g < 4; ++g) {
      const auto first = static_cast<size_t>(r * 256 + g * 64);
      double peak = 0;
      int64_t sum = 0, largest = 0;
      for (size_t i = 0; i < 64; ++i) peak = std::max(peak, std::abs(double{rows.x[first + i]}));
      for (int64_t i = 0; i < 64; ++i) {
        const int64_t code = code_of(rows.quantised, r, g, i);
        sum += code;
        largest = std::max(largest, std::abs(code));
        // Half a step, and the rounding of the fp32 scale, its inverse and the product.
        EXPECT_LE(std::abs(x[first + static_cast<size_t>(i)] - rows.x[first + static_cast<size_t>(i)]),
                  peak / kOnePlaneMax * 0.5 + 4 * kEps * peak);
      }
      EXPECT_EQ(largest, kOnePlaneMax) << "the largest value uses the whole range";
      EXPECT_EQ(rows.quantised.row_scales(r)[g].sum, static_cast<float>(sum));
    }
}

TEST_P(Quantise, ErrsByAtMostHalfAStepOfTheGroup) {
  std::mt19937 random(1);
  const TestRows rows(3, 256, random_floats(3 * 256, random, 3));
  for (int64_t r = 0; r < rows.rows; ++r) {
    for (int64_t g = 0; g < 4; ++g) {
      const GroupScale scale = rows.quantised.row_scales(r)[g];
      const int8_t* p = rows.quantised.row_planes(r) + g * 128;
      double peak = 0;
      int64_t sum = 0;
      for (int64_t i = 0; i < 64; ++i) peak = std::max(peak, std::abs(double{rows.x[r * 256 + g * 64 + i]}));
      for (int64_t i = 0; i < 64; ++i) {
        const int64_t q = 256 * p[i] + p[64 + i];
        sum += q;
        const double x = rows.x[static_cast<size_t>(r * 256 + g * 64 + column_of(i))];
        // Half a step, and the rounding of the fp32 scale, its inverse and the product.
        EXPECT_LE(std::abs(scale.scale * static_cast<double>(q) - x),
                  peak / kPlaneMax * 0.5 + 4 * kEps * peak);
      }
      EXPECT_EQ(scale.sum, static_cast<float>(sum));
    }
  }
}

TEST_P(Quantise, ExtremesUseTheWholeRange) {
  std::vector<float> x(64, 0.0f);
  x[3] = -7.5f;
  x[8] = 7.5f;
  const TestRows rows(1, 64, x);
  const int8_t* p = rows.quantised.row_planes(0);
  for (int64_t i = 0; i < 64; ++i) {
    const int q = 256 * p[i] + p[64 + i];
    EXPECT_EQ(q, column_of(i) == 3 ? -kPlaneMax : column_of(i) == 8 ? kPlaneMax : 0);
  }
}

TEST_P(Quantise, TheRestMakesARowExactToItsLastBits) {
  std::mt19937 random(3);
  const TestRows rows(2, 128, random_floats(2 * 128, random, 5));
  Aligned<std::byte> memory(quantised_bytes(2, 128, 2));
  const QuantisedRows rest = quantised_rows(memory.data(), 2, 128, 2);
  for (int64_t r = 0; r < 2; ++r) {
    quantise_rest(rows.x.data() + r * 128, rows.quantised, rest, r);
    for (int64_t i = 0; i < 128; ++i) {
      const auto value = [&](const QuantisedRows& q) {
        const int8_t* p = q.row_planes(r) + i / 64 * 128 + i % 64;
        return static_cast<double>(q.row_scales(r)[i / 64].scale) * (256 * p[0] + p[64]);
      };
      double peak = 0;
      for (int64_t j = 0; j < 64; ++j)
        peak = std::max(peak, std::abs(double{rows.x[static_cast<size_t>(r * 128 + i / 64 * 64 + j)]}));
      const double x = rows.x[static_cast<size_t>(r * 128 + i / 64 * 64 + column_of(i % 64))];
      // Half a step of the rest, whose peak is half a step of the row; and the rounding of what is left to
      // fp32.
      EXPECT_LE(std::abs(value(rows.quantised) + value(rest) - x),
                peak * (0.5 / kPlaneMax + 4 * kEps) * (0.5 / kPlaneMax + 5 * kEps));
    }
  }
}

TEST_P(Quantise, ZeroAndSubnormalGroupsGiveZeroPlanes) {
  for (float value : {0.0f, 1e-42f}) {
    for (int n_planes : {1, 2}) {
      const TestRows rows(1, 64, std::vector<float>(64, value), n_planes);
      for (int i = 0; i < 64 * n_planes; ++i) EXPECT_EQ(rows.quantised.row_planes(0)[i], 0);
      EXPECT_EQ(rows.quantised.row_scales(0)[0].sum, 0);
    }
  }
}

TEST_P(Quantise, WhatIsNotFiniteReachesEveryOutput) {
  std::mt19937 random(2);
  const TestWeight w(Storage::q4, 16, 128, random);
  for (float bad :
       {std::numeric_limits<float>::infinity(), -std::numeric_limits<float>::infinity(), kPoison}) {
    auto x = random_floats(128, random);
    x[77] = bad;
    for (int n_planes : {1, 2}) {
      const TestRows rows(1, 128, x, n_planes);
      std::vector<float> y(16);
      linear_tiles(w.matrix(), 0, 1, rows.input(), 1, {y.data(), 16, 0, nullptr});
      for (float v : y) EXPECT_TRUE(std::isnan(v));
    }
  }
}

// The tolerance of a dot product: activations are rounded to two planes (half a step of each group's peak)
// and the fp32 fold makes a few roundings a group on terms that the group's magnitudes bound. A product with
// what the planes hold has the fold's roundings only.
double tolerance(const TestWeight& w, int64_t out, const float* x, bool of_held) {
  double total = 0;
  const bool q = w.storage != Storage::bf16;
  double magnitude = 0, planes = 0;
  for (int64_t g = 0; g < w.cols; g += 64) {
    double peak = 0, weights = 0, largest_term = 0;
    for (int64_t c = g; c < std::min(g + 64, w.cols); ++c) {
      peak = std::max(peak, std::abs(double{x[c]}));
      weights += std::abs(w.at(out, c));
      largest_term += std::abs(w.at(out, c) * x[c]);
    }
    planes += (0.5 / kPlaneMax + 4 * kEps) * peak * weights;
    // scale * D and bias * Q may cancel: each is at most 64 * 16 steps of weight, here bounded through the
    // peak.
    magnitude += q ? 64 * peak * 0.5 : largest_term;
  }
  total =
      (q && !of_held ? planes : 0) +
      magnitude * kEps * (q ? 4.0 + static_cast<double>(w.cols) / 64 : static_cast<double>(w.cols) / 4 + 3);
  return total;
}

// Two planes against the exact rows. One plane, whose rounding would hide everything else, against what it
// holds.
void check_linear(Storage storage, int64_t n_out, int64_t cols, int64_t n_rows, int n_planes = 2) {
  SCOPED_TRACE(testing::Message() << "storage " << static_cast<int>(storage) << " [" << n_out << ", " << cols
                                  << "] x " << n_rows << " rows of " << n_planes << " planes");
  std::mt19937 random(static_cast<uint32_t>(n_out * 31 + cols * 7 + n_rows));
  const TestWeight w(storage, n_out, cols, random);
  const TestRows rows(n_rows, cols, random_floats(n_rows * cols, random), n_planes);
  const std::vector<double> exact =
      n_planes == 1 ? held(rows) : std::vector<double>(rows.x.begin(), rows.x.end());
  std::vector<float> y(static_cast<size_t>(n_rows * n_out), kPoison);
  linear_tiles(w.matrix(), 0, w.matrix().n_tiles(), rows.input(), n_rows, {y.data(), n_out, 0, nullptr});
  Worst worst;
  for (int64_t r = 0; r < n_rows; ++r) {
    const float* x = rows.x.data() + r * cols;
    for (int64_t o = 0; o < n_out; ++o) {
      double want = 0;
      for (int64_t c = 0; c < cols; ++c) want += w.at(o, c) * exact[static_cast<size_t>(r * cols + c)];
      worst.see(r * n_out + o, y[static_cast<size_t>(r * n_out + o)], want,
                tolerance(w, o, x, n_planes == 1));
    }
  }
  LILY_EXPECT_CLOSE(worst);
}

TEST_P(LinearTiles, AgreesWithDoublePrecisionForEveryRowCount) {
  for (Storage storage : {Storage::q4, Storage::q8, Storage::bf16})
    for (int64_t n_rows = 1; n_rows <= 17; ++n_rows) check_linear(storage, 32, 128, n_rows);
  for (int64_t n_rows = 1; n_rows <= 17; ++n_rows) check_linear(Storage::q4, 48, 128, n_rows, 1);
  for (int n_planes : {1, 2}) check_linear(Storage::q4, 16, 64, 65, n_planes);
}

TEST_P(LinearTiles, AgreesWithDoublePrecisionForTheModelsWidths) {
  for (int64_t cols : {512, 2048, 4096}) check_linear(Storage::q4, 48, cols, 3);
  check_linear(Storage::q4, 512, 256, 2);
  check_linear(Storage::q8, 257, 2048, 1);
  check_linear(Storage::bf16, 32, 2048, 2);
}

TEST_P(LinearTiles, WritesNoFurtherThanTheLastOutputRow) {
  for (int64_t n_out : {1, 15, 17, 31}) check_linear(Storage::q4, n_out, 64, 2);
  check_linear(Storage::q8, 1, 256, 1);
  std::mt19937 random(5);
  const TestWeight w(Storage::q4, 5, 64, random);
  const TestRows rows(1, 64, random_floats(64, random));
  std::vector<float> y(16, 123.0f);
  linear_tiles(w.matrix(), 0, 1, rows.input(), 1, {y.data(), 16, 2, nullptr});
  for (int i = 0; i < 16; ++i) EXPECT_EQ(y[static_cast<size_t>(i)] == 123.0f, i < 2 || i >= 7) << i;
}

TEST_P(LinearTiles, ARowDoesNotDependOnItsNeighbours) {
  std::mt19937 random(6);
  const std::pair<Storage, int> forms[] = {
      {Storage::q4, 1}, {Storage::q4, 2}, {Storage::q8, 2}, {Storage::bf16, 2}};
  for (const auto& [storage, n_planes] : forms) {
    const TestWeight w(storage, 48, 512, random);
    const TestRows rows(70, 512, random_floats(70 * 512, random), n_planes);
    std::vector<float> together(70 * 48), alone(48);
    linear_tiles(w.matrix(), 0, 3, rows.input(), 70, {together.data(), 48, 0, nullptr});
    for (int64_t r : {0, 1, 7, 8, 63, 64, 69}) {
      const auto id = static_cast<int32_t>(r);
      InputRows one = rows.input();
      one.ids = &id;
      linear_tiles(w.matrix(), 0, 3, one, 1, {alone.data(), 48, 0, nullptr});
      EXPECT_EQ(0, std::memcmp(alone.data(), together.data() + r * 48, 48 * sizeof(float))) << "row " << r;
    }
  }
}

TEST_P(LinearTiles, IdsChooseTheInputRow) {
  std::mt19937 random(12);
  const TestWeight w(Storage::q4, 16, 128, random);
  const TestRows rows(4, 128, random_floats(4 * 128, random));
  std::vector<float> all(4 * 16), chosen(3 * 16);
  linear_tiles(w.matrix(), 0, 1, rows.input(), 4, {all.data(), 16, 0, nullptr});
  const int32_t assignments[3] = {25, 3, 17};  // of tokens 3, 0, 2
  InputRows in = rows.input();
  in.ids = assignments;
  in.per_row = 8;
  linear_tiles(w.matrix(), 0, 1, in, 3, {chosen.data(), 16, 0, nullptr});
  for (int i = 0; i < 3; ++i)
    EXPECT_EQ(0, std::memcmp(chosen.data() + 16 * i, all.data() + 16 * (assignments[i] / 8), 64));
}

TEST_P(LinearTiles, TheResidualIsAddedOnce) {
  std::mt19937 random(13);
  const TestWeight w(Storage::q4, 32, 64, random);
  const TestRows rows(2, 64, random_floats(2 * 64, random));
  const auto residual = random_floats(2 * 32, random);
  std::vector<float> plain(64), added(residual);
  linear_tiles(w.matrix(), 0, 2, rows.input(), 2, {plain.data(), 32, 0, nullptr});
  linear_tiles(w.matrix(), 0, 2, rows.input(), 2, {added.data(), 32, 0, added.data()});
  for (size_t i = 0; i < 64; ++i) EXPECT_EQ(added[i], residual[i] + plain[i]);
}

TEST_P(LinearTiles, GateUpIsSiluOfTheOneTimesTheOther) {
  std::mt19937 random(14);
  const std::pair<int64_t, int> sizes[] = {{1, 2}, {3, 2}, {9, 2}, {1, 1}, {9, 1}, {15, 1}};
  for (const auto& [n_rows, n_planes] : sizes) {
    const TestWeight gate(Storage::q4, 64, 256, random), up(Storage::q4, 64, 256, random);
    const TestRows rows(n_rows, 256, random_floats(n_rows * 256, random, 4), n_planes);
    const auto n = static_cast<size_t>(n_rows * 64);
    std::vector<float> g(n), u(n), y(n, kPoison);
    linear_tiles(gate.matrix(), 0, 4, rows.input(), n_rows, {g.data(), 64, 0, nullptr});
    linear_tiles(up.matrix(), 0, 4, rows.input(), n_rows, {u.data(), 64, 0, nullptr});
    gate_up_tiles(gate.matrix(), up.matrix(), 0, 4, rows.input(), n_rows, {y.data(), 64, 0, nullptr});
    Worst worst;
    for (size_t i = 0; i < n; ++i) {
      const double want = g[i] / (1 + std::exp(-double{g[i]})) * u[i];
      worst.see(static_cast<int64_t>(i), y[i], want, 12 * kEps * std::abs(want) + 1e-37);
    }
    LILY_EXPECT_CLOSE(worst);
  }
}

TEST_P(LinearTiles, AccumulateAddsTheWeightedProduct) {
  std::mt19937 random(15);
  const TestWeight w(Storage::q4, 32, 128, random);
  const TestRows rows(1, 128, random_floats(128, random));
  std::vector<float> plain(32), sum(16, 2.0f);
  linear_tiles(w.matrix(), 0, 2, rows.input(), 1, {plain.data(), 32, 0, nullptr});
  accumulate_tile(w.matrix(), 1, w.matrix().tile(0), rows.input().row(0), 0.25f, sum.data());
  for (size_t i = 0; i < 16; ++i)
    EXPECT_NEAR(sum[i], 2.0 + 0.25 * plain[16 + i], 4 * kEps * (2 + std::abs(plain[16 + i])));
}

// Every width of the real plan's weights with the rows of a large prompt chunk; all outputs would say no more
// than the first and the last tiles of each.
TEST_P(LinearTiles, AgreesWithDoublePrecisionForTheRealPlansWeights) {
  std::set<std::tuple<Storage, int64_t, int64_t>> seen;  // outputs beyond whole pairs of tiles, columns
  for (const model::WeightSpec& spec : model::catalogue(model::qwen36_35b_a3b())) {
    if (!spec.quantisable) continue;
    const int64_t n_out = spec.shape[spec.shape.size() - 2], cols = spec.shape.back();
    const int64_t few = std::min<int64_t>(n_out, 32 + n_out % 32);
    const Storage storage = model::published_storage(spec.id.weight);
    if (!seen.emplace(storage, few, cols).second) continue;
    check_linear(storage, few, cols, 18);
    if (storage == Storage::q4) check_linear(storage, few, cols, 18, 1);
  }
  EXPECT_GE(seen.size(), 4u);
}

// The matrix unit's results and the vector path's, both without NaN where memory is not written.
TEST(MatrixUnit, GivesTheBitsOfTheVectorPath) {
  if (!matrix_unit_present() || current_target() != SimdTarget::avx512_vnni)
    GTEST_SKIP() << "this processor has no AMX, or the system does not grant it";
  std::mt19937 random(17);
  const std::pair<int64_t, int> forms[] = {{64, 2}, {128, 2}, {512, 2}, {2048, 2}, {4096, 2},
                                           {64, 1}, {128, 1}, {512, 1}, {2048, 1}, {4096, 1}};
  for (const auto& [cols, n_planes] : forms) {
    const TestWeight w(Storage::q4, 16 * 7 + 5, cols, random), up(Storage::q4, 16 * 7 + 5, cols, random);
    const int64_t n_out = w.rows, n_tiles = w.matrix().n_tiles();
    const TestRows rows(80, cols, random_floats(80 * cols, random), n_planes);
    Aligned<std::byte> scratch(matrix_scratch_bytes(cols));
    std::vector<int32_t> ids(80);
    for (int32_t& id : ids) id = static_cast<int32_t>(random() % (80 * 8));
    for (const int64_t n_rows : {5, 6, 15, 16, 17, 22, 64, 65, 80}) {
      for (const bool by_id : {false, true}) {
        SCOPED_TRACE(testing::Message() << cols << " columns, " << n_rows << " rows of " << n_planes
                                        << " planes, by id " << by_id);
        InputRows in = rows.input();
        if (by_id) {
          in.ids = ids.data();
          in.per_row = 8;
        }
        const auto n = static_cast<size_t>(n_rows * n_out);
        std::vector<float> y[2], activated[2];
        for (const bool with_unit : {false, true}) {
          y[with_unit].assign(n, 7.0f);
          activated[with_unit].assign(n, 7.0f);
          in.matrix_scratch = with_unit ? scratch.data() : nullptr;
          // All tiles but the first: an odd number of them, the last one cut.
          linear_tiles(w.matrix(), 1, n_tiles, in, n_rows, {y[with_unit].data(), n_out, 0, nullptr});
          gate_up_tiles(w.matrix(), up.matrix(), 1, n_tiles, in, n_rows,
                        {activated[with_unit].data(), n_out, 0, nullptr});
        }
        EXPECT_EQ(0, std::memcmp(y[0].data(), y[1].data(), n * sizeof(float)));
        EXPECT_EQ(0, std::memcmp(activated[0].data(), activated[1].data(), n * sizeof(float)));
        EXPECT_EQ(y[1][0], 7.0f);
        EXPECT_NE(y[1][16], 7.0f);
      }
    }
  }
}

TEST(MatrixUnit, WhatIsNotFiniteReachesEveryOutputOfItsRowAlone) {
  if (!matrix_unit_present() || current_target() != SimdTarget::avx512_vnni)
    GTEST_SKIP() << "this processor has no AMX, or the system does not grant it";
  std::mt19937 random(18);
  const TestWeight w(Storage::q4, 32, 128, random);
  auto x = random_floats(16 * 128, random);
  x[15 * 128 + 70] = std::numeric_limits<float>::infinity();
  const TestRows rows(16, 128, x);
  Aligned<std::byte> scratch(matrix_scratch_bytes(128));
  InputRows in = rows.input();
  in.matrix_scratch = scratch.data();
  std::vector<float> y(16 * 32);
  linear_tiles(w.matrix(), 0, 2, in, 16, {y.data(), 32, 0, nullptr});
  for (size_t i = 0; i < y.size(); ++i) EXPECT_EQ(std::isnan(y[i]), i >= 15 * 32) << i;
}

TEST(LinearTargets, TargetsWithFusedMultiplyAddAgreeToTheBit) {
  std::mt19937 random(16);
  const std::pair<Storage, int> forms[] = {{Storage::q4, 1}, {Storage::q4, 2}, {Storage::q8, 2}};
  for (const auto& [storage, n_planes] : forms) {
    const TestWeight w(storage, 64, 1024, random);
    const auto x = random_floats(15 * 1024, random);
    std::vector<float> first;
    for (SimdTarget target : runnable_targets()) {
      if (target == SimdTarget::ssse3) continue;  // has none
      use_target(target);
      const TestRows rows(15, 1024, x, n_planes);
      std::vector<float> y(15 * 64);
      linear_tiles(w.matrix(), 0, 4, rows.input(), 15, {y.data(), 64, 0, nullptr});
      if (first.empty()) first = y;
      EXPECT_EQ(0, std::memcmp(y.data(), first.data(), y.size() * sizeof(float))) << to_string(target);
    }
  }
  use_target(runnable_targets().front());
}

LILY_FOR_EACH_TARGET(Quantise);
LILY_FOR_EACH_TARGET(LinearTiles);

}  // namespace
}  // namespace lily::backend::cpu
