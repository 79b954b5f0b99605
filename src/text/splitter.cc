#include "text/splitter.h"

#include "text/unicode.h"

namespace lily::text {

const std::string_view kSplitPattern =
    R"((?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+)";

namespace {

struct Char {
  char32_t code_point;  // 0xFFFD for an invalid byte
  CharClass char_class;
  size_t n_bytes;  // 0 at the end of the text

  bool end() const { return n_bytes == 0; }
  bool in_word() const {
    return !end() && (char_class == CharClass::letter || char_class == CharClass::mark);
  }
  bool is_space() const { return !end() && char_class == CharClass::space; }
  bool is_symbol() const { return !end() && char_class == CharClass::symbol; }
  bool ends_line() const { return !end() && (code_point == '\r' || code_point == '\n'); }
};

Char char_at(std::string_view text, size_t pos) {
  if (pos >= text.size()) return {0, CharClass::symbol, 0};
  const Utf8Step step = decode_utf8(text, pos);
  if (!step.valid()) return {0xfffd, CharClass::symbol, 1};
  return {step.code_point, char_class(step.code_point), step.n_bytes};
}

template <typename Predicate>
size_t skip_while(std::string_view text, size_t pos, Predicate predicate) {
  for (;;) {
    const Char c = char_at(text, pos);
    if (!predicate(c)) return pos;
    pos += c.n_bytes;
  }
}

// Ignoring case as Unicode does, under which the long s (U+017F) is an s.
char32_t folded(const Char& c) {
  if (c.end()) return 0;
  if (c.code_point == 0x17f) return 's';
  return c.code_point >= 'A' && c.code_point <= 'Z' ? c.code_point + 32 : c.code_point;
}

// Bytes of 's 't 're 've 'm 'll 'd at `pos`, which holds an apostrophe; 0 if none stands there.
size_t contraction_size(std::string_view text, size_t pos) {
  const Char first = char_at(text, pos + 1);
  const char32_t a = folded(first);
  if (a == 's' || a == 't' || a == 'm' || a == 'd') return 1 + first.n_bytes;
  const Char second = char_at(text, pos + 1 + first.n_bytes);
  const char32_t b = folded(second);
  if (((a == 'r' || a == 'v') && b == 'e') || (a == 'l' && b == 'l'))
    return 1 + first.n_bytes + second.n_bytes;
  return 0;
}

size_t space_end(std::string_view text, size_t pos) {
  size_t end = pos, line_end = pos, last_begin = pos;
  for (;;) {
    const Char c = char_at(text, end);
    if (!c.is_space()) break;
    last_begin = end;
    end += c.n_bytes;
    if (c.ends_line()) line_end = end;
  }
  if (line_end > pos) return line_end;  // \s*[\r\n]+ reaches to the last line end of the run
  if (end == text.size() || last_begin == pos) return end;  // \s+(?!\S) takes all, or \s+ takes the only one
  return last_begin;                                        // \s+(?!\S) leaves one for the piece that follows
}

}  // namespace

size_t piece_size(std::string_view text, size_t pos) {
  const auto in_word = [](const Char& c) { return c.in_word(); };
  const Char first = char_at(text, pos);
  if (first.code_point == '\'')
    if (const size_t n = contraction_size(text, pos)) return n;

  if (first.in_word()) return skip_while(text, pos, in_word) - pos;
  if (first.char_class == CharClass::number) return first.n_bytes;
  const Char second = char_at(text, pos + first.n_bytes);
  if (!first.ends_line() && second.in_word()) return skip_while(text, pos + first.n_bytes, in_word) - pos;

  if (first.is_symbol() || (first.code_point == ' ' && second.is_symbol())) {
    const size_t symbols = skip_while(text, pos + first.n_bytes, [](const Char& c) { return c.is_symbol(); });
    return skip_while(text, symbols, [](const Char& c) { return c.ends_line(); }) - pos;
  }
  return space_end(text, pos) - pos;
}

}  // namespace lily::text
