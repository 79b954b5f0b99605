// Whole steps on the emulated GPU: what is encoded, what schedules may change, and what a missing barrier
// does.
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <limits>
#include <tuple>

#include "backend/metal/lower.h"
#include "tests/backend/metal/rig.h"
#include "tests/support/error_of.h"

namespace lily {
namespace {

using backend::StateSlot;
using plan::Ending;
using plan::Mechanism;
using plan::Phase;
using plan::Policy;
using test::Inputs;

model::Dims half_tiny() {
  model::Dims d = test::tiny_checkpoint().dims();
  d.n_layers = 4;
  return d;
}

plan::Plan make_plan(Phase phase, int rows, const Policy& policy, Ending ending = Ending::logits,
                     int64_t context = 128, const model::Dims& dims = half_tiny()) {
  return plan::forward(
      dims, {.phase = phase, .rows = rows, .outputs = 1, .context = context, .ending = ending}, policy);
}

// Where a sequence is.
struct Places {
  StateSlot state{0};
  std::vector<int32_t> blocks = {1, 0};
};

Inputs one_sequence(std::vector<int32_t> tokens, int position, const Places& at = {},
                    const model::Dims& dims = half_tiny()) {
  Inputs inputs({{.tokens = std::move(tokens),
                  .position = position,
                  .src = position == 0 ? backend::kNoState : at.state,
                  .dst = at.state}},
                2, dims.vocab, false);
  inputs.blocks() = at.blocks;
  return inputs;
}

// Logits after a prompt, and after each of three more tokens.
std::vector<float> logits_of(metal::MetalDevice& device, const Policy& policy, int prompt_rows,
                             const Places& at = {}, const model::Dims& dims = half_tiny()) {
  std::vector<float> all;
  const auto run = [&](backend::Program& program, std::vector<int32_t> tokens, int position) {
    const Inputs inputs = one_sequence(std::move(tokens), position, at, dims);
    program.submit(inputs.get());
    const auto logits = program.wait().logits;
    all.insert(all.end(), logits.begin(), logits.end());
  };
  const auto prefill =
      device.compile(make_plan(Phase::prefill, prompt_rows, policy, Ending::logits, 128, dims));
  const auto decode = device.compile(make_plan(Phase::decode, 1, policy, Ending::logits, 128, dims));
  run(*prefill, test::random_tokens(prompt_rows, dims.vocab, 3), 0);
  for (int i = 0; i < 3; ++i) run(*decode, {100 + i}, prompt_rows + i);
  return all;
}

// All of lily-tiny: what `lily plan` says of it.
TEST(Steps, TheEncoderGetsWhatThePlanSays) {
  auto metal = test::make_emulated_metal(test::tiny_checkpoint(), {.keep_counters = true});
  Policy fixed = metal::default_policy();
  fixed.fixed_blocks_from_context = 1;
  for (const Policy& policy : {metal::default_policy(), fixed})
    for (const bool is_decode : {true, false}) {
      const int n_rows = is_decode ? 1 : 16;
      const plan::Plan plan = plan::forward(test::tiny_checkpoint().dims(),
                                            {.phase = is_decode ? Phase::decode : Phase::prefill,
                                             .rows = n_rows,
                                             .outputs = 1,
                                             .context = 4096,
                                             .ending = Ending::greedy},
                                            policy);
      const auto program = metal.device->compile(plan);
      metal.gpu->take_counters();
      program->submit(one_sequence(test::random_tokens(n_rows, 8000, 1), 0).get());
      program->wait();
      const auto counters = metal.gpu->take_counters();
      const metal::Counts counts = metal::dispatches(plan);
      EXPECT_EQ(static_cast<int>(counters.size()), counts.launches);
      uint32_t last = 0;
      for (const auto& c : counters) last = std::max(last, c.stage);
      EXPECT_EQ(static_cast<int>(last) + 1, counts.stages);
    }
}

// What the emulated GPU counts for a few layers gives the counts of any number of them, the real model's
// included: widths do not matter where weights have multiples of four rows.
TEST(Steps, CountsAreThoseOfLayersAndEnds) {
  auto metal = test::make_emulated_metal(test::small_checkpoint(), {.keep_counters = true});
  const auto plan_of = [&](model::Dims dims, bool is_decode, const Policy& policy) {
    return plan::forward(dims,
                         {.phase = is_decode ? Phase::decode : Phase::prefill,
                          .rows = is_decode ? 1 : 9,
                          .context = 128,
                          .ending = Ending::greedy},
                         policy);
  };
  struct Counted {
    int launches = 0, stages = 0;
  };
  Policy fixed = metal::default_policy();
  fixed.fixed_blocks_from_context = 1;
  for (const bool is_decode : {true, false})
    for (const Policy& policy : {metal::default_policy(), fixed}) {
      const auto counted = [&](int n_layers) {
        model::Dims dims = test::small_checkpoint().dims();
        dims.n_layers = n_layers;
        const auto program = metal.device->compile(plan_of(dims, is_decode, policy));
        metal.gpu->take_counters();
        program->submit(
            Inputs({{.tokens = test::random_tokens(is_decode ? 1 : 9, dims.vocab, 1)}}, 2, dims.vocab, false)
                .get());
        program->wait();
        Counted counts;
        for (const auto& c : metal.gpu->take_counters()) {
          ++counts.launches;
          counts.stages = std::max(counts.stages, static_cast<int>(c.stage) + 1);
        }
        return counts;
      };
      const Counted three = counted(3), four = counted(4), five = counted(5);
      const auto total = [&](const model::Dims& dims, int Counted::* what) {
        const int attention = four.*what - three.*what, delta = five.*what - four.*what;
        return dims.n_delta_layers() * delta + dims.n_attention_layers() * attention + three.*what -
               3 * delta;
      };
      for (const model::Dims& dims : {model::lily_tiny(), model::qwen36_35b_a3b()}) {
        const metal::Counts counts = metal::dispatches(plan_of(dims, is_decode, policy));
        EXPECT_EQ(total(dims, &Counted::launches), counts.launches);
        EXPECT_EQ(total(dims, &Counted::stages), counts.stages);
      }
    }
}

TEST(Steps, WhatNoBufferHoldsIsRefusedBeforeAnythingIsLost) {
  auto metal = test::make_emulated_metal(test::small_checkpoint());
  const backend::MemorySpec too_much{.n_state_slots = 1, .n_kv_blocks = 80'000, .n_token_slots = 1};
  EXPECT_THAT(test::error_of([&] { metal.device->reserve(too_much, metal::default_policy()); }),
              testing::AllOf(testing::HasSubstr("at most 4.3 GB"), testing::HasSubstr("shorter context")));
  EXPECT_EQ(metal.device->memory().spec().n_kv_blocks, test::kBlocks);
}

class StepsWithCache : public testing::TestWithParam<plan::KvType> {};

TEST_P(StepsWithCache, MechanismsThatOnlyRearrangeWorkChangeNoBit) {
  auto metal = test::make_emulated_metal(test::tiny_checkpoint(), {.kv = GetParam()});
  Policy policy = metal::default_policy();
  policy.kv = GetParam();
  const std::vector<float> expected = logits_of(*metal.device, policy, 20);
  EXPECT_EQ(logits_of(*metal.device, policy, 20), expected) << "a second run";
  for (const Mechanism m : {Mechanism::p2, Mechanism::d2, Mechanism::d3, Mechanism::d5, Mechanism::d6})
    EXPECT_EQ(logits_of(*metal.device, *plan::without(policy, m), 20), expected) << plan::name(m);
  Policy split = policy;
  split.fixed_blocks_from_context = 1;
  const std::vector<float> with_parts = logits_of(*metal.device, split, 20);
  for (const Mechanism m : {Mechanism::d5, Mechanism::d6})
    EXPECT_EQ(logits_of(*metal.device, *plan::without(split, m), 20), with_parts)
        << plan::name(m) << ", fixed blocks";
}

TEST_P(StepsWithCache, SchedulesChangeNoBit) {
  auto metal = test::make_emulated_metal(test::tiny_checkpoint(), {.kv = GetParam()});
  Policy policy = metal::default_policy();
  policy.kv = GetParam();
  const std::vector<float> expected = logits_of(*metal.device, policy, 20);
  for (const uint64_t seed : {1, 2, 3}) {
    auto shuffled = test::make_emulated_metal(test::tiny_checkpoint(), {.seed = seed, .kv = GetParam()});
    EXPECT_EQ(logits_of(*shuffled.device, policy, 20), expected) << "seed " << seed;
  }
}

// A state in one place and blocks in others: the numbers are those of states and blocks apart, whatever was
// in their places before, and what lies in the places around stays as it is.
TEST_P(StepsWithCache, StatesAndBlocksShareTheirPlaces) {
  using Kv = backend::Device::Kv;
  constexpr int kRows = 9;               // of a prompt that the kernels for many rows read
  constexpr float kKept = 127.0f / 256;  // which 8 bits hold as well
  constexpr float kStale = std::numeric_limits<float>::quiet_NaN();
  const model::Dims dims = test::small_checkpoint().dims();
  Policy policy = metal::default_policy();
  policy.kv = GetParam();
  Policy unfused = *plan::without(policy, Mechanism::p4);
  unfused.prefill = unfused.decode = {};
  auto apart = test::make_emulated_metal(test::small_checkpoint(), {.kv = GetParam()});
  auto shared =
      test::make_emulated_metal(test::small_checkpoint(), {.kv = GetParam(), .shared_places = true});
  metal::MetalDevice& d = *shared.device;
  const backend::SharedPlaces places = d.shared_places(dims, policy);
  const int n = places.blocks_per_state;
  ASSERT_GT(n, 2);
  EXPECT_EQ(places.most_bytes, static_cast<int64_t>(shared.gpu->limits().max_buffer_length));

  const auto delta_of = [&](float v) {
    return std::vector<float>(static_cast<size_t>(dims.delta_state_bytes_per_layer() / 4), v);
  };
  const auto conv_of = [&](float v) {
    return std::vector<float>(static_cast<size_t>(3 * dims.conv_channels()), v);
  };
  const auto kv_of = [&](float v) {
    return std::vector<float>(static_cast<size_t>(backend::kKvBlockTokens * dims.kv_width()), v);
  };
  // The whole of a place as a state, and as blocks.
  const auto write_state = [&](int place, float v) {
    for (int layer = 0; layer < dims.n_layers; ++layer) {
      if (dims.mixer(layer) != model::Mixer::delta) continue;
      d.write_delta_state(StateSlot{place}, layer, delta_of(v));
      d.write_conv_state(StateSlot{place}, layer, conv_of(v));
    }
  };
  const auto write_blocks = [&](int place, float v) {
    for (int layer = 0; layer < dims.n_layers; ++layer)
      for (int b = place * n; dims.mixer(layer) == model::Mixer::attention && b < (place + 1) * n; ++b)
        for (const Kv which : {Kv::k, Kv::v}) d.write_kv(which, layer, b, backend::kKvBlockTokens, kv_of(v));
  };
  const auto expect_state = [&](int place, float v) {
    for (int layer = 0; layer < dims.n_layers; ++layer) {
      if (dims.mixer(layer) != model::Mixer::delta) continue;
      EXPECT_EQ(d.read_delta_state(StateSlot{place}, layer), delta_of(v)) << place << ", layer " << layer;
      EXPECT_EQ(d.read_conv_state(StateSlot{place}, layer), conv_of(v)) << place << ", layer " << layer;
    }
  };
  const auto expect_blocks = [&](int place, float v, const std::vector<int32_t>& used) {
    for (int layer = 0; layer < dims.n_layers; ++layer)
      for (int b = place * n; dims.mixer(layer) == model::Mixer::attention && b < (place + 1) * n; ++b)
        for (const Kv which : {Kv::k, Kv::v})
          if (std::find(used.begin(), used.end(), b) == used.end())
            EXPECT_EQ(d.read_kv(which, layer, b, backend::kKvBlockTokens), kv_of(v)) << b;
  };

  // States and blocks take turns in the places in the middle.
  for (const auto& [p, state, blocks] : {std::tuple(policy, 1, 3), {policy, 3, 1}, {unfused, 1, 3}}) {
    const std::vector<float> expected = logits_of(*apart.device, p, kRows, {}, dims);
    write_state(blocks, kStale);
    write_blocks(state, kStale);
    write_state(0, 3);
    write_blocks(2, kKept);
    write_state(4, 5);
    const Places at{StateSlot{state}, {(blocks + 1) * n - 1, blocks * n}};
    EXPECT_EQ(logits_of(d, p, kRows, at, dims), expected);
    expect_state(0, 3);
    expect_blocks(2, kKept, {});
    expect_state(4, 5);
    // A copy takes no more than the state, and a state is not longer than its place.
    d.copy_state(StateSlot{4}, StateSlot{state});
    expect_state(state, 5);
    expect_blocks(2, kKept, {});
    expect_state(0, 3);
  }
  // Blocks beside those of the sequence, in the place that a state had.
  write_state(3, kStale);
  write_blocks(3, kKept);
  const Places at{StateSlot{1}, {3 * n + 1, 3 * n}};
  EXPECT_EQ(logits_of(d, policy, kRows, at, dims), logits_of(*apart.device, policy, kRows, {}, dims));
  expect_blocks(3, kKept, at.blocks);
}

INSTANTIATE_TEST_SUITE_P(Types, StepsWithCache, testing::Values(plan::KvType::bf16, plan::KvType::int8),
                         [](const auto& type) { return std::string(plan::name(type.param)); });

// Tokens go from step to step through the GPU's slots while two steps are in flight, whatever the delays.
TEST(Steps, TwoStepsInFlightGiveTheTokensOfOneAtATime) {
  const auto tokens_of = [&](const test::EmulatedOptions& options, bool two) {
    auto metal = test::make_emulated_metal(test::tiny_checkpoint(), options);
    const auto prefill =
        metal.device->compile(make_plan(Phase::prefill, 12, metal::default_policy(), Ending::greedy));
    const auto decode =
        metal.device->compile(make_plan(Phase::decode, 1, metal::default_policy(), Ending::greedy));
    std::vector<int32_t> tokens;
    Inputs prompt = one_sequence(test::random_tokens(12, 8000, 5), 0);
    prompt.segments()[0].token_out = backend::TokenSlot{0};
    prefill->submit(prompt.get());
    tokens.push_back(prefill->wait().tokens[0]);
    int in_flight = 0;
    const auto collect = [&] {
      tokens.push_back(decode->wait().tokens[0]);
      --in_flight;
    };
    for (int i = 0; i < 8; ++i) {
      Inputs step = one_sequence({backend::kTokenFromSlot}, 12 + i);
      step.segments()[0].token_in = backend::TokenSlot{i % 2};
      step.segments()[0].token_out = backend::TokenSlot{(i + 1) % 2};
      decode->submit(step.get());
      if (++in_flight == (two ? 2 : 1)) collect();
    }
    while (in_flight > 0) collect();
    return tokens;
  };
  const auto expected = tokens_of({}, false);
  EXPECT_EQ(tokens_of({}, true), expected);
  EXPECT_EQ(tokens_of({.seed = 9, .max_delay_us = 3000}, true), expected);
}

TEST(Steps, StateSlotsAreCopiedAndReadBackInTheirCanonicalLayout) {
  auto metal = test::make_emulated_metal(test::tiny_checkpoint());
  metal::MetalDevice& d = *metal.device;
  const model::Dims dims = half_tiny();
  std::vector<float> delta(static_cast<size_t>(dims.delta_state_bytes_per_layer() / 4));
  for (size_t i = 0; i < delta.size(); ++i) delta[i] = static_cast<float>(i);
  std::vector<float> conv(static_cast<size_t>(3 * dims.conv_channels()));
  for (size_t i = 0; i < conv.size(); ++i) conv[i] = static_cast<float>(i % 251);
  for (int layer = 0; layer < test::tiny_checkpoint().dims().n_layers; ++layer) {
    if (dims.mixer(layer) != model::Mixer::delta) continue;
    d.write_delta_state(StateSlot{1}, layer, delta);
    d.write_conv_state(StateSlot{1}, layer, conv);
  }
  d.copy_state(StateSlot{1}, StateSlot{4});
  EXPECT_EQ(d.read_delta_state(StateSlot{4}, 2), delta);
  EXPECT_EQ(d.read_conv_state(StateSlot{4}, 2), conv);
  d.copy_state(backend::kNoState, StateSlot{4});
  EXPECT_EQ(d.read_delta_state(StateSlot{4}, 2), std::vector<float>(delta.size(), 0.0f));
}

struct TracedStep {
  Phase phase;
  int rows;
  plan::KvType kv = plan::KvType::bf16;
  bool shared_places = false;
};

class Traced : public testing::TestWithParam<TracedStep> {};

TEST_P(Traced, AStepHasNoFindings) {
  auto metal = test::make_emulated_metal(test::tiny_checkpoint(),
                                         {.traced = true,
                                          .seed = 4,
                                          .kv = GetParam().kv,
                                          .shared_places = GetParam().shared_places,
                                          .on_finding = emulator::Options::OnFinding::nothing});
  const auto [phase, rows, kv, shared_places] = GetParam();
  Policy policy = metal::default_policy();
  policy.kv = kv;
  const auto program = metal.device->compile(make_plan(phase, rows, policy, Ending::greedy));
  program->submit(one_sequence(test::random_tokens(rows, 8000, 1), 0).get());
  program->wait();
  for (const auto& finding : metal.gpu->findings())
    ADD_FAILURE() << to_string(finding.kind) << " in " << finding.kernel << ": " << finding.message;
}

INSTANTIATE_TEST_SUITE_P(Phases, Traced,
                         testing::Values(TracedStep{Phase::decode, 1}, TracedStep{Phase::prefill, 9},
                                         TracedStep{Phase::decode, 1, plan::KvType::int8, true},
                                         TracedStep{Phase::prefill, 9, plan::KvType::int8, true}));

}  // namespace
}  // namespace lily
