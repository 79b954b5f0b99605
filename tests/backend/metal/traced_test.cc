// Every kernel in the traced build at the real model's widths, against the reference and without a finding (a
// finding would end the step): at most 40 rows, 8 experts that have rows beside 2 that have none, 1,100 keys.
// The whole program ends with a check that no kernel has been left out.
#include <gtest/gtest.h>

#include <numeric>

#include "lily_metal_kernels_emulated.h"
#include "lily_metal_tensor_kernels_emulated.h"
#include "plan/uses.h"
#include "tests/backend/metal/op_comparison.h"

namespace lily {
namespace {

using model::Storage;
using model::Weight;
using plan::Ending;
using plan::Mechanism;
using plan::Phase;
using plan::Policy;
using test::Scene;

// In each scene the ops with kernels that none before had: each one once, the slowest things that run here.
class TracedOps : public test::OpComparison {
 protected:
  using Compares = std::function<bool(const plan::Op&)>;

  static void make(const model::Checkpoint& checkpoint, bool tensor_ops = false,
                   plan::KvType kv = plan::KvType::bf16) {
    make_stage({.traced = true, .seed = 3, .tensor_ops = tensor_ops, .kv = kv}, checkpoint);
  }
  static Policy policy() { return stage().metal().policy(stage().dims()); }
  static Policy unfused(Policy p) {
    p.prefill = p.decode = {};
    return p;
  }
  static Policy fixed_blocks(Policy p) {
    p.fixed_blocks_from_context = 1;
    return p;
  }

  // But for the mixers' projections, of up to 25 million weights, which projections() has, and a head of the
  // real vocabulary.
  static bool is_small(const plan::Op& op) {
    constexpr int64_t kMostWeights = int64_t{2} * 512 * 2048;
    if (!std::holds_alternative<plan::Linear>(op) && !std::holds_alternative<plan::NormLinear>(op) &&
        !std::holds_alternative<plan::LinearAdd>(op))
      return true;
    int64_t n_weights = 0;
    for (const plan::Use& use : plan::uses(op))
      if (use.resource == plan::Resource::weight) {
        const auto shape = model::weight_spec(stage().dims(), use.weight).shape;
        n_weights += std::accumulate(shape.begin(), shape.end(), int64_t{1}, std::multiplies<>());
      }
    return n_weights <= kMostWeights + 2048;  // a norm beside
  }

  // Three chunks with ragged ends, one behind many keys. Each expert that has rows has all of them.
  // Of few layers, as the reference computes all of them first.
  void prompt(const Policy& p, int n_rows, int n_layers = 1, const Compares& compares = is_small,
              Scene::Only only = Scene::Only::new_kernels) {
    compare({.name = "prompt",
             .phase = Phase::prefill,
             .positions = {3, 0, 1095},
             .rows = {2, n_rows - 2 - std::min(5, n_rows / 4), std::min(5, n_rows / 4)},
             .context = 1100,
             .expert = [](int64_t, int k) { return k + 2; },
             .compares = compares,
             .only = only,
             .end_tokens = true,
             .n_layers = n_layers},
            p);
  }
  // One row behind many keys, and three sequences.
  void decode(const Policy& p, int n_layers, const Compares& compares = is_small,
              Scene::Only only = Scene::Only::new_kernels) {
    for (const std::vector<int>& positions : {std::vector<int>{1099}, std::vector<int>{5, 0, 1099}})
      compare({.name = "decode",
               .phase = Phase::decode,
               .positions = positions,
               .rows = std::vector(positions.size(), 1),
               .context = 1100,
               .expert = [](int64_t, int k) { return k + 2; },
               .compares = compares,
               .only = only,
               .end_tokens = true,
               .n_layers = n_layers},
              p);
  }

  // The mixers' projections, each one once at its own width for one row, three and forty.
  void projections() {
    const auto is_projection = [](const plan::Op& op) {
      return !is_small(op) && !test::is_of_vocabulary(op);
    };
    for (const Policy& p : {policy(), unfused(policy())}) {
      decode(p, 4, is_projection, Scene::Only::new_shapes);
      prompt(p, 40, 4, is_projection, Scene::Only::new_shapes);
    }
  }

  // The trace of a value takes thirty times its memory: one expanded weight of one layer.
  void expanded_weights(int n_rows) {
    prompt(
        *plan::without(policy(), Mechanism::p1), n_rows, 1,
        [](const plan::Op& op) {
          constexpr model::WeightId kDown{Weight::expert_down, 0};
          return std::visit(plan::overloaded{
                                [&](const plan::ExpandWeight& o) { return o.weight == kDown; },
                                [&](const plan::ExpertsLinear& o) { return o.weight == kDown; },
                                [](const plan::ExpertGroups&) { return true; },
                                [](const auto&) { return false; },
                            },
                            op);
        },
        Scene::Only::all);
  }

