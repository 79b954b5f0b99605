#include "text/unicode.h"

#include <utf8proc.h>

#include <algorithm>
#include <array>
#include <utility>
#include <vector>

#include "base/error.h"

namespace lily::text {
namespace {

uint8_t byte_at(std::string_view text, size_t pos) { return static_cast<uint8_t>(text[pos]); }

// The first code point with a canonical combining class or a decomposition that NFC would keep is U+0300.
constexpr char32_t kFirstAffectedByNfc = 0x300;

std::array<CharClass, 128> ascii_classes() {
  std::array<CharClass, 128> classes{};
  for (const ClassRange& range : kClassRanges)
    for (uint32_t c = range.first; c <= range.last && c < classes.size(); ++c) classes[c] = range.char_class;
  return classes;
}

bool python_strips(char32_t c) { return (c >= 0x1c && c <= 0x1f) || char_class(c) == CharClass::space; }

// The library's own reordering is quadratic in the length of a run of marks, so we decompose character by
// character, sort each run ourselves and leave only the composition to the library.
void append_nfc_of_valid(std::string_view text, std::string& out) {
  std::vector<int32_t> code_points;
  code_points.reserve(text.size());
  for (size_t pos = 0; pos < text.size();) {
    const Utf8Step step = decode_utf8(text, pos);
    pos += step.n_bytes;
    std::array<int32_t, 8> parts;  // no canonical decomposition has more than 4
    int boundary_class = 0;
    const auto n_parts = utf8proc_decompose_char(
        static_cast<int32_t>(step.code_point), parts.data(), parts.size(),
        static_cast<utf8proc_option_t>(UTF8PROC_STABLE | UTF8PROC_DECOMPOSE), &boundary_class);
    LILY_CHECK(n_parts > 0 && n_parts <= static_cast<ptrdiff_t>(parts.size()), "{} parts", n_parts);
    code_points.insert(code_points.end(), parts.begin(), parts.begin() + n_parts);
  }
  const auto combining = [](int32_t c) { return int{utf8proc_get_property(c)->combining_class}; };
  struct Mark {
    int combining_class;
    size_t position;  // equal classes keep their order
    int32_t code_point;
  };
  std::vector<Mark> run;
  for (size_t begin = 0; begin < code_points.size(); begin += run.size() + 1) {
    run.clear();
    for (size_t i = begin; i < code_points.size() && combining(code_points[i]) != 0; ++i)
      run.push_back({combining(code_points[i]), i, code_points[i]});
    std::sort(run.begin(), run.end(), [](const Mark& x, const Mark& y) {
      return std::pair(x.combining_class, x.position) < std::pair(y.combining_class, y.position);
    });
    for (size_t i = 0; i < run.size(); ++i) code_points[begin + i] = run[i].code_point;
  }
  const auto n = utf8proc_normalize_utf32(code_points.data(), static_cast<ptrdiff_t>(code_points.size()),
                                          static_cast<utf8proc_option_t>(UTF8PROC_STABLE | UTF8PROC_COMPOSE));
  LILY_CHECK(n >= 0, "{}", n);
  for (ptrdiff_t i = 0; i < n; ++i)
    append_utf8(static_cast<char32_t>(code_points[static_cast<size_t>(i)]), out);
}

}  // namespace

Utf8Step decode_utf8(std::string_view text, size_t pos) {
  using enum Utf8Step::Kind;
  const uint8_t lead = byte_at(text, pos);
  if (lead < 0x80) return {valid, 1, lead};
  int n_bytes = 0;
  uint8_t low = 0x80, high = 0xbf;  // bounds of the second byte: no surrogates, no overlong forms
  if (lead >= 0xc2 && lead <= 0xdf) n_bytes = 2;
  else if (lead >= 0xe0 && lead <= 0xef) {
    n_bytes = 3;
    if (lead == 0xe0) low = 0xa0;
    if (lead == 0xed) high = 0x9f;
  } else if (lead >= 0xf0 && lead <= 0xf4) {
    n_bytes = 4;
    if (lead == 0xf0) low = 0x90;
    if (lead == 0xf4) high = 0x8f;
  } else {
    return {invalid, 1, 0};
  }
  char32_t code_point = lead & (0x7fu >> n_bytes);
  for (int i = 1; i < n_bytes; ++i) {
    if (pos + i >= text.size()) return {truncated, static_cast<uint8_t>(i), 0};
    const uint8_t byte = byte_at(text, pos + i);
    if (byte < low || byte > high) return {invalid, static_cast<uint8_t>(i), 0};
    low = 0x80;
    high = 0xbf;
    code_point = (code_point << 6) | (byte & 0x3fu);
  }
  return {valid, static_cast<uint8_t>(n_bytes), code_point};
}

void append_utf8(char32_t c, std::string& out) {
  const auto put = [&](char32_t byte) { out.push_back(static_cast<char>(byte)); };
  if (c < 0x80) {
    put(c);
  } else if (c < 0x800) {
    put(0xc0 | (c >> 6));
    put(0x80 | (c & 0x3f));
  } else if (c < 0x10000) {
    put(0xe0 | (c >> 12));
    put(0x80 | ((c >> 6) & 0x3f));
    put(0x80 | (c & 0x3f));
  } else {
    put(0xf0 | (c >> 18));
    put(0x80 | ((c >> 12) & 0x3f));
    put(0x80 | ((c >> 6) & 0x3f));
    put(0x80 | (c & 0x3f));
  }
}

std::string replace_invalid_utf8(std::string_view text) {
  std::string out;
  out.reserve(text.size());
  for (size_t pos = 0; pos < text.size();) {
    const Utf8Step step = decode_utf8(text, pos);
    out.append(step.valid() ? text.substr(pos, step.n_bytes) : kReplacement);
    pos += step.n_bytes;
  }
  return out;
}

CharClass char_class(char32_t c) {
  static const std::array<CharClass, 128> ascii = ascii_classes();
  if (c < ascii.size()) return ascii[c];
  const auto after =
      std::upper_bound(kClassRanges.begin(), kClassRanges.end(), c,
                       [](char32_t value, const ClassRange& range) { return value < range.first; });
  if (after == kClassRanges.begin()) return CharClass::symbol;
  const ClassRange& range = *(after - 1);
  return c <= range.last ? range.char_class : CharClass::symbol;
}

bool is_plainly_nfc(std::string_view text) {
  // 0xcc is the lead byte of U+0300.
  return std::all_of(text.begin(), text.end(), [](char c) { return static_cast<uint8_t>(c) < 0xcc; });
}

std::string to_nfc(std::string_view text) {
  static_assert(kFirstAffectedByNfc == ((0xcc & 0x1f) << 6));
  std::string out;
  out.reserve(text.size() + text.size() / 8);
  size_t valid_begin = 0;
  for (size_t pos = 0; pos < text.size();) {
    const Utf8Step step = decode_utf8(text, pos);
    if (!step.valid()) {
      append_nfc_of_valid(text.substr(valid_begin, pos - valid_begin), out);
      out.append(text.substr(pos, step.n_bytes));
      valid_begin = pos + step.n_bytes;
    }
    pos += step.n_bytes;
  }
  append_nfc_of_valid(text.substr(valid_begin), out);
  return out;
}

std::string_view strip(std::string_view text) {
  while (!text.empty()) {
    const Utf8Step step = decode_utf8(text, 0);
    if (!step.valid() || !python_strips(step.code_point)) break;
    text.remove_prefix(step.n_bytes);
  }
  while (!text.empty()) {
    size_t begin = text.size() - 1;
    while (begin > 0 && text.size() - begin < 4 && (byte_at(text, begin) & 0xc0) == 0x80) --begin;
    const Utf8Step step = decode_utf8(text, begin);
    if (!step.valid() || begin + step.n_bytes != text.size() || !python_strips(step.code_point)) break;
    text.remove_suffix(step.n_bytes);
  }
  return text;
}

std::string_view strip_leading_newlines(std::string_view text) {
  text.remove_prefix(std::min(text.find_first_not_of('\n'), text.size()));
  return text;
}

std::string_view strip_trailing_newlines(std::string_view text) {
  const size_t last = text.find_last_not_of('\n');
  return text.substr(0, last == std::string_view::npos ? 0 : last + 1);
}

}  // namespace lily::text
