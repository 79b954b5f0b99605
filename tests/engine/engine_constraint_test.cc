// The engine over a scripted executor: tokens that a constraint allows.
#include <gtest/gtest.h>

#include "plan/sample.h"
#include "tests/engine/engine_fixture.h"

namespace lily::engine {
namespace {

// Allows multiples of three only, and throws when told to.
class Threes final : public TokenConstraint {
 public:
  explicit Threes(int fail_at, bool forbid_all = false) : fail_at_(fail_at), forbid_all_(forbid_all) {}
  bool allowed(TokenMask& mask) override {
    if (n_ == fail_at_) fail(Fault::user, "the grammar has a hole");
    for (int32_t id = 0; id < mask.n_tokens() && !forbid_all_; id += 3) mask.allow(id);
    return n_ % 2 == 0 || forbid_all_;  // every other token is free
  }
  void accept(int32_t) override { ++n_; }

 private:
  const int fail_at_;
  const bool forbid_all_;
  int n_ = 0;
};

TEST_P(EngineOf, AConstraintIsAskedBeforeEachToken) {
  const auto engine = make();
  GenerateRequest request = greedy(prompt_of(20, 3), 30);
  request.constraint = std::make_unique<Threes>(-1);
  const Answer answer = read_all(engine->generate(std::move(request)));
  ASSERT_EQ(answer.ids.size(), 30u);
  std::vector<int32_t> prefix = prompt_of(20, 3);
  for (size_t i = 0; i < 30; ++i) {
    std::vector<float> z = logits_of(prefix, 100);
    if (i % 2 == 0)
      for (size_t id = 0; id < z.size(); ++id)
        if (id % 3 != 0) z[id] = -100;
    EXPECT_EQ(answer.ids[i], plan::greedy_token(z)) << i;
    prefix.push_back(answer.ids[i]);
  }
}

// Free for a while, then multiples of three for a while, and so on; can be asked for single tokens.
class Sometimes final : public TokenConstraint {
 public:
  bool allowed(TokenMask& mask) override {
    if (is_free()) return false;
    for (int32_t id = 0; id < mask.n_tokens(); id += 3) mask.allow(id);
    return true;
  }
  bool is_free() const override { return n_ % 10 < 6; }
  bool can_ask_single() const override { return true; }
  bool allows(int32_t token) override { return token % 3 == 0; }
  void accept(int32_t) override { ++n_; }
  StopDetail detail() const override { return StopDetail::loop; }

 private:
  int n_ = 0;
};

TEST_P(EngineOf, TheDeviceChoosesWhileAConstraintIsFree) {
  const auto engine = make();
  GenerateRequest request = greedy(prompt_of(20, 3), 40);
  request.constraint = std::make_unique<Sometimes>();
  const Answer answer = read_all(engine->generate(std::move(request)));
  ASSERT_EQ(answer.ids.size(), 40u);
  EXPECT_EQ(answer.finished.detail, StopDetail::loop);
  std::vector<int32_t> prefix = prompt_of(20, 3);
  for (size_t i = 0; i < 40; ++i) {
    std::vector<float> z = logits_of(prefix, 100);
    if (i % 10 >= 6)
      for (size_t id = 0; id < z.size(); ++id)
        if (id % 3 != 0) z[id] = -100;
    EXPECT_EQ(answer.ids[i], plan::greedy_token(z)) << i;
    prefix.push_back(answer.ids[i]);
  }
  int n_device = 0;
  for (const auto& step : script->steps()) n_device += step.ending == plan::Ending::greedy ? 1 : 0;
  EXPECT_GE(n_device, 24) << "four rounds of six tokens, the first of them from the prompt";
}

// Sampled, alone and beside a sequence that needs whole logits in each step.
TEST_P(EngineOf, AConstrainedTextIsTheSameInCompany) {
  const auto request = [](std::unique_ptr<TokenConstraint> constraint) {
    GenerateRequest r = greedy(prompt_of(20, 3), 30);
    r.sampling = {.temperature = 1, .top_k = 20, .seed = 5};
    r.constraint = std::move(constraint);
    r.keep_states = false;
    return r;
  };
  const auto engine = make();
  const Answer alone = read_all(engine->generate(request(std::make_unique<Sometimes>())));
  GenerateRequest hungry = greedy(prompt_of(21, 9), 60);
  hungry.sampling = {.temperature = 1, .top_k = 0, .seed = 6};
  Generation other = engine->generate(std::move(hungry));
  const Answer beside = read_all(engine->generate(request(std::make_unique<Sometimes>())));
  read_all(std::move(other));
  EXPECT_EQ(alone.ids, beside.ids);
  EXPECT_EQ(alone.ids.size(), 30u);
}

TEST_P(EngineOf, WhatAConstraintThrowsEndsItsRequest) {
  const auto engine = make();
  GenerateRequest request = greedy(prompt_of(20, 3), 30);
  request.constraint = std::make_unique<Threes>(4);
  const Answer answer = read_all(engine->generate(std::move(request)));
  EXPECT_EQ(answer.ids.size(), 4u);
  EXPECT_EQ(answer.finished.finish, Finish::error);
  EXPECT_EQ(answer.finished.fault, Fault::user);
  EXPECT_EQ(answer.finished.error, "the grammar has a hole");
  GenerateRequest nothing = greedy(prompt_of(20, 3), 30);
  nothing.constraint = std::make_unique<Threes>(-1, true);
  EXPECT_NE(read_all(engine->generate(std::move(nothing))).finished.error.find("no token may come next"),
            std::string::npos);
}

}  // namespace
}  // namespace lily::engine