  // Fused and op by op, each mechanism off, attention on both sides of the switch; tiles of 16 rows and 32.
  // With four decoded layers attention is there.
  void every_kernel(int decode_layers = 1) {
    std::vector<Policy> policies = {policy(), unfused(policy())};
    for (int m = 0; m < plan::kMechanisms; ++m)
      if (const auto mechanism = static_cast<Mechanism>(m); mechanism != Mechanism::p1)
        policies.push_back(*plan::without(policy(), mechanism));
    policies.push_back(*plan::without(*plan::without(policy(), Mechanism::d5), Mechanism::d6));
    Policy norm_only = policy();
    norm_only.decode = {.delta_norm = true};
    policies.push_back(norm_only);
    for (const Policy& p : policies) {
      decode(p, decode_layers);
      decode(fixed_blocks(p), decode_layers);
      for (const int n_rows : {9, 20}) prompt(p, n_rows);
    }
    expanded_weights(9);
  }
};

class TracedWidths : public TracedOps {
 protected:
  static void SetUpTestSuite() { make(test::wide_checkpoint_of(Storage::q4)); }
};
TEST_F(TracedWidths, APromptIsClean) {
  prompt(policy(), 40);
  prompt(policy(), 9, 4);
  prompt(unfused(policy()), 9, 4);
}
TEST_F(TracedWidths, EveryKernelIsClean) { every_kernel(4); }
TEST_F(TracedWidths, ProjectionsAreClean) { projections(); }
TEST_F(TracedWidths, ACopyOfAStateSlotIsClean) {
  constexpr int kLayer = 0;
  backend::Device& d = stage().metal();
  stage().fill_memory(2, 1);
  const auto state = d.read_delta_state(backend::StateSlot{1}, kLayer);
  const auto conv = d.read_conv_state(backend::StateSlot{1}, kLayer);
  note_launched();
  d.copy_state(backend::StateSlot{1}, backend::StateSlot{5});
  EXPECT_EQ(d.read_delta_state(backend::StateSlot{5}, kLayer), state);
  EXPECT_EQ(d.read_conv_state(backend::StateSlot{5}, kLayer), conv);
  note_launched();
}

// What reads or writes a cache of 8-bit groups.
class TracedEightBitCache : public TracedOps {
 protected:
  static void SetUpTestSuite() { make(test::wide_checkpoint_of(Storage::q4), false, plan::KvType::int8); }
};
TEST_F(TracedEightBitCache, EveryKernelIsClean) {
  Policy in_front = policy();
  in_front.decode.qk_in_attention = false;
  for (const Policy& p : {policy(), in_front, unfused(policy()), *plan::without(policy(), Mechanism::d5),
                          *plan::without(policy(), Mechanism::d6),
                          *plan::without(*plan::without(policy(), Mechanism::d5), Mechanism::d6)}) {
    decode(p, 4);
    decode(fixed_blocks(p), 4);
  }
  prompt(policy(), 40, 4);
  prompt(unfused(policy()), 9, 4);
}

class TracedTensorWidths : public TracedOps {
 protected:
  static void SetUpTestSuite() { make(test::wide_checkpoint_of(Storage::q4), true); }
};
TEST_F(TracedTensorWidths, APromptIsClean) { prompt(policy(), 40, 1, {}); }
TEST_F(TracedTensorWidths, EveryKernelIsClean) { every_kernel(); }

template <Storage kStorage, bool kTensorOps>
class TracedStorage : public TracedOps {
 protected:
  static void SetUpTestSuite() { make(test::wide_checkpoint_of(kStorage), kTensorOps); }
};
using TracedEightBits = TracedStorage<Storage::q8, false>;
using TracedEightBitsOnTensorOps = TracedStorage<Storage::q8, true>;
using TracedUnquantised = TracedStorage<Storage::bf16, false>;
using TracedUnquantisedOnTensorOps = TracedStorage<Storage::bf16, true>;
TEST_F(TracedEightBits, EveryKernelIsClean) { every_kernel(); }
TEST_F(TracedEightBitsOnTensorOps, EveryKernelIsClean) { every_kernel(); }
TEST_F(TracedUnquantised, EveryKernelIsClean) { every_kernel(); }
TEST_F(TracedEightBits, ProjectionsAreClean) { projections(); }
TEST_F(TracedUnquantised, ProjectionsAreClean) { projections(); }
TEST_F(TracedUnquantisedOnTensorOps, EveryKernelIsClean) { every_kernel(); }

// The real vocabulary: rows of the embedding from its first to its last, the head of a decoded token, and
// what the step ends in.
class TracedVocabulary : public TracedOps {
 protected:
  static void SetUpTestSuite() { make(test::vocabulary_checkpoint()); }
  void decode(std::vector<int> positions, Ending ending, const Compares& compares) {
    compare({.name = "decode",
             .phase = Phase::decode,
             .positions = positions,
             .rows = std::vector(positions.size(), 1),
             .context = 64,
             .compares = compares,
             .end_tokens = true,
             .n_layers = 1},
            policy(), ending);
  }
};
TEST_F(TracedVocabulary, EmbeddingHeadAndEndingsAreClean) {
  compare({.name = "embedding",
           .phase = Phase::prefill,
           .positions = {3, 0, 1095},
           .rows = {2, 33, 5},
           .context = 1100,
           .compares = [](const plan::Op& op) { return std::holds_alternative<plan::Embed>(op); },
           .all_outputs = false,
           .end_tokens = true,
           .n_layers = 1},
          policy(), Ending::none);
  decode({9}, Ending::greedy, [](const plan::Op& op) { return test::is_of_vocabulary(op); });
  decode({9, 0}, Ending::sampled,
         [](const plan::Op& op) { return std::holds_alternative<plan::SampleToken>(op); });
  decode({9}, Ending::candidates,
         [](const plan::Op& op) { return std::holds_alternative<plan::TopCandidates>(op); });
}

const testing::Environment* const kEveryKernel = testing::AddGlobalTestEnvironment(new test::EveryKernel(
    {&emulator::lily_metal_kernels_traced, &emulator::lily_metal_tensor_kernels_traced}));

}  // namespace
}  // namespace lily
