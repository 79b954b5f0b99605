// Two hundred random conversations on each side, and on lily-tiny with the cpu backend.
#include <gtest/gtest.h>

#include <cmath>

#include "engine/evaluate.h"
#include "engine/tolerance.h"
#include "plan/sample.h"
#include "tests/engine/conversations.h"
#include "tests/support/temp_folder.h"

namespace lily::engine {
namespace {

constexpr int kStatesKept[] = {0, 1, 3, 8};
constexpr int kConversations = 50;  // with each

void expect_variety(const ConversationTally& t) {
  EXPECT_GT(t.n_turns, 4 * kConversations);
  EXPECT_GT(t.n_cancelled, 10);
  EXPECT_GT(t.n_called, 10);
  EXPECT_GT(t.n_branched, 10);
  EXPECT_GT(t.n_edited, 10);
  EXPECT_GT(t.n_evictions, 100);
  EXPECT_GT(t.n_cached_tokens, t.n_prompt_tokens / 10);
}

void add(ConversationTally& sum, const ConversationTally& t) {
  sum.n_turns += t.n_turns;
  sum.n_exact += t.n_exact;
  sum.n_cancelled += t.n_cancelled;
  sum.n_called += t.n_called;
  sum.n_branched += t.n_branched;
  sum.n_edited += t.n_edited;
  sum.n_prompt_tokens += t.n_prompt_tokens;
  sum.n_cached_tokens += t.n_cached_tokens;
  sum.n_evictions += t.n_evictions;
}

TEST(Conversations, TwoHundredOnTheReferenceAgreeBitForBit) {
  const test::TempFolder folder;
  write_small_model(folder.path().string());
  ConversationTally all;
  for (const int n_cached_states : kStatesKept) {
    add(all, converse({.folder = folder.path().string(),
                       .backend = "reference",
                       .seed = 100u + static_cast<unsigned>(n_cached_states),
                       .n_conversations = kConversations,
                       .n_cached_states = n_cached_states}));
    if (HasFailure()) return;
  }
  EXPECT_EQ(all.n_exact, all.n_turns);
  expect_variety(all);
}

TEST(Conversations, AHundredInSharedPlacesAgreeBitForBit) {
  const test::TempFolder folder;
  write_small_model(folder.path().string());
  ConversationTally all;
  for (const int n_cached_states : {2, 4}) {
    add(all, converse({.folder = folder.path().string(),
                       .backend = "reference",
                       .seed = 300u + static_cast<unsigned>(n_cached_states),
                       .n_conversations = kConversations,
                       .n_cached_states = n_cached_states,
                       .shared_pool = true}));
    if (HasFailure()) return;
  }
  EXPECT_EQ(all.n_exact, all.n_turns);
  expect_variety(all);
}

// Knows by how little the logits of two ways to read the same tokens may differ.
class CpuJudge {
 public:
  CpuJudge(const std::string& folder, int context)
      : checkpoint_(model::Checkpoint::open(folder)),
        model_(checkpoint_, n_tokens_of(folder), load(context)) {
    model_.load();
    executor_ = model_.make_executor();
  }

  bool may_part(const Parting& p) {
    const auto n_tokens = static_cast<size_t>(model_.n_tokens());
    std::vector<float> row;
    read_forced(*executor_, p.ids, 0, static_cast<int64_t>(p.ids.size()) - 1,
                [&](int64_t, std::span<const float> logits) {
                  row.assign(logits.begin(), logits.begin() + model_.n_tokens());
                });
    if (row.size() != n_tokens) return false;
    const Precision once = precision_of("cpu", model_.policy());
    const double tolerance = logit_tolerance(both(once, once), model_.dims(), root_mean_square(row));
    const double margin = std::abs(row[static_cast<size_t>(p.warm)] - row[static_cast<size_t>(p.cold)]);
    if (margin <= tolerance) return true;
    return p.sampling.temperature > 0 && is_near_an_edge(p, row, tolerance);
  }

 private:
  static int32_t n_tokens_of(const std::string& folder) { return text::Tokenizer::load(folder).n_tokens(); }
  static LoadOptions load(int context) {
    LoadOptions load{.backend = "cpu", .threads = 2, .kv = plan::KvType::f32};
    load.memory.context = context;
    return load;
  }

  // The distribution is cut into intervals, and the draw falls into one of them.
  static bool is_near_an_edge(const Parting& p, std::span<const float> row, double tolerance) {
    const auto kept = plan::top_candidates(row, p.sampling.top_k);
    const double t = p.sampling.temperature;
    double sum = 0, at = 0, nearest = 1;
    for (const auto& c : kept) sum += std::exp((c.logit - kept[0].logit) / t);
    const double u = plan::uniform(p.sampling.seed, p.sampling.sequence, p.step);
    for (const auto& c : kept) {
      at += std::exp((c.logit - kept[0].logit) / t) / sum;
      nearest = std::min(nearest, std::abs(u - at));
    }
    return nearest <= std::expm1(2 * tolerance / t);
  }

  model::Checkpoint checkpoint_;
  LoadedModel model_;
  std::unique_ptr<DeviceExecutor> executor_;
};

TEST(Conversations, TwoHundredOnTheCpuAgreeUpToNearTies) {
  const std::string folder = "models/lily-tiny";
  constexpr int kContext = 1024;
  CpuJudge judge(folder, kContext);
  ConversationTally all;
  for (const int n_cached_states : kStatesKept) {
    add(all, converse({.folder = folder,
                       .backend = "cpu",
                       .seed = 200u + static_cast<unsigned>(n_cached_states),
                       .n_conversations = kConversations,
                       .n_cached_states = n_cached_states,
                       .context = kContext,
                       .penalties = false},
                      [&](const Parting& parting) { return judge.may_part(parting); }));
    if (HasFailure()) return;
  }
  EXPECT_GT(all.n_exact, all.n_turns * 9 / 10);
  expect_variety(all);
}

}  // namespace
}  // namespace lily::engine
