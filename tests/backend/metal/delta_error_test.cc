// The bound of delta_error.h holds for another correct computation in fp32, and not for one that is slightly
// wrong in one row.
#include "tests/backend/metal/delta_error.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <numeric>
#include <random>

#include "tests/backend/metal/rig.h"

namespace lily::test {
namespace {

using backend::StateSlot;

constexpr int kRows = 12, kWrongRow = 5;
constexpr size_t kSide = model::kDeltaHeadDim;

// The inputs of one head.
struct Head {
  std::vector<float> q, k, v, g, beta;  // [rows][128] or [rows]
  std::vector<float> state;             // [dk][dv]
};

// (19) in fp32, its sums over key dims from the last one to the first: o [rows][128].
std::vector<float> rule(Head head) {
  std::vector<float> o(kRows * kSide);
  for (size_t t = 0; t < kRows; ++t) {
    const float* const q = head.q.data() + t * kSide;
    const float* const k = head.k.data() + t * kSide;
    const float decay = std::exp(head.g[t]);
    for (float& x : head.state) x *= decay;
    for (size_t c = 0; c < kSide; ++c) {
      float read = 0, out = 0;
      for (size_t i = kSide; i-- > 0;) read += k[i] * head.state[i * kSide + c];
      const float delta = head.beta[t] * (head.v[t * kSide + c] - read);
      for (size_t i = kSide; i-- > 0;) {
        head.state[i * kSide + c] += k[i] * delta;
        out += q[i] * head.state[i * kSide + c];
      }
      o[t * kSide + c] = out;
    }
  }
  return o;
}

void normalise(std::vector<float>& x, float size) {
  for (size_t first = 0; first < x.size(); first += kSide) {
    float sum = 0;
    for (size_t i = first; i < first + kSide; ++i) sum += x[i] * x[i];
    for (size_t i = first; i < first + kSide; ++i) x[i] *= size / std::sqrt(sum);
  }
}

TEST(DeltaError, CoversRoundingsAndNotAWrongRow) {
  const model::Checkpoint& checkpoint = small_checkpoint();
  const model::Dims& dims = checkpoint.dims();
  const auto device = backend::make_reference_device({});
  device->load(checkpoint, {});
  const plan::Policy policy = device->policy(dims);
  device->reserve({.n_state_slots = 2, .n_kv_blocks = 1, .n_token_slots = 1, .max_rows = kRows}, policy);
  const auto program = device->compile(plan::forward(
      dims, {.phase = plan::Phase::prefill, .rows = kRows, .outputs = 1, .context = 64}, policy));
  const plan::Plan& plan = program->plan();
  const auto at = std::find_if(plan.ops.begin(), plan.ops.end(), [](const plan::Op& op) {
    return std::holds_alternative<plan::DeltaRule>(op);
  });
  ASSERT_NE(at, plan.ops.end());
  const auto& op = std::get<plan::DeltaRule>(*at);

  std::mt19937 random(7);
  std::normal_distribution<float> normal;
  const auto floats = [&](size_t n) {
    std::vector<float> x(n);
    for (float& value : x) value = normal(random);
    return x;
  };
  const auto n_heads = static_cast<size_t>(dims.n_value_heads), keys = static_cast<size_t>(dims.key_width());
  const auto v_cols = static_cast<size_t>(plan.value(op.v.value).cols);
  std::vector<float> q = floats(kRows * keys), k = floats(kRows * keys), g = floats(kRows * n_heads),
                     beta = floats(kRows * n_heads);
  const std::vector<float> v = floats(kRows * v_cols), state = floats(n_heads * kSide * kSide);
  normalise(q, 0.088388348f);
  normalise(k, 1);
  for (float& x : g) x = -0.1f * std::abs(x);
  for (float& x : beta) x = 1 / (1 + std::exp(-x));

  const std::vector<int32_t> tokens(kRows, 1), table = {0}, output_rows = {kRows - 1};
  const std::vector<backend::Segment> segments = {
      {.n_rows = kRows, .position = 0, .src = StateSlot{0}, .dst = StateSlot{1}}};
  const backend::StepInputs inputs{.tokens = tokens,
                                   .segments = segments,
                                   .block_table = table,
                                   .output_rows = output_rows,
                                   .n_tokens = 2};
  device->write_delta_state(StateSlot{0}, op.layer, state);
  const std::vector<std::pair<plan::ValueId, const std::vector<float>*>> values = {
      {op.q, &q}, {op.k, &k}, {op.v.value, &v}, {op.g, &g}, {op.beta, &beta}};
  const int index = static_cast<int>(at - plan.ops.begin());
  program->run_ops(inputs, index, index);  // makes the step's rows known, so that values can be written
  for (const auto& [id, data] : values) program->write(id, *data);
  program->run_ops(inputs, index, index + 1);
  const std::vector<float> expected = program->read(op.o);
  const std::vector<double> bound = delta_rule_error(plan, op, inputs, *program, *device);
  ASSERT_EQ(bound.size(), expected.size());

  for (size_t h = 0; h < n_heads; ++h) {
    SCOPED_TRACE(testing::Message() << "head " << h);
    Head head;
    const auto rows_of = [&](const std::vector<float>& x, size_t cols, size_t first, size_t n) {
      std::vector<float> part;
      for (size_t t = 0; t < kRows; ++t)
        part.insert(part.end(), x.begin() + static_cast<std::ptrdiff_t>(t * cols + first),
                    x.begin() + static_cast<std::ptrdiff_t>(t * cols + first + n));
      return part;
    };
    const size_t key = h / model::kValueHeadsPerKey * kSide;
    head.q = rows_of(q, keys, key, kSide);
    head.k = rows_of(k, keys, key, kSide);
    head.v = rows_of(v, v_cols, static_cast<size_t>(op.v.first_col) + h * kSide, kSide);
    head.g = rows_of(g, n_heads, h, 1);
    head.beta = rows_of(beta, n_heads, h, 1);
    head.state.assign(state.begin() + static_cast<std::ptrdiff_t>(h * kSide * kSide),
                      state.begin() + static_cast<std::ptrdiff_t>((h + 1) * kSide * kSide));
    // The largest error of each row, in multiples of its bound.
    const auto worst_of = [&](const std::vector<float>& o) {
      std::vector<double> worst(kRows, 0);
      for (size_t t = 0; t < kRows; ++t)
        for (size_t c = 0; c < kSide; ++c) {
          const size_t i = (t * n_heads + h) * kSide + c;
          worst[t] =
              std::max(worst[t], std::abs(static_cast<double>(o[t * kSide + c]) - expected[i]) / bound[i]);
        }
      return worst;
    };
    for (const double worst : worst_of(rule(head))) EXPECT_LE(worst, 1);
    Head wrong = head;
    wrong.beta[kWrongRow] *= 1 + 0x1p-10f;
    const std::vector<double> worst = worst_of(rule(wrong));
    for (size_t t = 0; t < kRows; ++t) {
      if (t < kWrongRow) EXPECT_LE(worst[t], 1) << "row " << t;
      else if (t == kWrongRow) EXPECT_GT(worst[t], 1);
    }
  }
}

}  // namespace
}  // namespace lily::test
