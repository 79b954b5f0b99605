// Requests parsed and answers written without HTTP: what the tests of the wire formats have in common.
#pragma once

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "server/dialect.h"

namespace lily::server {

using Kind = text::OutputEvent::Kind;

inline const text::Tokenizer& tiny_tokenizer() {
  static const text::Tokenizer tokenizer = text::Tokenizer::load("models/lily-tiny");
  return tokenizer;
}

inline ServedModel tiny_model() {
  return {.tokenizer = tiny_tokenizer(), .id = "lily-tiny", .created = 1, .context = 4096};
}

// The error of a call; a test that fails where there is none.
inline ApiError refusal_of(const std::function<void()>& call) {
  try {
    call();
  } catch (const ApiError& error) {
    EXPECT_EQ(std::string(error.what()).find('\n'), std::string::npos) << error.what();
    return error;
  }
  ADD_FAILURE() << "nothing was refused";
  return {200, "", "", "", ""};
}

struct WireEvent {
  std::string name;  // of the `event:` line; may be empty
  std::string raw;   // of the `data:` line
  Json data() const { return Json::parse(raw); }
};

// Checks the framing on the way: every event is its lines and an empty one. Comments are left out.
inline std::vector<WireEvent> wire_events(const std::string& stream) {
  std::vector<WireEvent> events;
  size_t at = 0;
  while (at < stream.size()) {
    const size_t end = stream.find("\n\n", at);
    if (end == std::string::npos) {
      ADD_FAILURE() << "the last event has no end: " << stream.substr(at);
      break;
    }
    std::string block = stream.substr(at, end - at);
    at = end + 2;
    if (block.starts_with(":")) continue;
    WireEvent event;
    if (block.starts_with("event: ")) {
      event.name = block.substr(7, block.find('\n') - 7);
      block.erase(0, block.find('\n') + 1);
    }
    EXPECT_TRUE(block.starts_with("data: ")) << block;
    EXPECT_EQ(block.find('\n'), std::string::npos) << block;
    event.raw = block.substr(6);
    events.push_back(std::move(event));
  }
  return events;
}

inline engine::AnswerPiece piece(std::vector<text::OutputEvent> events) { return {std::move(events), {}}; }

inline engine::AnswerEnd end_of(engine::Finish finish, int n_complete_calls = 0) {
  engine::AnswerEnd end{.finish = finish, .n_complete_calls = n_complete_calls};
  end.usage = {.prompt_tokens = 20, .cached_tokens = 5, .completion_tokens = 7};
  end.reasoning_tokens = 2;
  end.seed = 42;
  return end;
}

// Thinking, text and one call, as the parser of the model's output gives them.
inline std::vector<engine::AnswerEvent> thinking_text_call(
    const std::string& name = "ls", const std::string& arguments = R"({"path": "/tmp"})") {
  return {engine::PromptProgress{.n_done = 10, .n_total = 20, .n_cached = 5},
          piece({{Kind::reasoning, -1, "let me "}}),
          piece({{Kind::reasoning, -1, "see"}, {Kind::content, -1, "I "}}),
          piece({{Kind::content, -1, "look."}}),
          piece({{Kind::call_begin, 0, name}, {Kind::call_arguments, 0, arguments.substr(0, 4)}}),
          piece({{Kind::call_arguments, 0, arguments.substr(4)}, {Kind::call_end, 0, ""}}),
          end_of(engine::Finish::stop, 1)};
}

// All bytes of a streamed answer.
inline std::string streamed(AnswerWriter& writer, const std::vector<engine::AnswerEvent>& events) {
  std::string out = writer.begin();
  for (const engine::AnswerEvent& event : events) out += writer.event(event);
  return out;
}

}  // namespace lily::server
