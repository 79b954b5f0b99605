// The oracle's own oracle: the layer outputs of an independent implementation on the bundled model.
#include <gtest/gtest.h>

#include <cmath>
#include <memory>

#include "backend/backend.h"
#include "base/error.h"
#include "model/checkpoint.h"
#include "plan/plan.h"
#include "tests/support/golden.h"

namespace lily::backend {
namespace {

using plan::Ending;
using plan::Phase;
using test::GoldenTensor;

// Both sides compute in fp32 with sums of at most 4,096 terms; two independent implementations of the golden
// outputs differ by at most 2.4e-6 in the norm of a tensor. Ten times that leaves no room for another
// formula.
constexpr double kTolerance = 2.4e-5;

double relative_error(const std::vector<float>& a, const std::vector<float>& b) {
  EXPECT_EQ(a.size(), b.size());
  double difference = 0, norm = 0;
  for (size_t i = 0; i < std::min(a.size(), b.size()); ++i) {
    difference += (static_cast<double>(a[i]) - b[i]) * (static_cast<double>(a[i]) - b[i]);
    norm += static_cast<double>(b[i]) * b[i];
  }
  return std::sqrt(difference / norm);
}

class ReferenceTest : public testing::Test {
 protected:
  static void SetUpTestSuite() {
    checkpoint_ = new model::Checkpoint(model::Checkpoint::open(test::kTinyModel));
    goldens_ =
        new std::map(test::read_golden_tensors(std::string(test::kTinyGoldens) + "/layers.safetensors"));
    device_ = make_device("reference").release();
    device_->load(*checkpoint_, {});
  }
  static void TearDownTestSuite() {
    delete device_;
    delete goldens_;
    delete checkpoint_;
  }

  const model::Dims& dims() const { return checkpoint_->dims(); }
  const GoldenTensor& golden(const std::string& name) const { return goldens_->at(name); }

  std::vector<int32_t> prompt() const {
    const auto& ids = golden("ids").data;
    return {ids.begin(), ids.end()};
  }

  plan::Plan make_plan(int rows, Phase phase, const plan::Policy& policy) const {
    return plan::forward(
        dims(), {.phase = phase, .rows = rows, .outputs = rows, .context = 128, .ending = Ending::logits},
        policy, {.keep_values = true});
  }

  StepOutputs step(Program& program, std::span<const int32_t> tokens, int position) {
    segments_ = {{.n_rows = static_cast<int32_t>(tokens.size()),
                  .position = position,
                  .src = position == 0 ? kNoState : StateSlot{0},
                  .dst = StateSlot{0}}};
    rows_.clear();
    for (size_t t = 0; t < tokens.size(); ++t) rows_.push_back(static_cast<int32_t>(t));
    program.submit({.tokens = tokens,
                    .segments = segments_,
                    .block_table = blocks_,
                    .output_rows = rows_,
                    .n_tokens = dims().vocab});
    return program.wait();
  }

  // Golden names of the values of a plan without fusions.
  void expect_layers(Program& program, const std::string& prefix) {
    const std::pair<const char*, const char*> names[] = {
        {"input_norm", "input_norm"}, {"mixer_out", "mixer_out"},           {"post_norm", "post_norm"},
        {"router_ids", "router_ids"}, {"router_weights", "router_weights"}, {"out", "out"}};
    int n_compared = 0;
    for (size_t v = 0; v < program.plan().values.size(); ++v) {
      const std::string& name = program.plan().values[v].name;
      for (const auto& [ours, theirs] : names) {
        const size_t dot = name.rfind('.');
        if (dot == std::string::npos || name.substr(dot + 1) != ours) continue;
        const std::string layer = name.substr(name.find('.') + 1, dot - name.find('.') - 1);
        const GoldenTensor& expected = golden(prefix + "layer." + layer + "." + theirs);
        const auto found = program.read(plan::ValueId{static_cast<int32_t>(v)});
        if (std::string_view(ours) == "router_ids") EXPECT_EQ(found, expected.data) << name;
        else EXPECT_LT(relative_error(found, expected.data), kTolerance) << name;
        ++n_compared;
      }
    }
    EXPECT_EQ(n_compared, 6 * dims().n_layers);
  }

