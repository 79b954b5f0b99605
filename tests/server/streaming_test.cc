// Streamed and whole answers cannot disagree: random answers, cut at random, put together again from the
// stream.
#include <random>

#include "server/messages.h"
#include "server/openai_chat.h"
#include "server/openai_text.h"
#include "server/responses.h"
#include "tests/server/wire.h"

namespace lily::server {
namespace {

using engine::AnswerEvent;
using engine::Finish;

constexpr int kAnswers = 200;

struct Part {
  Kind kind;  // reasoning, content or call_begin
  std::string text, name;
};

class Cutter {
 public:
  explicit Cutter(uint64_t seed) : random_(seed) {}
  size_t below(size_t n) { return std::uniform_int_distribution<size_t>(0, n - 1)(random_); }

  std::string words() {
    static const std::vector<std::string> kWords = {
        "river ", "\n",   "\"quoted\"",       "\\",  "ä", "\xF0\x9F\x98\x80", "<tag>", "\t", "12",
        " ",      "null", "data: [DONE]\n\n", "\x01"};
    std::string out;
    for (size_t n = 1 + below(8); n > 0; --n) out += kWords[below(kWords.size())];
    return out;
  }

  // Thinking, then text and calls in any order; neighbours differ in kind but for calls.
  std::vector<Part> parts() {
    std::vector<Part> out;
    if (below(2) == 0) out.push_back({Kind::reasoning, words(), ""});
    for (size_t n = below(5); n > 0; --n) {
      if (below(2) == 0 && (out.empty() || out.back().kind != Kind::content))
        out.push_back({Kind::content, words(), ""});
      else
        out.push_back({Kind::call_begin, Json{{"input", words()}, {"n", below(100)}}.dump(),
                       below(2) == 0 ? "f" : "c"});
    }
    return out;
  }

  // The same parts in other pieces. Cuts are between characters, as the parser's are.
  std::vector<AnswerEvent> cut(const std::vector<Part>& parts, bool is_cut_short) {
    std::vector<text::OutputEvent> events;
    int call = -1, n_complete = 0;
    for (size_t i = 0; i < parts.size(); ++i) {
      const Part& part = parts[i];
      Kind kind = part.kind;
      if (kind == Kind::call_begin) {
        events.push_back({Kind::call_begin, ++call, part.name});
        kind = Kind::call_arguments;
      }
      for (size_t at = 0; at < part.text.size();) {
        size_t next = at + 1 + below(6);
        while (next < part.text.size() && (part.text[next] & 0xC0) == 0x80) ++next;
        events.push_back({kind, part.kind == Kind::call_begin ? call : -1, part.text.substr(at, next - at)});
        at = next;
      }
      const bool is_open = is_cut_short && i + 1 == parts.size();
      if (part.kind == Kind::call_begin && !is_open) {
        events.push_back({Kind::call_end, call, ""});
        ++n_complete;
      }
    }
    std::vector<AnswerEvent> out;
    if (below(2) == 0) out.emplace_back(engine::PromptProgress{.n_done = 3, .n_total = 20, .n_cached = 5});
    for (size_t at = 0; at < events.size();) {
      engine::AnswerPiece p;
      for (size_t n = below(4); n > 0 && at < events.size(); --n) p.events.push_back(events[at++]);
      out.emplace_back(std::move(p));
    }
    out.emplace_back(end_of(is_cut_short ? Finish::length : Finish::stop, n_complete));
    return out;
  }

