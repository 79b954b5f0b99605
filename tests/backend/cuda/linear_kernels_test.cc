#include "backend/cuda/kernels/linear_decode.h"
#include "tests/backend/cuda/kernel_fixture.h"

namespace lily::cuda {
namespace {

class LinearDecodeTest : public KernelTest {
 protected:
  std::vector<uint16_t> random_bf16(size_t n) {
    std::vector<uint16_t> x(n);
    for (auto& v : x) v = to_bf16(normal()).bits;
    return x;
  }
};

TEST_F(LinearDecodeTest, MatchesTheExactProductForConcatenatedWeights) {
  for (const int rows : {1, 3, 8}) {
    const int in = 256;
    Q4Weight a(random, 80, in), b(random, 20, in), c(random, 4, in);
    DeviceBuffer<unsigned char> pa(a.packed), pb(b.packed), pc(c.packed);
    const auto x = random_bf16(static_cast<size_t>(rows * in));
    DeviceBuffer<uint16_t> dx(x);
    DeviceBuffer<uint16_t> y(static_cast<size_t>(rows * 104));
    LinearDecode p;
    p.pieces[0] = {pa.get(), 80, 0};
    p.pieces[1] = {pb.get(), 20, 80};
    p.pieces[2] = {pc.get(), 4, 100};
    p.n_pieces = 3;
    p.in = in;
    p.rows = rows;
    p.x = dx.get();
    p.x_stride = in;
    p.y = y.get();
    p.y_stride = 104;
    launch_linear_decode(p, 3, nullptr);
    const auto got = widened(y.download());
    const auto xd = widened(x);
    Comparison compare;
    for (int r = 0; r < rows; ++r)
      for (int o = 0; o < 104; ++o) {
        const Q4Weight& w = o < 80 ? a : o < 100 ? b : c;
        const auto e = w.multiply(o < 80    ? o
                                  : o < 100 ? o - 80
                                            : o - 100,
                                  std::span(xd).subspan(static_cast<size_t>(r * in), in));
        compare.add(got[static_cast<size_t>(r * 104 + o)], e.y, e.error + kBf16Half * std::fabs(e.y), r, o);
      }
  }
}

TEST_F(LinearDecodeTest, ARowDoesNotDependOnItsNeighbours) {
  const int in = 512, out = 96;
  Q4Weight w(random, out, in);
  DeviceBuffer<unsigned char> packed(w.packed);
  const auto x = random_bf16(static_cast<size_t>(8 * in));
  DeviceBuffer<uint16_t> dx(x);
  for (const int n_sms : {1, 4}) {
    DeviceBuffer<float> all(static_cast<size_t>(8 * out)), one(static_cast<size_t>(out));
    LinearDecode p;
    p.pieces[0] = {packed.get(), out, 0};
    p.n_pieces = 1;
    p.in = in;
    p.rows = 8;
    p.x = dx.get();
    p.x_stride = in;
    p.y = all.get();
    p.y_f32 = true;
    p.y_stride = out;
    launch_linear_decode(p, n_sms, nullptr);
    const auto together = all.download();
    for (int r = 0; r < 8; ++r) {
      one.poison();
      p.rows = 1;
      p.x = dx.get() + r * in;
      p.y = one.get();
      launch_linear_decode(p, n_sms, nullptr);
      const auto alone = one.download();
      EXPECT_EQ(
          std::memcmp(alone.data(), together.data() + r * out, sizeof(float) * static_cast<size_t>(out)), 0)
          << "row " << r;
    }
  }
}

TEST_F(LinearDecodeTest, NormalisesInFrontAndAddsTheResidualBehind) {
  const int in = 384, out = 384, rows = 2;
  Q4Weight w(random, out, in);
  DeviceBuffer<unsigned char> packed(w.packed);
  std::vector<float> x(static_cast<size_t>(rows * in)), norm(static_cast<size_t>(in));
  for (auto& v : x) v = normal(3);
  for (auto& v : norm) v = uniform(0.5f, 1.5f);
  DeviceBuffer<float> dx(x), dnorm(norm), y(x.size());
  LinearDecode p;
  p.pieces[0] = {packed.get(), out, 0};
  p.n_pieces = 1;
  p.in = in;
  p.rows = rows;
  p.x = dx.get();
  p.x_f32 = true;
  p.x_stride = in;
  p.norm = dnorm.get();
  p.y_stride = out;
  p.residual_in = dx.get();
  p.residual_out = y.get();
  launch_linear_decode(p, 8, nullptr);
  const auto got = y.download();
  Comparison compare;
  for (int r = 0; r < rows; ++r) {
    double square = 0;
    for (int i = 0; i < in; ++i) square += std::pow(x[static_cast<size_t>(r * in + i)], 2);
    const double scale = 1 / std::sqrt(square / in + 1e-6);
    std::vector<double> u(static_cast<size_t>(in)), slack(static_cast<size_t>(in));
    for (int i = 0; i < in; ++i) {
      u[static_cast<size_t>(i)] = x[static_cast<size_t>(r * in + i)] * scale * norm[static_cast<size_t>(i)];
      slack[static_cast<size_t>(i)] = std::fabs(u[static_cast<size_t>(i)]) * kBf16Half;
    }
    for (int o = 0; o < out; ++o) {
      const auto e = w.multiply(o, u);
      double rounding = 0;  // the normalised row is rounded to bf16: independent errors
      for (int i = 0; i < in; ++i)
        rounding += std::pow(w.value[static_cast<size_t>(o * in + i)] * slack[static_cast<size_t>(i)], 2);
      const double residual = x[static_cast<size_t>(r * in + o)];
      compare.add(got[static_cast<size_t>(r * out + o)], residual + e.y,
                  e.error + 4 * std::sqrt(rounding) + 0x1p-23 * (std::fabs(residual) + std::fabs(e.y)), r, o);
    }
  }
}

TEST_F(LinearDecodeTest, TheRingServesLargeWeightsAndMasksPadding) {
  const int in = 320, out = 16 * 130,
            n_tokens = 2000;  // one block: 130 tiles, more than fit its shared memory
  Q4Weight w(random, out, in);
  DeviceBuffer<unsigned char> packed(w.packed);
  for (const int rows : {1, 2}) {
    const auto x = random_bf16(static_cast<size_t>(rows * in));
    DeviceBuffer<uint16_t> dx(x);
    DeviceBuffer<float> y(static_cast<size_t>(rows * out));
    LinearDecode p;
    p.pieces[0] = {packed.get(), out, 0};
    p.n_pieces = 1;
    p.in = in;
    p.rows = rows;
    p.x = dx.get();
    p.x_stride = in;
    p.y = y.get();
    p.y_f32 = true;
    p.y_stride = out;
    p.n_tokens = n_tokens;
    launch_linear_decode(p, 1, nullptr);
    const auto got = y.download();
    launch_linear_decode(p, 1, nullptr);
    const auto again = y.download();
    EXPECT_EQ(std::memcmp(got.data(), again.data(), got.size() * 4), 0);
    const auto xd = widened(x);
    Comparison compare;
    for (int r = 0; r < rows; ++r)
      for (int o = 0; o < out; ++o) {
        if (o >= n_tokens) {
          EXPECT_EQ(got[static_cast<size_t>(r * out + o)], -INFINITY);
          continue;
        }
        const auto e =
            w.multiply(o, std::span(xd).subspan(static_cast<size_t>(r * in), static_cast<size_t>(in)));
        compare.add(got[static_cast<size_t>(r * out + o)], e.y, e.error, r, o);
      }
  }
}

}  // namespace
}  // namespace lily::cuda
