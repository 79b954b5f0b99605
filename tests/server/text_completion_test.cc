// OpenAI's text completions.
#include "server/openai_text.h"
#include "tests/server/wire.h"

namespace lily::server {
namespace {
namespace text_completions {

using engine::Finish;

Call call_of(const char* json) { return parse_text_completion(parse_json(json), tiny_model()); }
engine::TextRequest request_of(const char* json) {
  return std::get<engine::TextRequest>(call_of(json).request);
}
ApiError refused(const char* json) {
  return refusal_of([&] { call_of(json); });
}

TEST(TextCompletion, PromptsAreTextsOrTokenIds) {
  using Ids = std::vector<int32_t>;
  EXPECT_EQ(std::get<std::string>(request_of(R"({"prompt": "Once"})").prompt), "Once");
  EXPECT_EQ(std::get<std::string>(request_of(R"({"prompt": ["Once"]})").prompt), "Once");
  EXPECT_EQ(std::get<Ids>(request_of(R"({"prompt": [1, 2, 3]})").prompt), (Ids{1, 2, 3}));
  EXPECT_EQ(std::get<Ids>(request_of(R"({"prompt": [[1, 2]]})").prompt), (Ids{1, 2}));
  for (const char* bad : {R"({})", R"({"prompt": ""})", R"({"prompt": []})", R"({"prompt": [[]]})",
                          R"({"prompt": ["a", "b"]})", R"({"prompt": [[1], [2]]})", R"({"prompt": [1, "a"]})",
                          R"({"prompt": [-1]})", R"({"prompt": [999999]})", R"({"prompt": [1.5]})",
                          R"({"prompt": 5})", R"({"prompt": [18446744073709551615]})"})
    EXPECT_EQ(refused(bad).param, "prompt") << bad;
}

TEST(TextCompletion, FieldsArrive) {
  const auto r =
      request_of(R"({"prompt": "a", "temperature": 0, "stop": ["x"], "logprobs": 3, "max_tokens": 9,
                                "response_format": {"type": "json_object"}})");
  EXPECT_EQ(r.sampling.temperature, 0.0f);
  EXPECT_THAT(r.stop, testing::ElementsAre("x"));
  EXPECT_EQ(r.top_logprobs, 3);
  EXPECT_EQ(r.max_tokens, 9);
  EXPECT_EQ(r.format.kind, engine::OutputFormat::Kind::json_object);
  EXPECT_EQ(request_of(R"({"prompt": "a"})").max_tokens, 16);
}

TEST(TextCompletion, WhatIsNotSupportedIsRefusedByName) {
  EXPECT_EQ(refused(R"({"prompt": "a", "suffix": "b"})").param, "suffix");
  EXPECT_EQ(refused(R"({"prompt": "a", "n": 2})").param, "n");
  EXPECT_EQ(refused(R"({"prompt": "a", "best_of": 2})").param, "best_of");
  EXPECT_EQ(refused(R"({"prompt": "a", "echo": true, "logprobs": 0})").param, "echo");
  EXPECT_EQ(refused(R"({"prompt": "a", "logprobs": 21})").param, "logprobs");
  EXPECT_EQ(refused(R"({"prompt": "a", "max_tokens": 0})").param, "max_tokens");
}

TEST(TextCompletion, AChunkDiffersFromTheNextInItsTextOnly) {
  const Call call = call_of(R"({"prompt": "Once", "stream": true, "model": "\u001f"})");
  const auto events =
      wire_events(streamed(*call.writer, {piece({{Kind::content, -1, " \"u\x1fpon"}}),
                                          piece({{Kind::content, -1, ""}}), end_of(Finish::stop)}));
  const Json first = events[0].data();
  EXPECT_EQ(first["choices"], Json::parse(R"([{"index": 0, "text": " \"u\u001fpon", "logprobs": null,
                                               "finish_reason": null}])"));
  Json last = events[1].data();  // says why the answer ended
  EXPECT_EQ(last["choices"][0]["finish_reason"], "stop");
  last["choices"] = first["choices"];
  EXPECT_EQ(first["model"], "\x1f");
  for (const char* name : {"id", "object", "created", "model"}) EXPECT_EQ(first[name], last[name]) << name;
}

TEST(TextCompletion, EchoStandsBeforeTheAnswerInBothForms) {
  const Call call = call_of(R"({"prompt": "Once", "echo": true, "stream": true})");
  const auto events =
      wire_events(streamed(*call.writer, {piece({{Kind::content, -1, " upon"}}),
                                          piece({{Kind::content, -1, " a"}}), end_of(Finish::length)}));
  std::string joined;
  for (size_t i = 0; i + 1 < events.size(); ++i) joined += events[i].data()["choices"][0]["text"];
  EXPECT_EQ(events.back().raw, "[DONE]");
  EXPECT_EQ(joined, "Once upon a");
  const Json whole = call.writer->whole();
  EXPECT_EQ(whole["choices"][0]["text"], "Once upon a");
  EXPECT_EQ(whole["choices"][0]["finish_reason"], "length");
  EXPECT_EQ(whole["object"], "text_completion");
  EXPECT_EQ(whole["usage"]["total_tokens"], 27);
}

TEST(TextCompletion, LogprobsAndOffsetsAreTheSameInBothForms) {
  const Call call =
      call_of(R"({"prompt": "a", "logprobs": 1, "stream": true, "stream_options": {"include_usage": true}})");
  const std::vector<int32_t> ids = tiny_tokenizer().encode("über all", text::AddedTokens::none);
  std::vector<engine::AnswerEvent> answer;
  for (const int32_t id : ids) {
    engine::AnswerPiece p = piece({{Kind::content, -1, tiny_tokenizer().decode(std::vector{id})}});
    p.tokens.push_back({.id = id, .logprob = -1, .top = {{id, -1.0f}}});
    answer.emplace_back(std::move(p));
  }
  answer.emplace_back(end_of(Finish::stop));
  const auto events = wire_events(streamed(*call.writer, answer));
  Json joined = {{"tokens", Json::array()},
                 {"token_logprobs", Json::array()},
                 {"top_logprobs", Json::array()},
                 {"text_offset", Json::array()}};
  for (size_t i = 0; i + 2 < events.size(); ++i) {
    const Json logprobs = events[i].data()["choices"][0]["logprobs"];
    for (auto& [name, list] : joined.items())
      for (const Json& item : logprobs[name]) list.push_back(item);
  }
  EXPECT_EQ(joined, call.writer->whole()["choices"][0]["logprobs"]);
  EXPECT_EQ(joined["text_offset"][0], 0);
  EXPECT_EQ(events[events.size() - 2].data()["choices"], Json::array());
  // Characters and not bytes: the last token begins after all others' characters.
  size_t characters = 0;
  for (size_t i = 0; i + 1 < ids.size(); ++i)
    for (const char c : tiny_tokenizer().token_bytes(ids[i])) characters += (c & 0xC0) != 0x80;
  EXPECT_EQ(joined["text_offset"].back(), characters);
}

}  // namespace text_completions
}  // namespace
}  // namespace lily::server
