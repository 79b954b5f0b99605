// The assistant on lily-tiny's tokenizer and an executor that says what it is told to.
#include "engine/assistant.h"

#include <gtest/gtest.h>

#include "tests/engine/scripted_executor.h"

namespace lily::engine {
namespace {

using Kind = text::OutputEvent::Kind;
constexpr auto kWait = std::chrono::milliseconds(5000);

struct Whole {
  text::ParsedOutput output;
  std::vector<int32_t> ids;
  AnswerEnd end;
};

Whole read(AnswerStream stream) {
  Whole whole;
  while (!stream.done()) {
    std::optional<AnswerEvent> event = stream.next_for(kWait);
    if (!event) {
      ADD_FAILURE() << "no event came";
      break;
    }
    if (auto* piece = std::get_if<AnswerPiece>(&*event)) {
      for (const auto& e : piece->events) whole.output.add(e);
      for (const auto& t : piece->tokens) whole.ids.push_back(t.id);
    } else if (auto* end = std::get_if<AnswerEnd>(&*event)) {
      whole.end = std::move(*end);
    }
  }
  return whole;
}

class AssistantTest : public testing::Test {
 protected:
  AssistantTest() {
    text::Tokenizer tokenizer = text::Tokenizer::load("models/lily-tiny");
    Limits limits = ScriptedExecutor::small();
    limits.n_tokens = tokenizer.n_tokens();
    limits.vocab = tokenizer.n_tokens() + 8;
    limits.max_context = 2048;
    auto executor = std::make_unique<ScriptedExecutor>(limits);
    executor->logits = [this, vocab = limits.vocab](std::span<const int32_t> prefix) {
      std::vector<float> row(static_cast<size_t>(vocab), 0.0f);
      const size_t i = prefix.size() - n_prompt_;
      row[static_cast<size_t>(i < script_.size() ? script_[i] : stop_)] = 10;
      return row;
    };
    model::Config config;
    config.stop_ids = {*tokenizer.id_of("<|im_end|>")};
    stop_ = config.stop_ids[0];
    assistant_ = std::make_unique<Assistant>(std::move(tokenizer), config, std::move(executor));
  }

  // The model will answer this request with this text, then stop.
  Whole ask(ChatRequest request, const std::string& answer) {
    request.sampling.temperature = 0.0f;
    n_prompt_ = assistant_->prepare(request).ids.size();
    script_ = assistant_->tokenizer().encode(answer, text::AddedTokens::all);
    return read(assistant_->start(request));
  }

  static ChatRequest request() {
    ChatRequest r;
    r.messages = {text::Message::of("user", "hello")};
    r.thinking.enabled = false;
    return r;
  }
  static ChatRequest with_tools() {
    ChatRequest r = request();
    r.tools = nlohmann::ordered_json::parse(
        R"([{"type": "function", "function": {"name": "ls", "parameters":
            {"type": "object", "properties": {"path": {"type": "string"}}}}}])");
    return r;
  }
  static constexpr const char* kCall =
      "<tool_call>\n<function=ls>\n<parameter=path>\n/tmp\n</parameter>\n</function>\n</tool_call>";

  size_t n_prompt_ = 0;
  std::vector<int32_t> script_;
  int32_t stop_ = -1;
  std::unique_ptr<Assistant> assistant_;
};

TEST_F(AssistantTest, TheAnswerIsTextThatStops) {
  const Whole whole = ask(request(), "Good morning.");
  EXPECT_EQ(whole.output.content, "Good morning.");
  EXPECT_EQ(whole.ids, script_);
  EXPECT_EQ(whole.end.finish, Finish::stop);
  EXPECT_EQ(whole.end.detail, AnswerEnd::Detail::none);
  EXPECT_EQ(whole.end.usage.completion_tokens, static_cast<int32_t>(script_.size()) + 1);
  EXPECT_EQ(whole.end.reasoning_tokens, 0);
}

