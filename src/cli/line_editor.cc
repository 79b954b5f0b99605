#include "cli/line_editor.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/ioctl.h>
#include <sys/stat.h>
#include <termios.h>
#include <unistd.h>
#include <utf8proc.h>

#include <algorithm>
#include <cerrno>
#include <csignal>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <iostream>

namespace lily::cli {
namespace {

constexpr size_t kMaxHistory = 1000;                  // lines that the arrow keys reach
constexpr size_t kMaxHistoryBytes = size_t{1} << 20;  // of the file
constexpr int kEscapeWaitMs = 50;                     // a lone ESC key sends nothing more

bool is_continuation(char c) { return (static_cast<unsigned char>(c) & 0xC0) == 0x80; }

size_t character_bytes(char first) {
  const auto c = static_cast<unsigned char>(first);
  return c < 0x80 ? 1 : c < 0xE0 ? 2 : c < 0xF0 ? 3 : 4;
}

bool is_word_character(char c) {
  return static_cast<unsigned char>(c) >= 0x80 || std::isalnum(static_cast<unsigned char>(c)) || c == '_';
}

termios original;                      // as it was before the first change
volatile sig_atomic_t is_changed = 0;  // `original` is valid and to be restored

constexpr std::string_view kPasteOn = "\x1b[?2004h", kPasteOff = "\x1b[?2004l";

// Keys come one by one, unechoed, Enter as CR; Ctrl-C is a signal only if `signals`.
void set_keys(bool signals) {
  if (is_changed == 0) {
    tcgetattr(STDIN_FILENO, &original);
    is_changed = 1;
  }
  termios raw = original;
  raw.c_iflag &= ~static_cast<tcflag_t>(BRKINT | ICRNL | INPCK | ISTRIP | IXON);
  raw.c_cflag |= CS8;
  raw.c_lflag &= ~static_cast<tcflag_t>(ECHO | ICANON | IEXTEN);
  if (!signals) raw.c_lflag &= ~static_cast<tcflag_t>(ISIG);
  raw.c_cc[VMIN] = 1;
  raw.c_cc[VTIME] = 0;
  tcsetattr(STDIN_FILENO, TCSADRAIN, &raw);
}

// Editing for as long as this lives.
class RawMode {
 public:
  RawMode() {
    set_keys(false);
    put(kPasteOn);
  }
  ~RawMode() {
    put(kPasteOff);
    set_keys(true);
  }
  RawMode(const RawMode&) = delete;
  RawMode& operator=(const RawMode&) = delete;

