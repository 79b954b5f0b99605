#include <algorithm>
#include <numeric>

#include "backend/cuda/kernels/experts_decode.h"
#include "tests/backend/cuda/kernel_fixture.h"

namespace lily::cuda {
namespace {

struct ExpertsShape {
  int hidden, width, shared_width, n_experts, rows;
};

class ExpertsDecodeTest : public KernelTest, public ::testing::WithParamInterface<ExpertsShape> {
 protected:
  void SetUp() override { KernelTest::SetUp(); }
};

struct Q8Weight {
  int rows, cols;
  std::vector<uint8_t> codes;
  std::vector<uint16_t> scales, biases;
  Q8Weight(std::mt19937& random, int n_rows, int n_cols) : rows(n_rows), cols(n_cols) {
    std::normal_distribution<float> normal(0, 0.002f);
    codes.resize(static_cast<size_t>(rows) * static_cast<size_t>(cols));
    for (auto& c : codes) c = static_cast<uint8_t>(random());
    for (size_t g = 0; g < codes.size() / 64; ++g) {
      const float s = normal(random);
      scales.push_back(to_bf16(s).bits);
      biases.push_back(to_bf16(-127 * s).bits);
    }
  }
  // Product and the bound of its fp32 rounding.
  std::pair<double, double> multiply(int row, std::span<const double> x) const {
    double y = 0, size = 0;
    for (int c = 0; c < cols; ++c) {
      const size_t i = static_cast<size_t>(row) * static_cast<size_t>(cols) + static_cast<size_t>(c);
      const double s = to_float(Bf16{scales[i / 64]}), b = to_float(Bf16{biases[i / 64]}),
                   xc = x[static_cast<size_t>(c)];
      y += (s * codes[i] + b) * xc;
      size += (std::fabs(s) * codes[i] + std::fabs(b)) * std::fabs(xc);
    }
    return {y, size * 0x1p-19};
  }
};

TEST_P(ExpertsDecodeTest, RouterGateUpAndDownMatchTheExactModel) {
  const ExpertsShape& d = GetParam();
  const auto H = static_cast<size_t>(d.hidden), W = static_cast<size_t>(d.width),
             S = static_cast<size_t>(d.shared_width), T = static_cast<size_t>(d.rows),
             E = static_cast<size_t>(d.n_experts);
  std::vector<float> x(T * H), norm(H);
  for (auto& v : x) v = normal(2);
  for (auto& v : norm) v = uniform(0.5f, 1.5f);
  const Q8Weight router(random, d.n_experts, d.hidden), shared_gate_weight(random, 1, d.hidden);
  const Q4Weight gate(random, d.n_experts * d.width, d.hidden), up(random, d.n_experts * d.width, d.hidden),
      down(random, d.n_experts * d.hidden, d.width);
  const Q4Weight shared_gate(random, std::max(d.shared_width, 16), d.hidden),
      shared_up(random, std::max(d.shared_width, 16), d.hidden),
      shared_down(random, d.hidden, std::max(d.shared_width, 64));

  DeviceBuffer<float> dx(x), dnorm(norm), logits(T * (E + 1)), weights(T * 8), out(T * H);
  DeviceBuffer<uint16_t> normed(T * H), act(T * 8 * W), shared_act(std::max<size_t>(T * S, 1));
  DeviceBuffer<int32_t> ids(T * 8);
  DeviceBuffer<uint8_t> rc(router.codes), sc(shared_gate_weight.codes);
  DeviceBuffer<uint16_t> rs(router.scales), rb(router.biases), ss(shared_gate_weight.scales),
      sb(shared_gate_weight.biases);
  DeviceBuffer<unsigned char> pg(gate.packed), pu(up.packed), pd(down.packed), psg(shared_gate.packed),
      psu(shared_up.packed), psd(shared_down.packed);

  RouterDecode r;
  r.x = dx.get();
  r.norm = dnorm.get();
  r.hidden = d.hidden;
  r.n_experts = d.n_experts;
  r.rows = d.rows;
  r.router_codes = rc.get();
  r.router_scales = rs.get();
  r.router_biases = rb.get();
  r.shared_codes = sc.get();
  r.shared_scales = ss.get();
  r.shared_biases = sb.get();
  r.normed = normed.get();
  r.logits = logits.get();
  launch_router_decode(r, nullptr);

  ExpertsGateUpDecode g;
  g.normed = normed.get();
  g.logits = logits.get();
  g.logits_stride = d.n_experts + 1;
  g.ids = ids.get();
  g.weights = weights.get();
  g.hidden = d.hidden;
  g.width = d.width;
  g.shared_width = d.shared_width;
  g.n_experts = d.n_experts;
  g.rows = d.rows;
  g.gate = pg.get();
  g.up = pu.get();
  g.shared_gate = psg.get();
  g.shared_up = psu.get();
  g.act = act.get();
  g.shared_act = shared_act.get();
  launch_experts_gate_up_decode(g, 132, nullptr);

  ExpertsDownDecode w;
  w.act = act.get();
  w.shared_act = shared_act.get();
  w.logits = logits.get();
  w.logits_stride = d.n_experts + 1;
  w.ids = ids.get();
  w.weights = weights.get();
  w.shared_logit = logits.get() + E;
  w.shared_logit_stride = d.n_experts + 1;
  w.hidden = d.hidden;
  w.width = d.width;
  w.shared_width = d.shared_width;
  w.n_experts = d.n_experts;
  w.rows = d.rows;
  w.down = pd.get();
  w.shared_down = psd.get();
  w.residual_in = dx.get();
  w.residual_out = out.get();
  launch_experts_down_decode(w, nullptr);

  const auto got_normed = normed.download();
  const auto got_logits = logits.download();
  const auto got_ids = ids.download();
  const auto got_weights = weights.download();
  const auto got_act = act.download();
  const auto got_shared = shared_act.download();
  const auto got_out = out.download();
  Comparison c_normed, c_logits, c_weights, c_act, c_out;
  for (size_t t = 0; t < T; ++t) {
    double square = 0;
    for (size_t i = 0; i < H; ++i) square += std::pow(x[t * H + i], 2);
    const double scale = 1 / std::sqrt(square / static_cast<double>(H) + 1e-6);
    std::vector<double> u;  // what the kernel stored, so that later stages are judged alone
    for (size_t i = 0; i < H; ++i) {
      const double e = x[t * H + i] * scale * norm[i];
      u.push_back(to_float(Bf16{got_normed[t * H + i]}));
      c_normed.add(u.back(), e, std::fabs(e) * (kBf16Half + 0x1p-20), static_cast<int>(t),
                   static_cast<int>(i));
    }
    std::vector<float> row(got_logits.begin() + static_cast<long>(t * (E + 1)),
                           got_logits.begin() + static_cast<long>((t + 1) * (E + 1)));
    for (size_t e = 0; e <= E; ++e) {
      const auto [y, error] =
          e < E ? router.multiply(static_cast<int>(e), u) : shared_gate_weight.multiply(0, u);
      c_logits.add(row[e], y, error, static_cast<int>(t), static_cast<int>(e));
    }
    std::vector<int> order(E);
    std::iota(order.begin(), order.end(), 0);
    std::stable_sort(order.begin(), order.end(),
                     [&](int a, int b) { return row[static_cast<size_t>(a)] > row[static_cast<size_t>(b)]; });
    double sum = 0;
    for (int j = 0; j < 8; ++j)
      sum += std::exp(row[static_cast<size_t>(order[static_cast<size_t>(j)])] -
                      row[static_cast<size_t>(order[0])]);
    for (size_t j = 0; j < 8; ++j) {
      EXPECT_EQ(got_ids[t * 8 + j], order[j]);
      const double e =
          std::exp(row[static_cast<size_t>(order[j])] - row[static_cast<size_t>(order[0])]) / sum;
      c_weights.add(got_weights[t * 8 + j], e, 0x1p-20 * e, static_cast<int>(t), static_cast<int>(j));
    }
    const auto swiglu = [&](const Q4Weight& wg, const Q4Weight& wu, int weight_row) {
      const auto a = wg.multiply(weight_row, u), b = wu.multiply(weight_row, u);
      const double y = silu_exact(a.y) * b.y;
      return std::pair(y, std::fabs(b.y) * a.error * 1.1 + std::fabs(silu_exact(a.y)) * b.error +
                              std::fabs(y) * (kBf16Half + 0x1p-20));
    };
    for (size_t j = 0; j < 8; ++j)
      for (size_t i = 0; i < W; ++i) {
        const auto [y, e] = swiglu(gate, up, got_ids[t * 8 + j] * d.width + static_cast<int>(i));
        c_act.add(to_float(Bf16{got_act[(t * 8 + j) * W + i]}), y, e, static_cast<int>(t * 8 + j),
                  static_cast<int>(i));
      }
    for (size_t i = 0; i < S; ++i) {
      const auto [y, e] = swiglu(shared_gate, shared_up, static_cast<int>(i));
      c_act.add(to_float(Bf16{got_shared[t * S + i]}), y, e, -1, static_cast<int>(i));
    }
    std::vector<std::vector<double>> a;
    for (size_t j = 0; j < 8; ++j) a.push_back(widened(std::span(got_act).subspan((t * 8 + j) * W, W)));
    const auto as = widened(std::span(got_shared).subspan(t * S, S));
    for (size_t o = 0; o < H; ++o) {
      double y = x[t * H + o], error = std::fabs(y) * 0x1p-22;
      for (size_t j = 0; j < 8; ++j) {
        const auto e = down.multiply(got_ids[t * 8 + j] * d.hidden + static_cast<int>(o), a[j]);
        y += got_weights[t * 8 + j] * e.y;
        error += got_weights[t * 8 + j] * (e.error + std::fabs(e.y) * 0x1p-20);
      }
      if (S > 0) {
        const auto e = shared_down.multiply(static_cast<int>(o), as);
        const double s = sigmoid_exact(row[E]);
        y += s * e.y;
        error += s * (e.error + std::fabs(e.y) * 0x1p-20);
      }
      c_out.add(got_out[t * H + o], y, error, static_cast<int>(t), static_cast<int>(o));
    }
  }
  // Again, with given ids in place of logits: the same bits.
  out.poison();
  act.poison();
  g.logits = nullptr;
  w.logits = nullptr;
  launch_experts_gate_up_decode(g, 5, nullptr);
  launch_experts_down_decode(w, nullptr);
  const auto again = out.download();
  EXPECT_EQ(std::memcmp(again.data(), got_out.data(), again.size() * 4), 0);
}

INSTANTIATE_TEST_SUITE_P(Shapes, ExpertsDecodeTest,
                         ::testing::Values(ExpertsShape{256, 128, 128, 32, 1},
                                           ExpertsShape{256, 128, 128, 32, 3},
                                           ExpertsShape{192, 64, 128, 64, 1},
                                           ExpertsShape{128, 192, 64, 96, 2},
                                           ExpertsShape{256, 64, 0, 32, 1}));

TEST_F(KernelTest, TheRouterPrefersLowerIndicesOnTies) {
  // All logits are equal: experts 0 .. 7 with equal weights.
  const int hidden = 128, n_experts = 64;
  std::vector<uint8_t> codes(static_cast<size_t>(n_experts * hidden), 7);
  std::vector<uint16_t> scales(static_cast<size_t>(n_experts * hidden / 64), to_bf16(0.01f).bits),
      biases(scales.size(), 0);
  std::vector<float> x(128), norm(128, 1.0f);
  for (auto& v : x) v = normal();
  DeviceBuffer<uint8_t> dc(codes);
  DeviceBuffer<uint16_t> ds(scales), db(biases), normed(128), act(8 * 64);
  DeviceBuffer<float> dx(x), dn(norm), logits(65), weights(8);
  DeviceBuffer<int32_t> ids(8);
  const Q4Weight gate(random, n_experts * 64, hidden);
  DeviceBuffer<unsigned char> pg(gate.packed);
  RouterDecode r;
  r.x = dx.get();
  r.norm = dn.get();
  r.hidden = hidden;
  r.n_experts = n_experts;
  r.router_codes = r.shared_codes = dc.get();
  r.router_scales = r.shared_scales = ds.get();
  r.router_biases = r.shared_biases = db.get();
  r.normed = normed.get();
  r.logits = logits.get();
  launch_router_decode(r, nullptr);
  ExpertsGateUpDecode g;
  g.normed = normed.get();
  g.logits = logits.get();
  g.logits_stride = n_experts + 1;
  g.ids = ids.get();
  g.weights = weights.get();
  g.hidden = hidden;
  g.width = 64;
  g.n_experts = n_experts;
  g.gate = g.up = pg.get();
  g.act = act.get();
  launch_experts_gate_up_decode(g, 2, nullptr);
  const auto got = ids.download();
  const auto w = weights.download();
  for (int j = 0; j < 8; ++j) {
    EXPECT_EQ(got[static_cast<size_t>(j)], j);
    EXPECT_EQ(w[static_cast<size_t>(j)], 0.125f);
  }
}

}  // namespace
}  // namespace lily::cuda