TEST_F(AssistantTest, ThinkingIsCountedApart) {
  ChatRequest r = request();
  r.thinking.enabled = true;
  const Whole whole = ask(r, "so and so\n</think>\n\nYes.");
  EXPECT_EQ(whole.output.reasoning, "so and so\n");
  EXPECT_EQ(whole.output.content, "Yes.");
  EXPECT_GT(whole.end.reasoning_tokens, 0);
  EXPECT_LT(whole.end.reasoning_tokens, whole.end.usage.completion_tokens);
}

TEST_F(AssistantTest, AStopStringEndsTheAnswerAndIsNotShown) {
  ChatRequest r = request();
  r.stop = {"never", "three"};
  const Whole whole = ask(r, "one two three four five six seven eight nine");
  EXPECT_EQ(whole.output.content, "one two ");
  EXPECT_EQ(whole.end.finish, Finish::stop);
  EXPECT_EQ(whole.end.detail, AnswerEnd::Detail::stop_string);
  EXPECT_EQ(whole.end.stop_string, 1);
  EXPECT_EQ(whole.end.usage.completion_tokens, static_cast<int32_t>(whole.ids.size()));
}

TEST_F(AssistantTest, MaxTokensEndInLength) {
  ChatRequest r = request();
  r.max_tokens = 3;
  const Whole whole = ask(r, "one two three four five six");
  EXPECT_EQ(whole.end.finish, Finish::length);
  EXPECT_FALSE(whole.end.context_full);
  EXPECT_EQ(whole.ids.size(), 3u);
}

TEST_F(AssistantTest, AFullContextIsToldFromMaxTokens) {
  std::string endless;
  for (int i = 0; i < 3000; ++i) endless += " a";
  const Whole whole = ask(request(), endless);
  EXPECT_EQ(whole.end.finish, Finish::length);
  EXPECT_TRUE(whole.end.context_full);
}

TEST_F(AssistantTest, CallsAreCounted) {
  const Whole whole = ask(with_tools(), std::string(kCall) + "\n" + kCall);
  ASSERT_EQ(whole.output.calls.size(), 2u);
  EXPECT_EQ(whole.output.calls[0].name, "ls");
  EXPECT_EQ(whole.output.calls[1].arguments, R"({"path": "/tmp"})");
  EXPECT_EQ(whole.end.n_complete_calls, 2);
  EXPECT_EQ(whole.end.finish, Finish::stop);
}

TEST_F(AssistantTest, WithoutParallelCallsTheFirstOneEndsTheAnswer) {
  ChatRequest r = with_tools();
  r.tool_choice.parallel = false;
  const Whole whole = ask(r, std::string(kCall) + "\n" + kCall);
  ASSERT_EQ(whole.output.calls.size(), 1u);
  EXPECT_TRUE(whole.output.calls[0].complete);
  EXPECT_EQ(whole.end.n_complete_calls, 1);
  EXPECT_EQ(whole.end.finish, Finish::stop);
}

TEST_F(AssistantTest, ToolChoiceNoneKeepsTheToolsInThePrompt) {
  ChatRequest none = with_tools();
  none.tool_choice.kind = ToolChoice::Kind::none;
  EXPECT_EQ(assistant_->prepare(none).ids, assistant_->prepare(with_tools()).ids);
  const Whole whole = ask(none, kCall);
  EXPECT_TRUE(whole.output.calls.empty());
  EXPECT_EQ(whole.end.n_complete_calls, 0);
}

TEST_F(AssistantTest, ALastAssistantMessageIsContinued) {
  ChatRequest r = request();
  r.messages.push_back(text::Message::of("assistant", "The answer"));
  EXPECT_TRUE(assistant_->prepare(r).continues_text);
  EXPECT_EQ(ask(r, " is 42.").output.content, " is 42.");
}

TEST_F(AssistantTest, ATooLongPromptSaysBothNumbers) {
  ChatRequest r = request();
  std::string text;
  for (int i = 0; i < 3000; ++i) text += "word ";
  r.messages = {text::Message::of("user", text)};
  try {
    assistant_->start(r);
    FAIL();
  } catch (const ContextExceeded& e) {
    EXPECT_EQ(e.n_context, 2048);
    EXPECT_GT(e.n_prompt, 3000);
  }
}

