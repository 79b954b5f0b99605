// UTF-8, character classes, NFC and the white space that Python strips.
//
// Text from outside may hold invalid UTF-8. Nothing here fails on it: an invalid byte counts as one symbol,
// is left alone by NFC and thus survives encoding to tokens and back (Tokenizer::decode_bytes;
// Tokenizer::decode shows U+FFFD).
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

#include "text/unicode_tables.h"

namespace lily::text {

inline constexpr std::string_view kReplacement = "\xEF\xBF\xBD";  // U+FFFD

// What stands at one position of a byte string.
struct Utf8Step {
  enum class Kind : uint8_t {
    valid,
    invalid,    // `n_bytes` bytes form a maximal part that no character begins with: one U+FFFD stands for it
    truncated,  // the text ends within a character that is valid so far
  };
  Kind kind;
  uint8_t n_bytes;      // >= 1
  char32_t code_point;  // if valid

  bool valid() const { return kind == Kind::valid; }
};

// `pos` must be less than text.size().
Utf8Step decode_utf8(std::string_view text, size_t pos);

// Appends a code point; it must be a Unicode scalar value.
void append_utf8(char32_t code_point, std::string& out);

// Each maximal invalid part becomes U+FFFD.
std::string replace_invalid_utf8(std::string_view text);

CharClass char_class(char32_t code_point);

// True if NFC certainly leaves the text as it is, which a cheap look can tell for most text.
bool is_plainly_nfc(std::string_view text);

// Normalisation form C, by the Unicode version of the utf8proc that is linked. Time is O(n log n) whatever
// the text; invalid bytes stay and keep their neighbours apart.
std::string to_nfc(std::string_view text);

// Python's str.strip(), which is also Jinja's `trim`: White_Space and U+001C to U+001F.
std::string_view strip(std::string_view text);

// Python's lstrip("\n") and rstrip("\n").
std::string_view strip_leading_newlines(std::string_view text);
std::string_view strip_trailing_newlines(std::string_view text);

}  // namespace lily::text
