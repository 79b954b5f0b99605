#include "emulator/rewriter/token.h"

#include <algorithm>
#include <cctype>

namespace lily::emulator {

namespace {

bool is_digit(char c) { return std::isdigit(static_cast<unsigned char>(c)) != 0; }
bool is_word(char c) { return std::isalnum(static_cast<unsigned char>(c)) != 0 || c == '_'; }

// One past the number that starts at `i`: digits, letters, points, and signs after an exponent's letter.
size_t end_of_number(const std::string& s, size_t i) {
  const bool hexadecimal = s.compare(i, 2, "0x") == 0 || s.compare(i, 2, "0X") == 0;
  while (i < s.size()) {
    const char c = s[i];
    const bool exponent = hexadecimal ? c == 'p' || c == 'P' : c == 'e' || c == 'E';
    if (exponent && i + 1 < s.size() && (s[i + 1] == '+' || s[i + 1] == '-')) i += 2;
    else if (is_word(c) || c == '.') ++i;
    else break;
  }
  return i;
}

size_t end_of_text(const std::string& s, size_t i) {
  const char quote = s[i++];
  while (i < s.size() && s[i] != quote) i += s[i] == '\\' ? 2 : 1;
  return std::min(i + 1, s.size());
}

// `# 12 "name"` says what the following line is.
bool parse_line_marker(const std::string& directive, int& line, std::string& file) {
  size_t i = 1;
  if (directive.compare(0, 5, "#line") == 0) i = 5;
  while (i < directive.size() && directive[i] == ' ') ++i;
  if (i >= directive.size() || !is_digit(directive[i])) return false;
  line = 0;
  while (i < directive.size() && is_digit(directive[i])) line = line * 10 + (directive[i++] - '0');
  const size_t open = directive.find('"', i);
  if (open == std::string::npos) return true;
  file = directive.substr(open + 1, directive.find('"', open + 1) - open - 1);
  return true;
}

}  // namespace

std::vector<Token> tokenize(const std::string& source) {
  std::vector<Token> tokens;
  std::string space, file = "?";
  int line = 1;
  size_t i = 0;
  const auto add = [&](Token::Kind kind, size_t end) {
    tokens.push_back({kind, source.substr(i, end - i), space, file, line});
    space.clear();
    i = end;
  };
  while (i < source.size()) {
    const char c = source[i];
    if (std::isspace(static_cast<unsigned char>(c))) {
      if (c == '\n') ++line;
      space += c;
      ++i;
    } else if (c == '#') {
      add(Token::Kind::directive, std::min(source.find('\n', i), source.size()));
      int next = 0;
      if (parse_line_marker(tokens.back().text, next, file)) line = next - 1;
    } else if (is_digit(c) || (c == '.' && i + 1 < source.size() && is_digit(source[i + 1]))) {
      add(Token::Kind::number, end_of_number(source, i));
    } else if (is_word(c)) {
      size_t end = i;
      while (end < source.size() && is_word(source[end])) ++end;
      add(Token::Kind::word, end);
    } else if (c == '"' || c == '\'') {
      add(Token::Kind::text, end_of_text(source, i));
    } else {
      const std::string two = source.substr(i, 2);
      add(Token::Kind::mark, i + (two == "[[" || two == "]]" || two == "::" ? 2 : 1));
    }
  }
  tokens.push_back({Token::Kind::end, "", space, file, line});
  return tokens;
}

size_t matching(const std::vector<Token>& tokens, size_t open) {
  const std::string& o = tokens[open].text;
  const std::string c = o == "(" ? ")" : o == "{" ? "}" : o == "[" ? "]" : o == "<" ? ">" : "]]";
  int depth = 0;
  for (size_t i = open; i < tokens.size(); ++i) {
    if (tokens[i].is(o)) ++depth;
    if (tokens[i].is(c) && --depth == 0) return i;
    // Comparisons within template arguments are in parentheses.
    if (o == "<" && i > open && tokens[i].is("(")) i = matching(tokens, i);
  }
  return tokens.size() - 1;
}

std::string joined(const std::vector<Token>& tokens, size_t first, size_t last) {
  std::string text;
  for (size_t i = first; i < last; ++i) {
    if (i > first && !tokens[i].space.empty()) text += ' ';
    text += tokens[i].text;
  }
  return text;
}

}  // namespace lily::emulator
