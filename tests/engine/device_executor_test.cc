#include "engine/device_executor.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <functional>

#include "base/error.h"
#include "model/dims.h"

namespace lily::engine {
namespace {

using plan::Ending;
using plan::Phase;

plan::Policy gpu_policy() {
  plan::Policy p;
  p.activation = plan::FloatType::bf16;
  p.tokens_stay_on_device = true;
  return p;
}

constexpr int64_t kGiB = int64_t{1} << 30;

std::string message(const std::function<void()>& action) {
  try {
    action();
  } catch (const Error& e) {
    EXPECT_EQ(e.fault(), Fault::user);
    return e.what();
  }
  return "no error";
}

// The published sizes of the real model.
TEST(Memory, OneSequenceOfTheRealModelTakesWhatIsPublished) {
  const model::Dims dims = model::qwen36_35b_a3b();
  EXPECT_EQ(state_slot_bytes(dims, gpu_policy()), 64'389'120);
  EXPECT_EQ(kv_block_bytes(dims, gpu_policy()), 64 * 20'480);
  plan::Policy f32 = gpu_policy();
  f32.kv = plan::KvType::f32;
  EXPECT_EQ(kv_block_bytes(dims, f32), 2 * 64 * 20'480);
  plan::Policy int8 = gpu_policy();
  int8.kv = plan::KvType::int8;
  EXPECT_EQ(kv_block_bytes(dims, int8), 64 * 10'560);
}

// The CPU backend takes 92 % of the machine.
TEST(Memory, A24GiBMachineHolds32KTokensOfTheRealModel) {
  plan::Policy cpu;
  cpu.max_chunk_rows = 512;
  const auto budget = static_cast<int64_t>(static_cast<double>(24 * kGiB) * 0.92);
  const MemoryPlan plan =
      plan_memory(model::qwen36_35b_a3b(), cpu, budget, 19'508'787'456, {.context = 32768});
  EXPECT_EQ(plan.context, 32768);
  EXPECT_LE(plan.total_bytes(), budget);
  EXPECT_GE(plan.spec.n_kv_blocks, 512);
}

// What fits, and the number that a refusal names.
TEST(Memory, AnInt8CacheHoldsAlmostTwiceTheContext) {
  const model::Dims dims = model::qwen36_35b_a3b();
  constexpr int64_t kBudget = 41 * kGiB / 2;
  const auto fits = [&](plan::KvType kv) {
    plan::Policy policy;
    policy.kv = kv;
    policy.max_chunk_rows = 512;
    const MemoryOptions options{.n_cached_states = 0};
    const MemoryPlan plan = plan_memory(dims, policy, kBudget, 19'508'787'456, options);
    EXPECT_LT(plan.context, dims.max_positions);
    MemoryOptions more = options;
    more.context = plan.context + backend::kKvBlockTokens;
    const std::string refused = message([&] { plan_memory(dims, policy, kBudget, 19'508'787'456, more); });
    EXPECT_NE(refused.find(fmt::format("one of {} does", plan.context)), std::string::npos) << refused;
    return plan.context;
  };
  const double ratio = static_cast<double>(fits(plan::KvType::int8)) / fits(plan::KvType::bf16);
  EXPECT_NEAR(ratio, 20'480.0 / 10'560, 1e-3);
}

// Whoever types the number that a refusal names is not refused again.
TEST(Memory, WhatARefusalNamesFits) {
  model::Dims dims = model::qwen36_35b_a3b();
  dims.n_layers = 4;  // plans are made in a moment
  const int64_t weights = 2 * kGiB;
  const auto try_with = [&](const MemoryOptions& options) {
    const std::string text = message([&] { plan_memory(dims, gpu_policy(), 0, weights, options); });
    return text == "no error" ? "" : text;
  };
  const auto number_after = [](const std::string& text, const std::string& words) -> int64_t {
    const size_t at = text.find(words);
    return at == std::string::npos ? -1 : std::stoll(text.substr(at + words.size()));
  };
  int n_contexts = 0, n_sequences = 0, n_budgets = 0;
  for (const int64_t budget : {2 * kGiB, 9 * kGiB / 4, 5 * kGiB / 2, 3 * kGiB})
    for (const int n : {1, 32})
      for (const int context : {0, 100'000}) {
        MemoryOptions options{.budget_bytes = budget, .context = context, .max_sequences = n};
        const std::string refused = try_with(options);
        if (refused.empty()) continue;
        SCOPED_TRACE(refused);
        if (const int64_t fits = number_after(refused, "; one of "); fits >= 0) {
          options.context = static_cast<int>(fits);
          if (refused.find("one sequence at a time") != std::string::npos) options.max_sequences = 1;
          EXPECT_GE(fits, 64);
          EXPECT_EQ(try_with(options), "");
          options.context += 64;
          EXPECT_NE(try_with(options), "");
          ++n_contexts;
        } else if (const int64_t few = number_after(refused, " of memory; "); few >= 0) {
          const int64_t each = number_after(refused, "a context of ");
          if (context == 0) options.context = 64;
          options.max_sequences = static_cast<int>(few);
          EXPECT_EQ(try_with(options), "");
          if (each > 0) {
            options.max_sequences = n;
            options.context = static_cast<int>(each);
            EXPECT_EQ(try_with(options), "");
          }
          ++n_sequences;
        } else {
          const int64_t mib = number_after(refused, "at least ");
          ASSERT_GT(mib, 0);
          options = {.budget_bytes = mib << 20};
          EXPECT_EQ(try_with(options), "");
          options.budget_bytes -= int64_t{1} << 20;
          EXPECT_NE(try_with(options), "");
          ++n_budgets;
        }
      }
  EXPECT_GT(std::min({n_contexts, n_sequences, n_budgets}), 0)
      << n_contexts << " " << n_sequences << " " << n_budgets;
}

TEST(Memory, AModelWithoutAttentionLayersNeedsNoCache) {
  model::Dims dims = model::qwen36_35b_a3b();
  dims.n_layers = 2;
  const MemoryPlan plan =
      plan_memory(dims, gpu_policy(), 8 * kGiB, kGiB, {.context = 4096, .max_sequences = 2});
  EXPECT_EQ(plan.context, 4096);
  EXPECT_EQ(plan.spec.n_kv_blocks, 128);
}

TEST(Memory, EverythingStaysWithinTheBudget) {
  const model::Dims dims = model::qwen36_35b_a3b();
  const int64_t weights = 19'508'787'456;
  for (const int64_t budget : {20 * kGiB, 30 * kGiB, 128 * kGiB})
    for (const int n : {1, 2, 4}) {
      const MemoryPlan plan =
          plan_memory(dims, gpu_policy(), 0, weights, {.budget_bytes = budget, .max_sequences = n});
      EXPECT_LE(plan.total_bytes(), budget);
      EXPECT_GE(plan.context, 64);
      EXPECT_LE(plan.context, dims.max_positions);
      EXPECT_GE(plan.spec.n_kv_blocks * 64, plan.context * n);
      EXPECT_GE(plan.spec.n_state_slots, 3 * n);
      if (plan.context < dims.max_positions)  // nothing is left unused but what a block for each would need
        EXPECT_LT(budget - plan.total_bytes(),
                  n * kv_block_bytes(dims, gpu_policy()) + state_slot_bytes(dims, gpu_policy()));
    }
}

TEST(Memory, TheDevicesMemoryIsTheBudgetIfNoneIsGiven) {
  const MemoryPlan plan = plan_memory(model::qwen36_35b_a3b(), gpu_policy(), 32 * kGiB, 19'508'787'456, {});
  EXPECT_EQ(plan.budget_bytes, 32 * kGiB);
  EXPECT_LE(plan.total_bytes(), 32 * kGiB);
  EXPECT_GT(plan.context, 100'000);
}

TEST(Memory, TheCacheHasStatesBeforeTheContextTakesAll) {
  const MemoryPlan plan = plan_memory(model::qwen36_35b_a3b(), gpu_policy(), 22 * kGiB, 19'508'787'456, {});
  EXPECT_EQ(plan.spec.n_state_slots, 3 + 8);
  EXPECT_LT(plan.context, 262'144);
  EXPECT_GT(plan.context, 100'000);
}

TEST(Memory, WhatNoContextNeedsBuysMoreStates) {
  const auto n_states = [](int64_t budget, int n_cached_states) {
    const MemoryPlan plan = plan_memory(model::qwen36_35b_a3b(), gpu_policy(), budget, 19'508'787'456,
                                        {.n_cached_states = n_cached_states});
    EXPECT_LE(plan.total_bytes(), budget);
    return plan.spec.n_state_slots;
  };
  EXPECT_EQ(n_states(128 * kGiB, 8), 3 + 4 * 8);
  EXPECT_EQ(n_states(128 * kGiB, 0), 3);
  EXPECT_GT(n_states(28 * kGiB, 8), 3 + 8);
  EXPECT_LT(n_states(28 * kGiB, 8), 3 + 4 * 8);
}

TEST(Memory, StatesAndBlocksOfASharedPoolAreMoreThanFitTogether) {
  const model::Dims dims = model::qwen36_35b_a3b();
  const int64_t budget = 24 * kGiB, weights = 19'508'787'456, program = kGiB / 2;
  const MemoryPlan plan = plan_memory(dims, gpu_policy(), 0, weights,
                                      {.budget_bytes = budget,
                                       .context = 32768,
                                       .max_sequences = 2,
                                       .program_bytes = program,
                                       .shared_pool = true});
  const int64_t state = state_slot_bytes(dims, gpu_policy()), block = kv_block_bytes(dims, gpu_policy());
  EXPECT_EQ(plan.total_bytes(), budget) << "the cache has what is left";
  EXPECT_EQ(plan.pool_bytes(), budget - weights - plan.scratch_bytes - program);
  EXPECT_EQ(plan.spec.n_state_slots, plan.pool_bytes() / state);
  EXPECT_EQ(plan.spec.n_kv_blocks, plan.pool_bytes() / block);
  EXPECT_GE(plan.pool_bytes(), 2 * 512 * block + 2 * 3 * state) << "what both sequences are promised";

  // The machine's memory is no budget that was given: no more is taken than without a shared pool.
  const MemoryPlan alone = plan_memory(dims, gpu_policy(), 128 * kGiB, weights, {.context = 4096});
  const MemoryPlan shared =
      plan_memory(dims, gpu_policy(), 128 * kGiB, weights, {.context = 4096, .shared_pool = true});
  EXPECT_EQ(shared.total_bytes(), alone.total_bytes());
}

// As a GPU offers them: a state of the real model lies where 50 blocks do.
backend::SharedPlaces places_of(int64_t most_bytes = 0) {
  const model::Dims dims = model::qwen36_35b_a3b();
  const int64_t state = state_slot_bytes(dims, gpu_policy()), block = kv_block_bytes(dims, gpu_policy());
  return {.blocks_per_state = static_cast<int>((state + block - 1) / block), .most_bytes = most_bytes};
}

MemoryPlan plan_in_places(int64_t device_bytes, MemoryOptions options,
                          const backend::SharedPlaces& places = places_of()) {
  options.shared_pool = true;
  return plan_memory(model::qwen36_35b_a3b(), gpu_policy(), device_bytes, 19'508'787'456, options, {},
                     places);
}

TEST(Memory, SharedPlacesAreOneBudgetInWhichWhatIsPromisedFits) {
  const model::Dims dims = model::qwen36_35b_a3b();
  const int64_t block = kv_block_bytes(dims, gpu_policy()), place = 50 * block;
  ASSERT_EQ(places_of().blocks_per_state, 50);
  for (const int64_t budget : {22 * kGiB, 30 * kGiB, 128 * kGiB})
    for (const int n : {1, 2, 4})
      for (const bool is_given : {false, true}) {
        MemoryOptions options{.max_sequences = n};
        if (is_given) options.budget_bytes = budget;
        const MemoryPlan apart = plan_memory(dims, gpu_policy(), budget, 19'508'787'456, options);
        const MemoryPlan plan = plan_in_places(budget, options);
        ASSERT_TRUE(plan.spec.shared_places) << budget << ", " << n;
        EXPECT_EQ(plan.spec.n_kv_blocks, plan.spec.n_state_slots * 50);
        EXPECT_EQ(plan.pool_bytes(), plan.spec.n_state_slots * place);
        EXPECT_EQ(plan.context, apart.context);
        const int64_t n_context_places = (apart.spec.n_kv_blocks + 49) / 50;
        EXPECT_GE(plan.spec.n_state_slots, 3 * n + n_context_places);
        EXPECT_LE(plan.spec.n_state_slots, 3 * n + n_context_places + 1024);
        EXPECT_LE(plan.total_bytes(), is_given ? budget : apart.total_bytes());
        const bool is_bounded = plan.spec.n_state_slots == 3 * n + n_context_places + 1024;
        if (!is_bounded) EXPECT_GT(plan.total_bytes() + place, is_given ? budget : apart.total_bytes());
      }
}

TEST(Memory, PlacesAreSharedOnlyWhereThatIsNoLoss) {
  const MemoryOptions options{.context = 32768};
  const MemoryPlan apart =
      plan_memory(model::qwen36_35b_a3b(), gpu_policy(), 64 * kGiB, 19'508'787'456, options);
  const auto is_as_apart = [&](const MemoryPlan& plan) {
    return !plan.spec.shared_places && plan.spec.n_state_slots == apart.spec.n_state_slots &&
           plan.spec.n_kv_blocks == apart.spec.n_kv_blocks && plan.total_bytes() == apart.total_bytes();
  };
  EXPECT_TRUE(plan_in_places(64 * kGiB, options).spec.shared_places);
  EXPECT_TRUE(is_as_apart(plan_in_places(64 * kGiB, options, places_of(apart.pool_bytes() - 1))));
  // A bound above that is kept.
  MemoryOptions given = options;
  given.budget_bytes = 64 * kGiB;
  const MemoryPlan bounded = plan_in_places(0, given, places_of(apart.pool_bytes() + kGiB));
  EXPECT_TRUE(bounded.spec.shared_places);
  EXPECT_LE(bounded.pool_bytes(), apart.pool_bytes() + kGiB);
  EXPECT_GT(bounded.pool_bytes(), apart.pool_bytes() + kGiB * 9 / 10);
  // Nothing is left for the cache: the context that fits is not to be less for the sake of places.
  const MemoryPlan least = plan_in_places(64 * kGiB, {.context = 32768, .n_cached_states = 0});
  EXPECT_FALSE(least.spec.shared_places);
  MemoryOptions tight = options;
  tight.budget_bytes = least.total_bytes();
  EXPECT_FALSE(plan_in_places(0, tight).spec.shared_places);
  EXPECT_EQ(plan_in_places(0, tight).context, 32768);
}

TEST(Memory, RefusalsNameWhatFits) {
  const model::Dims dims = model::qwen36_35b_a3b();
  const auto plan = [&](const MemoryOptions& options) {
    return plan_memory(dims, gpu_policy(), 0, 19'508'787'456, options);
  };
  const std::string little = message([&] { plan({.budget_bytes = 8 * kGiB}); });
  EXPECT_NE(little.find("8192 MiB"), std::string::npos) << little;
  EXPECT_NE(little.find("at least"), std::string::npos) << little;

  const std::string context = message([&] { plan({.budget_bytes = 21 * kGiB, .context = 262144}); });
  EXPECT_NE(context.find("262144"), std::string::npos) << context;
  // The number that it names does fit, and a block more does not.
  const int fits = std::stoi(context.substr(context.find("one of ") + 7));
  EXPECT_EQ(plan({.budget_bytes = 21 * kGiB, .context = fits}).context, fits);
  EXPECT_NE(message([&] { plan({.budget_bytes = 21 * kGiB, .context = fits + 64}); }), "no error");

  const std::string sequences =
      message([&] { plan({.budget_bytes = 24 * kGiB, .context = 65536, .max_sequences = 8}); });
  EXPECT_NE(sequences.find("8 sequences of 65536 tokens"), std::string::npos) << sequences;
  const size_t at = sequences.find("; ") + 2;
  const int n = std::stoi(sequences.substr(at));
  EXPECT_EQ(plan({.budget_bytes = 24 * kGiB, .context = 65536, .max_sequences = n}).max_sequences, n);

  EXPECT_NE(message([&] { plan({.context = 300'000}); }).find("262144"), std::string::npos);
  EXPECT_NE(message([&] { plan({.context = -1}); }), "no error");
  EXPECT_NE(message([&] { plan({.max_sequences = 0}); }), "no error");
}

Step step_of(Phase phase, Ending ending, int n_rows, int position, int n_sequences = 1) {
  Step step{.phase = phase, .ending = ending};
  for (int s = 0; s < n_sequences; ++s) {
    step.segments.push_back({.first_row = s * n_rows, .n_rows = n_rows, .position = position});
    step.tokens.insert(step.tokens.end(), static_cast<size_t>(n_rows), 0);
    if (ending != Ending::none) step.output_rows.push_back((s + 1) * n_rows - 1);
  }
  return step;
}

Limits limits() { return {.max_context = 262144, .max_chunk_rows = 2048, .max_decode_rows = 8}; }

TEST(ShapeClass, HoldsItsStepAndThereAreFewClasses) {
  const plan::Policy policy = gpu_policy();
  std::vector<plan::Shape> seen;
  for (int rows = 1; rows <= 2048; ++rows) {
    const plan::Shape shape = shape_class(step_of(Phase::prefill, Ending::greedy, rows, 0), limits(), policy);
    EXPECT_GE(shape.rows, rows);
    EXPECT_LE(shape.rows, 2048);
    EXPECT_EQ(shape.outputs, 1);
    if (std::find(seen.begin(), seen.end(), shape) == seen.end()) seen.push_back(shape);
  }
  EXPECT_EQ(seen.size(), 10u);  // 1, 8, 16, ... 2048
  for (int n = 1; n <= 8; ++n) {
    const plan::Shape shape =
        shape_class(step_of(Phase::decode, Ending::sampled, 1, 10, n), limits(), policy);
    EXPECT_GE(shape.rows, n);
    EXPECT_LE(shape.rows, 8);
    EXPECT_EQ(shape.outputs, shape.rows);
  }
}

TEST(ShapeClass, AChunkOfOneRowIsADecodeStep) {
  const plan::Policy policy = gpu_policy();
  EXPECT_EQ(shape_class(step_of(Phase::prefill, Ending::greedy, 1, 5), limits(), policy),
            shape_class(step_of(Phase::decode, Ending::greedy, 1, 5), limits(), policy));
  EXPECT_EQ(shape_class(step_of(Phase::prefill, Ending::none, 1, 5), limits(), policy).outputs, 0);
}

TEST(ShapeClass, TheLongContextPathIsForLongContexts) {
  const plan::Policy policy = gpu_policy();
  for (const int position : {0, 100, 4095, 4096, 20000, 32766, 32767, 32768, 100000, 262143}) {
    const plan::Shape shape =
        shape_class(step_of(Phase::decode, Ending::greedy, 1, position), limits(), policy);
    EXPECT_GE(shape.context, position + 1);
    EXPECT_LE(shape.context, 262144);
    EXPECT_EQ(shape.context >= policy.fixed_blocks_from_context,
              position + 1 >= policy.fixed_blocks_from_context)
        << position;
  }
}

}  // namespace
}  // namespace lily::engine
