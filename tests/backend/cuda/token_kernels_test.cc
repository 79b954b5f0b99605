#include <algorithm>

#include "backend/cuda/kernels/tokens.h"
#include "plan/sample.h"
#include "tests/backend/cuda/kernel_fixture.h"

namespace lily::cuda {
namespace {

class TokenTest : public KernelTest {
 protected:
  // Runs one choice over rows of logits and returns the tokens (or ids) of every row.
  struct Chosen {
    std::vector<int32_t> tokens, ids;
    std::vector<float> values, logsumexp;
    std::vector<int32_t> slots;
  };
  Chosen choose(Choice choice, const std::vector<std::vector<float>>& rows, int n_tokens,
                const std::vector<SampleRow>& settings, int n_candidates = 0) {
    const size_t outputs = rows.size(), vocab = rows[0].size();
    std::vector<float> logits;
    for (const auto& r : rows) {
      logits.insert(logits.end(), r.begin(), r.end());
      std::fill(logits.end() - static_cast<long>(vocab) + n_tokens, logits.end(), -INFINITY);
    }
    std::vector<int32_t> token_out;
    for (size_t o = 0; o < outputs; ++o) token_out.push_back(o == 1 ? -1 : static_cast<int32_t>(o));
    DeviceBuffer<float> d_logits(logits),
        values(std::max<size_t>(1, outputs * static_cast<size_t>(n_candidates))), lse(outputs),
        chunk_max(outputs * kChunks), chunk_sum(outputs * kChunks);
    DeviceBuffer<int32_t> tokens(outputs),
        ids(std::max<size_t>(1, outputs * static_cast<size_t>(n_candidates))), chunk_id(outputs * kChunks),
        out(token_out), slots(outputs);
    DeviceBuffer<uint64_t> weights(outputs * vocab);
    DeviceBuffer<StepCounts> counts(std::vector<StepCounts>{{1, static_cast<int32_t>(outputs), 1, n_tokens}});
    DeviceBuffer<SampleRow> sampling(settings.empty() ? std::vector<SampleRow>(1) : settings);
    ChooseToken p;
    p.choice = choice;
    p.logits = d_logits.get();
    p.vocab = static_cast<int>(vocab);
    p.outputs = static_cast<int>(outputs);
    p.n_candidates = n_candidates;
    p.step.counts = counts.get();
    p.step.token_out = out.get();
    p.step.token_slots = slots.get();
    p.step.sampling = sampling.get();
    p.token = tokens.get();
    p.ids = ids.get();
    p.values = values.get();
    p.logsumexp = lse.get();
    p.chunk_max = chunk_max.get();
    p.chunk_id = chunk_id.get();
    p.chunk_sum = chunk_sum.get();
    p.weights = weights.get();
    launch_choose_token(p, nullptr);
    return {tokens.download(), ids.download(), values.download(), lse.download(), slots.download()};
  }
  std::vector<float> random_row(size_t vocab, float sigma = 3) {
    std::vector<float> x(vocab);
    for (auto& v : x) v = normal(sigma);
    return x;
  }
};

TEST_F(TokenTest, GreedyTakesTheLowestIdOfTheLargest) {
  std::vector<std::vector<float>> rows;
  for (int i = 0; i < 4; ++i) rows.push_back(random_row(5000));
  rows[0][4321] = rows[0][77] = 50;
  rows[1][4999] = 99;  // a padding row of the vocabulary
  rows[2][10] = std::nanf("");
  rows[3].assign(5000, 1.5f);
  const auto got = choose(Choice::greedy, rows, 4990, {});
  for (size_t o = 0; o < 4; ++o) {
    EXPECT_EQ(got.tokens[o], plan::greedy_token(std::span(rows[o]).first(4990)));
    if (o != 1) EXPECT_EQ(got.slots[o], got.tokens[o]);
  }
  EXPECT_EQ(got.slots[1], -1);  // no token slot: untouched
  EXPECT_EQ(got.tokens[0], 77);
}

TEST_F(TokenTest, SamplesAsTheHostDoes) {
  struct Case {
    float temperature, top_p, min_p;
    int top_k;
  };
  for (const Case& c : {Case{1, 0.95f, 0, 20}, Case{0.6f, 1, 0.1f, 128}, Case{0, 1, 0, 20},
                        Case{0.7f, 0.8f, 0, 0}, Case{1.5f, 1, 0.02f, 300}, Case{1, 1, 0, 1}}) {
    std::vector<std::vector<float>> rows;
    std::vector<SampleRow> settings;
    for (uint32_t i = 0; i < 3; ++i) {
      rows.push_back(random_row(3000, i == 2 ? 0.5f : 3));
      settings.push_back(
          {c.temperature, c.top_p, c.min_p, c.top_k, 0x12345678u + i, 0x9abcu, 7 + i, 100 * i});
    }
    const auto got = choose(Choice::sample, rows, 2950, settings);
    for (size_t o = 0; o < rows.size(); ++o) {
      const auto real = std::span(rows[o]).first(2950);
      const uint64_t seed = uint64_t{settings[o].seed_high} << 32 | settings[o].seed_low;
      const float u = plan::uniform(seed, settings[o].sequence, settings[o].step);
      EXPECT_EQ(got.tokens[o], plan::sample_token(real, {c.temperature, c.top_p, c.min_p, c.top_k}, u))
          << "top_k " << c.top_k << " row " << o;
    }
  }
}

TEST_F(TokenTest, CandidatesAreSortedWithTheirLogsumexp) {
  std::vector<std::vector<float>> rows = {random_row(5000), random_row(5000, 0.01f),
                                          std::vector<float>(5000, 2.0f)};
  for (size_t i = 0; i < 300; ++i) rows[1][i * 16] = 7;  // more equal logits than are wanted
  const auto got = choose(Choice::candidates, rows, 4990, {}, 64);
  for (size_t o = 0; o < rows.size(); ++o) {
    const auto real = std::span(rows[o]).first(4990);
    const auto expected = plan::top_candidates(real, 64);
    for (size_t i = 0; i < 64; ++i) {
      EXPECT_EQ(got.ids[o * 64 + i], expected[i].id) << o << " " << i;
      EXPECT_EQ(got.values[o * 64 + i], expected[i].logit);
    }
    EXPECT_NEAR(got.logsumexp[o], plan::logsumexp(real), 1e-5);
  }
}

TEST_F(TokenTest, EmbedsRowsFromIdsAndTokenSlots) {
  const size_t vocab = 50, hidden = 128, rows = 3;
  std::vector<uint32_t> codes(vocab * hidden / 8);
  for (auto& c : codes) c = static_cast<uint32_t>(random());
  std::vector<uint16_t> scales(vocab * 2), biases(vocab * 2);
  for (auto& s : scales) s = to_bf16(normal(0.1f)).bits;
  for (auto& b : biases) b = to_bf16(normal()).bits;
  std::vector<double> frequency;
  for (int i = 0; i < 32; ++i) frequency.push_back(std::pow(1e7, -2.0 * i / 64));
  const std::vector<int32_t> tokens = {7, -1, 49}, token_in = {-1, 1, -1}, slots = {3, 11},
                             positions = {0, 262143, 1000};
  DeviceBuffer<uint32_t> d_codes(codes);
  DeviceBuffer<uint16_t> d_scales(scales), d_biases(biases);
  DeviceBuffer<double> d_frequency(frequency);
  DeviceBuffer<int32_t> d_tokens(tokens), d_in(token_in), d_slots(slots), d_positions(positions);
  DeviceBuffer<float> y(rows * hidden);
  DeviceBuffer<float2> rope(rows * 32);
  EmbedRows p;
  p.codes = d_codes.get();
  p.scales = d_scales.get();
  p.biases = d_biases.get();
  p.rope_frequency = d_frequency.get();
  p.hidden = hidden;
  p.vocab = vocab;
  p.rows = rows;
  p.step.tokens = d_tokens.get();
  p.step.token_in = d_in.get();
  p.step.token_slots = d_slots.get();
  p.step.positions = d_positions.get();
  p.step.rope = rope.get();
  p.y = y.get();
  launch_embed_rows(p, nullptr);
  const auto got = y.download();
  const auto got_rope = rope.download();
  const size_t ids[] = {7, 11, 49};
  for (size_t r = 0; r < rows; ++r) {
    for (size_t i = 0; i < hidden; ++i) {
      const size_t at = ids[r] * hidden + i;
      const float code = static_cast<float>(codes[at / 8] >> (4 * (at % 8)) & 15);
      EXPECT_EQ(got[r * hidden + i], bf16_rounded(std::fma(to_float(Bf16{scales[at / 64]}), code,
                                                           to_float(Bf16{biases[at / 64]}))))
          << r << " " << i;
    }
    for (size_t i = 0; i < 32; ++i) {
      EXPECT_NEAR(got_rope[r * 32 + i].x, std::cos(positions[r] * frequency[i]), 1e-6);
      EXPECT_NEAR(got_rope[r * 32 + i].y, std::sin(positions[r] * frequency[i]), 1e-6);
    }
  }
}

}  // namespace
}  // namespace lily::cuda
