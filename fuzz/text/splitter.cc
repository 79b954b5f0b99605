// The hand-written scanner against PCRE2 running the original pattern, on characters that PCRE2's Unicode
// version knows.
#define PCRE2_CODE_UNIT_WIDTH 8
#include <pcre2.h>

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

#include "base/error.h"
#include "text/splitter.h"
#include "text/unicode.h"

namespace {

using namespace lily::text;

constexpr size_t kMaxBytes = 2048;  // the pattern itself is quadratic in runs of white space

class Pattern {
 public:
  explicit Pattern(std::string_view pattern) {
    int error = 0;
    PCRE2_SIZE offset = 0;
    code_ = pcre2_compile(reinterpret_cast<PCRE2_SPTR>(pattern.data()), pattern.size(),
                          PCRE2_UTF | PCRE2_UCP | PCRE2_ANCHORED, &error, &offset, nullptr);
    LILY_CHECK(code_ != nullptr, "error {} at {}", error, offset);
    match_ = pcre2_match_data_create_from_pattern(code_, nullptr);
  }
  // Bytes matched at `pos`, 0 if none.
  size_t size_at(std::string_view text, size_t pos) const {
    const int n = pcre2_match(code_, reinterpret_cast<PCRE2_SPTR>(text.data()), text.size(), pos,
                              PCRE2_NO_UTF_CHECK, match_, nullptr);
    return n < 1 ? 0 : pcre2_get_ovector_pointer(match_)[1] - pos;
  }

 private:
  pcre2_code* code_;
  pcre2_match_data* match_;
};

bool pcre2_unicode_is_newer() {
  char version[32] = {};
  pcre2_config(PCRE2_CONFIG_UNICODE_VERSION, version);
  return std::stoi(version) > std::stoi(std::string(kUnicodeVersion));
}

// Both sides know the character, in the same class where PCRE2's tables are the newer ones.
bool is_comparable(char32_t c) {
  static const Pattern unassigned("\\p{Cn}"), letter("\\p{L}"), mark("\\p{M}"), number("\\p{N}");
  static const bool newer = pcre2_unicode_is_newer();
  if (c == 0x180e) return false;  // white space to PCRE2, as it was until Unicode 6.3
  std::string bytes;
  append_utf8(c, bytes);
  if (unassigned.size_at(bytes, 0) > 0) return false;
  if (!newer) return true;
  const CharClass ours = char_class(c);
  return (letter.size_at(bytes, 0) > 0) == (ours == CharClass::letter) &&
         (mark.size_at(bytes, 0) > 0) == (ours == CharClass::mark) &&
         (number.size_at(bytes, 0) > 0) == (ours == CharClass::number);
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  static const Pattern pattern(kSplitPattern);
  const std::string_view input(reinterpret_cast<const char*>(data), size);
  std::string text;
  for (size_t pos = 0; pos < input.size() && text.size() < kMaxBytes;) {
    const Utf8Step step = decode_utf8(input, pos);
    if (step.valid() && is_comparable(step.code_point)) text += input.substr(pos, step.n_bytes);
    pos += step.n_bytes;
  }
  for (size_t pos = 0; pos < text.size();) {
    const size_t ours = piece_size(text, pos), original = pattern.size_at(text, pos);
    LILY_CHECK(ours == original, "at byte {} of {:?}: {} and {} bytes", pos, text, ours, original);
    pos += ours;
  }
  // Invalid bytes: every byte lands in a piece.
  for (size_t pos = 0; pos < input.size();) {
    const size_t n = piece_size(input, pos);
    LILY_CHECK(n >= 1 && n <= input.size() - pos, "{} at {}", n, pos);
    pos += n;
  }
  return 0;
}
