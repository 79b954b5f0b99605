// Each seeded fault is found, in a kernel of its own, over several schedules; the controls beside them are
// clean.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "emulator/tests/test_device.h"
#include "emulator_faults.h"
#include "emulator_faults_emulated.h"

namespace lily::emulator {
namespace {

using testing::AllOf;
using testing::HasSubstr;
using Kind = Finding::Kind;

constexpr uint64_t kSeeds = 8;

struct Case {
  const char* kernel;
  Kind kind;
  bool in_plain_build;  // found there as well
  uint32_t n_threadgroups = 1, n_threads = 64;
};
std::ostream& operator<<(std::ostream& out, const Case& c) { return out << c.kernel; }

const Case kFaults[] = {
    {"reads_past_the_end", Kind::out_of_bounds, true},
    {"writes_before_the_start", Kind::out_of_bounds, true},
    {"writes_weights", Kind::immutable_write, false},
    {"reads_unbound", Kind::unbound_buffer, false},
    {"counts_without_atomics", Kind::race_between_threadgroups, false, 4, 32},
    {"mixes_atomic_and_plain", Kind::race_between_threadgroups, false, 4, 32},
    {"diverges_between_operations", Kind::divergent_collective, true},
    {"diverges_between_calls", Kind::divergent_collective, true},
    {"half_the_lanes_collect", Kind::deadlock, true},
    {"barrier_for_some", Kind::early_return, true},
    {"barriers_at_two_places", Kind::divergent_barrier, true},
    {"returns_before_collective", Kind::early_return, true},
    {"returns_before_barrier", Kind::early_return, true},
    {"barrier_orders_other_memory", Kind::race_in_threadgroup, false},
    {"no_barrier_before_reuse", Kind::race_in_threadgroup, false},
    {"simdgroup_barrier_is_not_enough", Kind::race_in_threadgroup, false},
    {"overruns_threadgroup_array", Kind::out_of_bounds, false},
    {"too_much_threadgroup_memory", Kind::limit, true},
};

class Faults : public testing::TestWithParam<Case> {
 protected:
  // Runs the kernel with every buffer it may ask for.
  static void run(TestDevice& device, const Case& c) {
    auto o = device.buffer("o", std::vector<uint32_t>(64));
    auto a = device.buffer("a", std::vector<uint32_t>(64));
    auto other = device.buffer("other", std::vector<uint32_t>(64));
    auto weights = device.buffer("weights", std::vector<uint32_t>(64), metal::BufferUse::weights);
    const std::string name = c.kernel;
    device.run([&](metal::Encoder& e) {
      e.set_pipeline(device.pipeline(name));
      e.set_buffer(0, name == "writes_weights" ? *weights : name == "reads_past_the_end" ? *a : *o);
      if (name == "reads_unbound") e.set_value(0, other->contents().data());
      e.set_buffer(1, *o);
      e.dispatch_threadgroups({c.n_threadgroups, 1, 1}, {c.n_threads, 1, 1}, {});
    });
  }
};

TEST_P(Faults, AreFoundInTheTracedBuild) {
  for (uint64_t seed = 0; seed < kSeeds; ++seed) {
    TestDevice device(metal::emulator_faults,
                      {.libraries = {&emulator_faults_traced}, .seed = seed, .shuffle = seed != 0});
    run(device, GetParam());
    // Which of the two ends of a skipped barrier is met first depends on the schedule.
    const bool found = device.found(GetParam().kind) ||
                       (GetParam().kind == Kind::early_return && device.found(Kind::race_in_threadgroup)) ||
                       (GetParam().kind == Kind::deadlock && device.found(Kind::divergent_collective));
    EXPECT_TRUE(found) << "seed " << seed << ": " << device.report();
    for (const Finding& f : device->findings()) EXPECT_EQ(f.kernel, GetParam().kernel);
  }
}

TEST_P(Faults, AreFoundInThePlainBuildWhereItCan) {
  if (!GetParam().in_plain_build) GTEST_SKIP() << "takes tracing";
  for (uint64_t seed = 0; seed < kSeeds; ++seed) {
    TestDevice device(metal::emulator_faults,
                      {.libraries = {&emulator_faults_plain}, .seed = seed, .shuffle = seed != 0});
    run(device, GetParam());
    EXPECT_TRUE(device.found(GetParam().kind)) << "seed " << seed << ": " << device.report();
  }
}

#if defined(__x86_64__)
TEST(Arithmetic, IntegerDivisionByZeroIsFound) {
  TestDevice device(metal::emulator_faults, {.libraries = {&emulator_faults_plain}});
  auto o = device.buffer("o", std::vector<uint32_t>(64)),
       zeros = device.buffer("zeros", std::vector<uint32_t>(64));
  EXPECT_THAT(device.run([&](metal::Encoder& e) {
    e.set_pipeline(device.pipeline("divides_by_zero"));
    e.set_buffer(0, *o);
    e.set_buffer(1, *zeros);
    e.dispatch_threadgroups({1, 1, 1}, {64, 1, 1}, {});
  }),
              HasSubstr("integer division by zero"));
}
#endif

INSTANTIATE_TEST_SUITE_P(Seeded, Faults, testing::ValuesIn(kFaults),
                         [](const auto& fault) { return std::string(fault.param.kernel); });

TEST(Controls, AreClean) {
  const Case controls[] = {{"copy", Kind::misuse, false},
                           {"counts_with_atomics", Kind::misuse, false, 4, 32},
                           {"exchanges", Kind::misuse, false},
                           {"simdgroup_barrier_is_enough", Kind::misuse, false}};
  for (const Case& c : controls)
    for (uint64_t seed = 0; seed < kSeeds; ++seed) {
      TestDevice device(metal::emulator_faults,
                        {.libraries = {&emulator_faults_traced}, .seed = seed, .shuffle = seed != 0});
      auto a = device.buffer("a", std::vector<uint32_t>(64)),
           o = device.buffer("o", std::vector<uint32_t>(64));
      EXPECT_EQ(device.run([&](metal::Encoder& e) {
        e.set_pipeline(device.pipeline(c.kernel));
        e.set_buffer(0, *a);
        e.set_buffer(1, *o);
        e.dispatch_threadgroups({c.n_threadgroups, 1, 1}, {c.n_threads, 1, 1}, {});
      }),
                "")
          << c.kernel;
      EXPECT_TRUE(device->findings().empty()) << c.kernel << " " << device.report();
    }
}

// ---- Between dispatches

class DispatchBarriers : public testing::Test {
 protected:
  // Copies a to b, then b to c (read after write) or c to a (write after read).
  static std::vector<Finding> run(bool barrier, bool write_after_read, uint64_t seed) {
    TestDevice device(metal::emulator_faults,
                      {.libraries = {&emulator_faults_traced}, .seed = seed, .shuffle = seed != 0});
    auto a = device.buffer("a", std::vector<uint32_t>(64, 1)),
         b = device.buffer("b", std::vector<uint32_t>(64, 2)),
         c = device.buffer("c", std::vector<uint32_t>(64, 3));
    device.run([&](metal::Encoder& e) {
      e.set_pipeline(device.pipeline("copy"));
      e.set_buffer(0, *a);
      e.set_buffer(1, *b);
      e.dispatch_threadgroups({2, 1, 1}, {32, 1, 1}, {});
      if (barrier) e.memory_barrier();
      e.set_buffer(0, write_after_read ? *c : *b);
      e.set_buffer(1, write_after_read ? *a : *c);
      e.dispatch_threadgroups({1, 1, 1}, {64, 1, 1}, {});
    });
    return device->findings();
  }
};

TEST_F(DispatchBarriers, ARemovedOneIsFoundInEverySchedule) {
  for (bool write_after_read : {false, true})
    for (uint64_t seed = 0; seed < 4 * kSeeds; ++seed) {
      const auto findings = run(false, write_after_read, seed);
      ASSERT_FALSE(findings.empty()) << "seed " << seed;
      EXPECT_EQ(findings[0].kind, Kind::missing_dispatch_barrier);
      EXPECT_THAT(findings[0].message,
                  AllOf(HasSubstr("dispatch 1"), HasSubstr("dispatch 2"), HasSubstr("thread ")));
      EXPECT_TRUE(run(true, write_after_read, seed).empty()) << "seed " << seed;
    }
}

TEST_F(DispatchBarriers, EncodersAndCommandBuffersOrderToo) {
  TestDevice device(metal::emulator_faults, {.libraries = {&emulator_faults_traced}});
  auto a = device.buffer("a", std::vector<uint32_t>(64, 1)),
       b = device.buffer("b", std::vector<uint32_t>(64, 2));
  const auto& copy = device.pipeline("copy");
  const auto encode = [&](metal::CommandBuffer& command_buffer, const metal::Buffer& from,
                          const metal::Buffer& to) {
    metal::Encoder& e = command_buffer.make_encoder();
    e.set_pipeline(copy);
    e.set_buffer(0, from);
    e.set_buffer(1, to);
    e.dispatch_threadgroups({1, 1, 1}, {64, 1, 1}, {});
    e.end();
  };
  auto first = device->make_command_buffer("first"), second = device->make_command_buffer("second");
  encode(*first, *a, *b);
  encode(*first, *b, *a);
  first->commit();
  encode(*second, *a, *b);
  second->commit();
  second->wait_until_completed(kTimeoutMs);
  EXPECT_TRUE(device->findings().empty()) << device.report();
}

TEST(Findings, NothingModeLetsTheCommandBufferSucceed) {
  for (const auto mode : {Options::OnFinding::nothing, Options::OnFinding::fail}) {
    TestDevice device(metal::emulator_faults, {.libraries = {&emulator_faults_traced}, .on_finding = mode});
    auto weights = device.buffer("weights", std::vector<uint32_t>(64), metal::BufferUse::weights);
    const std::string error = device.run([&](metal::Encoder& e) {
      e.set_pipeline(device.pipeline("writes_weights"));
      e.set_buffer(0, *weights);
      e.dispatch_threadgroups({1, 1, 1}, {64, 1, 1}, {});
    });
    EXPECT_EQ(error.empty(), mode == Options::OnFinding::nothing) << error;
    EXPECT_EQ(device->findings().size(), 1u);
    device->clear_findings();
    EXPECT_TRUE(device->findings().empty());
  }
}

TEST(FindingsDeathTest, AbortModeStopsTheProcess) {
  testing::FLAGS_gtest_death_test_style = "threadsafe";
  EXPECT_DEATH(
      {
        TestDevice device(metal::emulator_faults,
                          {.libraries = {&emulator_faults_plain}, .on_finding = Options::OnFinding::abort});
        auto o = device.buffer("o", std::vector<uint32_t>(64));
        device.run([&](metal::Encoder& e) {
          e.set_pipeline(device.pipeline("returns_before_collective"));
          e.set_buffer(0, *o);
          e.dispatch_threadgroups({1, 1, 1}, {64, 1, 1}, {});
        });
      },
      "returns_before_collective: early return");
}

}  // namespace
}  // namespace lily::emulator
