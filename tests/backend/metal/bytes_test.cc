// What a decoded token moves, counted by the emulated GPU: one traced step at the real model's widths, with
// 4,096 tokens in the cache. Distinct bytes of a dispatch are compared with the ideal, repeated reads are
// printed beside them.
//
// Layers, experts and vocabulary are few, so each kind of op gives a factor, counted bytes over those that
// plan::cost() says it must move, and the whole model is the sum of its ops' costs times these factors. Only
// attention knows of the context: its bytes grow by as much for each token of it, which three lengths show.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <map>

#include "backend/metal/lower.h"
#include "plan/cost.h"
#include "tests/backend/metal/rig.h"

namespace lily {
namespace {

using backend::Device;
using backend::StateSlot;

constexpr int kContext = 4096;  // tokens in the cache
constexpr int kLengths[] = {256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072};
constexpr double kShare = 0.02;

// Weights once, states read and written, KV read.
double ideal_mb(int context, plan::KvType kv) {
  return 1669.6 + 125.8 + 2.9 + (kv == plan::KvType::int8 ? 10560e-6 : 20480e-6) * context;
}

plan::Plan decode_plan(const model::Dims& dims, const plan::Policy& policy) {
  return plan::forward(dims,
                       {.phase = plan::Phase::decode,
                        .rows = 1,
                        .outputs = 1,
                        .context = kContext + 1,
                        .ending = plan::Ending::greedy},
                       policy);
}

// What an op must move, and the values that go from op to op.
double cost_of(const plan::Plan& plan, const plan::Op& op) {
  const plan::Cost cost = plan::cost(plan, op, {.rows = 1, .outputs = 1, .position = kContext});
  return static_cast<double>(cost.total_bytes() + cost.scratch_bytes);
}

struct Moved {
  double cost = 0, distinct = 0, traffic = 0;  // bytes

  void add(const emulator::DispatchCounters& c) {
    distinct += static_cast<double>(c.bytes_read + c.bytes_written);
    traffic += static_cast<double>(c.traffic_read + c.traffic_written);
  }
};

struct Line;

// The emulated GPU at the real model's widths, with one type of cache.
class Counting {
 public:
  explicit Counting(plan::KvType kv)
      : metal_(test::make_emulated_metal(test::wide_checkpoint(),
                                         {.traced = true, .keep_counters = true, .kv = kv})) {
    policy_.kv = kv;
    fill_memory();
  }

  const plan::Policy& policy() const { return policy_; }

  // By kind of op, of the few layers: one step with kContext tokens in the cache.
  std::map<std::string, Moved> step();
  // Of one layer's attention as a line over the context.
  Line line(bool fixed_blocks);

 private:
  static const model::Dims& dims() { return test::wide_checkpoint().dims(); }
  void fill_memory();
  static test::Inputs inputs(int context) {
    return test::Inputs({{.tokens = {7}, .position = context, .src = StateSlot{0}, .dst = StateSlot{0}}},
                        context / backend::kKvBlockTokens + 1, dims().vocab);
  }
  // Of one layer's attention, with `context` tokens in the cache.
  Moved attention(const plan::Policy& policy, int context);

