// Every op of the plans at the real model's widths against the reference, as `lily selftest` has it (contexts
// 1, 31, 32, 33 and 1,101, both sides of the attention switch, chunks of one tile and one row, and of several
// sequences), in the plain build under shuffled schedules.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include "engine/selftest.h"
#include "tests/backend/metal/rig.h"

namespace lily {
namespace {

void expect_reference(const test::EmulatedOptions& options) {
  auto metal = test::make_emulated_metal(test::wide_checkpoint(), options);
  const auto reference = backend::make_reference_device({});
  reference->load(test::wide_checkpoint(), {});
  int n_ops = 0;
  for (const engine::SelfTestResult& r :
       engine::self_test(*metal.device, *reference, test::wide_checkpoint().dims())) {
    n_ops += r.report.n_ops;
    EXPECT_FALSE(r.report.first) << r.step << ": " << r.report.first->line();
  }
  EXPECT_GT(n_ops, 80);
  for (const auto& finding : metal.gpu->findings())
    ADD_FAILURE() << to_string(finding.kind) << " in " << finding.kernel << ": " << finding.message;
}

class Shuffled : public testing::TestWithParam<uint64_t> {};
TEST_P(Shuffled, EveryOpIsTheReferences) { expect_reference({.seed = GetParam()}); }
INSTANTIATE_TEST_SUITE_P(Widths, Shuffled, testing::Values(1, 2));

}  // namespace
}  // namespace lily
