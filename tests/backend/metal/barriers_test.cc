// Barriers earn their place: from the accesses that traced steps make, each barrier separates two dispatches
// that touch the same bytes, at least one of them writing, and that no other barrier separates.
//
// A pair has only one barrier between it if one dispatch is of the stage in front of it and the other of the
// stage behind. So the question is asked stage by stage.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <map>
#include <set>

#include "backend/metal/lower.h"
#include "tests/backend/metal/rig.h"

namespace lily {
namespace {

using backend::StateSlot;
using emulator::DispatchCounters;
using emulator::Touched;
using plan::Ending;
using plan::Phase;
using plan::Policy;

constexpr int kLargeVocabulary = 70'000;

struct Step {
  std::string name;
  Phase phase;
  Policy policy;
  std::vector<test::Sequence> sequences;
  Ending ending = Ending::greedy;
  std::vector<int> top_k = {20, 20};  // of the sequences, where they sample
  int vocabulary = 0;                 // of a step that is nothing but its ending
};

// Each barrier of one kind, named by the kernels in front of it and behind it.
struct Barriers {
  std::map<std::string, int> needed, superfluous;
  int n_launches = 0, n_stages = 0;
};

bool overlap(const std::vector<Touched>& a, const std::vector<Touched>& b) {
  for (const Touched& x : a)
    for (const Touched& y : b)
      if ((x.is_write || y.is_write) && x.buffer == y.buffer && x.begin < y.end && y.begin < x.end)
        return true;
  return false;
}

std::string kernels_of(const std::vector<DispatchCounters>& stage) {
  std::set<std::string> names;
  for (const DispatchCounters& d : stage) names.insert(d.kernel);
  return fmt::format("{}", fmt::join(names, "+"));
}

model::Dims dims() { return test::small_checkpoint().dims(); }

plan::Plan plan_of(const Step& step) {
  if (step.vocabulary > 0)
    return test::ending_plan(step.ending, step.vocabulary, static_cast<int>(step.sequences.size()), 20);
  int n_rows = 0;
  for (const test::Sequence& s : step.sequences) n_rows += static_cast<int>(s.tokens.size());
  return plan::forward(dims(),
                       {.phase = step.phase,
                        .rows = n_rows,
                        .outputs = static_cast<int>(step.sequences.size()),
                        .context = 128,
                        .ending = step.ending},
                       step.policy);
}

class Recorder {
 public:
  explicit Recorder(plan::KvType kv = plan::KvType::bf16,
                    emulator::Options::OnFinding on_finding = emulator::Options::OnFinding::fail)
      : metal_(test::make_emulated_metal(test::small_checkpoint(), {.traced = true,
                                                                    .keep_counters = true,
                                                                    .keep_accesses = true,
                                                                    .kv = kv,
                                                                    .on_finding = on_finding})) {}

  metal::MetalDevice& device() { return *metal_.device; }
  emulator::EmulatedDevice& gpu() { return *metal_.gpu; }

  // Runs the step. The dispatches of each stage.
  std::vector<std::vector<DispatchCounters>> stages(const Step& step, backend::Program& program) {
    test::Inputs inputs(step.sequences, 2, step.vocabulary > 0 ? step.vocabulary : dims().vocab, false);
    for (size_t i = 0; i < inputs.segments().size(); ++i) {
      inputs.segments()[i].token_in = backend::TokenSlot{static_cast<int>(2 * i)};
      inputs.segments()[i].token_out = backend::TokenSlot{static_cast<int>(2 * i + 1)};
    }
    if (step.ending == Ending::sampled)
      for (size_t i = 0; i < step.sequences.size(); ++i)
        inputs.sampling().push_back({.top_k = step.top_k[i]});
    if (step.vocabulary > 0) {
      std::vector<float> logits(step.sequences.size() * static_cast<size_t>(step.vocabulary));
      for (size_t i = 0; i < logits.size(); ++i) logits[i] = static_cast<float>(i * 7919 % 1000);
      program.write(plan::ValueId{0}, logits);
    }
    metal_.gpu->take_counters();
    program.submit(inputs.get());
    program.wait();
    std::vector<std::vector<DispatchCounters>> stages;
    for (DispatchCounters& d : metal_.gpu->take_counters()) {
      if (d.stage >= stages.size()) stages.resize(d.stage + 1);
      stages[d.stage].push_back(std::move(d));
    }
    return stages;
  }

