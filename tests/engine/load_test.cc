#include "engine/load.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "backend/planner.h"
#include "base/error.h"
#include "engine/session_identity.h"
#include "model/checkpoint.h"
#include "tests/support/checkpoint_writer.h"
#include "tests/support/error_of.h"
#include "tests/support/golden.h"
#include "tests/support/temp_folder.h"

namespace lily::engine {
namespace {

using plan::Mechanism;
using testing::AllOf;
using testing::HasSubstr;

TEST(PolicyOf, IsTheDevicesWithoutWhatIsDisabled) {
  const auto device = backend::make_device("cpu", {.threads = 1});
  const model::Dims dims = model::lily_tiny();
  const plan::Policy whole = device->policy(dims);
  EXPECT_EQ(policy_of(*device, dims, {}, {}).kv, whole.kv);
  EXPECT_EQ(policy_of(*device, dims, plan::KvType::f32, {}).kv, plan::KvType::f32);
  const std::vector<Mechanism> twice = {Mechanism::p1, Mechanism::d3, Mechanism::p1};
  const plan::Policy policy = policy_of(*device, dims, {}, twice);
  EXPECT_TRUE(whole.dequantise_in_gemm && whole.concurrent);
  EXPECT_FALSE(policy.dequantise_in_gemm || policy.concurrent);
  EXPECT_TRUE(policy.pack_query_heads) << "what was not named stays";
}

TEST(PolicyOf, TheReferenceKeepsKvInFullPrecision) {
  const auto device = backend::make_device("reference", {.threads = 1});
  EXPECT_EQ(policy_of(*device, model::lily_tiny(), plan::KvType::bf16, {}).kv, plan::KvType::f32);
}

TEST(PolicyOf, AnInt8CacheIsTheReferencesToo) {
  const auto device = backend::make_device("reference", {.threads = 1});
  EXPECT_EQ(policy_of(*device, model::lily_tiny(), plan::KvType::int8, {}).kv, plan::KvType::int8);
}

TEST(PolicyOf, RefusesAKvTypeThatTheBackendDoesNotHave) {
  const backend::Planner* planner = backend::find_planner("metal");
  ASSERT_NE(planner, nullptr);
  const plan::Policy metal = planner->policy(model::lily_tiny(), {}), bf16_alone;
  const auto expect_refused = [](const plan::Policy& policy, const char* backend, plan::KvType type,
                                 const char* has) {
    EXPECT_THAT(test::error_of([&] { policy_of(policy, backend, type, {}); }),
                AllOf(HasSubstr(std::string("--kv ") + std::string(plan::name(type))), HasSubstr(has),
                      HasSubstr(backend), HasSubstr("leave --kv out")));
  };
  expect_refused(metal, "metal", plan::KvType::f32, "as bf16, int8;");
  expect_refused(bf16_alone, "other", plan::KvType::f32, "as bf16;");
  expect_refused(bf16_alone, "other", plan::KvType::int8, "choose another backend");
  EXPECT_EQ(policy_of(metal, "metal", plan::KvType::int8, {}).kv, plan::KvType::int8);
}

TEST(PolicyOf, OnlyTheCpuTakesActivationsAsIntegers) {
  const model::Dims dims = model::lily_tiny();
  const auto cpu = backend::make_device("cpu", {.threads = 1}),
             reference = backend::make_device("reference", {.threads = 1});
  EXPECT_EQ(policy_of(*cpu, dims, {}, {}).activation_planes, 2);
  EXPECT_EQ(policy_of(*cpu, dims, {}, {}, 1).activation_planes, 1);
  for (const char* backend : {"reference", "cuda", "metal"})
    EXPECT_THAT(test::error_of([&] { policy_of(reference->policy(dims), backend, {}, {}, 1); }),
                AllOf(HasSubstr("--activations"), HasSubstr(backend), HasSubstr("leave it out")));
}

// What was computed with other activations must not be resumed.
TEST(SessionIdentity, TellsThePlanesOfActivationsApart) {
  const model::Checkpoint checkpoint = model::Checkpoint::open(test::kTinyModel);
  const auto device = backend::make_device("cpu", {.threads = 1});
  const auto identity = [&](std::optional<int> planes) {
    return session_identity(checkpoint, device->info(), policy_of(*device, checkpoint.dims(), {}, {}, planes),
                            "1");
  };
  EXPECT_EQ(identity({}), identity(2));
  EXPECT_NE(identity(1), identity(2));
}

TEST(PolicyOf, RefusesAMechanismThatTheBackendDoesNotHave) {
  const auto device = backend::make_device("cpu", {.threads = 1});
  const std::vector<Mechanism> disable = {Mechanism::p1, Mechanism::p2};
  try {
    policy_of(*device, model::lily_tiny(), {}, disable);
    FAIL() << "P2 does not exist on a CPU";
  } catch (const Error& e) {
    EXPECT_EQ(e.fault(), Fault::user);
    EXPECT_THAT(e.what(), AllOf(HasSubstr("--disable P2"), HasSubstr("'cpu'")));
  }
}

TEST(LoadedModel, RefusesAMechanismThatTheBackendDoesNotHave) {
  const model::Checkpoint checkpoint = model::Checkpoint::open(test::kTinyModel);
  const LoadOptions options{.backend = "reference", .disable = {Mechanism::d2}};
  EXPECT_THAT(test::error_of([&] { LoadedModel(checkpoint, 8161, options); }),
              AllOf(HasSubstr("D2"), HasSubstr("'reference'")));
}

// bfloat16 knows 3e38, and the products of two such numbers are infinite in fp32.
TEST(LoadedModel, RefusesFiniteWeightsWhoseLogitsAreNot) {
  for (const char* name :
       {"language_model.model.norm.weight", "language_model.model.layers.3.input_layernorm.weight"}) {
    test::CheckpointWriter writer({});
    for (size_t i = 0; i + 1 < writer.tensor(name).data.size(); i += 2) {
      writer.tensor(name).data[i] = std::byte{0x61};
      writer.tensor(name).data[i + 1] = std::byte{0x7f};
    }
    const test::TempFolder folder;
    writer.write(folder.path());
    const model::Checkpoint checkpoint = model::Checkpoint::open(folder.path());
    for (const char* backend : {"reference", "cpu"}) {
      LoadedModel model(checkpoint, checkpoint.dims().vocab,
                        {.backend = backend, .threads = 1, .memory = {.context = 64}});
      model.load();
      EXPECT_THAT(test::error_of([&] { model.make_executor(); }), HasSubstr("so large that sums overflow"))
          << name << " on " << backend;
    }
  }
}

TEST(LoadedModel, AcceptsWeightsOfAnOrdinarySize) {
  const test::TempFolder folder;
  test::CheckpointWriter({}).write(folder.path());
  const model::Checkpoint checkpoint = model::Checkpoint::open(folder.path());
  LoadedModel model(checkpoint, checkpoint.dims().vocab,
                    {.backend = "cpu", .threads = 1, .memory = {.context = 64}});
  model.load();
  EXPECT_NE(model.make_executor(), nullptr);
}

}  // namespace
}  // namespace lily::engine
