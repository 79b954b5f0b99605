// The real vocabulary of 248,320 rows: the embedding from its first row to its last, the head for one row, a
// few and a tile, and what a step ends in, against the reference. All other dimensions but the hidden width
// are small.
#include <gtest/gtest.h>

#include "tests/backend/metal/op_comparison.h"

namespace lily {
namespace {

using plan::Ending;
using plan::Phase;

class Head : public test::OpComparison {
 protected:
  static void SetUpTestSuite() { make_stage({.seed = 1}, test::vocabulary_checkpoint()); }
  void compare_rows(Phase phase, const std::vector<int>& rows, Ending ending, bool all_outputs = true) {
    std::vector<int> positions(rows.size(), 0);
    positions[0] = 9;
    compare({.name = "vocabulary",
             .phase = phase,
             .positions = positions,
             .rows = rows,
             .context = 64,
             .compares = [](const plan::Op& op) { return test::is_of_vocabulary(op); },
             .all_outputs = all_outputs,
             .end_tokens = true,
             .n_layers = 1},
            stage().metal().policy(stage().dims()), ending);
  }
};

TEST_F(Head, OfADecodedRow) { compare_rows(Phase::decode, {1}, Ending::candidates); }
TEST_F(Head, OfTwoDecodedRows) { compare_rows(Phase::decode, {1, 1}, Ending::sampled); }
TEST_F(Head, OfThreeChunksOfAPrompt) { compare_rows(Phase::prefill, {2, 33, 5}, Ending::greedy, false); }
// More outputs than the row-parallel product takes: a tile of matrix products.
TEST_F(Head, OfATileOfRows) { compare_rows(Phase::prefill, {9}, Ending::logits); }

}  // namespace
}  // namespace lily
