#include <gtest/gtest.h>

#include <numeric>
#include <optional>
#include <random>

#include "engine/kv_blocks.h"
#include "engine/prefix_cache.h"
#include "engine/slots.h"

namespace lily::engine {
namespace {

enum class TestId : int32_t {};

TEST(Slots, AreFreeAgainWhenTheLastHoldIsGone) {
  SlotPool<TestId> pool(2);
  auto a = pool.take();
  auto b = pool.take();
  ASSERT_TRUE(a && b);
  EXPECT_NE(a->id(), b->id());
  EXPECT_FALSE(pool.take());
  Slot<TestId> shared = a->share();
  a->reset();
  EXPECT_EQ(pool.n_free(), 0);
  pool.check_integrity();
  shared.reset();
  EXPECT_EQ(pool.n_free(), 1);
  b->reset();
  pool.check_integrity();
}

TEST(Slots, MovingLeavesNothingBehind) {
  SlotPool<TestId> pool(2);
  Slot<TestId> a = std::move(*pool.take());
  Slot<TestId> b = std::move(*pool.take());
  a = std::move(b);  // gives back a's slot
  EXPECT_EQ(pool.n_free(), 1);
  EXPECT_FALSE(b);
  Slot<TestId>& same = a;
  a = std::move(same);
  EXPECT_TRUE(a);
  a.reset();
  EXPECT_EQ(pool.n_free(), 2);
}

TEST(KvBlocks, HaveOneWriter) {
  KvBlockPool pool(1);
  KvBlock writer = std::move(*pool.take());
  EXPECT_TRUE(writer.writable());
  KvBlock reader = writer.share(10);
  EXPECT_FALSE(reader.writable());
  EXPECT_FALSE(reader.make_writable(10)) << "while another one writes";
  writer.reset();
  EXPECT_FALSE(reader.make_writable(9)) << "position 9 is relied on";
  EXPECT_TRUE(reader.make_writable(10));
  KvBlock moved = std::move(reader);
  EXPECT_TRUE(moved.writable());
  EXPECT_FALSE(reader.writable());
  pool.check_integrity();
}

TEST(KvBlocks, WhatReadersReliedOnIsForgottenWithTheLastHold) {
  KvBlockPool pool(1);
  {
    const KvBlock writer = std::move(*pool.take());
    const KvBlock reader = writer.share(64);
  }
  KvBlock again = std::move(*pool.take());
  KvBlock reader = again.share(1);
  again.reset();
  EXPECT_TRUE(reader.make_writable(1));
}

TEST(KvBlocks, RandomUseKeepsIntegrity) {
  const unsigned seed = 20260101;
  std::mt19937 random(seed);
  KvBlockPool pool(20);
  std::vector<KvBlock> holds;
  for (int i = 0; i < 5000; ++i) {
    const size_t pick = holds.empty() ? 0 : random() % holds.size();
    switch (random() % 4) {
      case 0:
        if (auto block = pool.take()) holds.push_back(std::move(*block));
        else EXPECT_EQ(pool.n_free(), 0);
        break;
      case 1:
        if (!holds.empty()) holds.push_back(holds[pick].share(1 + static_cast<int>(random() % 64)));
        break;
      case 2:
        if (!holds.empty()) holds[pick].make_writable(static_cast<int>(random() % 64));
        break;
      default:
        if (!holds.empty()) {
          std::swap(holds[pick], holds.back());
          holds.pop_back();
        }
    }
    pool.check_integrity();
    for (size_t a = 0; a < holds.size(); ++a)
      for (size_t b = a + 1; b < holds.size(); ++b)
        if (holds[a].writable() && holds[b].writable())
          ASSERT_NE(holds[a].id(), holds[b].id()) << "seed " << seed;
  }
  holds.clear();
  EXPECT_EQ(pool.n_free(), 20);
}

Snapshot snapshot(std::vector<int32_t> tokens, std::string session = "",
                  Snapshot::Kind kind = Snapshot::Kind::turn_end) {
  return {.kind = kind, .session = std::move(session), .tokens = std::move(tokens)};
}

TEST(PrefixCache, FindsTheLongestPrefixWithinTheLimit) {
  PrefixCache cache;
  cache.insert(snapshot({1, 2}));
  cache.insert(snapshot({1, 2, 3, 4}));
  cache.insert(snapshot({1, 9}));
  const std::vector<int32_t> prompt = {1, 2, 3, 4, 5};
  ASSERT_NE(cache.find(prompt, 4), nullptr);
  EXPECT_EQ(cache.find(prompt, 4)->tokens.size(), 4u);
  EXPECT_EQ(cache.find(prompt, 3)->tokens.size(), 2u);
  EXPECT_EQ(cache.find(prompt, 1), nullptr);
  EXPECT_EQ(cache.find(std::vector<int32_t>{2, 2}, 2), nullptr);
  EXPECT_TRUE(cache.contains(std::vector<int32_t>{1, 9}));
  EXPECT_FALSE(cache.contains(std::vector<int32_t>{1}));
}

TEST(PrefixCache, EvictsWhatWasNotUsedLongest) {
  PrefixCache cache;
  cache.insert(snapshot({1}));
  cache.insert(snapshot({2}));
  EXPECT_NE(cache.find(std::vector<int32_t>{1, 5}, 1), nullptr);
  EXPECT_TRUE(cache.evict());
  EXPECT_TRUE(cache.contains(std::vector<int32_t>{1}));
  EXPECT_FALSE(cache.contains(std::vector<int32_t>{2}));
  EXPECT_TRUE(cache.evict());
  EXPECT_FALSE(cache.evict());
}

std::vector<int32_t> count_from(int32_t first, int n) {
  std::vector<int32_t> tokens(static_cast<size_t>(n));
  std::iota(tokens.begin(), tokens.end(), first);
  return tokens;
}

TEST(PrefixCache, SmallRequestsDoNotDriveOutALongConversation) {
  PrefixCache cache;
  const std::vector<int32_t> conversation = count_from(0, 5000);
  cache.insert(snapshot(conversation));
  for (int32_t i = 0; i < 200; ++i) {
    cache.insert(snapshot(count_from(10000 + 100 * i, 20)));
    if (cache.size() > 3) {
      ASSERT_TRUE(cache.evict());
    }
    ASSERT_TRUE(cache.contains(conversation)) << i;
  }
  // But it ages. With two others kept, each is worth 50 more than the one that went two before it.
  for (int32_t i = 0; i < 400; ++i) {
    cache.insert(snapshot(count_from(100000 + 100 * i, 50)));
    if (cache.size() > 3) {
      ASSERT_TRUE(cache.evict());
    }
  }
  EXPECT_FALSE(cache.contains(conversation));
}

TEST(PrefixCache, WhatOnlyAShortStretchIsLostOfGoesFirst) {
  PrefixCache cache;
  cache.insert(snapshot(count_from(0, 1000)));
  cache.insert(snapshot(count_from(0, 1010)));  // 10 tokens more than the one before
  cache.insert(snapshot(count_from(5000, 100)));
  EXPECT_TRUE(cache.evict());
  EXPECT_FALSE(cache.contains(count_from(0, 1010)));
  EXPECT_TRUE(cache.evict());
  EXPECT_FALSE(cache.contains(count_from(5000, 100)));
  EXPECT_TRUE(cache.contains(count_from(0, 1000)));
}

TEST(PrefixCache, WhatItsPrefixLosesALongerSnapshotSaves) {
  PrefixCache cache;
  cache.insert(snapshot(count_from(0, 60)));
  cache.insert(snapshot(count_from(0, 130)));  // saves 70, and 130 once the 60 are gone
  cache.insert(snapshot(count_from(5000, 100)));
  EXPECT_TRUE(cache.evict());
  EXPECT_FALSE(cache.contains(count_from(0, 60)));
  EXPECT_TRUE(cache.evict());
  EXPECT_TRUE(cache.contains(count_from(0, 130)));
}

TEST(PrefixCache, ASessionInUseIsPinnedAtItsEnd) {
  PrefixCache cache;
  cache.insert(snapshot(count_from(0, 10), "chat", Snapshot::Kind::stable));
  cache.insert(snapshot(count_from(0, 20), "chat"));
  cache.insert(snapshot(count_from(5000, 3000)));
  cache.insert(snapshot(count_from(9000, 3000)));
  EXPECT_TRUE(cache.evict());
  EXPECT_TRUE(cache.evict());
  EXPECT_TRUE(cache.evict());
  EXPECT_EQ(cache.size(), 1);
  EXPECT_TRUE(cache.contains(count_from(0, 20)));
  EXPECT_TRUE(cache.evict()) << "pinned or not, memory is given back where a request needs it";
}

TEST(PrefixCache, ExplainsWhereAPromptDiffers) {
  PrefixCache cache;
  EXPECT_FALSE(cache.explain(count_from(0, 30)));
  cache.insert(snapshot(count_from(0, 20)));
  cache.insert(snapshot(count_from(0, 10)));
  EXPECT_FALSE(cache.explain(count_from(0, 30))) << "goes on from all that is known";
  EXPECT_FALSE(cache.explain(count_from(500, 30))) << "nothing in common";
  EXPECT_FALSE(cache.explain(count_from(0, 15))) << "ends within what is known";
  std::vector<int32_t> prompt = count_from(0, 30);
  prompt[12] = 77;
  const std::optional<CacheMiss> miss = cache.explain(prompt);
  ASSERT_TRUE(miss);
  EXPECT_EQ(miss->position, 12);
  EXPECT_EQ(miss->before, count_from(4, 8));
  EXPECT_EQ(miss->known, count_from(12, 8));
  EXPECT_EQ(miss->asked, (std::vector<int32_t>{77, 13, 14, 15, 16, 17, 18, 19}));
  prompt = count_from(0, 30);
  prompt[10] = 77;  // right behind a snapshot, which another one goes on from
  ASSERT_TRUE(cache.explain(prompt));
  EXPECT_EQ(cache.explain(prompt)->position, 10);
}

TEST(PrefixCache, ASessionKeepsOneSnapshotOfEachKind) {
  PrefixCache cache;
  cache.insert(snapshot({1}, "a"));
  cache.insert(snapshot({1, 2}, "a", Snapshot::Kind::prompt_end));
  cache.insert(snapshot({7}, "b"));
  cache.insert(snapshot({1, 2, 3}, "a"));
  EXPECT_EQ(cache.size(), 3);
  EXPECT_FALSE(cache.contains(std::vector<int32_t>{1}));
  EXPECT_TRUE(cache.contains(std::vector<int32_t>{7}));
  cache.insert(snapshot({8, 8}, "a"));
  EXPECT_TRUE(cache.contains(std::vector<int32_t>{1, 2, 3})) << "another request of the session";
}

TEST(PrefixCache, WherePromptsPartASessionKeepsAllSnapshots) {
  PrefixCache cache;
  for (const auto kind : {Snapshot::Kind::branch, Snapshot::Kind::sparse}) {
    cache.insert(snapshot({1}, "a", kind));
    cache.insert(snapshot({1, 2}, "a", kind));
    EXPECT_TRUE(cache.contains(std::vector<int32_t>{1}));
    EXPECT_TRUE(cache.contains(std::vector<int32_t>{1, 2}));
    cache.clear();
  }
}

TEST(PrefixCache, WhatGivesBackNothingThatIsWantedStays) {
  SlotPool<backend::StateSlot> states(3);
  KvBlockPool blocks(4);
  PrefixCache cache;
  std::vector<KvBlock> conversation;
  for (int i = 0; i < 3; ++i) conversation.push_back(std::move(*blocks.take()));
  const auto insert = [&](int n_blocks, int32_t first, int n_tokens, const std::vector<KvBlock>& of) {
    Snapshot s = snapshot(count_from(first, n_tokens));
    s.state = std::move(*states.take());
    for (int i = 0; i < n_blocks; ++i) s.blocks.push_back(of[static_cast<size_t>(i)].share(64));
    cache.insert(std::move(s));
  };
  insert(1, 0, 64, conversation);
  insert(3, 0, 192, conversation);  // has the block of the one before too
  conversation.clear();
  {
    std::vector<KvBlock> other;
    other.push_back(std::move(*blocks.take()));
    insert(1, 5000, 64, other);
  }
  ASSERT_EQ(blocks.n_free(), 0);
  // The first one is worth as little as the third, and was not used for longer, but its block is held twice.
  EXPECT_TRUE(cache.evict(Wanted::block));
  EXPECT_EQ(blocks.n_free(), 1);
  EXPECT_TRUE(cache.contains(count_from(0, 64)));
  EXPECT_FALSE(cache.contains(count_from(5000, 64)));
  EXPECT_TRUE(cache.evict(Wanted::state));
  EXPECT_FALSE(cache.contains(count_from(0, 64)));
  cache.clear();
  EXPECT_EQ(blocks.n_free(), 4);
  EXPECT_EQ(states.n_free(), 3);
}

TEST(PrefixCache, KnowsWherePromptsPartAgain) {
  PrefixCache cache;
  const std::vector<int32_t> a = {1, 2, 3}, b = {1, 2, 4};
  EXPECT_FALSE(cache.parts_again_after(a));
  EXPECT_FALSE(cache.parts_again_after(b));
  EXPECT_FALSE(cache.parts_again_after(std::span(a).first(2)));
  EXPECT_TRUE(cache.parts_again_after(a));
  EXPECT_TRUE(cache.parts_again_after(b));
  for (int32_t i = 0; i < 300; ++i) EXPECT_FALSE(cache.parts_again_after(std::vector<int32_t>{i}));
  EXPECT_FALSE(cache.parts_again_after(a)) << "forgotten";
}

}  // namespace
}  // namespace lily::engine