  void expect_states(const std::string& prefix, int n_tokens) {
    for (int layer = 0; layer < dims().n_layers; ++layer) {
      const std::string name = fmt::format("{}layer.{}.", prefix, layer);
      if (dims().mixer(layer) == model::Mixer::delta) {
        EXPECT_LT(relative_error(device_->read_delta_state(StateSlot{0}, layer),
                                 golden(name + "recurrent_state").data),
                  kTolerance)
            << name;
        // Golden: [channel][4 last inputs]; ours: [3 last rows][channel].
        const auto& expected = golden(name + "conv_state").data;
        const auto found = device_->read_conv_state(StateSlot{0}, layer);
        const auto channels = static_cast<size_t>(dims().conv_channels());
        std::vector<float> transposed(3 * channels);
        for (size_t ch = 0; ch < channels; ++ch)
          for (size_t r = 0; r < 3; ++r) transposed[r * channels + ch] = expected[ch * 4 + r + 1];
        EXPECT_LT(relative_error(found, transposed), kTolerance) << name;
      } else {
        for (const auto& [which, cache] :
             {std::pair{Device::Kv::k, "k_cache"}, std::pair{Device::Kv::v, "v_cache"}}) {
          std::vector<float> found;  // one KV head: [position][256] is both layouts
          for (int first = 0; first < n_tokens; first += kKvBlockTokens) {
            const auto part =
                device_->read_kv(which, layer, blocks_[static_cast<size_t>(first / kKvBlockTokens)],
                                 std::min(kKvBlockTokens, n_tokens - first));
            found.insert(found.end(), part.begin(), part.end());
          }
          EXPECT_LT(relative_error(found, golden(name + cache).data), kTolerance) << name;
        }
      }
    }
  }

