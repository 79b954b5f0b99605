#include "backend/cuda/prefill_delta.h"

#include <cstdio>
#include <memory>

#include "tests/backend/cuda_prefill/support.h"

namespace lily::cuda::test {
namespace {

struct Shape {
  int n_tokens, n_key_heads;
  float decay;  // scale of a: 1 ordinary, 30 with decays that vanish
  bool from_zero;
};

struct Inputs {
  int n, nk, nv, channels;
  std::vector<uint16_t> qkvz, ab, conv_weight, conv;
  std::vector<float> a_log, dt_bias, norm, state;

  Inputs(Random& random, const Shape& shape)
      : n(shape.n_tokens), nk(shape.n_key_heads), nv(2 * nk), channels((2 * nk + nv) * 128) {
    qkvz = random.normals(static_cast<size_t>(n) * (channels + nv * 128));
    // Keys that resemble each other make the triangular system matter.
    for (int t = 0; t < n; ++t)
      for (int c = nk * 128; c < 2 * nk * 128; ++c) {
        auto& x = qkvz[static_cast<size_t>(t) * (channels + nv * 128) + c];
        x = bits(value(x) + 0.7f * std::sin(static_cast<float>(c)));
      }
    ab = random.normals(static_cast<size_t>(n) * 2 * nv, shape.decay);
    conv_weight = random.normals(static_cast<size_t>(channels) * 4, 0.5f);
    norm = values(random.normals(128));
    conv = random.normals(static_cast<size_t>(channels) * 3);
    for (int h = 0; h < nv; ++h) a_log.push_back(random.uniform(-3, 1)), dt_bias.push_back(random.normal());
    for (size_t i = 0; i < static_cast<size_t>(nv) * 128 * 128; ++i) state.push_back(random.normal(0.05f));
    if (shape.from_zero) {
      std::fill(conv.begin(), conv.end(), uint16_t{0});
      std::fill(state.begin(), state.end(), 0.0f);
    }
  }
  int stride() const { return channels + nv * 128; }
};

struct Reference {
  std::vector<double> y, size;  // [n, nv * 128]; size is |norm silu(z)|, the scale of an element
  // [n, nv * 128]: how much larger the products of a head's S^T q are than their sums. Roundings of S are as
  // large as the former, the norm divides by the latter.
  std::vector<double> cancels;
  std::vector<double> state;  // [nv, dv, dk]
  std::vector<uint16_t> conv;
};

Reference reference(const Inputs& in) {
  Reference r;
  const int n = in.n, nk = in.nk, nv = in.nv, channels = in.channels;
  const auto m = [&](int t, int c) {
    return static_cast<double>(t >= 0 ? value(in.qkvz[static_cast<size_t>(t) * in.stride() + c])
                                      : value(in.conv[static_cast<size_t>(t + 3) * channels + c]));
  };
  std::vector<double> c(static_cast<size_t>(n) * channels);
  for (int t = 0; t < n; ++t)
    for (int ch = 0; ch < channels; ++ch) {
      double sum = 0;
      for (int j = 0; j < 4; ++j)
        sum += value(in.conv_weight[static_cast<size_t>(ch) * 4 + j]) * m(t - 3 + j, ch);
      c[static_cast<size_t>(t) * channels + ch] = sum / (1 + std::exp(-sum));
    }
  for (int i = 0; i < 3; ++i)
    for (int ch = 0; ch < channels; ++ch) r.conv.push_back(bits(m(n - 3 + i, ch)));
  r.y.resize(static_cast<size_t>(n) * nv * 128);
  r.size.resize(r.y.size());
  r.cancels.resize(r.y.size());
  for (int h = 0; h < nv; ++h) {
    std::vector<double> s(in.state.begin() + static_cast<std::ptrdiff_t>(h) * 128 * 128,
                          in.state.begin() + static_cast<std::ptrdiff_t>(h + 1) * 128 * 128);
    for (int t = 0; t < n; ++t) {
      const double* row = &c[static_cast<size_t>(t) * channels];
      double q[128], k[128], v[128], o[128], qq = 0, kk = 0;
      for (int i = 0; i < 128; ++i)
        qq += std::pow(row[h / 2 * 128 + i], 2), kk += std::pow(row[(nk + h / 2) * 128 + i], 2);
      for (int i = 0; i < 128; ++i) {  // operands of the rule are bf16
        q[i] = value(bits(row[h / 2 * 128 + i] / std::sqrt(qq + 1e-6) / std::sqrt(128.0)));
        k[i] = value(bits(row[(nk + h / 2) * 128 + i] / std::sqrt(kk + 1e-6)));
        v[i] = value(bits(row[(2 * nk + h) * 128 + i]));
      }
      const double x =
          static_cast<double>(value(in.ab[static_cast<size_t>(t) * 2 * nv + nv + h])) + in.dt_bias[h];
      const double g = -std::exp(static_cast<double>(in.a_log[h])) *
                       (std::max(x, 0.0) + std::log1p(std::exp(-std::abs(x))));
      const double beta =
          1 / (1 + std::exp(-static_cast<double>(value(in.ab[static_cast<size_t>(t) * 2 * nv + h]))));
      double squares = 0, products = 0;
      for (int dv = 0; dv < 128; ++dv) {
        double* column = &s[static_cast<size_t>(dv) * 128];
        double read = 0;
        for (int i = 0; i < 128; ++i) column[i] *= std::exp(g), read += column[i] * k[i];
        const double delta = beta * (v[dv] - read);
        o[dv] = 0;
        for (int i = 0; i < 128; ++i)
          column[i] += k[i] * delta, o[dv] += column[i] * q[i], products += std::pow(column[i] * q[i], 2);
        squares += o[dv] * o[dv];
      }
      for (int dv = 0; dv < 128; ++dv) {
        const double z = value(in.qkvz[static_cast<size_t>(t) * in.stride() + channels + h * 128 + dv]);
        const size_t at = static_cast<size_t>(t) * nv * 128 + h * 128 + dv;
        r.cancels[at] = std::max(1.0, std::sqrt(products / (squares + 128e-6)));
        r.size[at] = std::abs(in.norm[dv] * z / (1 + std::exp(-z)));
        r.y[at] = o[dv] / std::sqrt(squares / 128 + 1e-6) * in.norm[dv] * z / (1 + std::exp(-z));
      }
    }
    r.state.insert(r.state.end(), s.begin(), s.end());
  }
  return r;
}

double relative_error(const std::vector<float>& got, const std::vector<double>& want) {
  double error = 0, norm = 0;
  for (size_t i = 0; i < want.size(); ++i) error += std::pow(got[i] - want[i], 2), norm += want[i] * want[i];
  return std::sqrt(error / norm);
}

class Delta : public ::testing::TestWithParam<Shape> {};

TEST_P(Delta, BothFormsFollowTheRecurrence) {
  const Shape& shape = GetParam();
  Random random(60 + static_cast<uint64_t>(shape.n_tokens));
  const Inputs in(random, shape);
  const Reference want = reference(in);
  const DeviceArray<uint16_t> qkvz(in.qkvz), ab(in.ab), conv_weight(in.conv_weight);
  const DeviceArray<float> a_log(in.a_log), dt_bias(in.dt_bias), norm(in.norm);
  for (const bool blocks : {false, true}) {
    SCOPED_TRACE(blocks ? "in blocks" : "token by token");
    DeviceArray<uint16_t> conv(in.conv), y(want.y.size());
    DeviceArray<float> state(in.state);
    DeviceArray<std::byte> scratch(delta_scratch_bytes(in.n, in.nk, in.nv));
    const DeltaArgs args{in.n,
                         in.nk,
                         in.nv,
                         qkvz.get(),
                         qkvz.get() + in.channels,
                         ab.get(),
                         ab.get() + in.nv,
                         in.stride(),
                         in.stride(),
                         2 * in.nv,
                         conv_weight.get(),
                         a_log.get(),
                         dt_bias.get(),
                         norm.get(),
                         shape.from_zero ? nullptr : conv.get(),
                         conv.get(),
                         shape.from_zero ? nullptr : state.get(),
                         state.get(),
                         y.get(),
                         scratch.get()};
    const auto run = [&] {
      blocks ? delta_blocks_prefill(args, nullptr) : delta_scan_prefill(args, nullptr);
    };
    run();
    finish();
    // Token by token all is fp32 after the operands' rounding, where a few differ by one bf16 step from the
    // reference's. In blocks T and W before K, and the state before W and Q, are operands of 8 bits: 4
    // roundings of 2^-9 relative to the row, two of them of one sum.
    const double row_error = blocks ? 0x1p-8 : 0x1p-9;
    std::vector<double> absolute;
    for (size_t i = 0; i < want.size.size(); ++i)
      absolute.push_back(8 * row_error * want.size[i] * (blocks ? want.cancels[i] : 1) + 1e-6);
    const auto got = values(y.download());
    expect_close(got, want.y, 0x1p-8, absolute, in.nv * 128, "y");
    const auto got_state = state.download();
    const double y_error = relative_error(got, want.y), state_error = relative_error(got_state, want.state);
    std::printf("tokens %d, %s: relative error of y %.2e, of the state %.2e\n", in.n,
                blocks ? "blocks" : "scan", y_error, state_error);
    EXPECT_LE(y_error, 4e-3);
    EXPECT_LE(state_error, blocks ? 1e-3 : 2e-3);
    EXPECT_EQ(conv.download(), want.conv);
    conv.upload(in.conv), state.upload(in.state), y.poison(), scratch.poison();
    run();
    finish();
    EXPECT_EQ(values(y.download()), got) << "two runs differ";
    EXPECT_EQ(state.download(), got_state) << "two runs differ";
  }
}

#ifdef LILY_CUDA_EMULATED
INSTANTIATE_TEST_SUITE_P(Shapes, Delta,
                         ::testing::Values(Shape{1, 1, 1, false}, Shape{2, 1, 1, true},
                                           Shape{65, 1, 1, false}, Shape{150, 1, 30, false}));
#else
INSTANTIATE_TEST_SUITE_P(Shapes, Delta,
                         ::testing::Values(Shape{1, 2, 1, false}, Shape{2, 1, 1, true}, Shape{63, 2, 1, true},
                                           Shape{64, 2, 1, false}, Shape{65, 2, 1, false},
                                           Shape{150, 2, 30, false}, Shape{512, 16, 1, false},
                                           Shape{1000, 2, 3, true}));
#endif

}  // namespace
}  // namespace lily::cuda::test
