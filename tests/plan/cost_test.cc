#include "plan/cost.h"

#include <gtest/gtest.h>

#include "base/error.h"
#include "plan/plan.h"
#include "tests/plan/policies.h"

namespace lily::plan {
namespace {

const model::Dims kReal = model::qwen36_35b_a3b();

Cost decode_cost(const Policy& policy, int64_t context) {
  const Plan plan =
      forward(kReal, {.phase = Phase::decode, .context = context + 1, .ending = Ending::greedy}, policy);
  return cost(plan, {.position = context});
}

TEST(Cost, ADecodedTokenReadsTheBytesOfTheModel) {
  for (const Policy& policy : test_policies()) {
    const Cost c = decode_cost(policy, 4096);
    EXPECT_EQ(c.weight_bytes, 1'669'561'728);
    EXPECT_EQ(c.state_read_bytes, 62'914'560);
    EXPECT_EQ(c.state_write_bytes, 62'914'560);
    EXPECT_EQ(c.kv_read_bytes, 20'480 * 4096);
    EXPECT_EQ(c.kv_write_bytes, 20'480);
  }
}

TEST(Cost, AnInt8CacheReadsALittleMoreThanAByteAValue) {
  Policy policy = fused_policy();
  policy.kv = KvType::int8;
  EXPECT_EQ(decode_cost(policy, 4096).kv_read_bytes, 10'560 * 4096);
  EXPECT_EQ(decode_cost(policy, 4096).kv_write_bytes, 10'560);
  policy.kv = KvType::f32;
  EXPECT_EQ(decode_cost(policy, 4096).kv_read_bytes, 40'960 * 4096);
}

TEST(Policy, KvTypesAreCalledByTheirNames) {
  for (const KvType type : {KvType::f32, KvType::bf16, KvType::int8})
    EXPECT_EQ(parse_kv_type(name(type)), type);
  EXPECT_EQ(parse_kv_type("fp8"), std::nullopt);
  Policy policy;
  EXPECT_EQ(kv_type_names(policy), "bf16");
  policy.kv_types.set();
  EXPECT_EQ(kv_type_names(policy), "f32, bf16, int8");
}

TEST(Cost, ConvStateIsThreeRowsReadAndWritten) {
  Policy policy = fused_policy();
  policy.activation = FloatType::bf16;
  EXPECT_EQ(decode_cost(policy, 100).conv_state_bytes, 2 * 1'474'560);
}

TEST(Cost, PrefillFlopsAreThoseOfTheModel) {
  for (const Policy& policy : test_policies()) {
    for (const int64_t n : {512, 4096}) {
      const Shape shape{.phase = Phase::prefill, .rows = static_cast<int>(n), .context = n};
      const Cost c = cost(forward(kReal, shape, policy), {.rows = n});
      EXPECT_EQ(c.flops, n * (4'875'386'880 + 110'100'480) + 163'840 * n * (n + 1) / 2 + 1'017'118'720);
    }
  }
}

TEST(Cost, APromptInChunksCostsTheSameArithmetic) {
  const Policy policy = fused_policy();
  const auto chunk = [&](int64_t position, int64_t rows, Ending ending) {
    const Shape shape{.phase = Phase::prefill,
                      .rows = static_cast<int>(rows),
                      .outputs = ending == Ending::none ? 0 : 1,
                      .context = position + rows,
                      .ending = ending};
    return cost(forward(kReal, shape, policy), {.rows = rows, .outputs = shape.outputs, .position = position})
        .flops;
  };
  EXPECT_EQ(chunk(0, 300, Ending::none) + chunk(300, 212, Ending::logits), chunk(0, 512, Ending::logits));
}

TEST(Cost, WeightBytesOfAllRowsAreTheCatalogue) {
  // With so many rows that every expert is expected to be touched, a step reads each weight once.
  const int64_t rows = 1 << 16;
  const Shape shape{.phase = Phase::prefill, .rows = 1 << 16, .context = rows};
  const Cost c = cost(forward(kReal, shape, fused_policy()), {.rows = rows});
  int64_t bytes = 0;
  for (const auto& spec : model::catalogue(kReal)) {
    int64_t n = spec.n_elements();
    if (spec.id.weight == Weight::embed) n = rows * kReal.hidden;  // one row a token
    bytes += model::storage_bytes(n, model::published_storage(spec.id.weight));
  }
  EXPECT_EQ(c.weight_bytes, bytes);
}

TEST(Cost, UnknownDevicesAreNamed) {
  try {
    device_rates("m9");
    FAIL();
  } catch (const Error& e) {
    EXPECT_EQ(e.fault(), Fault::user);
    EXPECT_NE(std::string(e.what()).find("m5-max"), std::string::npos);
  }
}

TEST(Catalogue, MatchesThePublishedCheckpoint) {
  int64_t bytes = 0, n_tensors = 0;
  for (const auto& spec : model::catalogue(kReal)) {
    bytes += model::storage_bytes(spec.n_elements(), model::published_storage(spec.id.weight));
    n_tensors += spec.quantisable ? 3 : 1;
  }
  EXPECT_EQ(bytes, 19'508'787'456);
  EXPECT_EQ(n_tensors, 1757);
}

}  // namespace
}  // namespace lily::plan
