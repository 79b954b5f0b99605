// Feeds written-out answers to the output parser.
#pragma once

#include <gtest/gtest.h>

#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "text/json_text.h"
#include "text/output_parser.h"

namespace lily::text {

// In an answer, <think>, </think>, <tool_call> and </tool_call> are tokens; after kQuote they are spelled by
// ordinary ones.
inline constexpr char kQuote = '\x01';

// Calls text(piece) and tag(tag) for the parts of an answer.
inline void for_each_part(std::string_view answer, const std::function<void(std::string_view)>& text,
                          const std::function<void(ControlTag)>& tag) {
  constexpr ControlTag kTags[] = {ControlTag::think_open, ControlTag::think_close, ControlTag::call_open,
                                  ControlTag::call_close};
  size_t begin = 0, pos = 0;
  const auto flush = [&] {
    if (pos > begin) text(answer.substr(begin, pos - begin));
  };
  while (pos < answer.size()) {
    if (answer[pos] == kQuote) {
      flush();
      begin = pos + 1;  // the quoted "<" is passed over
      pos += 2;
      continue;
    }
    const ControlTag* found = nullptr;
    for (const ControlTag& candidate : kTags)
      if (answer.substr(pos).starts_with(spelling(candidate))) found = &candidate;
    if (found == nullptr) {
      ++pos;
      continue;
    }
    flush();
    tag(*found);
    pos += spelling(*found).size();
    begin = pos;
  }
  pos = answer.size();
  flush();
}

// The functions ls(path: string, all: boolean), write_file(path: string, content: string) and get(n:
// integer).
inline const ToolSet& test_tools() {
  static const ToolSet tools(*parse_json(R"([
    {"type": "function", "function": {"name": "ls", "parameters": {"type": "object", "properties":
      {"path": {"type": "string"}, "all": {"type": "boolean"}}}}},
    {"type": "function", "function": {"name": "write_file", "parameters": {"type": "object", "properties":
      {"path": {"type": "string"}, "content": {"type": "string"}}}}},
    {"type": "function", "function": {"name": "get", "parameters": {"properties": {"n": {"type": "integer"}}}}}])"));
  return tools;
}

struct Parsed : ParsedOutput {
  std::vector<OutputEvent> events;
  int n_complete = 0;
};

// piece_bytes 0: as it comes.
inline Parsed parse_in_pieces(std::string_view answer, size_t piece_bytes, const OutputOptions& options,
                              OutputEnd end, const ToolSet& tools = test_tools()) {
  OutputParser parser(tools, options);
  Parsed out;
  const auto collect = [&](std::vector<OutputEvent>& events) {
    for (auto& event : events) {
      EXPECT_TRUE(!event.text.empty() || event.kind == OutputEvent::Kind::call_end);
      out.add(event);
      out.events.push_back(std::move(event));
    }
    events.clear();
  };
  std::vector<OutputEvent> events;
  for_each_part(
      answer,
      [&](std::string_view text) {
        const size_t step = piece_bytes == 0 ? text.size() : piece_bytes;
        for (size_t pos = 0; pos < text.size(); pos += step) {
          parser.push_text(text.substr(pos, step), events);
          collect(events);
        }
      },
      [&](ControlTag tag) {
        parser.push_tag(tag, events);
        collect(events);
      });
  parser.finish(end, events);
  collect(events);
  out.n_complete = parser.n_complete_calls();
  return out;
}

// Parses whole, one byte at a time and in pieces of 7; all must agree.
inline Parsed parse(std::string_view answer, OutputOptions options = {}, OutputEnd end = OutputEnd::stop,
                    const ToolSet& tools = test_tools()) {
  const Parsed whole = parse_in_pieces(answer, 0, options, end, tools);
  for (const size_t piece_bytes : {1, 7})
    EXPECT_EQ(static_cast<const ParsedOutput&>(parse_in_pieces(answer, piece_bytes, options, end, tools)),
              static_cast<const ParsedOutput&>(whole))
        << piece_bytes << " bytes a piece: " << answer;
  return whole;
}

inline OutputOptions thinking() {
  OutputOptions options;
  options.starts_in_thinking = true;
  return options;
}

}  // namespace lily::text