TEST_F(AssistantTest, CancellingEndsTheAnswer) {
  std::string endless;
  for (int i = 0; i < 1500; ++i) endless += " a";
  ChatRequest r = request();
  r.sampling.temperature = 0.0f;
  n_prompt_ = assistant_->prepare(r).ids.size();
  script_ = assistant_->tokenizer().encode(endless, text::AddedTokens::all);
  AnswerStream stream = assistant_->start(r);
  stream.cancel();
  const Whole whole = read(std::move(stream));
  EXPECT_EQ(whole.end.finish, Finish::cancelled);
  EXPECT_LT(whole.ids.size(), 1500u);
}

TEST_F(AssistantTest, TextIsContinuedAsItIs) {
  TextRequest r;
  r.prompt = std::string("Once upon");
  r.sampling.temperature = 0.0f;
  n_prompt_ = assistant_->tokenizer().encode("Once upon", text::AddedTokens::all).size();
  script_ = assistant_->tokenizer().encode(" a time", text::AddedTokens::all);
  EXPECT_EQ(read(assistant_->start(r)).output.content, " a time");
}

TEST_F(AssistantTest, APromptIsTokenisedInPartsAsInOnePiece) {
  ChatRequest r = with_tools();
  r.messages = {text::Message::of("system", "You are brief."), text::Message::of("user", "hello\n"),
                text::Message::of("assistant", "\nHi.\n\n"), text::Message::of("user", "<|im_end|>\n more")};
  const auto begins = [&](int32_t n, const PreparedPrompt& p) {
    return assistant_->tokenizer().decode_bytes(std::span(p.ids).first(static_cast<size_t>(n)));
  };
  for (const bool tools : {true, false})
    for (const bool system : {true, false}) {
      ChatRequest each = r;
      if (!tools) each.tools = nullptr;
      if (!system) each.messages.erase(each.messages.begin());
      const PreparedPrompt p = assistant_->prepare(each);
      const text::RenderedPrompt rendered =
          text::render(each.messages, each.tools, {.add_generation_prompt = true, .enable_thinking = false});
      EXPECT_EQ(p.ids, text::tokenize(rendered, assistant_->tokenizer()));
      ASSERT_EQ(p.branches.size(), tools || system ? 2u : 1u);
      if (tools || system)
        EXPECT_EQ(begins(p.branches[0], p), rendered.text().substr(0, rendered.system_end()));
      EXPECT_TRUE(begins(p.branches.back(), p).ends_with("Hi.<|im_end|>\n"));
      EXPECT_EQ(begins(p.n_stable, p) + "<|im_start|>assistant\n<think>\n\n</think>\n\n", rendered.text());
    }
}

TEST_F(AssistantTest, AnotherConversationWithTheSameToolsReadsThemOnce) {
  ChatRequest r = with_tools();
  ask(r, "yes");
  const auto n_system = assistant_->prepare(r).branches.at(0);
  EXPECT_GT(n_system, 64);
  r.messages = {text::Message::of("user", "something else altogether")};
  EXPECT_EQ(ask(r, "no").end.usage.cached_tokens, n_system);
}

// ---- Exact replay

class Replay : public AssistantTest {
 protected:
  static bool begins_with(const std::vector<int32_t>& ids, const std::vector<int32_t>& prefix) {
    return prefix.size() <= ids.size() && std::equal(prefix.begin(), prefix.end(), ids.begin());
  }
  // Everything that was read and written, and the token that closes the turn.
  std::vector<int32_t> written(const std::vector<int32_t>& prompt) const {
    std::vector<int32_t> ids = prompt;
    ids.insert(ids.end(), script_.begin(), script_.end());
    ids.push_back(stop_);
    return ids;
  }
  static ChatRequest thinking(ChatRequest r) {
    r.thinking.enabled = true;
    return r;
  }
  static ChatRequest next_turn(ChatRequest r, text::Message answer, const std::string& question) {
    r.messages.push_back(std::move(answer));
    r.messages.push_back(text::Message::of("user", question));
    return r;
  }
};

