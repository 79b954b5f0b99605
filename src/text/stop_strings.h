// Ends an answer at strings the client named: they are never emitted, not even in part.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>
#include <vector>

namespace lily::text {

// One answer's matcher. The text may come in any pieces. Work is linear in the text times the number of
// strings.
class StopStrings {
 public:
  // Empty strings never match.
  explicit StopStrings(std::vector<std::string> strings = {});

  // Appends to `out` what can be shown by now: everything but a tail that may be the head of a stop string.
  // Once a string has matched, nothing more. The string that ends first wins; of those that end together, the
  // longest.
  void push(std::string_view text, std::string& out);
  // Appends what was held back: the text ends here, or something other than text follows.
  void flush(std::string& out);

  // Index of the string that matched, or -1.
  int matched() const { return matched_; }

 private:
  struct Pattern {
    std::string text;
    std::vector<size_t> border;  // border[n]: length of the longest proper border of the first n bytes
    size_t n_matched = 0;        // bytes at the end of the text so far that begin the pattern
    int index = 0;
  };
  std::vector<Pattern> patterns_;
  std::string held_;  // as long as the longest of n_matched
  int matched_ = -1;
};

}  // namespace lily::text