  static model::Checkpoint* checkpoint_;
  static std::map<std::string, GoldenTensor>* goldens_;
  static Device* device_;
  std::vector<Segment> segments_;
  std::vector<int32_t> rows_;
  const std::vector<int32_t> blocks_ = {2, 0};  // not in order, so that the table is really read
};

model::Checkpoint* ReferenceTest::checkpoint_ = nullptr;
std::map<std::string, GoldenTensor>* ReferenceTest::goldens_ = nullptr;
Device* ReferenceTest::device_ = nullptr;

TEST_F(ReferenceTest, EveryLayerAgreesWithTheGoldens) {
  const plan::Policy policy = device_->policy(dims());
  device_->reserve({.n_state_slots = 1, .n_kv_blocks = 3}, policy);
  const auto program = device_->compile(make_plan(static_cast<int>(prompt().size()), Phase::prefill, policy));
  const StepOutputs out = step(*program, prompt(), 0);
  EXPECT_LT(relative_error({out.logits.begin(), out.logits.end()}, golden("logits").data), kTolerance);
  expect_layers(*program, "");
  expect_states("", static_cast<int>(prompt().size()));

  const auto decode = device_->compile(make_plan(1, Phase::decode, policy));
  const std::vector<int32_t> token = {static_cast<int32_t>(golden("decode.token").data[0])};
  const StepOutputs next = step(*decode, token, static_cast<int>(prompt().size()));
  EXPECT_LT(relative_error({next.logits.begin(), next.logits.end()}, golden("decode.logits").data),
            kTolerance);
  expect_layers(*decode, "decode.");
  expect_states("decode.", static_cast<int>(prompt().size()) + 1);
}

TEST_F(ReferenceTest, FusedPlansAndChunksGiveTheSameBits) {
  plan::Policy policy = device_->policy(dims());
  device_->reserve({.n_state_slots = 1, .n_kv_blocks = 3}, policy);
  std::vector<int32_t> short_prompt = prompt();
  short_prompt.resize(24);  // the reference takes its time
  const auto whole = [&] {
    const auto program = device_->compile(make_plan(24, Phase::prefill, policy));
    const StepOutputs out = step(*program, short_prompt, 0);
    return std::vector<float>(out.logits.begin(), out.logits.end());
  };
  const std::vector<float> expected = whole();
  policy.prefill = policy.decode = {.norm_linear = true,
                                    .linear_add = true,
                                    .norm_router = true,
                                    .gate_up = true,
                                    .shared_in_experts = true,
                                    .down_combine = true,
                                    .qk_prepare = true,
                                    .delta_norm = true,
                                    .delta_mixer = true,
                                    .attention_gate = true};
  EXPECT_EQ(whole(), expected);
  for (const int chunk : {1, 5, 23}) {
    const auto program = device_->compile(make_plan(chunk, Phase::prefill, policy));
    std::vector<float> found;
    for (size_t first = 0; first < short_prompt.size(); first += static_cast<size_t>(chunk)) {
      const size_t n = std::min(static_cast<size_t>(chunk), short_prompt.size() - first);
      const StepOutputs out =
          step(*program, std::span(short_prompt).subspan(first, n), static_cast<int>(first));
      found.insert(found.end(), out.logits.begin(), out.logits.end());
    }
    EXPECT_EQ(found, expected) << "chunks of " << chunk;
  }
}

TEST_F(ReferenceTest, InSharedPlacesAStateLiesWhereItsBlocksDo) {
  for (const plan::KvType kv : {plan::KvType::f32, plan::KvType::int8}) {
    plan::Policy policy = device_->policy(dims());
    policy.kv = kv;
    const SharedPlaces places = device_->shared_places(dims(), policy);
    const int n = places.blocks_per_state;
    ASSERT_GT(n, 0);
    device_->reserve({.n_state_slots = 3, .n_kv_blocks = 3 * n, .shared_places = true}, policy);
    int delta_layer = -1, attention_layer = -1;
    for (int layer = 0; layer < dims().n_layers; ++layer)
      (dims().mixer(layer) == model::Mixer::delta ? delta_layer : attention_layer) = layer;
    const StateSlot slot{1};
    const std::vector<float> state(static_cast<size_t>(dims().delta_state_bytes_per_layer() / 4), 2.0f);
    const std::vector<float> rows(static_cast<size_t>(kKvBlockTokens * dims().kv_width()), 0.5f);
    device_->write_delta_state(slot, delta_layer, state);
    device_->write_kv(Device::Kv::v, attention_layer, 0, kKvBlockTokens, rows);
    const std::vector<float> held = device_->read_kv(Device::Kv::v, attention_layer, 0, kKvBlockTokens);
    const auto each_block_of_the_place = [&](const auto& visit) {
      for (int block = n; block < 2 * n; ++block)
        for (int layer = 0; layer < dims().n_layers; ++layer)
          if (dims().mixer(layer) == model::Mixer::attention)
            for (const auto which : {Device::Kv::k, Device::Kv::v}) visit(which, layer, block);
    };
    // Blocks of the places beside it leave it alone, its own do not; and the other way round.
    for (const int block : {n - 1, 2 * n}) {
      device_->write_kv(Device::Kv::v, attention_layer, block, kKvBlockTokens, rows);
      EXPECT_EQ(device_->read_delta_state(slot, delta_layer), state);
    }
    each_block_of_the_place([&](Device::Kv which, int layer, int block) {
      device_->write_kv(which, layer, block, kKvBlockTokens, rows);
    });
    EXPECT_NE(device_->read_delta_state(slot, delta_layer), state);
    device_->write_delta_state(slot, delta_layer, state);
    int n_spoilt = 0;
    each_block_of_the_place([&](Device::Kv which, int layer, int block) {
      n_spoilt += device_->read_kv(which, layer, block, kKvBlockTokens) != held ? 1 : 0;
    });
    EXPECT_GT(n_spoilt, 0);
    for (const int block : {n - 1, 2 * n})
      EXPECT_EQ(device_->read_kv(Device::Kv::v, attention_layer, block, kKvBlockTokens), held);
  }
}

TEST_F(ReferenceTest, TheEpsilonOfTheKeyNormIsInsideTheSum) {
  // Keys of length 1e-3: an epsilon of 1e-6 on the sum shortens them to 0.70711 of a unit, one on the mean to
  // 0.088.
  const plan::Policy policy = device_->policy(dims());
  device_->reserve({.n_state_slots = 1, .n_kv_blocks = 3}, policy);
  const auto program = device_->compile(make_plan(1, Phase::decode, policy));
  const std::vector<int32_t> token = {65};
  step(*program, token, 0);
  int prepare = -1;
  for (size_t i = 0; i < program->plan().ops.size() && prepare < 0; ++i)
    if (std::holds_alternative<plan::DeltaPrepare>(program->plan().ops[i])) prepare = static_cast<int>(i);
  ASSERT_GE(prepare, 0);
  const auto& op = std::get<plan::DeltaPrepare>(program->plan().ops[static_cast<size_t>(prepare)]);
  const std::vector<float> mixed(static_cast<size_t>(dims().conv_channels()), 1e-3f / std::sqrt(128.0f));
  program->write(op.k_in.value, mixed);
  program->run_ops({.tokens = token,
                    .segments = segments_,
                    .block_table = blocks_,
                    .output_rows = rows_,
                    .n_tokens = dims().vocab},
                   prepare, prepare + 1);
  double k_length = 0, q_length = 0;
  for (int j = 0; j < model::kDeltaHeadDim; ++j) {
    k_length += std::pow(program->read(op.k)[static_cast<size_t>(j)], 2);
    q_length += std::pow(program->read(op.q)[static_cast<size_t>(j)], 2);
  }
  EXPECT_NEAR(std::sqrt(k_length), std::sqrt(0.5), 1e-6);
  EXPECT_NEAR(std::sqrt(q_length), std::sqrt(0.5 / 128), 1e-7);
}

}  // namespace
}  // namespace lily::backend
