// Preprocessed Metal source as tokens, each with the white space before it, so that a rewritten file keeps
// its lines.
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace lily::emulator {

struct Token {
  enum class Kind { word, number, text, mark, directive, end };
  Kind kind = Kind::end;
  std::string text;
  std::string space;  // before the token
  std::string file;
  int line = 0;  // in `file`, as the preprocessor's line markers have it

  bool is(std::string_view s) const { return text == s; }
};

// "[[", "]]" and "::" are one token each, every other mark is a token of its own. The last token is an `end`.
std::vector<Token> tokenize(const std::string& source);

// Index of the token that closes the bracket at `open`; the last token if none does.
size_t matching(const std::vector<Token>& tokens, size_t open);

// Text of tokens [first, last), without comments and with single spaces where there was any.
std::string joined(const std::vector<Token>& tokens, size_t first, size_t last);

}  // namespace lily::emulator
