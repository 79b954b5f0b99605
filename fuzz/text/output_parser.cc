// An answer means the same however it is cut into pieces, complete arguments are one JSON object, and work is
// bounded. Bytes below 32 stand for tags and other words of the syntax, the others for themselves.
#include <cstddef>
#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <vector>

#include "base/error.h"
#include "text/json_text.h"
#include "text/output_parser.h"

namespace {

using namespace lily::text;

constexpr std::string_view kWords[] = {"<function=ls>",
                                       "<function=write_file>",
                                       "<function=odd>",
                                       "</function>",
                                       "<parameter=path>",
                                       "<parameter=content>",
                                       "<parameter=n>",
                                       "<parameter=odd>",
                                       "</parameter>",
                                       "\n",
                                       "\n\n",
                                       "<function=",
                                       "<parameter=",
                                       "</",
                                       "{\"name\": \"ls\", \"arguments\": {}}",
                                       "{\"name\": \"ls\", \"arguments\": \"{\\\"a\\\":1}\"}",
                                       "STOP",
                                       "STO",
                                       "\t",
                                       "\r\n",
                                       "12",
                                       "true",
                                       "[1]",
                                       "</function_invocation>",
                                       "<tool_call>",
                                       "</think>",
                                       "\x01",
                                       "é"};

const ToolSet& tools() {
  static const ToolSet set(*parse_json(R"([
    {"function": {"name": "ls", "parameters": {"properties": {"path": {"type": "string"}, "n": {"type": ["integer", "null"]}}}}},
    {"function": {"name": "write_file", "parameters": {"properties": {"path": {"type": "string"}, "content": {}, "n": {"type": "array"}}}}}])"));
  return set;
}

// Cuts text at places that a linear congruential generator picks; seed 0: nowhere.
ParsedOutput parsed(std::string_view script, const OutputOptions& options, OutputEnd end, uint32_t seed) {
  OutputParser parser(tools(), options);
  std::vector<OutputEvent> events;
  const auto push = [&](std::string_view text) {
    while (!text.empty()) {
      seed = seed * 1664525u + 1013904223u * (seed != 0);
      const size_t n = seed == 0 ? text.size() : 1 + (seed >> 24) % 5;
      parser.push_text(text.substr(0, n), events);
      text.remove_prefix(std::min(n, text.size()));
    }
  };
  std::string text;
  for (const char c : script) {
    const auto byte = static_cast<uint8_t>(c);
    if (byte < 4) {
      push(text);
      text.clear();
      parser.push_tag(static_cast<ControlTag>(byte), events);
    } else if (byte < 32) {
      text += kWords[byte - 4];
    } else {
      text += c;
    }
  }
  push(text);
  parser.finish(end, events);
  ParsedOutput out;
  int n_complete = 0;
  for (const OutputEvent& event : events) {
    LILY_CHECK(!event.text.empty() || event.kind == OutputEvent::Kind::call_end);
    n_complete += event.kind == OutputEvent::Kind::call_end;
    out.add(event);
  }
  LILY_CHECK(n_complete == parser.n_complete_calls() &&
             static_cast<int>(out.calls.size()) == parser.n_calls());
  return out;
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  static_assert(std::size(kWords) == 28);
  if (size < 2) return 0;
  OutputOptions options;
  options.starts_in_thinking = data[0] & 1;
  options.continues_text = data[0] & 2;
  options.calls = !(data[0] & 4);
  if (data[0] & 8) options.stop = {"STOP", "x", "\n\n"};
  const OutputEnd end = data[0] & 16 ? OutputEnd::length : OutputEnd::stop;
  const std::string_view script(reinterpret_cast<const char*>(data + 2), size - 2);
  const ParsedOutput whole = parsed(script, options, end, 0);
  const ParsedOutput pieces = parsed(script, options, end, 1u + data[1]);
  LILY_CHECK(whole == pieces, "content {:?} and {:?}", whole.content, pieces.content);
  for (const auto& call : whole.calls) {
    if (!call.complete) continue;
    // A model's bytes may be invalid UTF-8 here; the detokenizer lets none through.
    const bool ascii =
        std::all_of(call.arguments.begin(), call.arguments.end(), [](char c) { return c >= 0; });
    const auto arguments = parse_json(call.arguments);
    LILY_CHECK(!ascii || (arguments && arguments->is_object()), "{:?}", call.arguments);
  }
  return 0;
}
