#include "text/output_parser.h"

#include <nlohmann/json.hpp>
#include <utility>

#include "base/error.h"
#include "base/log.h"
#include "text/json_text.h"

namespace lily::text {

using Kind = Lexeme::Kind;
using Mode = OutputLexer::Mode;

OutputParser::OutputParser(const ToolSet& tools, OutputOptions options)
    : tools_(tools),
      calls_(options.calls),
      thinking_gate_(false),
      gate_(options.continues_text),
      stop_(std::move(options.stop)),
      outer_(Outer::prose) {
  go_outside(options.starts_in_thinking ? Outer::thinking : Outer::prose);
}

void OutputParser::push_text(std::string_view text, std::vector<OutputEvent>& out) {
  out_ = &out;
  lexer_.push(text, [this](const Lexeme& lexeme) { handle(lexeme); });
}

void OutputParser::push_tag(ControlTag tag, std::vector<OutputEvent>& out) {
  out_ = &out;
  lexer_.flush([this](const Lexeme& lexeme) { handle(lexeme); });
  lexer_.control_seen();
  handle({.kind = Kind::control, .raw = spelling(tag), .tag = tag});
}

void OutputParser::finish(OutputEnd end, std::vector<OutputEvent>& out) {
  out_ = &out;
  end_ = end;
  lexer_.flush([this](const Lexeme& lexeme) { handle(lexeme); });
  handle({.kind = Kind::end});
}

void OutputParser::handle(const Lexeme& lexeme) {
  const bool in_call = state_ == State::body || state_ == State::value || state_ == State::tail;
  if (lexeme.kind == Kind::end && in_call && end_ == OutputEnd::length) {
    state_ = State::done;
    return;
  }
  switch (state_) {
    case State::outside:
      return outer_ == Outer::thinking ? in_thinking_text(lexeme) : in_prose(lexeme);
    case State::probe:
      return in_probe(lexeme);
    case State::json:
      return in_json(lexeme);
    case State::body:
      return in_body(lexeme);
    case State::value:
      return in_value(lexeme);
    case State::tail:
      return in_tail(lexeme);
    case State::done:
      return;
  }
}

void OutputParser::go_outside(Outer outer) {
  outer_ = outer;
  state_ = State::outside;
  lexer_.set_mode(outer == Outer::prose && calls_ ? Mode::prose : Mode::plain);
}

// Thinking and prose
// -------------------------------------------------------------------------------------------------

void OutputParser::in_thinking_text(const Lexeme& lexeme) {
  if (lexeme.is_control(ControlTag::think_close)) {
    thinking_gate_.drop_held();
    go_outside(Outer::prose);
    lexer_.set_line_start();
  } else if (lexeme.is_control(ControlTag::call_open) && calls_) {
    begin_probe(lexeme.raw);
  } else if (lexeme.kind == Kind::end) {
    state_ = State::done;
  } else {
    reasoning(lexeme.raw);
  }
}

void OutputParser::in_prose(const Lexeme& lexeme) {
  if (lexeme.kind == Kind::end) {
    finish_outside();
  } else if (lexeme.kind == Kind::open_function && lexeme.at_line_start &&
             tools_.find(lexeme.name) != nullptr) {
    begin_probe(lexeme.raw);
    probe_is_bare_ = true;
    probed_name_ = lexeme.name;
  } else if (lexeme.is_control(ControlTag::think_close)) {
    return;  // thinking ends once
  } else if (lexeme.is_control(ControlTag::call_open) && calls_) {
    begin_probe(lexeme.raw);
  } else if (lexeme.is_control(ControlTag::call_close)) {
    if (std::exchange(wrapper_open_, false)) return gate_.drop_held();
    std::string shown;
    gate_.push_closing_tag(lexeme.raw, shown);
    show(shown);
  } else {
    content(lexeme.raw);
  }
}

void OutputParser::finish_outside() {
  state_ = State::done;
  std::string shown;
  gate_.finish(shown);
  show(shown);
  std::string rest;
  stop_.flush(rest);
  emit(OutputEvent::Kind::content, rest);
}

void OutputParser::reasoning(std::string_view text) {
  std::string shown;
  thinking_gate_.push(text, shown);
  emit(OutputEvent::Kind::reasoning, shown);
}

void OutputParser::content(std::string_view text) {
  std::string shown;
  gate_.push(text, shown);
  show(shown);
}

void OutputParser::show(std::string_view gated) {
  std::string text;
  stop_.push(gated, text);
  emit(OutputEvent::Kind::content, text);
  if (stop_.matched() >= 0) state_ = State::done;
}

void OutputParser::emit(OutputEvent::Kind kind, std::string_view text) {
  if (text.empty() && kind != OutputEvent::Kind::call_end) return;
  const bool is_delta = kind != OutputEvent::Kind::call_begin && kind != OutputEvent::Kind::call_end;
  const bool is_call = kind != OutputEvent::Kind::reasoning && kind != OutputEvent::Kind::content;
  const int call = is_call ? n_calls_ - 1 : -1;
  if (is_delta && !out_->empty() && out_->back().kind == kind && out_->back().call == call)
    out_->back().text += text;
  else out_->push_back({kind, call, std::string(text)});
}

// What may become a call
// ---------------------------------------------------------------------------------------------

void OutputParser::begin_probe(std::string_view raw) {
  state_ = State::probe;
  held_ = raw;
  probed_name_.clear();
  probe_is_bare_ = false;
  lexer_.set_mode(Mode::call);
}

// It was no call: what was held is text.
void OutputParser::release_probe() {
  const std::string text = std::exchange(held_, {});
  go_outside(outer_);
  if (outer_ == Outer::thinking) reasoning(text);
  else content(text);
}

void OutputParser::in_probe(const Lexeme& lexeme) {
  if (lexeme.kind == Kind::space) {
    held_ += lexeme.raw;
    return;
  }
  if (probed_name_.empty()) {  // <tool_call>
    if (lexeme.kind == Kind::open_function) {
      if (tools_.find(lexeme.name) != nullptr) return begin_call(lexeme.name);
      held_ += lexeme.raw;
      if (outer_ == Outer::thinking) return release_probe();
      probed_name_ = lexeme.name;
      return;
    }
    if (lexeme.kind == Kind::text && lexeme.raw.starts_with('{')) {
      state_ = State::json;
      json_begin_ = held_.size();
      json_depth_ = 0;
      json_in_string_ = json_escaped_ = false;
      lexer_.set_mode(Mode::single);
      return in_json(lexeme);
    }
  } else {  // a function's tag that needs something of a call after it
    const bool part_follows = lexeme.kind == Kind::open_parameter || lexeme.kind == Kind::close_function;
    const bool closes = lexeme.kind == Kind::end || lexeme.is_control(ControlTag::call_close);
    if (part_follows || (probe_is_bare_ && closes)) {
      begin_call(std::string(probed_name_));
      return handle(lexeme);
    }
  }
  release_probe();
  handle(lexeme);
}

// False once the object is complete.
bool OutputParser::read_json(char c) {
  held_ += c;
  if (json_in_string_) {
    if (json_escaped_) json_escaped_ = false;
    else if (c == '\\') json_escaped_ = true;
    else if (c == '"') json_in_string_ = false;
  } else if (c == '"') {
    json_in_string_ = true;
  } else if (c == '{' || c == '[') {
    ++json_depth_;
  } else if (c == '}' || c == ']') {
    --json_depth_;
  }
  return json_depth_ > 0;
}

void OutputParser::in_json(const Lexeme& lexeme) {
  const bool is_text = lexeme.kind == Kind::text;
  const bool is_thinking_tag =
      lexeme.is_control(ControlTag::think_open) || lexeme.is_control(ControlTag::think_close);
  if (!is_text && !(is_thinking_tag && json_in_string_)) {
    release_probe();
    return handle(lexeme);
  }
  for (size_t i = 0; i < lexeme.raw.size(); ++i) {
    if (read_json(lexeme.raw[i])) continue;
    finish_json();
    if (i + 1 < lexeme.raw.size()) handle({.kind = Kind::text, .raw = lexeme.raw.substr(i + 1)});
    return;
  }
}

void OutputParser::finish_json() {
  const auto object = parse_json(std::string_view(held_).substr(json_begin_), kMaxValueDepth);
  const auto member = [&](const char* name) -> const ordered_json* {
    if (!object || !object->is_object()) return nullptr;
    const auto at = object->find(name);
    return at == object->end() ? nullptr : &*at;
  };
  const ordered_json* name = member("name");
  const ordered_json* arguments = member("arguments");
  std::optional<ordered_json> inner;  // arguments that are a string of JSON
  if (arguments != nullptr && arguments->is_string()) {
    inner = parse_json(arguments->get_ref<const std::string&>(), kMaxValueDepth);
    if (inner) arguments = &*inner;
  }
  const bool is_call =
      name != nullptr && name->is_string() && !name->get_ref<const std::string&>().empty() &&
      arguments != nullptr && arguments->is_object() &&
      (outer_ == Outer::prose || tools_.find(name->get_ref<const std::string&>()) != nullptr);
  if (!is_call) return release_probe();
  begin_call(name->get_ref<const std::string&>());
  emit(OutputEvent::Kind::call_arguments, dump_json(*arguments));
  emit(OutputEvent::Kind::call_end, {});
  ++n_complete_calls_;
  gate_.call_ended();
  wrapper_open_ = true;
  go_outside(Outer::prose);
}

// Calls
// --------------------------------------------------------------------------------------------------------------

void OutputParser::begin_call(std::string_view name) {
  held_.clear();
  gate_.drop_held();
  std::string rest;  // the head of a stop string that did not come
  stop_.flush(rest);
  emit(OutputEvent::Kind::content, rest);
  outer_ = Outer::prose;
  state_ = State::body;
  lexer_.set_mode(Mode::call);
  name_ = name;
  arguments_ = ArgumentsWriter(tools_.find(name));
  ++n_calls_;
  emit(OutputEvent::Kind::call_begin, name);
}

void OutputParser::end_call(bool wrapper_open) {
  std::string text;
  arguments_.close(text);
  emit(OutputEvent::Kind::call_arguments, text);
  emit(OutputEvent::Kind::call_end, {});
  ++n_complete_calls_;
  gate_.call_ended();
  wrapper_open_ = wrapper_open;
  go_outside(Outer::prose);
  lexer_.set_line_start();
}

void OutputParser::in_body(const Lexeme& lexeme) {
  if (lexeme.kind == Kind::open_parameter) {
    begin_value(lexeme.name);
  } else if (lexeme.kind == Kind::close_function) {
    end_call(true);
  } else if (lexeme.is_control(ControlTag::call_close)) {
    end_call(false);
  } else if (lexeme.kind == Kind::end || lexeme.is_control(ControlTag::call_open) ||
             (lexeme.kind == Kind::open_function && lexeme.at_line_start &&
              tools_.find(lexeme.name) != nullptr)) {
    end_call(false);
    handle(lexeme);
  }
}

void OutputParser::begin_value(std::string_view name) {
  std::string text;
  if (!arguments_.begin_value(name, text))
    log(LogLevel::notice, "call of {}: parameter {} comes twice, the first counts", name_, name);
  emit(OutputEvent::Kind::call_arguments, text);
  state_ = State::value;
  depth_ = 0;
}

void OutputParser::in_value(const Lexeme& lexeme) {
  const bool is_parameter = lexeme.kind == Kind::open_parameter;
  if (is_parameter && lexeme.at_line_start && arguments_.declares(lexeme.name) &&
      arguments_.is_unused(lexeme.name)) {
    tail_ = {};
    return end_tail(lexeme);
  }
  if (lexeme.kind == Kind::close_parameter)
    return begin_tail(depth_ > 0 ? Tail::Kind::nested : Tail::Kind::closed, lexeme);
  if (lexeme.kind == Kind::close_function || lexeme.is_control(ControlTag::call_close))
    return begin_tail(Tail::Kind::unclosed, lexeme);
  if (lexeme.kind == Kind::end) {
    tail_ = {};
    return end_tail(lexeme);
  }
  if (is_parameter && !arguments_.declares(lexeme.name)) ++depth_;
  std::string text;
  arguments_.append(lexeme.raw, text);
  emit(OutputEvent::Kind::call_arguments, text);
}

void OutputParser::begin_tail(Tail::Kind kind, const Lexeme& lexeme) {
  state_ = State::tail;
  tail_ = {kind, std::string(lexeme.raw), lexeme.kind == Kind::close_function,
           lexeme.is_control(ControlTag::call_close)};
}

void OutputParser::in_tail(const Lexeme& lexeme) {
  const bool closes_function = lexeme.kind == Kind::close_function;
  const bool closes_call = lexeme.is_control(ControlTag::call_close);
  const bool next_or_end = lexeme.kind == Kind::end || lexeme.is_control(ControlTag::call_open);
  const bool anything_closed = tail_.function_closed || tail_.call_closed;
  bool holds = lexeme.kind == Kind::space, ends = false;
  switch (tail_.kind) {
    case Tail::Kind::closed:
      holds |= lexeme.kind == Kind::close_parameter;
      ends = lexeme.kind == Kind::open_parameter || closes_function || closes_call || next_or_end;
      break;
    case Tail::Kind::nested:
      holds |= (closes_function && !anything_closed) || (closes_call && !tail_.call_closed);
      ends = next_or_end || (lexeme.kind == Kind::open_parameter && !anything_closed &&
                             arguments_.declares(lexeme.name) && arguments_.is_unused(lexeme.name));
      break;
    case Tail::Kind::unclosed:
      holds |= closes_call && !tail_.call_closed;
      ends = next_or_end;
      break;
  }
  if (holds) {
    tail_.raw += lexeme.raw;
    tail_.function_closed |= closes_function;
    tail_.call_closed |= closes_call;
    return;
  }
  if (ends) return end_tail(lexeme);
  // The value goes on, and what was held belongs to it.
  if (tail_.kind == Tail::Kind::nested) --depth_;
  std::string text;
  arguments_.append(tail_.raw, text);
  emit(OutputEvent::Kind::call_arguments, text);
  state_ = State::value;
  handle(lexeme);
}

// The value has ended; the closers that the tail holds and the lexeme after it are read as parts of the call.
void OutputParser::end_tail(const Lexeme& lexeme) {
  std::string text;
  arguments_.end_value(text);
  emit(OutputEvent::Kind::call_arguments, text);
  state_ = State::body;
  const Tail tail = std::exchange(tail_, {});
  if (tail.function_closed) handle({.kind = Kind::close_function, .raw = "</function>"});
  if (tail.call_closed)
    handle({.kind = Kind::control, .raw = spelling(ControlTag::call_close), .tag = ControlTag::call_close});
  handle(lexeme);
}

void ParsedOutput::add(const OutputEvent& event) {
  switch (event.kind) {
    case OutputEvent::Kind::reasoning:
      reasoning += event.text;
      break;
    case OutputEvent::Kind::content:
      content += event.text;
      break;
    case OutputEvent::Kind::call_begin:
      calls.push_back({event.text, {}, false, event.id});
      break;
    case OutputEvent::Kind::call_arguments:
      calls.at(static_cast<size_t>(event.call)).arguments += event.text;
      break;
    case OutputEvent::Kind::call_end:
      calls.at(static_cast<size_t>(event.call)).complete = true;
      break;
  }
}

}  // namespace lily::text
