// What a decoded token moves, counted by the emulated GPU: one traced step at the real model's widths, with
// 4,096 tokens in the cache. Distinct bytes of a dispatch are compared with the ideal, repeated reads are
// printed beside them.
//
// Layers, experts and vocabulary are few, so each kind of op gives a factor, counted bytes over those that
// plan::cost() says it must move, and the whole model is the sum of its ops' costs times these factors.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <map>

#include "backend/metal/lower.h"
#include "engine/selftest.h"
#include "plan/cost.h"
#include "tests/backend/metal/rig.h"
#include "tests/support/temp_folder.h"

namespace lily {
namespace {

using backend::Device;
using backend::StateSlot;

constexpr int kPosition = 4096;
constexpr double kIdealMb = 1882;  // weights once, states read and written, KV read
constexpr double kShare = 0.02;

plan::Plan decode_plan(const model::Dims& dims) {
  return plan::forward(dims,
                       {.phase = plan::Phase::decode,
                        .rows = 1,
                        .outputs = 1,
                        .context = kPosition + 1,
                        .ending = plan::Ending::greedy},
                       metal::default_policy());
}

// What an op must move, and the values that go from op to op.
double cost_of(const plan::Plan& plan, const plan::Op& op) {
  const plan::Cost cost = plan::cost(plan, op, {.rows = 1, .outputs = 1, .position = kPosition});
  return static_cast<double>(cost.total_bytes() + cost.scratch_bytes);
}

struct Moved {
  double cost = 0, distinct = 0, traffic = 0;  // bytes
};

// Small values: what is read is what counts, but NaN would make every expert the eighth.
void fill_memory(metal::MetalDevice& device, const model::Dims& dims) {
  const std::vector<float> state(static_cast<size_t>(dims.delta_state_bytes_per_layer() / 4), 0.01f);
  const std::vector<float> conv(static_cast<size_t>(3 * dims.conv_channels()), 0.5f);
  const std::vector<float> kv(static_cast<size_t>(backend::kKvBlockTokens * dims.kv_width()), 0.25f);
  for (int layer = 0; layer < dims.n_layers; ++layer) {
    if (dims.mixer(layer) == model::Mixer::delta) {
      device.write_delta_state(StateSlot{0}, layer, state);
      device.write_conv_state(StateSlot{0}, layer, conv);
      continue;
    }
    for (int block = 0; block < test::kBlocks; ++block)
      for (const auto which : {Device::Kv::k, Device::Kv::v})
        device.write_kv(which, layer, block, backend::kKvBlockTokens, kv);
  }
}

TEST(Bytes, ATokenMovesItsIdealBytes) {
  const test::TempFolder folder;
  engine::write_self_test_checkpoint(folder.path() / "model");
  const model::Checkpoint checkpoint = model::Checkpoint::open(folder.path() / "model");
  const model::Dims dims = checkpoint.dims();
  auto metal = test::make_emulated_metal(checkpoint, {.traced = true, .keep_counters = true});
  fill_memory(*metal.device, dims);
  const plan::Plan plan = decode_plan(dims);
  const auto program = metal.device->compile(plan);
  const test::Inputs inputs(
      {{.tokens = {7}, .position = kPosition, .src = StateSlot{0}, .dst = StateSlot{0}}},
      kPosition / backend::kKvBlockTokens + 1, dims.vocab);
  metal.gpu->take_counters();
  program->submit(inputs.get());
  program->wait();
  const auto counters = metal.gpu->take_counters();

  // Dispatches are counted in the order in which they were encoded.
  std::map<std::string, Moved> kinds;
  size_t n = 0;
  const metal::Lowered lowered = metal::lower(plan);
  for (const metal::Group& group : metal::groups(plan, lowered, 0, static_cast<int>(plan.ops.size())))
    for (const metal::Group::Item& item : group.items) {
      ASSERT_LT(n, counters.size());
      const emulator::DispatchCounters& c = counters[n++];
      const auto op = static_cast<size_t>(item.op);
      ASSERT_EQ(c.kernel, lowered.ops[op].dispatches[static_cast<size_t>(item.dispatch)].kernel);
      Moved& moved = kinds[std::string(plan::kind_name(plan.ops[op]))];
      moved.distinct += static_cast<double>(c.bytes_read + c.bytes_written);
      moved.traffic += static_cast<double>(c.traffic_read + c.traffic_written);
    }
  ASSERT_EQ(n, counters.size());
  for (const plan::Op& op : plan.ops) kinds[std::string(plan::kind_name(op))].cost += cost_of(plan, op);

  const plan::Plan real = decode_plan(model::qwen36_35b_a3b());
  std::map<std::string, Moved> token;
  Moved all;
  for (const plan::Op& op : real.ops) {
    const Moved& counted = kinds.at(std::string(plan::kind_name(op)));
    const double cost = cost_of(real, op);
    for (Moved* to : {&token[std::string(plan::kind_name(op))], &all}) {
      to->cost += cost;
      to->distinct += cost * counted.distinct / counted.cost;
      to->traffic += cost * counted.traffic / counted.cost;
    }
  }
  fmt::print("a token at {} tokens of context, MB: must move, distinct, with repetitions\n", kPosition);
  token["all"] = all;
  for (const auto& [kind, m] : token)
    fmt::print("{:24} {:9.2f} {:9.2f} {:9.2f}\n", kind, m.cost * 1e-6, m.distinct * 1e-6, m.traffic * 1e-6);
  EXPECT_NEAR(all.distinct * 1e-6, kIdealMb, kShare * kIdealMb);
  EXPECT_GT(all.traffic, all.distinct);
}

}  // namespace
}  // namespace lily
