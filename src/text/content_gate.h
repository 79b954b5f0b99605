// Decides which white space and stray tags around an answer's text are part of it.
#pragma once

#include <string>
#include <string_view>

namespace lily::text {

// Text comes in through push() and leaves through `out`, which is appended to. White space before the first
// text is held until text follows, then loses its leading newlines. After a call, white space and closing
// tags (`</name>`) are held until other text follows; if none does, they are dropped.
class ContentGate {
 public:
  // With keep_newlines the text continues what is there already, and its leading newlines are kept.
  explicit ContentGate(bool keep_newlines) : keep_newlines_(keep_newlines) {}

  void push(std::string_view text, std::string& out);
  // A closing tag that came as a token of its own.
  void push_closing_tag(std::string_view tag, std::string& out);
  void drop_held();
  void call_ended();
  void finish(std::string& out);

 private:
  enum class Mode { leading, open, after_call };

  void open(std::string& out);
  // Reads one character of a closing tag; false if it is none.
  bool extend_tag(char c);

  Mode mode_ = Mode::leading;
  bool keep_newlines_;  // from the first text on
  std::string held_;    // white space and whole closing tags
  std::string tag_;     // the beginning of a closing tag
};

}  // namespace lily::text
