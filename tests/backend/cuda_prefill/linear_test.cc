#include "backend/cuda/prefill_linear.h"

#include <memory>

#include "backend/cuda/kernels/prefill_expand.h"
#include "tests/backend/cuda_prefill/support.h"

namespace lily::cuda::test {
namespace {

// fp32 accumulation of n products of bf16 values: gamma_n |x||w|; n is small enough for the first-order
// bound.
constexpr double kFloatEpsilon = 0x1p-24, kBf16Epsilon = 0x1p-8;

struct Reference {
  std::vector<double> y, error;  // [n_tokens, n_rows]
};

Reference product(const std::vector<uint16_t>& x, int n_tokens, const Matrix& w) {
  const auto n = static_cast<size_t>(n_tokens) * static_cast<size_t>(w.n_rows);
  Reference r{std::vector<double>(n), std::vector<double>(n)};
  for_each_index(static_cast<size_t>(n_tokens), [&](size_t t) {
    std::vector<double> row;
    for (int k = 0; k < w.n_cols; ++k) row.push_back(value(x[t * w.n_cols + k]));
    for (int o = 0; o < w.n_rows; ++o) {
      double sum = 0, magnitude = 0;
      for (int k = 0; k < w.n_cols; ++k) {
        const double p = row[k] * w.weights[static_cast<size_t>(o) * w.n_cols + k];
        sum += p;
        magnitude += std::abs(p);
      }
      r.y[t * w.n_rows + o] = sum;
      r.error[t * w.n_rows + o] = 2 * w.n_cols * kFloatEpsilon * magnitude + 1e-30;
    }
  });
  return r;
}

struct Shape {
  int n_tokens, n_cols;
  std::vector<int> outputs;
};

const char* unit_name(ProductUnit unit) {
  return unit == ProductUnit::wgmma ? "wgmma" : unit == ProductUnit::mma ? "mma" : "fma";
}

class Linear : public ::testing::TestWithParam<Shape> {};

TEST_P(Linear, WritesEverySegmentInEveryForm) {
  const Shape& shape = GetParam();
  Random random(17 + static_cast<uint64_t>(shape.n_tokens));
  const auto x = random.normals(static_cast<size_t>(shape.n_tokens) * shape.n_cols);
  const DeviceArray<uint16_t> device_x(x);
  std::vector<Matrix> matrices;
  for (int n : shape.outputs) matrices.emplace_back(random, n, shape.n_cols);
  std::vector<Reference> products;
  for (const Matrix& m : matrices) products.push_back(product(x, shape.n_tokens, m));
  for (const auto& [unit, output] : {std::pair{ProductUnit::wgmma, LinearOutput::bf16},
                                     {ProductUnit::wgmma, LinearOutput::residual},
                                     {ProductUnit::wgmma, LinearOutput::floats},
                                     {ProductUnit::mma, LinearOutput::bf16},
                                     {ProductUnit::mma, LinearOutput::residual},
                                     {ProductUnit::mma, LinearOutput::floats},
                                     {ProductUnit::fma, LinearOutput::bf16},
                                     {ProductUnit::fma, LinearOutput::residual},
                                     {ProductUnit::fma, LinearOutput::floats}}) {
    LinearArgs args{device_x.get(), shape.n_tokens, shape.n_cols, static_cast<int>(shape.outputs.size()), {},
                    output,         nullptr};
    std::vector<std::unique_ptr<DeviceArray<std::byte>>> packed;
    std::vector<std::unique_ptr<DeviceArray<float>>> out;  // room for either type
    std::vector<float> residual;
    for (size_t s = 0; s < matrices.size(); ++s) {
      packed.push_back(std::make_unique<DeviceArray<std::byte>>(matrices[s].packed));
      out.push_back(
          std::make_unique<DeviceArray<float>>(static_cast<size_t>(shape.n_tokens) * shape.outputs[s]));
      args.segments[s] = {packed[s]->get(), shape.outputs[s], out[s]->get(), shape.outputs[s]};
    }
    residual = values(random.normals(static_cast<size_t>(shape.n_tokens) * shape.outputs[0]));
    const DeviceArray<float> device_residual(residual);
    args.residual = device_residual.get();
    args.unit = unit;
    if (output == LinearOutput::residual) args.n_segments = 1;
    linear_q4_prefill(args, kMultiprocessors, nullptr);
    finish();
    for (int s = 0; s < args.n_segments; ++s) {
      Reference want = products[s];
      std::vector<float> got = out[s]->download();
      if (output == LinearOutput::bf16) {
        std::vector<uint16_t> half(want.y.size());
        std::memcpy(half.data(), got.data(), half.size() * 2);
        got = values(half);
      }
      if (output == LinearOutput::residual)
        for (size_t i = 0; i < want.y.size(); ++i) {
          want.error[i] += kBf16Epsilon * std::abs(want.y[i]);
          want.y[i] += residual[i];
        }
      expect_close(got, want.y, output == LinearOutput::bf16 ? kBf16Epsilon : kFloatEpsilon, want.error,
                   shape.outputs[s], unit_name(unit));
    }
    const auto first = out[0]->download();
    linear_q4_prefill(args, kMultiprocessors, nullptr);
    finish();
    const auto again = out[0]->download();
    EXPECT_EQ(std::memcmp(first.data(), again.data(), first.size() * 4), 0) << "two runs differ";
  }
}

#ifdef LILY_CUDA_EMULATED
INSTANTIATE_TEST_SUITE_P(Shapes, Linear,
                         ::testing::Values(Shape{1, 128, {256}}, Shape{17, 64, {264, 64, 8}},
                                           Shape{127, 192, {512}}, Shape{129, 512, {40}},
                                           Shape{260, 128, {256, 16}}));
#else
INSTANTIATE_TEST_SUITE_P(Shapes, Linear,
                         ::testing::Values(Shape{1, 256, {1024, 512, 8}}, Shape{16, 512, {264, 64, 8}},
                                           Shape{17, 2048, {2048}}, Shape{63, 128, {256}},
                                           Shape{113, 448, {272}}, Shape{127, 192, {512}},
                                           Shape{128, 256, {256}}, Shape{129, 4096, {2048}},
                                           Shape{700, 2048, {512, 520, 32, 32}}));
#endif

struct Load {
  int n_tokens, hidden, width, n_experts;
  std::vector<int> counts;  // rows of each expert
  bool shared;
};
class Experts : public ::testing::TestWithParam<Load> {};

struct Variant {
  int tile_rows = kMaxTileTokens;
  ProductUnit unit = ProductUnit::wgmma;
  bool expanded = false;
};
void gate_up_then_down(const Load& load, const Variant& variant);
TEST_P(Experts, GateUpThenDownInLargeTiles) { gate_up_then_down(GetParam(), {}); }
TEST_P(Experts, GateUpThenDownInSmallTiles) { gate_up_then_down(GetParam(), {kFewTileTokens}); }
TEST_P(Experts, GateUpThenDownInFixedTiles) { gate_up_then_down(GetParam(), {kLeastTileTokens}); }
TEST_P(Experts, GateUpThenDownByMmaSync) {
  gate_up_then_down(GetParam(), {kMaxTileTokens, ProductUnit::mma});
}
TEST_P(Experts, GateUpThenDownInVectorArithmetic) {
  gate_up_then_down(GetParam(), {kMaxTileTokens, ProductUnit::fma});
}
TEST_P(Experts, GateUpThenDownFromExpandedWeights) {
  gate_up_then_down(GetParam(), {kMaxTileTokens, ProductUnit::wgmma, true});
  gate_up_then_down(GetParam(), {kFewTileTokens, ProductUnit::wgmma, true});
}

// Weights as the variant's kernels read them.
DeviceArray<std::byte> resident(const std::vector<std::byte>& packed, bool expanded) {
  DeviceArray<std::byte> records(packed);
  if (!expanded) return records;
  const auto n = static_cast<int64_t>(packed.size()) / pack::mma_q4::kRecordBytes;
  DeviceArray<std::byte> operands(static_cast<size_t>(n) * kExpandedRecordBytes);
  expand_q4_prefill({records.get(), n, operands.get()}, nullptr);
  finish();
  return operands;
}

void gate_up_then_down(const Load& load, const Variant& variant) {
  const int tile_rows = variant.tile_rows;
  Random random(5 + static_cast<uint64_t>(load.n_tokens));
  const auto x = random.normals(static_cast<size_t>(load.n_tokens) * load.hidden);
  std::vector<ExpertTile> tiles;
  std::vector<int32_t> tokens, expert_of;
  const auto add = [&](int expert, int n, bool identity) {
    for (int done = 0; done < n;) {
      const int rows = std::min({n - done, tile_rows, 1 + random.below(tile_rows)});
      tiles.push_back({expert, static_cast<int32_t>(tokens.size()), rows});
      for (int i = 0; i < rows; ++i) {
        tokens.push_back(identity ? done + i : random.below(load.n_tokens));
        expert_of.push_back(expert);
      }
      done += rows;
    }
  };
  for (int e = 0; e < load.n_experts; ++e) add(e, load.counts[static_cast<size_t>(e)], false);
  if (load.shared) add(load.n_experts, load.n_tokens, true);
  const size_t n_rows = tokens.size();
  std::vector<float> weight(n_rows);
  for (auto& w : weight) w = random.uniform(0.01f, 1.0f);
  std::vector<Matrix> gate, up, down;
  std::vector<std::byte> packed[3];
  for (int e = 0; e <= load.n_experts; ++e) {
    gate.emplace_back(random, load.width, load.hidden);
    up.emplace_back(random, load.width, load.hidden);
    down.emplace_back(random, load.hidden, load.width);
    packed[0].insert(packed[0].end(), gate.back().packed.begin(), gate.back().packed.end());
    packed[1].insert(packed[1].end(), up.back().packed.begin(), up.back().packed.end());
    packed[2].insert(packed[2].end(), down.back().packed.begin(), down.back().packed.end());
  }
  const auto device_gate = resident(packed[0], variant.expanded),
             device_up = resident(packed[1], variant.expanded),
             device_down = resident(packed[2], variant.expanded);
  const DeviceArray<uint16_t> device_x(x);
  const DeviceArray<int32_t> device_tokens(tokens),
      n_tiles(std::vector<int32_t>{static_cast<int32_t>(tiles.size())});
  const DeviceArray<float> device_weight(weight);
  const DeviceArray<ExpertTile> device_tiles(tiles);
  DeviceArray<uint16_t> act(n_rows * load.width), y(n_rows * load.hidden);
  const size_t stride = device_gate.size() / (static_cast<size_t>(load.n_experts) + 1),
               last = stride * load.n_experts;
  experts_gate_up_q4_prefill(
      {device_tiles.get(), n_tiles.get(), load.n_experts, device_x.get(), device_tokens.get(),
       device_weight.get(), device_gate.get(), device_up.get(), device_gate.get() + last,
       device_up.get() + last, load.width, load.hidden, act.get(), tile_rows, variant.unit, variant.expanded},
      kMultiprocessors, nullptr);
  finish();
  const auto act_bits = act.download();
  std::vector<double> want(n_rows * load.width), error(want.size());
  for_each_index(n_rows, [&](size_t r) {
    for (int i = 0; i < load.width; ++i) {
      double g = 0, u = 0, magnitude_g = 0, magnitude_u = 0;
      for (int k = 0; k < load.hidden; ++k) {
        const double xk = value(x[static_cast<size_t>(tokens[r]) * load.hidden + k]);
        const double pg = xk * gate[expert_of[r]].weights[static_cast<size_t>(i) * load.hidden + k];
        const double pu = xk * up[expert_of[r]].weights[static_cast<size_t>(i) * load.hidden + k];
        g += pg, u += pu, magnitude_g += std::abs(pg), magnitude_u += std::abs(pu);
      }
      const double unit = 2 * load.hidden * kFloatEpsilon, act_value = weight[r] * g / (1 + std::exp(-g)) * u;
      want[r * load.width + i] = act_value;
      error[r * load.width + i] = unit * (magnitude_g * 1.1 * std::abs(u) + magnitude_u * std::abs(g)) +
                                  1e-5 * std::abs(act_value) + 1e-30;
    }
  });
  expect_close(values(act_bits), want, kBf16Epsilon, error, load.width, "gate_up");
  experts_down_q4_prefill({device_tiles.get(), n_tiles.get(), load.n_experts, act.get(), nullptr, nullptr,
                           device_down.get(), nullptr, device_down.get() + last, nullptr, load.hidden,
                           load.width, y.get(), tile_rows, variant.unit, variant.expanded},
                          kMultiprocessors, nullptr);
  finish();
  want.assign(n_rows * load.hidden, 0), error = want;
  for_each_index(n_rows, [&](size_t r) {
    for (int o = 0; o < load.hidden; ++o) {
      double sum = 0, magnitude = 0;
      for (int i = 0; i < load.width; ++i) {
        const double p = static_cast<double>(value(act_bits[r * load.width + i])) *
                         down[expert_of[r]].weights[static_cast<size_t>(o) * load.width + i];
        sum += p, magnitude += std::abs(p);
      }
      want[r * load.hidden + o] = sum;
      error[r * load.hidden + o] = 2 * load.width * kFloatEpsilon * magnitude + 1e-30;
    }
  });
  expect_close(values(y.download()), want, kBf16Epsilon, error, load.hidden, "down");
}

#ifdef LILY_CUDA_EMULATED
INSTANTIATE_TEST_SUITE_P(Loads, Experts,
                         ::testing::Values(Load{20, 128, 128, 4, {0, 1, 17, 30}, true},
                                           Load{3, 64, 128, 2, {140, 0}, false}));
#else
INSTANTIATE_TEST_SUITE_P(Loads, Experts,
                         ::testing::Values(Load{20, 256, 128, 8, {0, 1, 16, 17, 127, 128, 129, 300}, true},
                                           Load{3, 512, 512, 2, {700, 0}, false},
                                           Load{200, 2048, 512, 4, {1, 200, 0, 57}, true}));
#endif

}  // namespace
}  // namespace lily::cuda::test
