// The interactive chat, and how answers look on a terminal.
#pragma once

#include <nlohmann/json_fwd.hpp>
#include <string>

#include "cli/answer.h"

namespace lily::cli {

// Writes an answer as it comes: thinking dimmed, on a terminal only, and calls on lines of their own. Control
// characters that a model might write to confuse a terminal are shown, not sent.
class AnswerPrinter {
 public:
  AnswerPrinter();
  void print(const text::OutputEvent& event);
  void finish();  // ends the last line

 private:
  void switch_to(text::OutputEvent::Kind kind);
  bool colour_, shows_thinking_;
  bool has_output_ = false, ends_line_ = true;
  bool dimmed_ = false;
  bool in_content_ = false;
};

// Text without control characters except line breaks and tabs, each of the others as U+FFFD, if stdout is a
// terminal.
std::string safe_for_terminal(std::string_view text);

// One line on stderr: tokens, speeds, time to the first token.
void print_statistics(const Answer& answer);

// Reads messages and answers them until /quit or Ctrl-D; the first from the keys that were typed ahead.
// `keeps_history`: prompts of this and earlier chats, in a file. Returns the exit code.
int chat(engine::Assistant& assistant, const AnswerOptions& options, const std::string& system,
         const nlohmann::ordered_json& tools, const std::string& typed_ahead, bool keeps_history);

}  // namespace lily::cli
