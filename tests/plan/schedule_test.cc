#include "plan/schedule.h"

#include <gtest/gtest.h>

#include <set>

#include "base/error.h"
#include "plan/plan.h"
#include "plan/print.h"
#include "plan/uses.h"
#include "tests/plan/policies.h"

namespace lily::plan {
namespace {

const model::Dims kTiny = model::lily_tiny();

Plan tiny_plan(const Policy& policy, Phase phase, int rows, bool keep_values = false) {
  return forward(kTiny, {.phase = phase, .rows = rows, .context = 4096}, policy,
                 {.keep_values = keep_values});
}

bool conflict(const Use& a, const Use& b) {
  return a.resource == b.resource && a.value == b.value && a.layer == b.layer && (a.writes() || b.writes()) &&
         a.resource != Resource::weight && a.resource != Resource::step;
}

bool conflict(const Op& a, const Op& b) {
  for (const Use& x : uses(a))
    for (const Use& y : uses(b))
      if (conflict(x, y)) return true;
  return false;
}

TEST(Edges, WriteAfterReadIsAnEdge) {
  const std::vector<Op> ops = {RmsNorm{{Weight::input_norm, 0}, ValueId{0}, ValueId{1}},
                               Add{ValueId{2}, ValueId{0}, ValueId{0}}};
  const std::vector<Edge> found = edges(ops);
  ASSERT_EQ(found.size(), 1u);
  EXPECT_EQ(found[0].why, Edge::Why::write_after_read);
}

TEST(Edges, ReadersOfOneValueAreIndependent) {
  const std::vector<Op> ops = {RmsNorm{{Weight::input_norm, 0}, ValueId{0}, ValueId{1}},
                               RmsNorm{{Weight::input_norm, 1}, ValueId{0}, ValueId{2}}};
  EXPECT_TRUE(edges(ops).empty());
}

TEST(Edges, ImpliedOnesAreLeftOut) {
  const std::vector<Op> ops = {RmsNorm{{Weight::input_norm, 0}, ValueId{0}, ValueId{1}},
                               RmsNorm{{Weight::input_norm, 1}, ValueId{1}, ValueId{2}},
                               Add{ValueId{2}, ValueId{1}, ValueId{3}}};
  EXPECT_EQ(edges(ops).size(), 2u);  // 0 -> 1 -> 2; 0 -> 2 follows
}

TEST(Stages, OpsOfOneStageNeverConflict) {
  for (const Policy& policy : test_policies()) {
    for (const Phase phase : {Phase::prefill, Phase::decode}) {
      for (const bool keep : {false, true}) {
        const Plan plan = tiny_plan(policy, phase, phase == Phase::decode ? 1 : 100, keep);
        for (size_t i = 0; i < plan.ops.size(); ++i)
          for (size_t j = i + 1; j < plan.ops.size() && plan.stage[j] == plan.stage[i]; ++j)
            EXPECT_FALSE(conflict(plan.ops[i], plan.ops[j]))
                << kind_name(plan.ops[i]) << kind_name(plan.ops[j]);
      }
    }
  }
}

TEST(Stages, SerialExecutionHasOneOpAStage) {
  const Plan plan = tiny_plan(*without(plain_policy(), Mechanism::d3), Phase::decode, 1);
  EXPECT_EQ(plan.n_stages(), static_cast<int>(plan.ops.size()));
}

TEST(Stages, FusionsTakeStagesAway) {
  EXPECT_LT(tiny_plan(fused_policy(), Phase::decode, 1).n_stages(),
            tiny_plan(plain_policy(), Phase::decode, 1).n_stages());
}

TEST(Placement, ValuesThatLiveTogetherDoNotShareBytes) {
  for (const Policy& policy : test_policies()) {
    for (const bool keep : {false, true}) {
      const Plan plan = tiny_plan(policy, Phase::prefill, 100, keep);
      std::vector<int> first(plan.values.size(), 1 << 30), last(plan.values.size(), -1);
      for (size_t op = 0; op < plan.ops.size(); ++op)
        for (const Use& use : uses(plan.ops[op])) {
          if (use.resource != Resource::value) continue;
          const auto v = static_cast<size_t>(use.value);
          first[v] = std::min(first[v], plan.stage[op]);
          last[v] = std::max(last[v], plan.stage[op]);
        }
      for (size_t a = 0; a < plan.values.size(); ++a) {
        const Placement& p = plan.placement[a];
        EXPECT_LE(p.offset + p.bytes, plan.scratch_bytes);
        for (size_t b = a + 1; b < plan.values.size(); ++b) {
          const Placement& q = plan.placement[b];
          const bool share = p.offset < q.offset + q.bytes && q.offset < p.offset + p.bytes;
          const bool together = keep || (first[a] <= last[b] && first[b] <= last[a]);
          if (last[a] >= 0 && last[b] >= 0 && share)
            EXPECT_FALSE(together) << plan.values[a].name << " and " << plan.values[b].name;
        }
      }
    }
  }
}

TEST(Plan, EveryValueIsWrittenBeforeItIsRead) {
  for (const Policy& policy : test_policies()) {
    for (const int rows : {1, 8, 9, 100}) {
      const Plan fused = tiny_plan(policy, rows == 1 ? Phase::decode : Phase::prefill, rows);
      for (const Plan& plan : {fused, expanded(fused)}) {
        std::set<ValueId> written;
        for (const Op& op : plan.ops) {
          for (const Use& use : uses(op))
            if (use.resource == Resource::value && use.reads())
              EXPECT_TRUE(written.count(use.value)) << plan.value(use.value).name << " in " << kind_name(op);
          for (const Use& use : uses(op))
            if (use.resource == Resource::value && use.writes()) written.insert(use.value);
        }
      }
    }
  }
}

TEST(Plan, KeptValuesAreWrittenOnce) {
  for (const Policy& policy : test_policies()) {
    const Plan plan = expanded(tiny_plan(policy, Phase::prefill, 100, true));
    std::set<ValueId> written;
    for (const Op& op : plan.ops)
      for (const Use& use : uses(op))
        if (use.resource == Resource::value && use.writes())
          EXPECT_TRUE(written.insert(use.value).second) << plan.value(use.value).name;
  }
}

TEST(Plan, ExpansionOfAFullyFusedPlanIsThePlainPlan) {
  const Plan plain = tiny_plan(plain_policy(), Phase::prefill, 100);
  const Plan from_fused = expanded(tiny_plan(fused_policy(), Phase::prefill, 100));
  std::multiset<std::string> a, b;
  for (const Op& op : plain.ops) a.insert(kind_name(op));
  for (const Op& op : from_fused.ops) b.insert(kind_name(op));
  EXPECT_EQ(a, b);
}

TEST(Plan, PrefillChunksWithoutOutputsHaveNoHead) {
  const Plan plan = forward(
      kTiny, {.phase = Phase::prefill, .rows = 64, .outputs = 0, .ending = Ending::none}, fused_policy());
  for (const Op& op : plan.ops)
    for (const Use& use : uses(op))
      EXPECT_FALSE(use.resource == Resource::weight && use.weight.weight == Weight::lm_head);
}

TEST(Policy, ListsOfMechanismsAreParsed) {
  EXPECT_EQ(parse_mechanisms("p1,D7"), (std::vector{Mechanism::p1, Mechanism::d7}));
  EXPECT_TRUE(parse_mechanisms("").empty());
  EXPECT_THROW(parse_mechanisms("P7"), Error);
  EXPECT_THROW(parse_mechanisms("P1,,D3"), Error);
}

TEST(Policy, AnAbsentMechanismCannotBeSwitchedOff) {
  Policy policy = plain_policy();
  policy.mechanisms.reset(static_cast<size_t>(Mechanism::p6));
  EXPECT_FALSE(without(policy, Mechanism::p6).has_value());
}

}  // namespace
}  // namespace lily::plan