TEST_F(Replay, AnAnswerThatComesBackWithoutItsThinkingIsReplayed) {
  const ChatRequest first = thinking(request());
  const std::vector<int32_t> prompt = assistant_->prepare(first).ids;
  ask(first, "so and so\n</think>\n\nYes.");
  const std::vector<int32_t> all = written(prompt);
  for (const char* text : {"Yes.", " Yes.\n", "<think>\nso and so\n</think>\n\nYes."}) {
    const ChatRequest second = next_turn(first, text::Message::of("assistant", text), "more");
    const PreparedPrompt prepared = assistant_->prepare(second);
    EXPECT_TRUE(begins_with(prepared.ids, all)) << text;
    // What follows is what the template writes.
    EXPECT_EQ(assistant_->tokenizer().decode_bytes(std::span(prepared.ids).subspan(all.size())),
              "\n<|im_start|>user\nmore<|im_end|>\n<|im_start|>assistant\n<think>\n");
    EXPECT_GT(prepared.n_stable, static_cast<int32_t>(all.size()));
    EXPECT_LT(prepared.n_stable, static_cast<int32_t>(prepared.ids.size()));
  }
}

TEST_F(Replay, OnlyWhatIsNewIsRead) {
  ChatRequest r = thinking(request());
  size_t n_known = 0;
  for (int turn = 0; turn < 4; ++turn) {
    const size_t n_prompt = assistant_->prepare(r).ids.size();
    const Whole whole =
        ask(r, "thought " + std::to_string(turn) + "\n</think>\n\nanswer " + std::to_string(turn));
    const size_t n_read = static_cast<size_t>(whole.end.usage.prompt_tokens - whole.end.usage.cached_tokens);
    EXPECT_LE(n_read, n_prompt - n_known + 1) << "turn " << turn;
    n_known = n_prompt + script_.size();
    r = next_turn(r, text::Message::of("assistant", whole.output.content), "and then?");
  }
}

TEST_F(Replay, CallsAreRecognisedHoweverTheirArgumentsAreSpelt) {
  const ChatRequest first = thinking(with_tools());
  const std::vector<int32_t> prompt = assistant_->prepare(first).ids;
  ask(first, std::string("look\n</think>\n\n") + kCall);
  for (const nlohmann::ordered_json& arguments :
       {nlohmann::ordered_json{{"path", "/tmp"}}, nlohmann::ordered_json("{ \"path\" :\"/tmp\"}")}) {
    ChatRequest second = first;
    text::Message call = text::Message::of("assistant", "");
    call.tool_calls.push_back({"ls", arguments});
    second.messages.push_back(call);
    second.messages.push_back(text::Message::of("tool", "a.txt"));
    EXPECT_TRUE(begins_with(assistant_->prepare(second).ids, written(prompt)));
  }
}

TEST_F(Replay, CallsAreRecognisedByTheirIdsWhateverTheClientMakesOfThem) {
  const ChatRequest first = thinking(with_tools());
  const std::vector<int32_t> prompt = assistant_->prepare(first).ids;
  const Whole whole = ask(first, std::string("look\n</think>\n\nI look.\n") + kCall);
  ASSERT_EQ(whole.output.calls.size(), 1u);
  const std::string id = whole.output.calls[0].id;
  EXPECT_EQ(id.size(), 24u);
  const auto turn = [&](const std::string& call_id) {
    ChatRequest r = first;
    text::Message call = text::Message::of("assistant", "I looked, the client says.");
    call.tool_calls.push_back({"ls", nlohmann::ordered_json{{"path", "/tmp"}, {"added", true}}, call_id});
    r.messages.push_back(call);
    r.messages.push_back(text::Message::of("tool", "a.txt"));
    return r;
  };
  for (const std::string prefix : {"", "call_", "toolu_"})
    EXPECT_TRUE(begins_with(assistant_->prepare(turn(prefix + id)).ids, written(prompt))) << prefix;
  EXPECT_FALSE(begins_with(assistant_->prepare(turn("call_" + std::string(24, 'x'))).ids, written(prompt)));
  EXPECT_FALSE(begins_with(assistant_->prepare(turn("")).ids, written(prompt)));
  // The same id after another conversation is another turn.
  ChatRequest other = turn("call_" + id);
  other.messages[0] = text::Message::of("user", "goodbye");
  const std::vector<int32_t> with = assistant_->prepare(other).ids;
  assistant_->set_replay(0);
  EXPECT_EQ(with, assistant_->prepare(other).ids);
}

