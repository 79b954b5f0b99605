#include "tests/engine/conversations.h"

#include <gtest/gtest.h>

#include "tests/support/temp_folder.h"

namespace lily::engine {
namespace {

TEST(Conversations, WithACacheWriteWhatAnEngineWithoutOneWritesBitForBit) {
  const test::TempFolder folder;
  write_small_model(folder.path().string());
  ConversationTally all;
  for (const auto& [n_cached_states, kv] :
       {std::pair{0, plan::KvType::f32}, std::pair{3, plan::KvType::f32}, std::pair{3, plan::KvType::int8}}) {
    const ConversationTally tally = converse({.folder = folder.path().string(),
                                              .backend = "reference",
                                              .kv = kv,
                                              .seed = 11u + static_cast<unsigned>(n_cached_states),
                                              .n_conversations = 2,
                                              .n_cached_states = n_cached_states});
    EXPECT_EQ(tally.n_exact, tally.n_turns);
    all.n_turns += tally.n_turns;
    all.n_cached_tokens += tally.n_cached_tokens;
    all.n_evictions += tally.n_evictions;
  }
  // It did come to what is tested.
  EXPECT_GT(all.n_turns, 8);
  EXPECT_GT(all.n_cached_tokens, 0);
  EXPECT_GT(all.n_evictions, 0);
}

}  // namespace
}  // namespace lily::engine