  test::EmulatedMetal metal_;
  plan::Policy policy_ = metal::default_policy();
};

// Bytes of one layer's attention as a line over the context.
struct Line {
  Moved at, per_token;  // with kContext tokens
  Moved operator()(int context) const {
    const double more = context - kContext;
    return {.distinct = at.distinct + more * per_token.distinct,
            .traffic = at.traffic + more * per_token.traffic};
  }
};

// Small values: what is read is what counts, but NaN would make every expert the eighth.
void Counting::fill_memory() {
  const std::vector<float> state(static_cast<size_t>(dims().delta_state_bytes_per_layer() / 4), 0.01f);
  const std::vector<float> conv(static_cast<size_t>(3 * dims().conv_channels()), 0.5f);
  const std::vector<float> kv(static_cast<size_t>(backend::kKvBlockTokens * dims().kv_width()), 0.25f);
  for (int layer = 0; layer < dims().n_layers; ++layer) {
    if (dims().mixer(layer) == model::Mixer::delta) {
      metal_.device->write_delta_state(StateSlot{0}, layer, state);
      metal_.device->write_conv_state(StateSlot{0}, layer, conv);
      continue;
    }
    for (int block = 0; block < test::kBlocks; ++block)
      for (const auto which : {Device::Kv::k, Device::Kv::v})
        metal_.device->write_kv(which, layer, block, backend::kKvBlockTokens, kv);
  }
}

std::map<std::string, Moved> Counting::step() {
  const plan::Plan plan = decode_plan(dims(), policy_);
  const auto program = metal_.device->compile(plan);
  metal_.gpu->take_counters();
  program->submit(inputs(kContext).get());
  program->wait();
  const auto counters = metal_.gpu->take_counters();
  // Dispatches are counted in the order in which they were encoded.
  std::map<std::string, Moved> kinds;
  size_t n = 0;
  const metal::Lowered lowered = metal::lower(plan);
  for (const metal::Group& group : metal::groups(plan, lowered, 0, static_cast<int>(plan.ops.size())))
    for (const metal::Group::Item& item : group.items) {
      const emulator::DispatchCounters& c = counters.at(n++);
      const auto op = static_cast<size_t>(item.op);
      EXPECT_EQ(c.kernel, lowered.ops[op].dispatches[static_cast<size_t>(item.dispatch)].kernel);
      kinds[std::string(plan::kind_name(plan.ops[op]))].add(c);
    }
  EXPECT_EQ(n, counters.size());
  for (const plan::Op& op : plan.ops) kinds[std::string(plan::kind_name(op))].cost += cost_of(plan, op);
  return kinds;
}

Moved Counting::attention(const plan::Policy& policy, int context) {
  const plan::Plan plan = decode_plan(dims(), policy);
  const auto op = std::find_if(plan.ops.begin(), plan.ops.end(), [](const plan::Op& o) {
    return std::holds_alternative<plan::GatedAttention>(o);
  });
  const auto first = static_cast<int>(op - plan.ops.begin());
  const auto program = metal_.device->compile(plan);
  metal_.gpu->take_counters();
  program->run_ops(inputs(context).get(), first, first + 1);
  Moved moved;
  for (const emulator::DispatchCounters& c : metal_.gpu->take_counters()) moved.add(c);
  return moved;
}

Line Counting::line(bool fixed_blocks) {
  plan::Policy policy = policy_;
  if (fixed_blocks) policy.fixed_blocks_from_context = 1;
  const Moved one = attention(policy, kContext / 4), two = attention(policy, kContext / 2),
              four = attention(policy, kContext);
  EXPECT_EQ(2 * (two.distinct - one.distinct), four.distinct - two.distinct);
  EXPECT_EQ(2 * (two.traffic - one.traffic), four.traffic - two.traffic);
  return Line{four,
              {.distinct = (four.distinct - two.distinct) * 2 / kContext,
               .traffic = (four.traffic - two.traffic) * 2 / kContext}};
}

// Of all lengths, with the bytes of everything but attention in `rest`.
void expect_ideal(plan::KvType kv, const Moved& rest, const Line& general, const Line& fixed_blocks) {
  fmt::print("{}: context, MB: ideal, distinct, with repetitions\n", plan::name(kv));
  for (const int context : kLengths) {
    const bool is_split = context >= metal::default_policy().fixed_blocks_from_context;
    const Moved layer = (is_split ? fixed_blocks : general)(context);
    const int n = model::qwen36_35b_a3b().n_attention_layers();
    const double distinct = (rest.distinct + n * layer.distinct) * 1e-6,
                 traffic = (rest.traffic + n * layer.traffic) * 1e-6;
    fmt::print("{:7} {:9.1f} {:9.1f} {:9.1f}\n", context, ideal_mb(context, kv), distinct, traffic);
    // What comes on top is no part of the cache: values between ops and partial results.
    EXPECT_NEAR(distinct, ideal_mb(context, kv), kShare * ideal_mb(context, plan::KvType::bf16)) << context;
    EXPECT_GT(traffic, distinct);
  }
}

TEST(Bytes, ATokenMovesItsIdealBytes) {
  Counting bf16(plan::KvType::bf16);
  const std::map<std::string, Moved> kinds = bf16.step();
  const Line general = bf16.line(false), fixed_blocks = bf16.line(true);
  const plan::Plan real = decode_plan(model::qwen36_35b_a3b(), bf16.policy());
  constexpr const char* kAttention = "gated_attention";
  EXPECT_EQ(kinds.at(kAttention).distinct, general(kContext).distinct);
  EXPECT_EQ(kinds.at(kAttention).traffic, general(kContext).traffic);

  std::map<std::string, Moved> token;
  Moved rest;  // all but attention
  for (const plan::Op& op : real.ops) {
    const std::string kind(plan::kind_name(op));
    const Moved& counted = kinds.at(kind);
    const double cost = cost_of(real, op);
    for (Moved* to : {&token[kind], &token["all"], kind == kAttention ? nullptr : &rest}) {
      if (to == nullptr) continue;
      to->cost += cost;
      to->distinct += cost * counted.distinct / counted.cost;
      to->traffic += cost * counted.traffic / counted.cost;
    }
  }
  fmt::print("a token at {} tokens of context, MB: must move, distinct, with repetitions\n", kContext);
  for (const auto& [kind, m] : token)
    fmt::print("{:24} {:9.2f} {:9.2f} {:9.2f}\n", kind, m.cost * 1e-6, m.distinct * 1e-6, m.traffic * 1e-6);
  expect_ideal(plan::KvType::bf16, rest, general, fixed_blocks);

  Counting int8(plan::KvType::int8);
  const Line general_int8 = int8.line(false), fixed_blocks_int8 = int8.line(true);
  expect_ideal(plan::KvType::int8, rest, general_int8, fixed_blocks_int8);
  // A key and a value of each KV head, in groups: besides, only the block table grows with the context.
  const double saved = 2.0 * model::qwen36_35b_a3b().kv_width() * (2 - 66.0 / 64);
  EXPECT_EQ(general.per_token.distinct - general_int8.per_token.distinct, saved);
  EXPECT_EQ(fixed_blocks.per_token.distinct - fixed_blocks_int8.per_token.distinct, saved);
}

}  // namespace
}  // namespace lily
