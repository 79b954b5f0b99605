// A long agent session on lily-tiny through the whole line: nothing is read twice.
#include <gtest/gtest.h>

#include "engine/assistant.h"

namespace lily::engine {
namespace {

struct Whole {
  text::ParsedOutput output;
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
    if (auto* piece = std::get_if<AnswerPiece>(&*event))
      for (const auto& e : piece->events) whole.output.add(e);
    else if (auto* end = std::get_if<AnswerEnd>(&*event)) whole.end = std::move(*end);
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

// What is read of each prompt is what has come since the last answer, and at most so many tokens more: the
// end of a turn that was written but not fed, and the beginning of a turn.
constexpr int kMostTokensMore = 64;

TEST(Session, OfTwentyTurnsWithToolsReadsNothingTwice) {
  LoadOptions load;
  load.backend = "cpu";
  load.memory.context = 8192;
  Assistant assistant("models/lily-tiny", load);
  assistant.load();
  ChatRequest request;
  request.tools = nlohmann::ordered_json::parse(R"([
    {"type": "function", "function": {"name": "get_weather", "description": "Weather of a city",
      "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}}},
    {"type": "function", "function": {"name": "calculator", "description": "Works out an expression",
      "parameters": {"type": "object", "properties": {"expression": {"type": "string"}}}}}])");
  request.messages = {text::Message::of("system", "You are a careful agent. Use the tools.")};
  request.sampling.seed = 7;
  request.sampling.temperature = 0.0f;
  request.max_tokens = 60;
  const char* const questions[] = {"What is the weather in Paris?", "What does the word river mean?",
                                   "What is 17 + 5?", "Spell total letter by letter."};
  int n_known = 0, n_calls = 0, n_requests = 0;
  for (int turn = 0; turn < 20; ++turn) {
    request.messages.push_back(text::Message::of("user", questions[turn % 4]));
    for (int step = 0; step < 3; ++step) {
      const Whole whole = ask(assistant, request);
      ++n_requests;
      const Usage& usage = whole.end.usage;
      ASSERT_NE(whole.end.finish, Finish::error) << whole.end.error;
      const int n_new = usage.prompt_tokens - n_known;
      EXPECT_LE(usage.prompt_tokens - usage.cached_tokens, n_new + kMostTokensMore)
          << "turn " << turn << ", step " << step << ": " << usage.prompt_tokens << " tokens, "
          << usage.cached_tokens << " cached";
      n_known = usage.prompt_tokens + usage.completion_tokens - 1;
      request.messages.push_back(turn_of(whole.output));
      if (whole.output.calls.empty()) break;
      for (const auto& call : whole.output.calls) {
        ++n_calls;
        request.messages.push_back(text::Message::of("tool", "the result of " + call.name + " is 21"));
      }
      if (step == 2) request.messages.push_back(text::Message::of("assistant", "I give up."));
    }
  }
  EXPECT_GT(n_calls, 0);
  EXPECT_GE(n_requests, 20);
}

}  // namespace
}  // namespace lily::engine
