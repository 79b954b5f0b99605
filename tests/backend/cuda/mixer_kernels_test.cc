#include "backend/cuda/kernels/attention_decode.h"
#include "backend/cuda/kernels/delta_decode.h"
#include "backend/cuda/kernels/simple.h"
#include "tests/backend/cuda/kernel_fixture.h"
#include "tests/backend/cuda/kv_bytes.h"

namespace lily::cuda {
namespace {

class MixerDecodeTest : public KernelTest {
 protected:
  std::vector<uint16_t> random_bf16(size_t n, float sigma = 1) {
    std::vector<uint16_t> x(n);
    for (auto& v : x) v = to_bf16(normal(sigma)).bits;
    return x;
  }
  std::vector<float> random_floats(size_t n, float low, float high) {
    std::vector<float> x(n);
    for (auto& v : x) v = uniform(low, high);
    return x;
  }
};

TEST_F(MixerDecodeTest, DeltaMixerMatchesTheExactRecurrence) {
  constexpr size_t nk = 2, nv = 4, kHead = 128, channels = 4 * nk * kHead, width = nv * kHead;
  const size_t rows = 3, stride = channels + width + 2 * nv, n_slots = 4;
  // Row 0: in place. Row 1: from slot 1 to slot 2. Row 2: from nothing to slot 3. The second round has tiny q
  // and k, where the norm's epsilon shows.
  const std::vector<int32_t> src = {0, 1, -1}, dst = {0, 2, 3};
  for (const float sigma : {1.0f, 0.002f}) {
    const auto in = random_bf16(rows * stride, sigma);
    const auto conv = random_bf16(channels * 4, 0.4f);
    const auto a_log = random_floats(nv, -1, 1.5f), dt_bias = random_floats(nv, -2, 2),
               norm = random_floats(kHead, 0.5f, 1.5f);
    const auto conv_state = random_bf16(n_slots * 3 * channels, sigma);
    std::vector<float> state(n_slots * nv * kHead * kHead);
    for (auto& v : state) v = normal(0.3f);
    DeviceBuffer<uint16_t> d_in(in), d_conv(conv), d_conv_state(conv_state), y(rows * width);
    DeviceBuffer<float> d_a_log(a_log), d_dt_bias(dt_bias), d_norm(norm), d_state(state);
    DeviceBuffer<int32_t> d_src(src), d_dst(dst);
    DeltaDecode p;
    p.qkv = d_in.get();
    p.z = d_in.get() + channels;
    p.b = d_in.get() + channels + width;
    p.a = d_in.get() + channels + width + nv;
    p.stride = static_cast<int64_t>(stride);
    p.conv = d_conv.get();
    p.a_log = d_a_log.get();
    p.dt_bias = d_dt_bias.get();
    p.norm = d_norm.get();
    p.n_key_heads = nk;
    p.rows = static_cast<int>(rows);
    p.conv_state = d_conv_state.get();
    p.conv_slot_stride = 3 * channels;
    p.delta_state = d_state.get();
    p.delta_slot_stride = nv * kHead * kHead;
    p.step.state_src = d_src.get();
    p.step.state_dst = d_dst.get();
    p.y = y.get();
    launch_delta_decode(p, nullptr);
    const auto got_y = y.download();
    const auto got_state = d_state.download();
    const auto got_conv = d_conv_state.download();

    Comparison c_y, c_state;
    const auto bf = [](uint16_t b) { return static_cast<double>(to_float(Bf16{b})); };
    for (size_t t = 0; t < rows; ++t) {
      std::vector<double> mixed(channels);
      for (size_t ch = 0; ch < channels; ++ch) {
        double sum = bf(conv[ch * 4 + 3]) * bf(in[t * stride + ch]);
        for (size_t i = 0; i < 3; ++i) {
          const uint16_t old =
              src[t] < 0 ? uint16_t{0} : conv_state[(static_cast<size_t>(src[t]) * 3 + i) * channels + ch];
          sum += bf(conv[ch * 4 + i]) * bf(old);
          const uint16_t expected =
              i == 2 ? in[t * stride + ch]
                     : (src[t] < 0 ? uint16_t{0}
                                   : conv_state[(static_cast<size_t>(src[t]) * 3 + i + 1) * channels + ch]);
          EXPECT_EQ(got_conv[(static_cast<size_t>(dst[t]) * 3 + i) * channels + ch], expected)
              << t << " " << i << " " << ch;
        }
        mixed[ch] = bf16_rounded(static_cast<float>(silu_exact(sum)));
      }
      for (size_t h = 0; h < nv; ++h) {
        const size_t kh = h / 2;
        std::vector<double> q(kHead), k(kHead), o(kHead);
        double qq = 1e-6, kk = 1e-6;
        for (size_t i = 0; i < kHead; ++i) {
          q[i] = mixed[kh * kHead + i];
          k[i] = mixed[nk * kHead + kh * kHead + i];
          qq += q[i] * q[i];
          kk += k[i] * k[i];
        }
        double k_norm = 0, q_norm = 0;
        for (size_t i = 0; i < kHead; ++i) {
          q[i] /= std::sqrt(qq) * std::sqrt(128.0);
          k[i] /= std::sqrt(kk);
          k_norm += std::fabs(k[i]);
          q_norm += std::fabs(q[i]);
        }
        const double a = bf(in[t * stride + channels + width + nv + h]) + dt_bias[h],
                     b = bf(in[t * stride + channels + width + h]);
        const double decay =
            std::exp(-std::exp(a_log[h]) * (std::max(a, 0.0) + std::log1p(std::exp(-std::fabs(a)))));
        const double beta = sigmoid_exact(b);
        double square = 0;
        std::vector<double> o_error(kHead);
        for (size_t col = 0; col < kHead; ++col) {
          std::vector<double> s(kHead, 0.0);
          double read = 0, size = 0;
          for (size_t i = 0; i < kHead; ++i) {
            if (src[t] >= 0)
              s[i] = state[((static_cast<size_t>(src[t]) * nv + h) * kHead + col) * kHead + i] * decay;
            read += k[i] * s[i];
            size = std::max(size, std::fabs(s[i]));
          }
          const double v = mixed[2 * nk * kHead + h * kHead + col], delta = beta * (v - read);
          // A convolved value next to a rounding boundary may differ by one bf16 step (2^-8 relative): rare,
          // so its influence on a length of 128 values is taken as a few values' worth.
          const double flip = 4 * 0x1p-8 * (std::fabs(delta) / 8 + size / 8 + std::fabs(v) / 4);
          for (size_t i = 0; i < kHead; ++i) {
            s[i] += k[i] * delta;
            o[col] += q[i] * s[i];
            c_state.add(got_state[((static_cast<size_t>(dst[t]) * nv + h) * kHead + col) * kHead + i], s[i],
                        (size + std::fabs(delta)) * 0x1p-17 * (1 + k_norm) + flip, static_cast<int>(t),
                        static_cast<int>(col));
          }
          o_error[col] = (size + std::fabs(delta)) * q_norm * 0x1p-17 * (1 + k_norm) + flip;
          square += o[col] * o[col];
        }
        const double r = 1 / std::sqrt(square / kHead + 1e-6);
        double mean_error = 0;
        for (const double e : o_error) mean_error += e / kHead;
        for (size_t col = 0; col < kHead; ++col) {
          const double gate = norm[col] * silu_exact(bf(in[t * stride + channels + h * kHead + col]));
          const double y_exact = o[col] * r * gate;
          c_y.add(bf(got_y[t * width + h * kHead + col]), y_exact,
                  std::fabs(y_exact) * (kBf16Half + 0x1p-18 + r * mean_error) +
                      r * o_error[col] * std::fabs(gate),
                  static_cast<int>(t), static_cast<int>(col));
        }
      }
    }
  }
}

class AttentionDecodeTest : public MixerDecodeTest, public ::testing::WithParamInterface<KvForm> {};

TEST_P(AttentionDecodeTest, MatchesTheExactSoftmaxAndAppends) {
  const KvForm form = GetParam();
  constexpr size_t hq = 8, hkv = 1, D = 256;
  constexpr size_t stride = hq * 512 + 2 * hkv * D;
  // One key, a chunk, beyond a block, splits of uneven size, the most for one cluster, several clusters; each
  // row its own blocks in shuffled order.
  const std::vector<int32_t> positions = {0, 15, 16, 30, 31, 32, 62, 63, 64, 200, 319, 383, 767, 768, 1100};
  const size_t rows = positions.size();
  std::vector<int32_t> first, table;
  int n_blocks = 0;
  for (const int32_t p : positions) {
    first.push_back(static_cast<int32_t>(table.size()));
    for (int b = 0; b <= p / 64; ++b) table.push_back(n_blocks++);
  }
  std::shuffle(table.begin(), table.end(), random);
  const size_t cache_size = static_cast<size_t>(n_blocks) * hkv * 64 * D;
  std::vector<float> k(cache_size, NAN), v(cache_size, NAN);  // NaN wherever no position was written
  const auto cache_at = [&](size_t row, int32_t position) {
    return (static_cast<size_t>(table[static_cast<size_t>(first[row]) + static_cast<size_t>(position / 64)]) *
                hkv * 64 +
            static_cast<size_t>(position % 64)) *
           D;
  };
  for (size_t r = 0; r < rows; ++r)
    for (int32_t p = 0; p < positions[r]; ++p)
      for (size_t i = 0; i < D; ++i) {
        k[cache_at(r, p) + i] = bf16_rounded(normal(p % 7 == 0 ? 3.0f : 1.0f));
        v[cache_at(r, p) + i] = bf16_rounded(normal());
      }
  const auto in = random_bf16(rows * stride);
  const auto q_norm = random_floats(D, 0.5f, 2), k_norm = random_floats(D, 0.5f, 2);
  std::vector<float2> rope(rows * 32);
  for (size_t r = 0; r < rows; ++r)
    for (size_t i = 0; i < 32; ++i) {
      const double angle = positions[r] * std::pow(1e7, -2.0 * static_cast<double>(i) / 64);
      rope[r * 32 + i] = {static_cast<float>(std::cos(angle)), static_cast<float>(std::sin(angle))};
    }
  DeviceBuffer<uint16_t> d_in(in), y(rows * hq * D);
  DeviceBuffer<std::byte> d_k(kv_bytes(k, form, hkv)), d_v(kv_bytes(v, form, hkv));
  DeviceBuffer<float> d_qn(q_norm), d_kn(k_norm),
      partial(attention_partial_floats(static_cast<int>(rows), hq));
  DeviceBuffer<float2> d_rope(rope);
  DeviceBuffer<int32_t> d_first(first), d_table(table), d_positions(positions);
  DeviceBuffer<unsigned> counters(std::vector<unsigned>(rows * hq, 0));
  AttentionDecode p;
  p.q_gate = d_in.get();
  p.k = d_in.get() + hq * 512;
  p.v = p.k + hkv * D;
  p.stride = stride;
  p.q_norm = d_qn.get();
  p.k_norm = d_kn.get();
  p.n_q_heads = hq;
  p.rows = static_cast<int>(rows);
  p.cache = kv_apart(d_k.get(), d_v.get(), hkv, form);
  p.step.positions = d_positions.get();
  p.step.table_first = d_first.get();
  p.step.block_table = d_table.get();
  p.step.rope = d_rope.get();
  p.partial = partial.get();
  p.counters = counters.get();
  p.y = y.get();
  launch_attention_decode(p, nullptr);
  const auto got = y.download();
  const auto got_k = kv_floats(d_k.download(), form, hkv), got_v = kv_floats(d_v.download(), form, hkv);
  launch_attention_decode(p, nullptr);  // appends the same key; counters are ready again
  const auto again = y.download();
  EXPECT_EQ(std::memcmp(got.data(), again.data(), got.size() * 2), 0);

  // Preparation as a kernel of its own: the same bits.
  {
    DeviceBuffer<uint16_t> q(rows * hq * D);
    d_k.upload(kv_bytes(k, form, hkv));
    d_v.upload(kv_bytes(v, form, hkv));
    y.poison();
    PrepareHeads h;
    h.q_gate = p.q_gate;
    h.k = p.k;
    h.v = p.v;
    h.stride = stride;
    h.q_norm = d_qn.get();
    h.k_norm = d_kn.get();
    h.n_q_heads = hq;
    h.rows = static_cast<int>(rows);
    h.cache = p.cache;
    h.step = p.step;
    h.q = q.get();
    launch_prepare_heads(h, nullptr);
    AttentionDecode apart = p;
    apart.prepare = false;
    apart.q = q.get();
    launch_attention_decode(apart, nullptr);
    const auto other = y.download();
    EXPECT_EQ(std::memcmp(got.data(), other.data(), got.size() * 2), 0);
  }

  const auto prepare = [&](size_t row, size_t from, const std::vector<float>& weight) {
    std::vector<double> x(D);
    double square = 0;
    for (size_t i = 0; i < D; ++i) {
      x[i] = to_float(Bf16{in[from + i]});
      square += x[i] * x[i];
    }
    const double scale = 1 / std::sqrt(square / D + 1e-6);
    for (size_t i = 0; i < D; ++i) x[i] *= scale * weight[i];
    for (size_t i = 0; i < 32; ++i) {
      const double angle = positions[row] * std::pow(1e7, -2.0 * static_cast<double>(i) / 64), a = x[i],
                   b = x[i + 32];
      x[i] = a * std::cos(angle) - b * std::sin(angle);
      x[i + 32] = a * std::sin(angle) + b * std::cos(angle);
    }
    return x;
  };
  Comparison c_k, c_y;
  for (size_t r = 0; r < rows; ++r) {
    const auto new_k = prepare(r, r * stride + hq * 512, k_norm);
    for (size_t i = 0; i < D; ++i) {
      double largest = 0;
      for (size_t j = i / 64 * 64; j < i / 64 * 64 + 64; ++j)
        largest = std::max(largest, std::fabs(new_k[j]));
      c_k.add(got_k[cache_at(r, positions[r]) + i], new_k[i],
              std::fabs(new_k[i]) * kBf16Half + 0x1p-16 + kv_error(form, largest), static_cast<int>(r),
              static_cast<int>(i));
      v[cache_at(r, positions[r]) + i] = to_float(Bf16{in[r * stride + hq * 512 + hkv * D + i]});
    }
    for (size_t h = 0; h < hq; ++h) {
      auto q = prepare(r, r * stride + h * 512, q_norm);
      double q_square = 0;
      for (double& x : q) {
        x = bf16_rounded(static_cast<float>(x));
        q_square += x * x;
      }
      std::vector<double> score;
      double largest = -1e300, score_error = 0;
      for (int32_t pos = 0; pos <= positions[r]; ++pos) {
        double s = 0, k_square = 0;
        for (size_t i = 0; i < D; ++i) {
          const double kv = got_k[cache_at(r, pos) + i];
          s += q[i] * kv / 16;
          k_square += kv * kv;
        }
        score.push_back(s);
        largest = std::max(largest, s);
        // A q value next to a rounding boundary may be rounded the other way: 2^-8 of a few values' size.
        score_error =
            std::max(score_error, std::sqrt(q_square * k_square) / 16 * (0x1p-18 + 0x1p-8 * 2 / 256));
      }
      double sum = 0;
      for (double& s : score) sum += s = std::exp(s - largest);
      for (size_t i = 0; i < D; ++i) {
        double o = 0, size = 0;
        for (int32_t pos = 0; pos <= positions[r]; ++pos) {
          const double value = got_v[cache_at(r, pos) + i];
          o += score[static_cast<size_t>(pos)] / sum * value;
          size += score[static_cast<size_t>(pos)] / sum * std::fabs(value);
        }
        const double gate = sigmoid_exact(to_float(Bf16{in[r * stride + h * 512 + 256 + i]}));
        c_y.add(to_float(Bf16{got[(r * hq + h) * D + i]}), o * gate,
                gate * (std::fabs(o) * kBf16Half + size * (2 * score_error + 0x1p-16)),
                static_cast<int>(r * hq + h), static_cast<int>(i));
      }
    }
  }
  EXPECT_EQ(d_v.download(), kv_bytes(v, form, hkv)) << "values, bit for bit, and nothing else";
}

INSTANTIATE_TEST_SUITE_P(Forms, AttentionDecodeTest, ::testing::Values(KvForm::bf16, KvForm::int8));

}  // namespace
}  // namespace lily::cuda
