// Inputs of a step that would read or write what is not theirs end the program.
#include "backend/step_checks.h"

#include <gtest/gtest.h>

#include <functional>

namespace lily::backend {
namespace {

// Two sequences in one step: three rows that begin, one row that goes on in its third block.
struct Step {
  std::vector<int32_t> tokens = {5, 6, 7, kTokenFromSlot};
  std::vector<Segment> segments = {
      {.first_row = 0, .n_rows = 3, .position = 0, .src = kNoState, .dst = StateSlot{1}, .first_block = 0},
      {.first_row = 3,
       .n_rows = 1,
       .position = 130,
       .src = StateSlot{0},
       .dst = StateSlot{0},
       .first_block = 1,
       .token_in = TokenSlot{0},
       .token_out = TokenSlot{1}}};
  std::vector<int32_t> block_table = {3, 0, 1, 2};
  std::vector<int32_t> output_rows = {2, 3};
  std::vector<Sampling> sampling;
  int32_t n_tokens = 100;
};

plan::Plan plan_of(plan::Ending ending) {
  plan::Plan plan;
  plan.dims.vocab = 104;
  plan.shape = {.phase = plan::Phase::prefill, .rows = 4, .outputs = 2, .context = 140, .ending = ending};
  return plan;
}

void check(const Step& step, plan::Ending ending = plan::Ending::logits) {
  check_step({.tokens = step.tokens,
              .segments = step.segments,
              .block_table = step.block_table,
              .output_rows = step.output_rows,
              .sampling = step.sampling,
              .n_tokens = step.n_tokens},
             plan_of(ending), {.n_state_slots = 2, .n_kv_blocks = 4, .n_token_slots = 2});
}

TEST(StepChecks, AStepWithinBoundsPasses) {
  check({});
  Step sampled;
  sampled.sampling.resize(2);
  check(sampled, plan::Ending::sampled);
}

TEST(StepChecks, EachStrayIndexIsNamed) {
  struct Case {
    const char* message;
    std::function<void(Step&)> spoil;
  };
  const Case cases[] = {
      {"0 rows, planned for 4", [](Step& s) { s.tokens.clear(); }},
      {"5 rows, planned for 4", [](Step& s) { s.tokens.push_back(1); }},
      {"3 outputs, planned for 2", [](Step& s) { s.output_rows = {0, 1, 2}; }},
      {"output row 4 of 4", [](Step& s) { s.output_rows[1] = 4; }},
      {"n_tokens 105 of 104", [](Step& s) { s.n_tokens = 105; }},
      {"a segment has rows 2 \\+ 1, expected from 3", [](Step& s) { s.segments[1].first_row = 2; }},
      {"a segment has rows 0 \\+ 0", [](Step& s) { s.segments[0].n_rows = 0; }},
      {"a segment has rows 3 \\+ 2", [](Step& s) { s.segments[1].n_rows = 2; }},
      {"segments cover 3 of 4 rows", [](Step& s) { s.segments.pop_back(); }},
      {"141 tokens, planned for 140", [](Step& s) { s.segments[1].position = 140; }},
      {"0 tokens, planned for 140", [](Step& s) { s.segments[1].position = -1; }},
      {"state slots 2 and 0 of 2", [](Step& s) { s.segments[1].src = StateSlot{2}; }},
      {"state slots 0 and -1 of 2", [](Step& s) { s.segments[1].dst = kNoState; }},
      {"token slot 2 of 2", [](Step& s) { s.segments[1].token_out = TokenSlot{2}; }},
      {"blocks 2 \\+ 3 of a table of 4", [](Step& s) { s.segments[1].first_block = 2; }},
      {"blocks -1 \\+ 1 of a table of 4", [](Step& s) { s.segments[0].first_block = -1; }},
      {"KV block 4 of 4", [](Step& s) { s.block_table[3] = 4; }},
      {"token 104 in row 0", [](Step& s) { s.tokens[0] = 104; }},
      {"token -1 in row 1", [](Step& s) { s.tokens[1] = kTokenFromSlot; }},
      {"token -2 in row 3", [](Step& s) { s.tokens[3] = -2; }},
  };
  for (const Case& c : cases) {
    Step step;
    c.spoil(step);
    EXPECT_DEATH(check(step), c.message);
  }
  EXPECT_DEATH(check({}, plan::Ending::sampled), "0 samplings for 2 outputs");
}

}  // namespace
}  // namespace lily::backend
