#include "text/stop_strings.h"

#include <algorithm>

namespace lily::text {

StopStrings::StopStrings(std::vector<std::string> strings) {
  int index = 0;
  for (std::string& text : strings) {
    if (!text.empty()) {
      std::vector<size_t> border(text.size() + 1, 0);
      for (size_t n = 1, length = 0; n < text.size(); ++n) {
        while (length > 0 && text[n] != text[length]) length = border[length];
        if (text[n] == text[length]) ++length;
        border[n + 1] = length;
      }
      patterns_.push_back({std::move(text), std::move(border), 0, index});
    }
    ++index;
  }
}

void StopStrings::push(std::string_view text, std::string& out) {
  if (matched_ >= 0) return;
  if (patterns_.empty()) {
    out += text;
    return;
  }
  held_ += text;
  size_t longest_match = 0, longest_head = 0;
  size_t n_read = held_.size() - text.size();
  for (const char c : text) {
    ++n_read;
    longest_head = 0;
    for (Pattern& pattern : patterns_) {
      size_t& n = pattern.n_matched;
      while (n > 0 && pattern.text[n] != c) n = pattern.border[n];
      if (pattern.text[n] == c) ++n;
      longest_head = std::max(longest_head, n);
      if (n == pattern.text.size() && n > longest_match) {
        longest_match = n;
        matched_ = pattern.index;
      }
    }
    if (matched_ >= 0) {
      out.append(held_, 0, n_read - longest_match);
      held_.clear();
      return;
    }
  }
  if (text.empty()) return;
  out.append(held_, 0, held_.size() - longest_head);
  held_.erase(0, held_.size() - longest_head);
}

void StopStrings::flush(std::string& out) {
  if (matched_ < 0) out += held_;
  held_.clear();
  for (Pattern& pattern : patterns_) pattern.n_matched = 0;
}

}  // namespace lily::text
