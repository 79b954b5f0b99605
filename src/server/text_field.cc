#include "server/text_field.h"

#include "server/body.h"

namespace lily::server {
namespace {

constexpr size_t kUnicodeEscape = 6;  // \u0041

// \ud83d, which needs a second half.
bool is_high_surrogate(std::string_view escape) {
  if (escape.size() < 4 || escape[1] != 'u' || (escape[2] != 'd' && escape[2] != 'D')) return false;
  return escape[3] == '8' || escape[3] == '9' || ((escape[3] | 0x20) >= 'a' && (escape[3] | 0x20) <= 'b');
}

}  // namespace

std::string TextField::push(std::string_view fragment) {
  std::string out;
  for (const char c : fragment) {
    if (is_other_ || state_ == State::done) break;
    if (state_ == State::head) {
      is_other_ = !read_head(c);
      if (n_head_ == head_.size()) state_ = State::text;
    } else if (!escape_.empty() || c == '\\') {
      read_escape(c, out);
    } else if (c == '"') {
      state_ = State::done;
    } else {
      out += c;
    }
  }
  return out;
}

bool TextField::read_head(char c) {
  if (head_[n_head_] == c) {
    ++n_head_;
    return true;
  }
  const bool in_name = n_head_ > 1 && n_head_ + 2 < head_.size();
  return !in_name && (c == ' ' || c == '\n' || c == '\r' || c == '\t');
}

void TextField::read_escape(char c, std::string& out) {
  escape_ += c;
  const size_t wanted = escape_.size() < 2 || escape_[1] != 'u' ? 2
                        : is_high_surrogate(escape_)            ? 2 * kUnicodeEscape
                                                                : kUnicodeEscape;
  if (escape_.size() < wanted) return;
  const Json text = Json::parse('"' + escape_ + '"', nullptr, false);
  out += text.is_string() ? text.get<std::string>() : "\xEF\xBF\xBD";
  escape_.clear();
}

}  // namespace lily::server
