#include "text/output_reader.h"

#include <gtest/gtest.h>

#include "tests/text/golden_lines.h"
#include "tests/text/parsed_answer.h"
#include "tests/text/tiny_tokenizer.h"

namespace lily::text {
namespace {

ParsedOutput read(const std::vector<int32_t>& ids, const OutputOptions& options,
                  OutputEnd end = OutputEnd::stop) {
  OutputReader reader(tiny(), test_tools(), options);
  std::vector<OutputEvent> events;
  for (const int32_t id : ids) reader.push(id, events);
  reader.finish(end, events);
  ParsedOutput out;
  for (const auto& event : events) out.add(event);
  return out;
}

TEST(OutputReader, ReadsTheGoldenAnswers) {
  int n_thinking = 0;
  for (const auto& row : read_golden("tests/golden/lily-tiny/prompts.jsonl").rows) {
    OutputOptions options;
    options.starts_in_thinking = row["enable_thinking"].get<bool>();
    options.calls = false;
    auto text = row["output_text"].get<std::string>();
    if (text.ends_with("<|im_end|>")) text.resize(text.size() - 10);
    const auto out = read(row["output_ids"].get<std::vector<int32_t>>(), options);
    const size_t close = text.find("</think>");
    if (options.starts_in_thinking && close != std::string::npos) {
      EXPECT_EQ(out.reasoning, text.substr(0, close));
      EXPECT_EQ("\n\n" + out.content, text.substr(close + 8));
      ++n_thinking;
    } else if (!options.starts_in_thinking) {
      EXPECT_EQ(out.content, text);
    }
  }
  EXPECT_GT(n_thinking, 5);
}

TEST(OutputReader, ReadsTheGoldenCalls) {
  std::vector<std::string> calls;
  for (const auto& row : read_golden("tests/golden/lily-tiny/prompts.jsonl").rows) {
    if (row["tools"].is_null()) continue;
    const ToolSet tools(row["tools"]);
    OutputOptions options;
    options.starts_in_thinking = row["enable_thinking"].get<bool>();
    OutputReader reader(tiny(), tools, options);
    std::vector<OutputEvent> events;
    for (const auto& id : row["output_ids"]) reader.push(id.get<int32_t>(), events);
    reader.finish(OutputEnd::stop, events);
    ParsedOutput out;
    for (const auto& event : events) out.add(event);
    const auto text = row["output_text"].get<std::string>();
    EXPECT_EQ(out.calls.empty(), text.find("<tool_call>") == std::string::npos) << text;
    if (!out.calls.empty()) EXPECT_EQ(out.content, "");
    for (const auto& call : out.calls) {
      EXPECT_TRUE(call.complete);
      calls.push_back(call.name + call.arguments);
    }
  }
  EXPECT_EQ(calls, (std::vector<std::string>{
                       R"(convert_units{"value": 3.5, "from_unit": "pounds", "to_unit": "kg"})",
                       R"(get_weather{"city": "Zurich"})", R"(get_weather{"city": "Zurich"})",
                       R"(get_weather{"city": "Zurich"})", R"(get_weather{"city": "Paris"})"}));
}

TEST(OutputReader, TagsCountAsTokensOnly) {
  const std::string call =
      "<tool_call>\n<function=ls>\n<parameter=path>\né\n</parameter>\n</function>\n</tool_call>";
  const auto as_tokens = read(tiny().encode(call, AddedTokens::all), {});
  ASSERT_EQ(as_tokens.calls.size(), 1u);
  EXPECT_EQ(as_tokens.calls[0].arguments, "{\"path\": \"é\"}");
  EXPECT_EQ(as_tokens.content, "");
  const auto in_thinking = read(tiny().encode("so</think>\n\nYes", AddedTokens::none), thinking());
  EXPECT_EQ(in_thinking.reasoning, "so</think>\n\nYes");
  EXPECT_EQ(in_thinking.content, "");
}

TEST(OutputReader, AnUnfinishedCharacterEndsAtATag) {
  auto ids = tiny().encode("\xF0\x9F", AddedTokens::none);
  ids.push_back(tiny().id_of("</think>").value());
  const auto rest = tiny().encode("\x98\x80", AddedTokens::none);
  ids.insert(ids.end(), rest.begin(), rest.end());
  const auto out = read(ids, thinking());
  EXPECT_EQ(out.reasoning, "\uFFFD");
  EXPECT_EQ(out.content, "\uFFFD\uFFFD");
}

TEST(OutputReader, CountsThinkingTokens) {
  OutputReader reader(tiny(), test_tools(), thinking());
  std::vector<OutputEvent> events;
  const auto ids = tiny().encode("I think about this a while", AddedTokens::none);
  for (const int32_t id : ids) reader.push(id, events);
  EXPECT_EQ(reader.n_reasoning_tokens(), static_cast<int>(ids.size()));
  reader.push(tiny().id_of("</think>").value(), events);
  for (const int32_t id : ids) reader.push(id, events);
  EXPECT_EQ(reader.n_reasoning_tokens(), static_cast<int>(ids.size()));
}

TEST(OutputReader, AStopStringOverSeveralTokens) {
  OutputOptions options;
  options.stop = {"own fox"};
  EXPECT_EQ(read(tiny().encode("The quick brown fox jumps", AddedTokens::none), options).content,
            "The quick br");
}

}  // namespace
}  // namespace lily::text
