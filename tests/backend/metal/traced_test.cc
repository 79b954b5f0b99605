// A prompt in the traced build at the real model's widths, on tensor operations: against the reference and
// without a finding, with 40 rows, 8 experts that have rows beside others that have none, and 1,100 keys.
#include <gtest/gtest.h>

#include "tests/backend/metal/op_comparison.h"

namespace lily {
namespace {

using plan::Mechanism;
using plan::Phase;
using plan::Policy;
using test::Scene;

// In each scene the ops with kernels, or with shapes, that none before had.
class TracedOps : public test::OpComparison {
 protected:
  static void make(const model::Checkpoint& checkpoint, bool tensor_ops = false) {
    make_stage({.traced = true, .seed = 3, .tensor_ops = tensor_ops}, checkpoint);
  }
  static Policy policy() { return stage().metal().policy(stage().dims()); }
  using Compares = std::function<bool(const plan::Op&)>;

  // Three chunks with ragged ends, one behind many keys. Each expert that has rows has all of them.
  void prefill(const Policy& p, Scene::Only only = Scene::Only::new_kernels) { prefill(p, only, compares_); }
  void prefill(const Policy& p, Scene::Only only, const Compares& compares) {
    compare({.name = "40 rows",
             .phase = Phase::prefill,
             .positions = {3, 0, 1095},
             .rows = {2, 33, 5},
             .context = 1100,
             .expert = [](int64_t, int k) { return k + 2; },
             .compares = compares,
             .only = only},
            p);
  }
  // The trace of a value takes thirty times its memory: the expanded weights of one layer.
  void prefill_with_expanded_weights() {
    prefill(*plan::without(policy(), Mechanism::p1), Scene::Only::new_kernels, [](const plan::Op& op) {
      return std::visit(plan::overloaded{
                            [](const plan::ExpandWeight& o) { return o.weight.layer == 0; },
                            [](const plan::ExpertsLinear& o) { return o.weight.layer == 0; },
                            [](const plan::ExpertsGateUp& o) { return o.layer == 0; },
                            [](const plan::ExpertGroups&) { return true; },
                            [](const auto&) { return false; },
                        },
                        op);
    });
  }
  Compares compares_;  // empty: all ops
};

class TracedTensorWidths : public TracedOps {
 protected:
  static void SetUpTestSuite() { make(test::wide_checkpoint(), true); }
};
TEST_F(TracedTensorWidths, EveryOpOfAPromptIsClean) {
  prefill(policy());
  prefill(*plan::without(policy(), Mechanism::p3));
  prefill_with_expanded_weights();
}

}  // namespace
}  // namespace lily
