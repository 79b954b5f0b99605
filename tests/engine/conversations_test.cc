#include "tests/engine/conversations.h"

#include <gtest/gtest.h>

#include "tests/support/temp_folder.h"

namespace lily::engine {
namespace {

TEST(Conversations, WithACacheWriteWhatAnEngineWithoutOneWritesBitForBit) {
  const test::TempFolder folder;
  write_small_model(folder.path().string());
  ConversationTally all;
  struct Memory {
    int n_cached_states;
    bool shared_pool = false;
    plan::KvType kv = plan::KvType::f32;
  };
  for (const Memory& memory : {Memory{0}, Memory{2, true, plan::KvType::int8}}) {
    const ConversationTally tally = converse({.folder = folder.path().string(),
                                              .backend = "reference",
                                              .kv = memory.kv,
                                              .seed = 11u + static_cast<unsigned>(memory.n_cached_states),
                                              .n_conversations = 2,
                                              .n_cached_states = memory.n_cached_states,
                                              .shared_pool = memory.shared_pool});
    EXPECT_EQ(tally.n_exact, tally.n_turns);
    EXPECT_GT(tally.n_evictions, 0);
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
