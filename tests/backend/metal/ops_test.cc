// Every op of the plans against the reference backend, over the edges of shapes, for all three storages of
// weights and each matrix unit.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include "backend/metal/lower.h"
#include "lily_metal_kernels_emulated.h"
#include "lily_metal_tensor_kernels_emulated.h"
#include "tests/backend/metal/op_comparison.h"

namespace lily {
namespace {

using plan::Ending;
using plan::Phase;
using plan::Policy;

class Ops : public test::OpComparison {
 protected:
  static void SetUpTestSuite() { make_stage(); }
};

// The same on a chip with matrix units that tensor operations reach.
class TensorOps : public Ops {
 protected:
  static void SetUpTestSuite() { make_stage({.tensor_ops = true}); }

  static Policy policy() {
    Policy p = stage().metal().policy(stage().dims());
    EXPECT_EQ(p.matrix_unit, plan::MatrixUnit::tensor);
    return p;
  }
};

Policy unfused(Policy p) {
  p.prefill = p.decode = {};
  return p;
}

Policy all_off() {
  Policy p = metal::default_policy();
  for (int m = 0; m < plan::kMechanisms; ++m)
    if (static_cast<plan::Mechanism>(m) != plan::Mechanism::p2)
      p = *plan::without(p, static_cast<plan::Mechanism>(m));
  return p;
}

TEST_F(Ops, DecodeOfOneRowAsFusedAsItGets) {
  for (const int position : {0, 1, 31, 32, 33})
    compare({.name = "1 row", .phase = Phase::decode, .positions = {position}, .rows = {1}, .context = 256},
            metal::default_policy(), Ending::greedy);
}

TEST_F(Ops, DecodeOfThreeSequencesAsFusedAsItGets) {
  compare(
      {.name = "3 rows", .phase = Phase::decode, .positions = {5, 0, 130}, .rows = {1, 1, 1}, .context = 192},
      metal::default_policy());
}

TEST_F(Ops, DecodeOpByOp) {
  compare({.name = "unfused", .phase = Phase::decode, .positions = {40, 63}, .rows = {1, 1}, .context = 128},
          unfused(metal::default_policy()));
}

TEST_F(Ops, DecodeWithADeltaRuleFusedOnlyWithItsNorm) {
  Policy p = metal::default_policy();
  p.decode = {.delta_norm = true};
  compare({.name = "delta_norm", .phase = Phase::decode, .positions = {9}, .rows = {1}, .context = 64}, p);
}

TEST_F(Ops, DecodeOverFixedBlocksOfTheCache) {
  Policy p = metal::default_policy();
  p.fixed_blocks_from_context = 1;
  for (const int position : {0, 1023, 1024, 2100})
    compare({.name = "fixed blocks",
             .phase = Phase::decode,
             .positions = {position},
             .rows = {1},
             .context = 2112},
            p);
}

TEST_F(Ops, DecodeWithoutMechanisms) {
  compare({.name = "all off", .phase = Phase::decode, .positions = {70, 3}, .rows = {1, 1}, .context = 128},
          all_off());
}

TEST_F(Ops, PrefillOfOneTileMoreOrLess) {
  for (const int rows : {9, 16, 17, 33})
    compare({.name = "prefill", .phase = Phase::prefill, .positions = {0}, .rows = {rows}, .context = 64},
            metal::default_policy());
}

TEST_F(Ops, PrefillOfFewRowsUsesTheDecodeKernels) {
  compare({.name = "5 rows", .phase = Phase::prefill, .positions = {17}, .rows = {5}, .context = 64},
          metal::default_policy());
}

TEST_F(Ops, PrefillOfRaggedChunksOfThreeSequences) {
  compare({.name = "3 chunks",
           .phase = Phase::prefill,
           .positions = {3, 0, 60},
           .rows = {2, 40, 27},
           .context = 128},
          metal::default_policy());
}

TEST_F(Ops, PrefillOpByOp) {
  compare({.name = "unfused", .phase = Phase::prefill, .positions = {64, 1}, .rows = {1, 35}, .context = 128},
          unfused(metal::default_policy()));
}

TEST_F(Ops, PrefillWithoutMechanisms) {
  compare({.name = "all off", .phase = Phase::prefill, .positions = {30, 0}, .rows = {70, 3}, .context = 128},
          all_off());
}

TEST_F(TensorOps, PrefillOfOneTileMoreOrLess) {
  for (const int rows : {9, 16, 17, 33})
    compare({.name = "prefill", .phase = Phase::prefill, .positions = {0}, .rows = {rows}, .context = 64},
            policy());
}

TEST_F(TensorOps, PrefillOpByOpOfRaggedChunks) {
  compare({.name = "unfused", .phase = Phase::prefill, .positions = {64, 1}, .rows = {1, 35}, .context = 128},
          unfused(policy()));
}

TEST_F(TensorOps, PrefillWithExpandedWeights) {
  compare({.name = "P1 off", .phase = Phase::prefill, .positions = {0}, .rows = {20}, .context = 64},
          *plan::without(policy(), plan::Mechanism::p1));
}

// The kernels of one storage: op by op and fused, for one row, a few and many, with each matrix unit.
class OfStorage : public Ops {
 protected:
  static void make(const model::Checkpoint& checkpoint, bool tensor_ops = false) {
    make_stage({.tensor_ops = tensor_ops}, checkpoint);
  }
  void compare_all() {
    const Policy policy = stage().metal().policy(stage().dims());
    for (const Policy& p : {policy, unfused(policy)}) {
      compare({.name = "1 row", .phase = Phase::decode, .positions = {9}, .rows = {1}, .context = 64}, p);
      compare({.name = "3 rows",
               .phase = Phase::decode,
               .positions = {5, 0, 63},
               .rows = {1, 1, 1},
               .context = 64},
              p);
      for (const int rows : {9, 20})
        compare({.name = "prefill", .phase = Phase::prefill, .positions = {0}, .rows = {rows}, .context = 64},
                p);
    }
    for (const plan::Mechanism m : {plan::Mechanism::p1, plan::Mechanism::p6})
      for (const int rows : {9, 17})
        compare({.name = "ablated", .phase = Phase::prefill, .positions = {0}, .rows = {rows}, .context = 64},
                *plan::without(policy, m));
    compare({.name = "D1 off", .phase = Phase::decode, .positions = {9}, .rows = {1}, .context = 64},
            *plan::without(policy, plan::Mechanism::d1));
  }
};
class EightBits : public OfStorage {
 protected:
  static void SetUpTestSuite() { make(test::checkpoint_of(model::Storage::q8)); }
};
class Unquantised : public OfStorage {
 protected:
  static void SetUpTestSuite() { make(test::checkpoint_of(model::Storage::bf16)); }
};
class FourBitsOnTensorOps : public OfStorage {
 protected:
  static void SetUpTestSuite() { make(test::checkpoint_of(model::Storage::q4), true); }
};
class EightBitsOnTensorOps : public OfStorage {
 protected:
  static void SetUpTestSuite() { make(test::checkpoint_of(model::Storage::q8), true); }
};
class UnquantisedOnTensorOps : public OfStorage {
 protected:
  static void SetUpTestSuite() { make(test::checkpoint_of(model::Storage::bf16), true); }
};
TEST_F(EightBits, EveryOp) { compare_all(); }
TEST_F(Unquantised, EveryOp) { compare_all(); }

// Results far smaller than the state that they are read from, and rounded with it row by row.
TEST_F(EightBits, ARecurrenceOfManyRows) {
  for (const std::vector<int>& rows :
       {std::vector<int>{2, 33, 5}, std::vector<int>{40}, std::vector<int>{3, 130}})
    compare({.name = "many rows",
             .phase = Phase::prefill,
             .positions = std::vector<int>(rows.size(), 0),
             .rows = rows,
             .context = 256,
             .compares = [](const plan::Op& op) { return std::holds_alternative<plan::DeltaRule>(op); }},
            metal::default_policy());
}

TEST_F(FourBitsOnTensorOps, EveryOp) { compare_all(); }
TEST_F(EightBitsOnTensorOps, EveryOp) { compare_all(); }
TEST_F(UnquantisedOnTensorOps, EveryOp) { compare_all(); }

TEST_F(Ops, Candidates) {
  compare({.name = "candidates", .phase = Phase::decode, .positions = {3, 0}, .rows = {1, 1}, .context = 64},
          metal::default_policy(), Ending::candidates);
}

// How rows fall on experts: all on the same eight, so that each of these has all rows and the others none, or
// one expert that has all rows beside others that change.
class OfExperts : public test::OpComparison {
 protected:
  void compare_loads(int n_rows, const Policy& policy) {
    const int n = stage().dims().n_experts;
    const auto same_eight = [](int64_t, int k) { return k + 2; };
    const auto one_takes_all = [n](int64_t row, int k) {
      return k == 0 ? 5 : (6 + static_cast<int>((row + k) % (n - 1))) % n;  // the others in turn
    };
    for (const auto& [name, expert] :
         {std::pair<const char*, std::function<int(int64_t, int)>>("the same eight", same_eight),
          {"one takes all", one_takes_all}})
      compare_experts(name, n_rows, policy, expert);
  }
  void compare_experts(const char* name, int n_rows, const Policy& policy,
                       const std::function<int(int64_t, int)>& expert = {}) {
    compare({.name = name,
             .phase = Phase::prefill,
             .positions = {0},
             .rows = {n_rows},
             .context = 128,
             .expert = expert,
             .compares = is_of_experts},
            policy);
  }
  static bool is_of_experts(const plan::Op& op) {
    const std::string kind = plan::kind_name(op);
    return kind.starts_with("exp") || kind.find("router") != std::string::npos || kind == "swiglu";
  }
};

class Loads : public OfExperts, public testing::WithParamInterface<uint64_t> {
 protected:
  void SetUp() override { make_stage({.seed = GetParam()}, test::checkpoint_of(model::Storage::q4)); }
};

TEST_P(Loads, OneTileMoreOrLess) {
  for (const int n_rows : {9, 15, 16, 17, 31, 32, 33, 49}) compare_loads(n_rows, metal::default_policy());
}

TEST_P(Loads, WithoutAMechanism) {
  for (const auto m : {plan::Mechanism::p1, plan::Mechanism::p2, plan::Mechanism::p3, plan::Mechanism::p6,
                       plan::Mechanism::d4})
    for (const int n_rows : {17, 33}) compare_loads(n_rows, *plan::without(metal::default_policy(), m));
}

TEST_P(Loads, OfFewRows) {
  for (const int n_rows : {1, 2, 8}) {
    compare_loads(n_rows, metal::default_policy());
    compare_loads(n_rows, unfused(metal::default_policy()));
  }
}

INSTANTIATE_TEST_SUITE_P(Seeds, Loads, testing::Values(1, 2));

// As many experts as the real model has, of which most have no row.
class ManyExperts : public OfExperts {
 protected:
  static void SetUpTestSuite() { make_stage({.seed = 1}, test::checkpoint_of(model::Storage::q4, 256)); }
};

TEST_F(ManyExperts, OfFewRowsAndMany) {
  for (const int n_rows : {1, 9, 40})
    for (const Policy& p : {metal::default_policy(), unfused(metal::default_policy())}) {
      compare_experts("chosen by the router", n_rows, p);
      compare_loads(n_rows, p);
    }
  compare_loads(40, *plan::without(metal::default_policy(), plan::Mechanism::p2));
  compare({.name = "decode",
           .phase = Phase::decode,
           .positions = {7, 0},
           .rows = {1, 1},
           .context = 64,
           .compares = is_of_experts},
          metal::default_policy());
}

// The same under many orders of dispatches, threadgroups and lanes.
class Schedules : public test::OpComparison, public testing::WithParamInterface<uint64_t> {
 protected:
  void SetUp() override { make_stage({.seed = GetParam()}, test::checkpoint_of(model::Storage::q4)); }
};

TEST_P(Schedules, EveryOpIsTheReferences) {
  const Policy policy = metal::default_policy();
  Policy split = policy;
  split.fixed_blocks_from_context = 1;
  for (const Policy& p : {policy, split, unfused(policy), all_off()}) {
    compare({.name = "decode", .phase = Phase::decode, .positions = {5, 33}, .rows = {1, 1}, .context = 64},
            p);
    compare({.name = "prefill", .phase = Phase::prefill, .positions = {1, 0}, .rows = {1, 17}, .context = 64},
            p);
  }
}
INSTANTIATE_TEST_SUITE_P(Seeds, Schedules, testing::Range<uint64_t>(1, 11));

TEST_F(Ops, SampledTokens) {
  compare({.name = "sampled", .phase = Phase::decode, .positions = {3, 0}, .rows = {1, 1}, .context = 64},
          metal::default_policy(), Ending::sampled);
}

TEST_F(Ops, PrefillWithoutOneMechanism) {
  for (const auto m : {plan::Mechanism::p3, plan::Mechanism::p4, plan::Mechanism::d5, plan::Mechanism::d6})
    compare({.name = "ablated", .phase = Phase::prefill, .positions = {30}, .rows = {21}, .context = 64},
            *plan::without(metal::default_policy(), m));
}

bool is_of_attention(const plan::Op& op) {
  const std::string_view kind = plan::kind_name(op);
  return kind.find("attention") != std::string_view::npos || kind == "qk_prepare" ||
         kind == "head_norm_rope" || kind == "kv_append";
}

// Queries and keys prepared before, as bf16 values: nothing is rounded inside, the gate included.
TEST_F(Ops, DecodeAttentionIsFp32Inside) {
  for (const int64_t from : {int64_t{1}, plan::kNever})  // both sides of the switch
    for (const int position : {0, 30, 31, 32, 1025}) {
      Policy p = metal::default_policy();
      p.decode.qk_in_attention = false;
      p.fixed_blocks_from_context = from;
      compare({.name = "prepared before",
               .phase = Phase::decode,
               .positions = {position},
               .rows = {1},
               .context = 1088,
               .compares = is_of_attention},
              p);
    }
}

// Angles of rotation reach 2.6e5 rad.
TEST_F(Ops, TheLastPositionIsRotatedAsExactlyAsTheFirst) {
  Policy prepared = metal::default_policy();
  prepared.decode.qk_in_attention = false;
  for (const Policy& p : {metal::default_policy(), prepared, unfused(metal::default_policy())}) {
    const int last = stage().dims().max_positions - 1;
    compare({.name = "far away",
             .phase = Phase::decode,
             .positions = {last},
             .rows = {1},
             .context = last + 1,
             .compares =
                 [&](const plan::Op& op) {
                   const bool attends = std::holds_alternative<plan::GatedAttention>(op) ||
                                        std::holds_alternative<plan::Attention>(op);
                   return is_of_attention(op) && (!attends || p.decode.qk_in_attention);
                 }},
            p);
  }
}

TEST_F(Ops, DecodeAttentionWithoutPackingOrCoalescing) {
  using Off = std::vector<plan::Mechanism>;
  for (const Off& off :
       {Off{plan::Mechanism::d5}, Off{plan::Mechanism::d6}, Off{plan::Mechanism::d5, plan::Mechanism::d6}})
    for (const int64_t from : {int64_t{1}, plan::kNever}) {  // both sides of the switch
      Policy p = metal::default_policy();
      for (const plan::Mechanism m : off) p = *plan::without(p, m);
      p.fixed_blocks_from_context = from;
      compare({.name = "ablated",
               .phase = Phase::decode,
               .positions = {1025},
               .rows = {1},
               .context = 1088,
               .compares = is_of_attention},
              p);
    }
}

// Attention over a cache of 8-bit groups, and what writes it: the edges of contexts and chunks.
class EightBitCache : public test::OpComparison {
 protected:
  static void SetUpTestSuite() { make_stage({.kv = plan::KvType::int8}); }