  Barriers barriers(const Step& step) {
    const auto program = metal_.device->compile(plan_of(step));
    const auto run = stages(step, *program);
    Barriers barriers{.n_stages = static_cast<int>(run.size())};
    for (const auto& stage : run) barriers.n_launches += static_cast<int>(stage.size());
    for (size_t s = 1; s < run.size(); ++s) {
      bool found = false;
      for (const DispatchCounters& before : run[s - 1])
        for (const DispatchCounters& after : run[s]) found = found || overlap(before.touched, after.touched);
      ++(found ? barriers.needed : barriers.superfluous)[kernels_of(run[s - 1]) + " | " + kernels_of(run[s])];
    }
    return barriers;
  }

 private:
  test::EmulatedMetal metal_;
};

test::Sequence sequence(int n_tokens, int position, int slot) {
  return {.tokens = test::random_tokens(n_tokens, dims().vocab, 17),
          .position = position,
          .src = position == 0 ? backend::kNoState : StateSlot{slot},
          .dst = StateSlot{slot}};
}

// Decode and a prefill of 16 tokens, with the attention of both sides of the switch.
std::vector<Step> steps(plan::KvType kv = plan::KvType::bf16) {
  Policy general = metal::default_policy(), fixed;
  general.kv = kv;
  fixed = general;
  general.fixed_blocks_from_context = plan::kNever;
  fixed.fixed_blocks_from_context = 1;
  std::vector<Step> all;
  for (const auto& [name, policy] : {std::pair("general", general), std::pair("fixed blocks", fixed)}) {
    all.push_back({fmt::format("decode, {}", name), Phase::decode, policy, {sequence(1, 40, 0)}});
    all.push_back({fmt::format("prefill, {}", name), Phase::prefill, policy, {sequence(16, 40, 0)}});
  }
  return all;
}

class BarriersWithCache : public testing::TestWithParam<plan::KvType> {};

TEST_P(BarriersWithCache, EachSeparatesWhatNoOtherSeparates) {
  Recorder recorder(GetParam());
  for (const Step& step : steps(GetParam())) {
    const Barriers barriers = recorder.barriers(step);
    const metal::Counts counts = metal::dispatches(plan_of(step));
    EXPECT_EQ(barriers.n_launches, counts.launches) << step.name;
    EXPECT_EQ(barriers.n_stages, counts.stages) << step.name;
    int n = 0;
    for (const auto& [kind, count] : barriers.needed) n += count;
    EXPECT_EQ(n, counts.barriers) << step.name;
    for (const auto& [kind, count] : barriers.superfluous)
      ADD_FAILURE() << step.name << ": " << count << " barriers separate nothing: " << kind;
  }
}

INSTANTIATE_TEST_SUITE_P(Types, BarriersWithCache, testing::Values(plan::KvType::bf16, plan::KvType::int8),
                         [](const auto& type) { return std::string(plan::name(type.param)); });

// The endings that greedy steps do not have.
std::vector<Step> other_endings() {
  const Policy policy = metal::default_policy();
  const std::vector<test::Sequence> two = {sequence(1, 70, 0), sequence(1, 0, 1)};
  return {{"two sequences, sampled", Phase::decode, policy, two, Ending::sampled},
          {"one without a top-k", Phase::decode, policy, two, Ending::sampled, {20, 0}},
          {"candidates", Phase::decode, policy, {sequence(1, 63, 0)}, Ending::candidates},
          // Vocabularies that one threadgroup cannot rank what is left of, as the real one.
          {"sampled, large", Phase::decode, policy, two, Ending::sampled, {20, 20}, kLargeVocabulary},
          {"candidates, large", Phase::decode, policy, two, Ending::candidates, {}, kLargeVocabulary}};
}

// Whatever the data: the first token, one row in a program for more, several sequences, other endings.
TEST(Barriers, AllButOneAreThereForAnyData) {
  Recorder recorder;
  const Policy policy = metal::default_policy();
  // The barriers whose conflict depends on the data, with the input that does without. The steps here and
  // above have the conflict.
  const std::map<std::string, std::string> depend_on_data = {
      // Ranked logits are read for a row with a top-k only ("one without a top-k" has such a row); the others
      // sample from the logits themselves.
      {"rank_logits | rank_sample+sample_whole", "sampled without a top-k"}};
  std::vector<Step> all = other_endings();
  all.push_back({"sampled without a top-k",
                 Phase::decode,
                 policy,
                 {sequence(1, 70, 0), sequence(1, 0, 1)},
                 Ending::sampled,
                 {0, 0}});
  all.push_back({"first token", Phase::decode, policy, {sequence(1, 0, 0)}});
  all.push_back({"ragged chunks", Phase::prefill, policy, {sequence(1, 64, 0), sequence(8, 3, 1)}});
  std::map<std::string, std::string> found;
  for (const Step& step : all)
    for (const auto& [kind, count] : recorder.barriers(step).superfluous) found.emplace(kind, step.name);
  EXPECT_EQ(found, depend_on_data);
}

// With a barrier after every op, those between independent ops stand out.
TEST(Barriers, ThoseOfSerialExecutionAreSuperfluous) {
  Recorder recorder;
  const Policy serial = *plan::without(metal::default_policy(), plan::Mechanism::d3);
  const Barriers barriers = recorder.barriers({"serial", Phase::prefill, serial, {sequence(9, 0, 0)}});
  EXPECT_GT(barriers.superfluous.size(), 0u);
}

// One barrier of each kind is left out: the emulator names the kernels that it stood between.
// Of the kinds that kernels with `part` in their name stand beside.
void expect_missing_ones_reported(plan::KvType kv, const std::vector<Step>& all, const std::string& part,
                                  size_t n_kinds) {
  Recorder recorder(kv, emulator::Options::OnFinding::nothing);
  std::set<std::string> done;
  for (const Step& step : all) {
    const auto program = recorder.device().compile(plan_of(step));
    const auto run = recorder.stages(step, *program);
    std::map<std::string, int> left;  // kinds that no step before had, and a barrier of each
    for (size_t g = 1; g < run.size(); ++g) {
      const std::string kind = kernels_of(run[g - 1]) + " | " + kernels_of(run[g]);
      if (kind.find(part) != std::string::npos && !done.contains(kind))
        left.emplace(kind, static_cast<int>(g));
    }
    while (!left.empty()) {
      // Several at once, far enough apart that what one lets meet does not reach the next.
      // A finding is listed once for each kernel that comes too early.
      std::set<int> groups;
      std::set<std::string> early;
      for (const auto& [kind, g] : left) {
        const auto& behind = run[static_cast<size_t>(g)];
        if (std::any_of(groups.begin(), groups.end(), [&](int other) { return std::abs(other - g) <= 2; }) ||
            std::any_of(behind.begin(), behind.end(),
                        [&](const auto& d) { return early.contains(d.kernel); }))
          continue;
        groups.insert(g);
        for (const DispatchCounters& d : behind) early.insert(d.kernel);
      }
      recorder.gpu().clear_findings();
      dynamic_cast<metal::MetalProgram&>(*program).leave_out_barriers(groups);
      recorder.stages(step, *program);
      const auto findings = recorder.gpu().findings();
      for (const int g : groups) {
        const auto& before = run[static_cast<size_t>(g) - 1];
        const auto& after = run[static_cast<size_t>(g)];
        const auto is_of = [](const std::vector<DispatchCounters>& stage, const auto& names) {
          return std::any_of(stage.begin(), stage.end(), [&](const auto& d) { return names(d.kernel); });
        };
        const bool is_reported = std::any_of(findings.begin(), findings.end(), [&](const auto& f) {
          return f.kind == emulator::Finding::Kind::missing_dispatch_barrier &&
                 is_of(after, [&](const std::string& kernel) { return f.kernel == kernel; }) &&
                 is_of(before, [&](const std::string& kernel) {
                   return f.message.find(" " + kernel + " (dispatch") != std::string::npos;
                 });
        });
        const std::string kind = kernels_of(before) + " | " + kernels_of(after);
        EXPECT_TRUE(is_reported) << step.name << ", without the barrier " << kind;
        left.erase(kind);
        done.insert(kind);
      }
    }
  }
  EXPECT_GE(done.size(), n_kinds);
}

TEST(Barriers, AMissingOneIsReported) {
  std::vector<Step> all = steps();
  for (Step& step : other_endings()) all.push_back(std::move(step));
  expect_missing_ones_reported(plan::KvType::bf16, all, "", 56);
}

TEST(Barriers, AMissingOneIsReportedBesideTheKernelsOfAnEightBitCache) {
  expect_missing_ones_reported(plan::KvType::int8, steps(plan::KvType::int8), "_int8", 7);
}

}  // namespace
}  // namespace lily
