// A small line editor for the interactive chat: history, cursor keys, UTF-8, multi-line input and bracketed
// paste, so that a pasted prompt is not sent line by line. On anything but a terminal it reads plain lines.
#pragma once

#include <sys/types.h>

#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace lily::cli {

// The text being edited, without a terminal: keys in, text and cursor out.
class EditBuffer {
 public:
  const std::string& text() const { return text_; }
  size_t cursor() const { return cursor_; }  // byte offset, always between characters

  void insert(std::string_view utf8);
  void backspace();
  void erase();  // the character under the cursor
  void left();
  void right();
  void word_left();
  void word_right();
  void line_start();
  void line_end();
  bool line_up();     // false on the first line
  bool line_down();   // false on the last line
  void erase_word();  // before the cursor
  void erase_to_line_end();
  void erase_to_line_start();
  void set(std::string text);  // cursor at the end

 private:
  size_t line_begin(size_t at) const;
  size_t line_finish(size_t at) const;
  std::string text_;
  size_t cursor_ = 0;
};

// Keys as a terminal sends them, decoded byte by byte.
struct Key {
  enum class Kind {
    text,  // `text` holds one character, or a whole paste
    enter,
    newline,  // Alt-Enter or Ctrl-J: a line break inside the message
    backspace,
    erase,
    left,
    right,
    word_left,
    word_right,
    up,
    down,
    home,
    end,
    erase_word,
    erase_to_end,
    erase_to_start,
    clear_screen,
    interrupt,    // Ctrl-C
    end_of_input  // Ctrl-D
  };
  Kind kind = Kind::text;
  std::string text;
};

class KeyDecoder {
 public:
  // Feeds one byte; returns a key when it completes one. Unknown sequences are dropped.
  std::optional<Key> push(char byte);
  // A lone ESC has no end: called when no further byte came in time.
  void reset();

 private:
  std::optional<Key> finish_escape(char last);
  std::string pending_;  // an escape sequence or an incomplete character
  std::string paste_;
  bool in_paste_ = false;
};

// Before the first read() too, while this lives, keys go unechoed and unchanged to it: what is typed while a
// model loads, Enter included, is its first line. Ctrl-C is a signal.
class TypedAhead {
 public:
  TypedAhead();
  // Whole lines that were typed even before this, as keys.
  std::string take() { return std::move(keys_); }
  ~TypedAhead();
  TypedAhead(const TypedAhead&) = delete;
  TypedAhead& operator=(const TypedAhead&) = delete;

 private:
  std::string keys_;
};

class LineEditor {
 public:
  // From the first read() on, until this is destroyed, keys go unechoed and unchanged to the next read(), so
  // that what is typed during an answer is not lost; Ctrl-C is a signal outside read() and a key inside.
  // `was_interrupted`: whether a signal came that nobody has answered; asked once it cannot come any more.
  explicit LineEditor(std::function<bool()> was_interrupted = {})
      : was_interrupted_(std::move(was_interrupted)) {}
  ~LineEditor();
  LineEditor(const LineEditor&) = delete;
  LineEditor& operator=(const LineEditor&) = delete;

  enum class Result { line, interrupted, end_of_input };
  // Shows the prompt and edits one message, which may hold line breaks. `line` is valid with Result::line.
  Result read(std::string_view prompt, std::string& line);

  // Keys for the next read(), before those of the terminal.
  void give(std::string_view keys) { given_ += keys; }

  void add_history(const std::string& line);
  const std::vector<std::string>& history() const { return history_; }
  // One entry a line, line breaks and backslashes escaped. Missing or unreadable files are an empty history.
  void load_history(const std::string& path);
  // Adds a line to the file, which only its owner may read; false if it cannot be written.
  static bool append_history(const std::string& path, const std::string& line);
  // Cuts a file that has grown too long to its newest lines.
  static void shorten_history(const std::string& path);

 private:
  Result read_terminal(std::string_view prompt, std::string& line);
  void draw(std::string_view prompt, const EditBuffer& buffer);
  // read() of one byte.
  ssize_t next_byte(char& byte);

  std::function<bool()> was_interrupted_;
  std::string given_;
  std::vector<std::string> history_;
  int drawn_cursor_row_ = 0;  // where the last draw left the cursor, in rows below the prompt's first
};

// Gives the terminal back as it was before the first read(). Safe in a signal handler.
void restore_terminal();

// Columns that a UTF-8 text takes on a terminal.
int display_width(std::string_view text);

}  // namespace lily::cli
