// Which GPUs get the kernels on tensor operations, and what happens when those are not to be trusted.
#include <gtest/gtest.h>

#include "backend/metal/lower.h"
#include "backend/metal/tensor_check.h"
#include "base/error.h"
#include "base/log.h"
#include "lily_metal_kernels.h"
#include "lily_metal_kernels_emulated.h"
#include "lily_metal_tensor_kernels.h"
#include "lily_metal_tensor_kernels_emulated.h"
#include "metal_wrong_tensor_kernels.h"
#include "metal_wrong_tensor_kernels_emulated.h"
#include "tests/backend/metal/rig.h"

namespace lily::metal {
namespace {

constexpr int64_t kTimeoutMs = 600'000;

std::unique_ptr<emulator::EmulatedDevice> make_gpu(bool tensor_ops, bool traced = false) {
  emulator::Options options{.libraries = traced ? std::vector{&emulator::lily_metal_kernels_traced,
                                                              &emulator::lily_metal_tensor_kernels_traced}
                                                : std::vector{&emulator::lily_metal_kernels_plain,
                                                              &emulator::lily_metal_tensor_kernels_plain,
                                                              &emulator::metal_wrong_tensor_kernels_plain}};
  options.limits.apple_family = tensor_ops ? 10 : 9;
  options.limits.tensor_ops = tensor_ops;
  return emulator::make_emulated_device(options);
}

struct Made {
  plan::MatrixUnit unit;
  std::vector<std::string> warnings;
};
Made make(bool tensor_ops, const KernelLibrary& tensor_kernels, bool use = true) {
  static std::vector<std::string> warnings;
  warnings.clear();
  set_log_sink([](LogLevel level, std::string_view line) {
    if (level == LogLevel::warning) warnings.emplace_back(line);
  });
  const MetalDevice device(make_gpu(tensor_ops), "metal-emulated", lily_metal_kernels, tensor_kernels, use,
                           kTimeoutMs);
  set_log_sink({});
  return {device.policy(model::lily_tiny()).matrix_unit, warnings};
}

TEST(Tensor, OnlyAChipThatHasTheUnitsUsesThem) {
  const Made with = make(true, lily_metal_tensor_kernels);
  EXPECT_EQ(with.unit, plan::MatrixUnit::tensor);
  EXPECT_TRUE(with.warnings.empty());
  const Made without = make(false, lily_metal_tensor_kernels);
  EXPECT_EQ(without.unit, plan::MatrixUnit::simdgroup);
  EXPECT_TRUE(without.warnings.empty());
}

TEST(Tensor, WrongProductsSwitchThemOffWithOneLine) {
  const Made made = make(true, metal_wrong_tensor_kernels);
  EXPECT_EQ(made.unit, plan::MatrixUnit::simdgroup);
  ASSERT_EQ(made.warnings.size(), 1u);
  EXPECT_NE(made.warnings[0].find("a product of 13 rows"), std::string::npos) << made.warnings[0];
}

TEST(Tensor, ALibraryThatDoesNotCompileSwitchesThemOffWithOneLine) {
  const KernelLibrary missing{.name = "not_there", .files = {}, .tensor_ops = true};
  const Made made = make(true, missing);
  EXPECT_EQ(made.unit, plan::MatrixUnit::simdgroup);
  ASSERT_EQ(made.warnings.size(), 1u);
  EXPECT_NE(made.warnings[0].find("not_there"), std::string::npos) << made.warnings[0];
}

TEST(Tensor, NobodyGetsThemWhoDidNotAsk) {
  const Made made = make(true, lily_metal_tensor_kernels, false);
  EXPECT_EQ(made.unit, plan::MatrixUnit::simdgroup);
  EXPECT_TRUE(made.warnings.empty());
}

TEST(Tensor, APlanForThemIsRefusedWhereTheyAreNotUsed) {
  auto metal = test::make_emulated_metal(test::tiny_checkpoint());
  plan::Policy policy = default_policy();
  policy.matrix_unit = plan::MatrixUnit::tensor;
  const plan::Plan plan =
      plan::forward(test::tiny_checkpoint().dims(), {.phase = plan::Phase::prefill, .rows = 32}, policy);
  try {
    metal.device->compile(plan);
    FAIL() << "compiled";
  } catch (const Error& error) {
    EXPECT_EQ(error.fault(), Fault::user);
    EXPECT_NE(std::string(error.what()).find("policy.matrix_unit"), std::string::npos) << error.what();
  }
}

TEST(Tensor, TheProductsOfTheCheckAreCleanWhenTraced) {
  auto gpu = make_gpu(true, true);
  const auto base = gpu->make_library(lily_metal_kernels),
             tensor = gpu->make_library(lily_metal_tensor_kernels);
  EXPECT_EQ(tensor_fault(*gpu, *base, *tensor, kTimeoutMs), std::nullopt);
  EXPECT_TRUE(gpu->findings().empty()) << gpu->findings()[0].message;
}

}  // namespace
}  // namespace lily::metal
