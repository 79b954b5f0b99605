// Cuts a model's output into text and the tags of its call syntax, however the text is divided into pieces.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

namespace lily::text {

// Tags that are tokens of their own. Only the token counts; the same characters in text are text.
enum class ControlTag : uint8_t { think_open, think_close, call_open, call_close };

std::string_view spelling(ControlTag tag);

struct Lexeme {
  enum class Kind : uint8_t {
    text,             // never white space only in Mode::call
    space,            // white space, in Mode::call
    open_function,    // <function=name>
    close_function,   // </function>
    open_parameter,   // <parameter=name>
    close_parameter,  // </parameter>
    control,
    end,  // of the output
  };
  Kind kind = Kind::text;
  std::string_view raw = {};   // as written
  std::string_view name = {};  // of open_function and open_parameter
  ControlTag tag = ControlTag::think_open;
  bool at_line_start = false;  // of tags

  bool is_control(ControlTag wanted) const { return kind == Kind::control && tag == wanted; }
};

// Pushes lexemes to a sink, which may change the mode for what follows. At most one unfinished tag is held
// back.
class OutputLexer {
 public:
  enum class Mode : uint8_t {
    plain,   // everything is text
    single,  // the same, one byte a lexeme
    prose,   // <function=name> counts at the start of a line
    call,    // all tags count, and white space is told from other text
  };

  void set_mode(Mode mode) { mode_ = mode; }
  // The next character begins a line.
  void set_line_start() { at_line_start_ = true; }

  // `sink` is called with each Lexeme; its views live until it returns.
  template <typename Sink>
  void push(std::string_view text, Sink&& sink) {
    while (!text.empty()) {
      const Step step = next(text);
      text.remove_prefix(step.n_read);
      if (step.has_lexeme) sink(lexeme_);
    }
  }
  // Ends an unfinished tag, which is text then.
  template <typename Sink>
  void flush(Sink&& sink) {
    if (partial_.empty()) return;
    release_partial();
    sink(lexeme_);
  }
  void control_seen() { at_line_start_ = false; }

 private:
  struct Step {
    size_t n_read;
    bool has_lexeme;
  };
  Step next(std::string_view text);
  Step extend_tag(char c);
  Step run(std::string_view text);
  bool may_begin_tag() const;
  void release_partial();

  Mode mode_ = Mode::plain;
  bool at_line_start_ = true;
  std::string partial_;  // of a tag, from its "<"
  bool partial_line_start_ = false;
  std::string emitted_;  // what lexeme_ refers to
  Lexeme lexeme_;
};

}  // namespace lily::text
