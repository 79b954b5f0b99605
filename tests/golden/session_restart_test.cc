// An agent session on lily-tiny whose server is restarted again and again: nothing is read twice, and every
// answer is the one that a server without a restart gives.
#include <gtest/gtest.h>

#include "engine/assistant.h"
#include "tests/support/temp_folder.h"

namespace lily::engine {
namespace {

struct Whole {
  text::ParsedOutput output;
  std::vector<int32_t> ids;
  AnswerEnd end;
};

Whole ask(Assistant& assistant, const ChatRequest& request) {
  AnswerStream stream = assistant.start(request);
  Whole whole;
  while (!stream.done()) {
    auto event = stream.next_for(std::chrono::seconds(60));
    if (!event) {
      ADD_FAILURE() << "no event came";
      break;
    }
    if (auto* piece = std::get_if<AnswerPiece>(&*event)) {
      for (const auto& e : piece->events) whole.output.add(e);
      for (const Token& token : piece->tokens) whole.ids.push_back(token.id);
    } else if (auto* end = std::get_if<AnswerEnd>(&*event)) {
      whole.end = std::move(*end);
    }
  }
  return whole;
}

// The turn as a client sends it back: without the thinking.
text::Message turn_of(const text::ParsedOutput& output) {
  text::Message message = text::Message::of("assistant", output.content);
  for (const auto& call : output.calls)
    message.tool_calls.push_back({call.name, nlohmann::ordered_json(call.arguments)});
  return message;
}

ChatRequest first_request() {
  ChatRequest request;
  request.tools = nlohmann::ordered_json::parse(R"([
    {"type": "function", "function": {"name": "get_weather", "description": "Weather of a city",
      "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}}},
    {"type": "function", "function": {"name": "calculator", "description": "Works out an expression",
      "parameters": {"type": "object", "properties": {"expression": {"type": "string"}}}}}])");
  request.messages = {text::Message::of("system", "You are a careful agent. Use the tools.")};
  request.sampling.seed = 7;
  request.sampling.temperature = 0.0f;
  request.max_tokens = 40;
  return request;
}

std::unique_ptr<Assistant> start(const std::filesystem::path* folder, bool replay = true,
                                 plan::KvType kv = plan::KvType::bf16) {
  LoadOptions load;
  load.backend = "cpu";
  load.kv = kv;
  load.memory.context = 8192;
  auto assistant = std::make_unique<Assistant>("models/lily-tiny", load);
  assistant->set_build("test");
  if (folder != nullptr) assistant->set_disk_cache({.folder = *folder});
  if (!replay) assistant->set_replay(0);
  assistant->load();
  return assistant;
}

constexpr int kTurns = 20;
constexpr int kMostTokensMore = 64;  // as in session_test.cc

// The whole session; with a folder the server is restarted before every turn.
std::vector<Whole> session(const std::filesystem::path* folder, int n_turns = kTurns,
                           plan::KvType kv = plan::KvType::bf16) {
  const char* const questions[] = {"What is the weather in Paris?", "What does the word river mean?",
                                   "What is 17 + 5?", "Spell total letter by letter."};
  std::vector<Whole> answers;
  ChatRequest request = first_request();
  std::unique_ptr<Assistant> assistant = start(folder, true, kv);
  int n_known = 0;
  for (int turn = 0; turn < n_turns; ++turn) {
    if (turn > 0 && folder != nullptr) {
      assistant.reset();
      assistant = start(folder, true, kv);
    }
    request.messages.push_back(text::Message::of("user", questions[turn % 4]));
    for (int step = 0; step < 3; ++step) {
      Whole whole = ask(*assistant, request);
      EXPECT_NE(whole.end.finish, Finish::error) << whole.end.error;
      const Usage& usage = whole.end.usage;
      EXPECT_LE(usage.prompt_tokens - usage.cached_tokens, usage.prompt_tokens - n_known + kMostTokensMore)
          << "turn " << turn << ", step " << step << ": " << usage.prompt_tokens << " tokens, "
          << usage.cached_tokens << " cached";
      if (turn > 0) EXPECT_EQ(whole.end.cache_source, folder != nullptr && step == 0 ? "disk" : "ram");
      n_known = usage.prompt_tokens + usage.completion_tokens - 1;
      request.messages.push_back(turn_of(whole.output));
      const auto calls = whole.output.calls;
      answers.push_back(std::move(whole));
      if (calls.empty()) break;
      for (const auto& call : calls)
        request.messages.push_back(text::Message::of("tool", "the result of " + call.name + " is 21"));
      if (step == 2) request.messages.push_back(text::Message::of("assistant", "I give up."));
    }
  }
  return answers;
}

TEST(SessionRestart, BeforeEachOfTwentyTurnsReadsNothingTwice) {
  const test::TempFolder folder;
  const std::filesystem::path cache = folder.path() / "cache";
  const std::vector<Whole> restarted = session(&cache), straight = session(nullptr);
  ASSERT_EQ(restarted.size(), straight.size());
  for (size_t i = 0; i < straight.size(); ++i) EXPECT_EQ(restarted[i].ids, straight[i].ids) << "answer " << i;
}

TEST(SessionRestart, WithAnInt8CacheWritesWhatAServerWritesThatWasNotRestarted) {
  const test::TempFolder folder;
  const std::filesystem::path cache = folder.path() / "cache";
  constexpr int kFewTurns = 4;
  const std::vector<Whole> restarted = session(&cache, kFewTurns, plan::KvType::int8),
                           straight = session(nullptr, kFewTurns, plan::KvType::int8);
  ASSERT_EQ(restarted.size(), straight.size());
  for (size_t i = 0; i < straight.size(); ++i) EXPECT_EQ(restarted[i].ids, straight[i].ids) << "answer " << i;
}

class SavedChat : public testing::TestWithParam<plan::KvType> {};

TEST_P(SavedChat, GoesOnAsIfItHadNeverEnded) {
  const auto launch = [](const std::filesystem::path* cache) {
    return engine::start(cache, true, GetParam());
  };
  const test::TempFolder folder;
  const std::filesystem::path path = folder.path() / "chat.lily";
  ChatRequest request = first_request();
  request.messages.push_back(text::Message::of("user", "What does the word river mean?"));
  std::vector<int32_t> expected;
  int n_known = 0;
  {
    const auto assistant = launch(nullptr);
    const Whole first = ask(*assistant, request);
    n_known = first.end.usage.prompt_tokens + first.end.usage.completion_tokens - 1;
    request.messages.push_back(turn_of(first.output));
    assistant->save_session(path, request, "the messages");
    request.messages.push_back(text::Message::of("user", "And the word total?"));
    expected = ask(*assistant, request).ids;
  }
  const auto assistant = launch(nullptr);
  const Assistant::SavedSession saved = assistant->load_session(path);
  EXPECT_EQ(saved.messages, "the messages");
  EXPECT_TRUE(saved.has_state);
  const Whole second = ask(*assistant, request);
  EXPECT_EQ(second.ids, expected);
  EXPECT_GE(second.end.usage.cached_tokens, n_known - kMostTokensMore);

  // Another build: the conversation is there, its state is not trusted.
  const auto other = launch(nullptr);
  other->set_build("another");
  EXPECT_FALSE(other->load_session(path).has_state);
  EXPECT_EQ(other->load_session(path).messages, "the messages");

  // Nor is that of another cache.
  const auto wide = engine::start(nullptr, true, plan::KvType::f32);
  EXPECT_FALSE(wide->load_session(path).has_state);
}

INSTANTIATE_TEST_SUITE_P(KvTypes, SavedChat, testing::Values(plan::KvType::bf16, plan::KvType::int8),
                         [](const auto& kv) { return std::string(plan::name(kv.param)); });

}  // namespace
}  // namespace lily::engine