TEST_F(Replay, WhatDiffersIsRenderedByTheTemplate) {
  const ChatRequest first = thinking(with_tools());
  ask(first, "so\n</think>\n\nYes.");
  ChatRequest other_question = first;
  other_question.messages[0] = text::Message::of("user", "goodbye");
  ChatRequest other_tools = first;
  other_tools.tools[0]["function"]["description"] = "lists";
  const ChatRequest changed[] = {next_turn(first, text::Message::of("assistant", "No."), "more"),
                                 next_turn(other_question, text::Message::of("assistant", "Yes."), "more"),
                                 next_turn(other_tools, text::Message::of("assistant", "Yes."), "more")};
  std::vector<PreparedPrompt> with;
  for (const ChatRequest& r : changed) with.push_back(assistant_->prepare(r));
  assistant_->set_replay(0);
  for (size_t i = 0; i < with.size(); ++i) EXPECT_EQ(with[i].ids, assistant_->prepare(changed[i]).ids) << i;
}

TEST_F(Replay, TurnedOffTheTemplateDecides) {
  assistant_->set_replay(0);
  const ChatRequest first = thinking(request());
  const std::vector<int32_t> prompt = assistant_->prepare(first).ids;
  ask(first, "so\n</think>\n\nYes.");
  EXPECT_FALSE(
      begins_with(assistant_->prepare(next_turn(first, text::Message::of("assistant", "Yes."), "m")).ids,
                  written(prompt)));
}

TEST_F(Replay, AnAnswerCutByAStopStringIsNotReplayed) {
  ChatRequest first = thinking(request());
  first.stop = {"three"};
  const std::vector<int32_t> prompt = assistant_->prepare(first).ids;
  EXPECT_EQ(ask(first, "so\n</think>\n\none two three four").output.content, "one two ");
  const auto ids =
      assistant_->prepare(next_turn(first, text::Message::of("assistant", "one two"), "more")).ids;
  EXPECT_FALSE(begins_with(ids, written(prompt)));
}

TEST(ReplayBook, ForgetsWhatWasNotUsedForTheLongestTime) {
  ReplayBook book(3 * 100 * sizeof(int32_t));
  const text::ParsedOutput says[] = {{"", "a"}, {"", "b"}, {"", "c"}, {"", "d"}};
  std::vector<VisibleHash> names;
  for (const text::ParsedOutput& answer : says) names.push_back(ReplayBook::hash_after({}, answer));
  for (int i = 0; i < 3; ++i) book.remember({}, says[i], std::vector<int32_t>(100, i));
  EXPECT_TRUE(book.find(names[0]));
  book.remember({}, says[3], std::vector<int32_t>(100, 3));
  EXPECT_FALSE(book.find(names[1]));
  EXPECT_EQ(book.find(names[0]), std::vector<int32_t>(100, 0));
  EXPECT_EQ(book.find(names[3]), std::vector<int32_t>(100, 3));
  EXPECT_EQ(book.n_bytes(), 3 * 100 * sizeof(int32_t));
  book.remember({}, says[0], std::vector<int32_t>(50, 7));
  EXPECT_EQ(book.n_bytes(), 250 * sizeof(int32_t));
  book.remember({}, says[2], std::vector<int32_t>(1000, 1));  // more than fits: not kept, nothing lost
  EXPECT_EQ(book.find(names[0]), std::vector<int32_t>(50, 7));
}

}  // namespace
}  // namespace lily::engine