  void decode(const std::vector<int>& positions, const Policy& policy, int64_t context) {
    compare({.name = "decode",
             .phase = Phase::decode,
             .positions = positions,
             .rows = std::vector(positions.size(), 1),
             .context = context,
             .compares = is_of_attention},
            policy);
  }
  void prompt(const std::vector<int>& positions, const std::vector<int>& rows, const Policy& policy) {
    compare({.name = "prompt",
             .phase = Phase::prefill,
             .positions = positions,
             .rows = rows,
             .context = 128,
             .compares = is_of_attention},
            policy);
  }
  // Prepared inside attention, by one kernel in front of it, and by one for each of its parts.
  static std::vector<Policy> preparations() {
    Policy in_front = metal::default_policy();
    in_front.decode.qk_in_attention = false;
    return {metal::default_policy(), in_front, unfused(metal::default_policy())};
  }
};

TEST_F(EightBitCache, DecodeOnBothSidesOfTheSwitch) {
  for (Policy p : preparations())
    for (const int64_t from : {int64_t{1}, plan::kNever}) {
      p.fixed_blocks_from_context = from;
      for (const int position : {0, 1, 30, 31, 32, 33}) decode({position}, p, 256);
      decode({5, 0, 130}, p, 192);
    }
}

TEST_F(EightBitCache, DecodeBehindManyKeys) {
  for (Policy p : preparations())
    for (const int64_t from : {int64_t{1}, plan::kNever}) {
      p.fixed_blocks_from_context = from;
      for (const int position : {1023, 1024, 2100}) decode({position}, p, 2112);
    }
}

TEST_F(EightBitCache, DecodeWithoutPackingOrCoalescing) {
  using Off = std::vector<plan::Mechanism>;
  for (const Off& off :
       {Off{plan::Mechanism::d5}, Off{plan::Mechanism::d6}, Off{plan::Mechanism::d5, plan::Mechanism::d6}})
    for (const int64_t from : {int64_t{1}, plan::kNever}) {
      Policy p = metal::default_policy();
      for (const plan::Mechanism m : off) p = *plan::without(p, m);
      p.fixed_blocks_from_context = from;
      decode({1025}, p, 1088);
      decode({33}, p, 64);
    }
}

TEST_F(EightBitCache, PromptsOfOneTileMoreOrLessAndOfRaggedChunks) {
  for (const Policy& p : {metal::default_policy(), unfused(metal::default_policy())}) {
    for (const int rows : {1, 5, 9, 16, 17, 31, 32, 33}) prompt({0}, {rows}, p);
    prompt({17}, {5}, p);
    prompt({3, 0, 60}, {2, 40, 27}, p);
    prompt({64, 1}, {1, 35}, p);
  }
}

class EightBitSchedules : public test::OpComparison, public testing::WithParamInterface<uint64_t> {
 protected:
  void SetUp() override {
    make_stage({.seed = GetParam(), .kv = plan::KvType::int8}, test::checkpoint_of(model::Storage::q4));
  }
};

TEST_P(EightBitSchedules, AttentionIsTheReferences) {
  Policy split = metal::default_policy();
  split.fixed_blocks_from_context = 1;
  for (const Policy& p : {metal::default_policy(), split, unfused(metal::default_policy()), all_off()}) {
    compare({.name = "decode",
             .phase = Phase::decode,
             .positions = {5, 33},
             .rows = {1, 1},
             .context = 64,
             .compares = is_of_attention},
            p);
    compare({.name = "prefill",
             .phase = Phase::prefill,
             .positions = {1, 0},
             .rows = {1, 17},
             .context = 64,
             .compares = is_of_attention},
            p);
  }
}
INSTANTIATE_TEST_SUITE_P(Seeds, EightBitSchedules, testing::Range<uint64_t>(1, 11));

// No op stands for a copy of a state slot (steps_test has it), and the vocabularies here are ranked in one
// round (vocabulary_test and head_test have longer ones).
const testing::Environment* const kEveryKernel = testing::AddGlobalTestEnvironment(
    new test::EveryKernel({&emulator::lily_metal_kernels_plain, &emulator::lily_metal_tensor_kernels_plain},
                          {"copy_slot", "rank_keys"}));

}  // namespace
}  // namespace lily
