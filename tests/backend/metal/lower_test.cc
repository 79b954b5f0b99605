// What plans become: counts of launches and stages, and barriers that each separate what conflicts.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <set>
#include <string>
#include <tuple>

#include "backend/metal/lower.h"
#include "base/error.h"
#include "plan/cost.h"

namespace lily::metal {
namespace {

using plan::Ending;
using plan::Phase;

plan::Plan make_plan(const model::Dims& dims, Phase phase, int rows, int64_t context,
                     const plan::Policy& policy, Ending ending = Ending::greedy) {
  return plan::forward(
      dims, {.phase = phase, .rows = rows, .outputs = 1, .context = context, .ending = ending}, policy);
}

bool overlap(const Place& a, const Place& b) {
  if (a.kind != b.kind || a.part != b.part || a.layer != b.layer || !(a.weight == b.weight)) return false;
  if (a.bytes == 0 || b.bytes == 0) return true;
  return a.offset < b.offset + b.bytes && b.offset < a.offset + a.bytes;
}

// What a dispatch touches, the arguments of an indirect one included.
std::vector<Argument> touched(const Dispatch& d) {
  std::vector<Argument> all = d.arguments;
  if (d.is_indirect) all.push_back({-1, d.indirect, Access::Kind::read});
  return all;
}

bool conflict(const Dispatch& a, const Dispatch& b) {
  for (const Argument& x : touched(a))
    for (const Argument& y : touched(b))
      if ((x.access != Access::Kind::read || y.access != Access::Kind::read) && overlap(x.place, y.place))
        return true;
  return false;
}

// Each barrier has a conflicting pair right around it, and no group has one inside, but for dispatches that
// share an output by columns or rows.
void check_barriers(const plan::Plan& plan) {
  const Lowered lowered = lower(plan);
  const auto run = groups(plan, lowered, 0, static_cast<int>(plan.ops.size()));
  const auto dispatch = [&](const Group::Item& item) -> const Dispatch& {
    return lowered.ops[static_cast<size_t>(item.op)].dispatches[static_cast<size_t>(item.dispatch)];
  };
  for (size_t g = 0; g < run.size(); ++g) {
    for (size_t i = 0; i < run[g].items.size(); ++i)
      for (size_t j = i + 1; j < run[g].items.size(); ++j)
        if (run[g].items[i].op != run[g].items[j].op)
          EXPECT_FALSE(conflict(dispatch(run[g].items[i]), dispatch(run[g].items[j])))
              << dispatch(run[g].items[i]).kernel << " and " << dispatch(run[g].items[j]).kernel;
    if (g == 0 || run[g].on_host >= 0 || run[g - 1].on_host >= 0) continue;
    bool found = false;
    for (const Group::Item& before : run[g - 1].items)
      for (const Group::Item& after : run[g].items)
        found = found || conflict(dispatch(before), dispatch(after));
    EXPECT_TRUE(found) << "the barrier in front of " << dispatch(run[g].items[0]).kernel
                       << " separates nothing";
  }
}

TEST(Lower, ATokenOfTheRealModelNeedsFewerLaunchesAndStagesThanThePublishedEngine) {
  const plan::Plan plan = make_plan(model::qwen36_35b_a3b(), Phase::decode, 1, 4096, default_policy());
  const Counts counts = dispatches(plan);
  fmt::print("decode at 4K: {} launches, {} stages, {} barriers\n", counts.launches, counts.stages,
             counts.barriers);
  EXPECT_LT(counts.launches, 795);
  EXPECT_LE(counts.stages, 250);
  EXPECT_EQ(counts.barriers, counts.stages - 1);
}

// What a token must move at the least: weights, states read and written, KV read.
TEST(Lower, ATokenMovesItsIdealBytes) {
  for (const auto& [context, ideal_mb] :
       {std::pair(256, 1803.0), {4096, 1882.0}, {32768, 2470.0}, {131072, 4483.0}}) {
    const plan::Plan plan =
        make_plan(model::qwen36_35b_a3b(), Phase::decode, 1, context + 1, default_policy());
    const auto bytes = static_cast<double>(plan::cost(plan, {.rows = 1, .position = context}).total_bytes());
    EXPECT_NEAR(bytes * 1e-6, ideal_mb, 0.02 * ideal_mb) << context;
  }
}

// The kernels that write or read the cache, and no others, are those of its type.
TEST(Lower, TheCachesTypeChoosesTheKernelsOfAttention) {
  plan::Policy unfused = default_policy();
  unfused.prefill = unfused.decode = {};
  for (const plan::Policy& policy : {default_policy(), unfused})
    for (const auto& [phase, rows, context] :
         {std::tuple(Phase::prefill, 96, 512), {Phase::decode, 1, 512}, {Phase::decode, 1, 65536}}) {
      plan::Policy eight_bits = policy;
      eight_bits.kv = plan::KvType::int8;
      const Lowered bf16 = lower(make_plan(model::lily_tiny(), phase, rows, context, policy)),
                    int8 = lower(make_plan(model::lily_tiny(), phase, rows, context, eight_bits));
      ASSERT_EQ(bf16.ops.size(), int8.ops.size());
      int n_other = 0;
      for (size_t op = 0; op < bf16.ops.size(); ++op)
        for (size_t i = 0; i < bf16.ops[op].dispatches.size(); ++i) {
          const Dispatch &a = bf16.ops[op].dispatches[i], &b = int8.ops[op].dispatches.at(i);
          const bool is_of_cache =
              std::any_of(a.arguments.begin(), a.arguments.end(), [](const Argument& argument) {
                return argument.place.kind == Place::Kind::k_cache ||
                       argument.place.kind == Place::Kind::v_cache;
              });
          EXPECT_EQ(b.kernel, is_of_cache ? a.kernel + "_int8" : a.kernel);
          EXPECT_EQ(a.params, b.params);
          n_other += is_of_cache;
        }
      EXPECT_GT(n_other, 0);
    }
}

TEST(Lower, EveryBarrierSeparatesAConflict) {
  for (const model::Dims& dims : {model::lily_tiny(), model::qwen36_35b_a3b()}) {
    check_barriers(make_plan(dims, Phase::decode, 1, 4096, default_policy()));
    check_barriers(make_plan(dims, Phase::decode, 8, 65536, default_policy(), Ending::sampled));
    check_barriers(make_plan(dims, Phase::prefill, 512, 4096, default_policy(), Ending::candidates));
    plan::Policy unfused = default_policy();
    unfused.prefill = unfused.decode = {};
    check_barriers(make_plan(dims, Phase::decode, 1, 4096, unfused));
    check_barriers(make_plan(dims, Phase::prefill, 64, 4096, unfused));
  }
}

// What a policy encodes, as text: kernels, their parameters and grids, and where barriers and the host stand.
std::string encoded(const plan::Policy& policy) {
  std::string text;
  for (const auto& [phase, rows, context] :
       {std::tuple(Phase::prefill, 96, 512), {Phase::decode, 1, 65536}}) {
    const plan::Plan plan = make_plan(model::lily_tiny(), phase, rows, context, policy);
    const Lowered lowered = lower(plan);
    for (const LoweredOp& op : lowered.ops) {
      text += op.on_host ? "host\n" : "";
      for (const Dispatch& d : op.dispatches) {
        text += d.kernel;
        for (const std::byte b : d.params) text += fmt::format(" {:02x}", static_cast<int>(b));
        for (const Extent& e : d.grid)
          text += fmt::format(" {}/{}/{}", static_cast<int>(e.count), e.n, e.per);
        text += "\n";
      }
    }
    text += fmt::format("{} groups\n", groups(plan, lowered, 0, static_cast<int>(plan.ops.size())).size());
  }
  return text;
}

// D2 and P5 are the engine's to do: two steps in flight, and how a prompt is cut.
TEST(Lower, EachAblationOfTheKernelsEncodesSomethingElse) {
  std::set<std::string> all = {encoded(default_policy())};
  for (int m = 0; m < plan::kMechanisms; ++m) {
    const auto mechanism = static_cast<plan::Mechanism>(m);
    if (mechanism == plan::Mechanism::d2 || mechanism == plan::Mechanism::p5) continue;
    EXPECT_TRUE(all.insert(encoded(*plan::without(default_policy(), mechanism))).second)
        << plan::name(mechanism);
  }
}

TEST(Lower, SerialExecutionHasABarrierAfterEveryOp) {
  const model::Dims dims = model::lily_tiny();
  plan::Policy serial = *plan::without(default_policy(), plan::Mechanism::d3);
  const plan::Plan plan = make_plan(dims, Phase::decode, 1, 128, serial);
  EXPECT_GE(dispatches(plan).stages, static_cast<int>(plan.ops.size()));
  EXPECT_GT(dispatches(plan).stages,
            dispatches(make_plan(dims, Phase::decode, 1, 128, default_policy())).stages - 1);
}

TEST(Lower, GroupingOnTheHostSplitsTheEncoder) {
  const plan::Policy policy = *plan::without(default_policy(), plan::Mechanism::p2);
  const plan::Plan plan = make_plan(model::lily_tiny(), Phase::prefill, 32, 128, policy);
  const Lowered lowered = lower(plan);
  int n_on_host = 0;
  for (const Group& g : groups(plan, lowered, 0, static_cast<int>(plan.ops.size())))
    n_on_host += g.on_host >= 0;
  EXPECT_EQ(n_on_host, model::lily_tiny().n_layers);
}

TEST(Lower, APolicyThatKernelsCannotFollowIsRefusedByName) {
  const auto message_of = [](const plan::Policy& policy, Phase phase) -> std::string {
    try {
      lower(make_plan(model::lily_tiny(), phase, phase == Phase::decode ? 1 : 32, 128, policy));
    } catch (const Error& error) {
      EXPECT_EQ(error.fault(), Fault::user);
      return error.what();
    }
    return "";
  };
  plan::Policy p = default_policy();
  p.activation = plan::FloatType::f32;
  EXPECT_NE(message_of(p, Phase::decode).find("policy.activation"), std::string::npos);
  p = default_policy();
  p.kv = plan::KvType::f32;
  EXPECT_NE(message_of(p, Phase::decode).find("policy.kv"), std::string::npos);
  p.kv = plan::KvType::int8;
  EXPECT_EQ(message_of(p, Phase::decode), "");
  p = default_policy();
  p.prefill.down_combine = true;
  EXPECT_NE(message_of(p, Phase::prefill).find("down_combine"), std::string::npos);
}

}  // namespace
}  // namespace lily::metal