  static void put(std::string_view text) {
    while (!text.empty()) {
      const ssize_t n = ::write(STDOUT_FILENO, text.data(), text.size());
      if (n < 0 && errno == EINTR) continue;
      if (n <= 0) return;
      text.remove_prefix(static_cast<size_t>(n));
    }
  }
};

int terminal_columns() {
  winsize size{};
  if (ioctl(STDOUT_FILENO, TIOCGWINSZ, &size) == 0 && size.ws_col > 0) return size.ws_col;
  return 80;
}

}  // namespace

// ---- EditBuffer

void EditBuffer::insert(std::string_view utf8) {
  text_.insert(cursor_, utf8);
  cursor_ += utf8.size();
}

void EditBuffer::left() {
  if (cursor_ == 0) return;
  do --cursor_;
  while (cursor_ > 0 && is_continuation(text_[cursor_]));
}

void EditBuffer::right() {
  if (cursor_ == text_.size()) return;
  do ++cursor_;
  while (cursor_ < text_.size() && is_continuation(text_[cursor_]));
}

void EditBuffer::backspace() {
  const size_t end = cursor_;
  left();
  text_.erase(cursor_, end - cursor_);
}

void EditBuffer::erase() {
  const size_t begin = cursor_;
  right();
  text_.erase(begin, cursor_ - begin);
  cursor_ = begin;
}

void EditBuffer::word_left() {
  while (cursor_ > 0 && !is_word_character(text_[cursor_ - 1])) --cursor_;
  while (cursor_ > 0 && is_word_character(text_[cursor_ - 1])) --cursor_;
}

void EditBuffer::word_right() {
  while (cursor_ < text_.size() && !is_word_character(text_[cursor_])) ++cursor_;
  while (cursor_ < text_.size() && is_word_character(text_[cursor_])) ++cursor_;
}

size_t EditBuffer::line_begin(size_t at) const {
  const size_t newline = at == 0 ? std::string::npos : text_.rfind('\n', at - 1);
  return newline == std::string::npos ? 0 : newline + 1;
}

size_t EditBuffer::line_finish(size_t at) const { return std::min(text_.find('\n', at), text_.size()); }

void EditBuffer::line_start() { cursor_ = line_begin(cursor_); }
void EditBuffer::line_end() { cursor_ = line_finish(cursor_); }

bool EditBuffer::line_up() {
  const size_t begin = line_begin(cursor_);
  if (begin == 0) return false;
  const size_t column = cursor_ - begin, above = line_begin(begin - 1);
  cursor_ = std::min(above + column, begin - 1);
  while (cursor_ > above && is_continuation(text_[cursor_])) --cursor_;
  return true;
}

bool EditBuffer::line_down() {
  const size_t end = line_finish(cursor_);
  if (end == text_.size()) return false;
  const size_t column = cursor_ - line_begin(cursor_);
  cursor_ = std::min(end + 1 + column, line_finish(end + 1));
  while (cursor_ > end + 1 && cursor_ < text_.size() && is_continuation(text_[cursor_])) --cursor_;
  return true;
}

void EditBuffer::erase_word() {
  const size_t end = cursor_;
  word_left();
  text_.erase(cursor_, end - cursor_);
}

void EditBuffer::erase_to_line_end() { text_.erase(cursor_, line_finish(cursor_) - cursor_); }

void EditBuffer::erase_to_line_start() {
  const size_t begin = line_begin(cursor_);
  text_.erase(begin, cursor_ - begin);
  cursor_ = begin;
}

void EditBuffer::set(std::string text) {
  text_ = std::move(text);
  cursor_ = text_.size();
}

// ---- KeyDecoder

void KeyDecoder::reset() { pending_.clear(); }

std::optional<Key> KeyDecoder::finish_escape(char last) {
  const std::string sequence = std::move(pending_);
  pending_.clear();
  using Kind = Key::Kind;
  const auto is = [&](std::string_view s) { return sequence == s; };
  if (is("\x1b[200~")) {
    in_paste_ = true;
    paste_.clear();
    return std::nullopt;
  }
  if (is("\x1b[1;5D") || is("\x1b[1;3D") ||
      is("\x1b"
         "b"))
    return Key{Kind::word_left, {}};
  if (is("\x1b[1;5C") || is("\x1b[1;3C") ||
      is("\x1b"
         "f"))
    return Key{Kind::word_right, {}};
  if (is("\x1b[1~") || is("\x1b[7~")) return Key{Kind::home, {}};
  if (is("\x1b[4~") || is("\x1b[8~")) return Key{Kind::end, {}};
  if (is("\x1b[3~")) return Key{Kind::erase, {}};
  if (is("\x1b\r") || is("\x1b\n")) return Key{Kind::newline, {}};
  if (is("\x1b\x7f")) return Key{Kind::erase_word, {}};
  if (sequence.size() == 3) {  // ESC [ X and ESC O X
    switch (last) {
      case 'A':
        return Key{Kind::up, {}};
      case 'B':
        return Key{Kind::down, {}};
      case 'C':
        return Key{Kind::right, {}};
      case 'D':
        return Key{Kind::left, {}};
      case 'H':
        return Key{Kind::home, {}};
      case 'F':
        return Key{Kind::end, {}};
      default:
        break;
    }
  }
  return std::nullopt;
}

std::optional<Key> KeyDecoder::push(char byte) {
  using Kind = Key::Kind;
  if (in_paste_) {
    constexpr std::string_view kEnd = "\x1b[201~";
    paste_ += byte;
    if (paste_.size() < kEnd.size() || std::string_view(paste_).substr(paste_.size() - kEnd.size()) != kEnd)
      return std::nullopt;
    paste_.resize(paste_.size() - kEnd.size());
    in_paste_ = false;
    std::string text;  // terminals send line ends as CR
    for (size_t i = 0; i < paste_.size(); ++i) {
      if (paste_[i] == '\r') {
        text += '\n';
        if (i + 1 < paste_.size() && paste_[i + 1] == '\n') ++i;
      } else if (static_cast<unsigned char>(paste_[i]) >= 0x20 || paste_[i] == '\n' || paste_[i] == '\t') {
        text += paste_[i];
      }
    }
    return Key{Kind::text, std::move(text)};
  }
  if (!pending_.empty() && pending_[0] == '\x1b') {
    pending_ += byte;
    if (pending_.size() == 2) {
      if (byte == '[' || byte == 'O') return std::nullopt;
      return finish_escape(byte);
    }
    const bool is_final = byte >= 0x40 && byte <= 0x7e;
    if (is_final || pending_.size() > 16) return finish_escape(byte);
    return std::nullopt;
  }
  if (!pending_.empty()) {  // inside a character
    if (!is_continuation(byte)) {
      pending_.clear();
      return push(byte);
    }
    pending_ += byte;
    if (pending_.size() < character_bytes(pending_[0])) return std::nullopt;
    Key key{Kind::text, std::move(pending_)};
    pending_.clear();
    return key;
  }
  switch (byte) {
    case '\x1b':
      pending_ = byte;
      return std::nullopt;
    case '\r':
      return Key{Kind::enter, {}};
    case '\n':
      return Key{Kind::newline, {}};
    case '\t':
      return Key{Kind::text, "\t"};
    case 0x7f:
    case 0x08:
      return Key{Kind::backspace, {}};
    case 0x01:
      return Key{Kind::home, {}};
    case 0x02:
      return Key{Kind::left, {}};
    case 0x03:
      return Key{Kind::interrupt, {}};
    case 0x04:
      return Key{Kind::end_of_input, {}};
    case 0x05:
      return Key{Kind::end, {}};
    case 0x06:
      return Key{Kind::right, {}};
    case 0x0b:
      return Key{Kind::erase_to_end, {}};
    case 0x0c:
      return Key{Kind::clear_screen, {}};
    case 0x0e:
      return Key{Kind::down, {}};
    case 0x10:
      return Key{Kind::up, {}};
    case 0x15:
      return Key{Kind::erase_to_start, {}};
    case 0x17:
      return Key{Kind::erase_word, {}};
    default:
      break;
  }
  const auto c = static_cast<unsigned char>(byte);
  if (c < 0x20 || is_continuation(byte) || c >= 0xF8) return std::nullopt;
  if (c < 0x80) return Key{Kind::text, std::string(1, byte)};
  pending_ = byte;
  return std::nullopt;
}

// ---- LineEditor

int display_width(std::string_view text) {
  int width = 0;
  const auto* at = reinterpret_cast<const utf8proc_uint8_t*>(text.data());
  auto left = static_cast<utf8proc_ssize_t>(text.size());
  while (left > 0) {
    utf8proc_int32_t code_point = 0;
    const utf8proc_ssize_t n = utf8proc_iterate(at, left, &code_point);
    if (n <= 0) {
      ++width;  // a broken byte shows as one replacement character
      ++at;
      --left;
      continue;
    }
    width += std::max(0, utf8proc_charwidth(code_point));
    at += n;
    left -= n;
  }
  return width;
}

void restore_terminal() {
  if (is_changed == 0) return;
  is_changed = 0;
  [[maybe_unused]] const ssize_t n = ::write(STDOUT_FILENO, kPasteOff.data(), kPasteOff.size());
  tcsetattr(STDIN_FILENO, TCSANOW, &original);
}

TypedAhead::TypedAhead() {
  if (!isatty(STDIN_FILENO) || !isatty(STDOUT_FILENO)) return;
  // The terminal has made line feeds of their Enter keys, which would read as line breaks inside a message.
  char line[4096];
  for (pollfd typed{STDIN_FILENO, POLLIN, 0}; poll(&typed, 1, 0) == 1;) {
    const ssize_t n = ::read(STDIN_FILENO, line, sizeof line);
    if (n > 0) keys_.append(line, static_cast<size_t>(n));
    else if (n == 0) keys_ += '\x04';  // Ctrl-D
    if (n <= 0) break;
  }
  std::replace(keys_.begin(), keys_.end(), '\n', '\r');
  set_keys(true);
}
TypedAhead::~TypedAhead() { restore_terminal(); }

LineEditor::~LineEditor() { restore_terminal(); }

void LineEditor::add_history(const std::string& line) {
  if (line.empty() || (!history_.empty() && history_.back() == line)) return;
  history_.push_back(line);
  if (history_.size() > kMaxHistory) history_.erase(history_.begin());
}

void LineEditor::load_history(const std::string& path) {
  std::ifstream in(path);
  std::string escaped;
  while (std::getline(in, escaped)) {
    std::string line;
    for (size_t i = 0; i < escaped.size(); ++i) {
      if (escaped[i] == '\\' && i + 1 < escaped.size()) line += escaped[++i] == 'n' ? '\n' : escaped[i];
      else line += escaped[i];
    }
    add_history(line);
  }
}

bool LineEditor::append_history(const std::string& path, const std::string& line) {
  std::string entry;
  for (const char c : line) {
    if (c == '\n') entry += "\\n";
    else if (c == '\\') entry += "\\\\";
    else entry += c;
  }
  entry += '\n';
  // One write at the end of the file: programs that run side by side do not lose each other's lines.
  const int fd = ::open(path.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, S_IRUSR | S_IWUSR);
  if (fd < 0) return false;
  const bool written = ::write(fd, entry.data(), entry.size()) == static_cast<ssize_t>(entry.size());
  return ::close(fd) == 0 && written;
}

void LineEditor::shorten_history(const std::string& path) {
  std::error_code error;
  const auto n_bytes = std::filesystem::file_size(path, error);
  if (error || n_bytes <= kMaxHistoryBytes) return;
  std::vector<std::string> entries;
  {
    std::ifstream in(path);
    for (std::string entry; std::getline(in, entry);) entries.push_back(std::move(entry));
  }
  // The newest half of the bytes stays.
  size_t first = entries.size(), kept = 0;
  while (first > 0 && kept + entries[first - 1].size() + 1 <= kMaxHistoryBytes / 2)
    kept += entries[--first].size() + 1;
  const std::string aside = path + ".new";
  const int fd = ::open(aside.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, S_IRUSR | S_IWUSR);
  if (fd < 0) return;  // another program is at it
  std::string text;
  for (; first < entries.size(); ++first) text += entries[first] + '\n';
  const bool written = ::write(fd, text.data(), text.size()) == static_cast<ssize_t>(text.size());
  if (::close(fd) == 0 && written) std::filesystem::rename(aside, path, error);
  else std::filesystem::remove(aside, error);
}

void LineEditor::draw(std::string_view prompt, const EditBuffer& buffer) {
  const int columns = terminal_columns();
  std::string out;
  if (drawn_cursor_row_ > 0) out += "\x1b[" + std::to_string(drawn_cursor_row_) + "A";
  out += "\r\x1b[J";
  const std::string indent(static_cast<size_t>(display_width(prompt)), ' ');
  out += prompt;

  int row = 0, column = display_width(prompt), cursor_row = 0, cursor_column = column;
  const std::string& text = buffer.text();
  for (size_t i = 0; i < text.size();) {
    if (i == buffer.cursor()) cursor_row = row, cursor_column = column;
    if (text[i] == '\n') {
      out += "\r\n" + indent;
      ++row;
      column = static_cast<int>(indent.size());
      ++i;
      continue;
    }
    size_t n = 1;
    while (i + n < text.size() && is_continuation(text[i + n])) ++n;
    const bool is_tab = text[i] == '\t';
    const std::string shown = is_tab ? "    " : text.substr(i, n);
    const int width = is_tab ? 4 : display_width(shown);
    if (column + width > columns) {
      out += "\r\n";
      ++row;
      column = 0;
      if (i == buffer.cursor()) cursor_row = row, cursor_column = column;
    }
    out += shown;
    column += width;
    i += n;
  }
  if (buffer.cursor() == text.size()) {
    if (column >= columns) {
      out += "\r\n";
      ++row;
      column = 0;
    }
    cursor_row = row, cursor_column = column;
  }
  if (row > cursor_row) out += "\x1b[" + std::to_string(row - cursor_row) + "A";
  out += '\r';
  if (cursor_column > 0) out += "\x1b[" + std::to_string(cursor_column) + "C";
  drawn_cursor_row_ = cursor_row;
  RawMode::put(out);
}

LineEditor::Result LineEditor::read(std::string_view prompt, std::string& line) {
  if (isatty(STDIN_FILENO) && isatty(STDOUT_FILENO)) return read_terminal(prompt, line);
  return std::getline(std::cin, line) ? Result::line : Result::end_of_input;
}

ssize_t LineEditor::next_byte(char& byte) {
  if (given_.empty()) return ::read(STDIN_FILENO, &byte, 1);
  byte = given_.front();
  given_.erase(0, 1);
  return 1;
}

LineEditor::Result LineEditor::read_terminal(std::string_view prompt, std::string& line) {
  using Kind = Key::Kind;
  const RawMode raw;
  EditBuffer buffer;
  KeyDecoder decoder;
  size_t at = history_.size();
  std::string draft;  // what was typed before the history was opened
  drawn_cursor_row_ = 0;
  draw(prompt, buffer);

  const auto finish = [&](Result result) {
    buffer.set(buffer.text());  // cursor to the end, so that the next output starts below
    draw(prompt, buffer);
    RawMode::put("\r\n");
    return result;
  };
  if (was_interrupted_ && was_interrupted_()) return finish(Result::interrupted);
  bool in_escape = false;
  while (true) {
    if (in_escape && given_.empty()) {
      pollfd waiting{STDIN_FILENO, POLLIN, 0};
      if (poll(&waiting, 1, kEscapeWaitMs) == 0) {
        decoder.reset();
        in_escape = false;
      }
    }
    char byte = 0;
    const ssize_t n = next_byte(byte);
    if (n < 0 && errno == EINTR) {
      draw(prompt, buffer);  // most likely the window changed its size
      continue;
    }
    if (n <= 0) return finish(Result::end_of_input);
    const std::optional<Key> key = decoder.push(byte);
    in_escape = !key && byte == '\x1b';
    if (!key) continue;

    switch (key->kind) {
      case Kind::text:
        buffer.insert(key->text);
        break;
      case Kind::newline:
        buffer.insert("\n");
        break;
      case Kind::enter:
        // A backslash at the end of a line continues the message on the next one.
        if (!buffer.text().empty() && buffer.cursor() == buffer.text().size() &&
            buffer.text().back() == '\\') {
          buffer.backspace();
          buffer.insert("\n");
          break;
        }
        line = buffer.text();
        return finish(Result::line);
      case Kind::backspace:
        buffer.backspace();
        break;
      case Kind::erase:
        buffer.erase();
        break;
      case Kind::left:
        buffer.left();
        break;
      case Kind::right:
        buffer.right();
        break;
      case Kind::word_left:
        buffer.word_left();
        break;
      case Kind::word_right:
        buffer.word_right();
        break;
      case Kind::home:
        buffer.line_start();
        break;
      case Kind::end:
        buffer.line_end();
        break;
      case Kind::erase_word:
        buffer.erase_word();
        break;
      case Kind::erase_to_end:
        buffer.erase_to_line_end();
        break;
      case Kind::erase_to_start:
        buffer.erase_to_line_start();
        break;
      case Kind::clear_screen:
        RawMode::put("\x1b[H\x1b[2J");
        drawn_cursor_row_ = 0;
        break;
      case Kind::up:
        if (buffer.line_up() || at == 0) break;
        if (at == history_.size()) draft = buffer.text();
        buffer.set(history_[--at]);
        break;
      case Kind::down:
        if (buffer.line_down() || at == history_.size()) break;
        ++at;
        buffer.set(at == history_.size() ? draft : history_[at]);
        break;
      case Kind::interrupt:
        return finish(Result::interrupted);
      case Kind::end_of_input:
        if (buffer.text().empty()) return finish(Result::end_of_input);
        buffer.erase();
        break;
    }
    draw(prompt, buffer);
  }
}

}  // namespace lily::cli