 private:
  std::mt19937_64 random_;
};

// Ids and times are those of one answer.
Json without_ids(Json json) {
  if (json.is_object())
    for (const char* name : {"id", "call_id", "created", "created_at"})
      if (json.contains(name)) json[name] = 0;
  if (json.is_structured())
    for (Json& item : json) item = without_ids(item);
  return json;
}

// Calls `check` with the stream and the whole of one cut, after comparing it with the whole of another cut.
void for_random_answers(const std::function<Call()>& make,
                        const std::function<void(const std::vector<WireEvent>&, const Json&)>& check) {
  for (int i = 0; i < kAnswers; ++i) {
    SCOPED_TRACE(i);
    Cutter cutter(static_cast<uint64_t>(i));
    const std::vector<Part> parts = cutter.parts();
    const bool is_cut_short = cutter.below(3) == 0;
    const Call one = make(), other = make();
    const std::string stream = streamed(*one.writer, cutter.cut(parts, is_cut_short));
    for (const AnswerEvent& event : cutter.cut(parts, is_cut_short)) other.writer->event(event);
    EXPECT_EQ(without_ids(one.writer->whole()), without_ids(other.writer->whole()));
    check(wire_events(stream), one.writer->whole());
    if (testing::Test::HasFailure()) return;
  }
}

TEST(Streaming, ChatChunksJoinToTheWholeMessage) {
  const auto make = [] {
    return parse_chat_completion(
        parse_json(R"({"messages": [{"role": "user", "content": "a"}], "stream": true})"), tiny_model());
  };
  for_random_answers(make, [](const std::vector<WireEvent>& events, const Json& whole) {
    Json message = {{"role", nullptr}, {"content", ""}};
    Json finish;
    ASSERT_EQ(events.back().raw, "[DONE]");
    for (size_t i = 0; i + 1 < events.size(); ++i) {
      const Json chunk = events[i].data();
      const Json& delta = chunk["choices"][0]["delta"];
      EXPECT_TRUE(finish.is_null()) << "nothing comes after the finish reason";
      finish = chunk["choices"][0]["finish_reason"];
      EXPECT_EQ(delta.empty(), i + 2 == events.size());
      EXPECT_LE(delta.contains("content") + delta.contains("reasoning") + delta.contains("tool_calls"), 1);
      if (delta.contains("role")) message["role"] = delta["role"];
      for (const char* name : {"content", "reasoning_content", "reasoning"})
        if (delta.contains(name))
          message[name] = message.value(name, std::string()) + delta[name].get<std::string>();
      if (!delta.contains("tool_calls")) continue;
      Json piece = delta["tool_calls"][0];
      const size_t index = piece["index"];
      piece.erase("index");
      if (piece.contains("id")) {
        EXPECT_EQ(index, message.contains("tool_calls") ? message["tool_calls"].size() : 0);
        message["tool_calls"].push_back(piece);
      } else {
        ASSERT_EQ(index + 1, message["tool_calls"].size());
        Json& arguments = message["tool_calls"][index]["function"]["arguments"];
        arguments = arguments.get<std::string>() + piece["function"]["arguments"].get<std::string>();
      }
    }
    Json expected = whole["choices"][0]["message"];
    if (expected["content"].is_null()) expected["content"] = "";
    EXPECT_EQ(nlohmann::json(message), nlohmann::json(expected));
    EXPECT_EQ(finish, whole["choices"][0]["finish_reason"]);
  });
}

TEST(Streaming, TextChunksJoinToTheWholeText) {
  const auto make = [] {
    return parse_text_completion(parse_json(R"({"prompt": "a", "stream": true})"), tiny_model());
  };
  for (int i = 0; i < kAnswers; ++i) {
    Cutter cutter(static_cast<uint64_t>(i));
    const std::vector<Part> parts = {{Kind::content, cutter.words(), ""}};
    const Call call = make();
    std::string text;
    for (const WireEvent& event : wire_events(streamed(*call.writer, cutter.cut(parts, false))))
      if (event.raw != "[DONE]") text += event.data()["choices"][0]["text"].get<std::string>();
    EXPECT_EQ(text, parts[0].text);
    EXPECT_EQ(call.writer->whole()["choices"][0]["text"], text);
  }
}

TEST(Streaming, MessageEventsJoinToTheWholeMessage) {
  const auto make = [] {
    return parse_message(parse_json(R"({"messages": [{"role": "user", "content": "a"}], "stream": true})"),
                         tiny_model());
  };
  for_random_answers(make, [](const std::vector<WireEvent>& events, const Json& whole) {
    Json message;
    std::string partial;
    bool is_open = false;
    for (const WireEvent& event : events) {
      const Json data = event.data();
      if (event.name == "message_start") {
        message = data["message"];
      } else if (event.name == "content_block_start") {
        EXPECT_FALSE(is_open);
        is_open = true;
        EXPECT_EQ(data["index"], message["content"].size());
        message["content"].push_back(data["content_block"]);
        partial.clear();
      } else if (event.name == "content_block_delta") {
        ASSERT_TRUE(is_open);
        EXPECT_EQ(data["index"], message["content"].size() - 1);
        Json& block = message["content"].back();
        const Json& delta = data["delta"];
        for (const char* name : {"text", "thinking", "signature"})
          if (delta.contains(name))
            block[name] = block[name].get<std::string>() + delta[name].get<std::string>();
        if (delta.contains("partial_json")) partial += delta["partial_json"].get<std::string>();
      } else if (event.name == "content_block_stop") {
        is_open = false;
        Json& block = message["content"].back();
        const Json input = Json::parse(partial, nullptr, false);
        if (block["type"] == "tool_use" && input.is_object()) block["input"] = input;
      } else if (event.name == "message_delta") {
        message.update(data["delta"]);
        message.update(Json{{"usage", data["usage"]}, {"lily", data["lily"]}});
      }
    }
    EXPECT_EQ(events.back().name, "message_stop");
    // A call that was cut in its last white space or closing brace may look whole in pieces.
    Json expected = whole;
    if (whole["stop_reason"] == "max_tokens" && !whole["content"].empty() &&
        whole["content"].back()["type"] == "tool_use")
      expected["content"].back()["input"] = message["content"].back()["input"];
    EXPECT_EQ(nlohmann::json(message), nlohmann::json(expected));
  });
}

TEST(Streaming, ResponseEventsJoinToTheWholeResponse) {
  ResponseStore store;
  const auto make = [&] {
    return parse_response(
        parse_json(R"({"input": "a", "stream": true, "tools": [{"type": "function", "name": "f"},
                                        {"type": "custom", "name": "c"}]})"),
        tiny_model(), store);
  };
  for_random_answers(make, [](const std::vector<WireEvent>& events, const Json& whole) {
    Json output = Json::array();
    std::vector<std::string> deltas;
    for (size_t i = 0; i < events.size(); ++i) {
      const Json data = events[i].data();
      EXPECT_EQ(data["sequence_number"], i);
      const std::string& name = events[i].name;
      if (name == "response.output_item.added") {
        EXPECT_EQ(data["output_index"], deltas.size());
        deltas.emplace_back();
      } else if (name.ends_with(".delta") && name != "response.reasoning_text.delta") {
        deltas.back() += data["delta"].get<std::string>();
      } else if (name == "response.output_item.done") {
        output.push_back(data["item"]);
        const Json& item = data["item"];
        const Json said = item["type"] == "reasoning"          ? item["summary"][0]["text"]
                          : item["type"] == "message"          ? item["content"][0]["text"]
                          : item["type"] == "custom_tool_call" ? item["input"]
                                                               : item["arguments"];
        EXPECT_EQ(said, deltas.back());
      }
    }
    EXPECT_EQ(output, whole["output"]);
    EXPECT_EQ(events.back().data()["response"], whole);
  });
}

}  // namespace
}  // namespace lily::server
