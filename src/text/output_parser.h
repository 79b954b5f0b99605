// Reads a model's answer as it comes: thinking, text, and calls with typed arguments.
//
//   answer    = [ reasoning "</think>" ] text { call text }
//   call      = "<tool_call>" "<function=" NAME ">" { "<parameter=" KEY ">" VALUE "</parameter>" }
//   "</function>" "</tool_call>"
//
// Tags that are tokens (<think>, <tool_call> and their closers) count only as tokens. What strays from the
// grammar:
// - <tool_call> may be missing where a declared function's tag begins a line and call syntax follows, and may
// hold a JSON
//   object {"name", "arguments"} instead. Inside thinking it counts only if a declared function follows.
// - An undeclared function is a call once a parameter or its closer follows. What never becomes a call is
// text.
// - A value ends at the first </parameter> (models double it at times) that is followed, white space aside,
// by another
//   parameter, the function's or call's closer or the end. A pair <parameter=x>...</parameter> inside with
//   undeclared x belongs to the value. A value left open ends at a declared, unused parameter that begins a
//   line, at closers that nothing but another call or the end follows, and at the end.
// - Text between the parts of a call is dropped; text after a call is too if it is white space and closing
// tags only.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "text/arguments_writer.h"
#include "text/content_gate.h"
#include "text/output_lexer.h"
#include "text/stop_strings.h"
#include "text/tool_schema.h"

namespace lily::text {

struct OutputEvent {
  enum class Kind {
    reasoning,       // text: more thinking
    content,         // text: more of the answer
    call_begin,      // text: the function's name
    call_arguments,  // text: more of the arguments' JSON
    call_end,        // the arguments are complete
  };
  Kind kind;
  int call = -1;  // of the call events: 0, 1, 2 over the answer
  std::string text;
  std::string id = {};  // of call_begin: clients know the call by it; the parser gives none

  bool operator==(const OutputEvent&) const = default;
};

struct OutputOptions {
  bool starts_in_thinking = false;  // RenderedPrompt::starts_in_thinking
  bool continues_text = false;      // RenderedPrompt::continues_text: leading newlines are kept
  bool calls = true;                // false: call syntax is text (no tools, or tool_choice none)
  std::vector<std::string> stop;    // strings that end the visible text
};

enum class OutputEnd {
  stop,    // a stop token: what is open is closed, and a call counts
  length,  // the budget is spent: an open call's arguments stay unfinished
};

// One answer. Events depend on the characters and tags alone, not on how they are cut into pushes; only the
// deltas are. Work is linear. No event has an empty text but call_end.
class OutputParser {
 public:
  // `tools` must outlive this.
  OutputParser(const ToolSet& tools, OutputOptions options);

  void push_text(std::string_view text, std::vector<OutputEvent>& out);
  void push_tag(ControlTag tag, std::vector<OutputEvent>& out);
  void finish(OutputEnd end, std::vector<OutputEvent>& out);

  bool in_thinking() const { return outer_ == Outer::thinking; }
  // Index of the stop string that ended the answer, or -1. From then on nothing more comes out.
  int matched_stop() const { return stop_.matched(); }
  int n_calls() const { return n_calls_; }
  // Calls whose arguments are complete; one less than n_calls() while one is open or when it was cut.
  int n_complete_calls() const { return n_complete_calls_; }

 private:
  enum class Outer { thinking, prose };
  enum class State {
    outside,  // thinking or prose, as outer_ says
    probe,    // after <tool_call>, or after a function's tag that may or may not begin a call
    json,     // inside the JSON object of a call
    body,     // inside a call, between parameters
    value,    // inside a parameter
    tail,     // after tags that may end a value
    done,
  };
  // What was read since a tag that ends the open value if the right thing follows.
  struct Tail {
    enum class Kind {
      closed,    // </parameter>
      nested,    // </parameter> that may belong to a pair inside the value
      unclosed,  // </function> or </tool_call> without it
    };
    Kind kind = Kind::closed;
    std::string raw;
    bool function_closed = false, call_closed = false;
  };

  void handle(const Lexeme& lexeme);
  void in_thinking_text(const Lexeme& lexeme);
  void in_prose(const Lexeme& lexeme);
  void in_probe(const Lexeme& lexeme);
  void in_json(const Lexeme& lexeme);
  void in_body(const Lexeme& lexeme);
  void in_value(const Lexeme& lexeme);
  void in_tail(const Lexeme& lexeme);

  void begin_probe(std::string_view raw);
  void release_probe();
  bool read_json(char c);
  void finish_json();
  void begin_call(std::string_view name);
  void end_call(bool wrapper_open);
  void begin_value(std::string_view name);
  void begin_tail(Tail::Kind kind, const Lexeme& lexeme);
  void end_tail(const Lexeme& lexeme);
  void finish_outside();

  void go_outside(Outer outer);
  void emit(OutputEvent::Kind kind, std::string_view text);
  void reasoning(std::string_view text);
  void content(std::string_view text);
  void show(std::string_view gated);

  const ToolSet& tools_;
  const bool calls_;
  std::vector<OutputEvent>* out_ = nullptr;  // of the push at work
  OutputLexer lexer_;
  ContentGate thinking_gate_, gate_;
  StopStrings stop_;
  Outer outer_;
  State state_ = State::outside;
  OutputEnd end_ = OutputEnd::stop;

  std::string held_;            // probe, json: as written
  std::string probed_name_;     // probe: the function's name, once read
  bool probe_is_bare_ = false;  // probe: without <tool_call>
  size_t json_begin_ = 0;       // json: where it begins in held_
  int json_depth_ = 0;
  bool json_in_string_ = false, json_escaped_ = false;

  ArgumentsWriter arguments_{nullptr};
  std::string name_;           // of the open call
  bool wrapper_open_ = false;  // a call has ended and its </tool_call> may still come
  int depth_ = 0;              // value: open pairs inside it
  Tail tail_;
  int n_calls_ = 0, n_complete_calls_ = 0;
};

// The events of an answer put together, as a reply that is not streamed needs them.
struct ParsedOutput {
  struct Call {
    std::string name, arguments;
    bool complete = false;
    std::string id = {};  // as in OutputEvent
    bool operator==(const Call&) const = default;
  };
  std::string reasoning, content;
  std::vector<Call> calls;

  void add(const OutputEvent& event);
  bool operator==(const ParsedOutput&) const = default;
};

}  // namespace lily::text
