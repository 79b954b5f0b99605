#include "base/printable.h"

#include <fmt/format.h>

#include <cstdint>

namespace lily {
namespace {

// Bytes of the well-formed UTF-8 sequence at the start of `text`, 0 if there is none.
size_t sequence_bytes(std::string_view text) {
  const auto at = [&](size_t i) { return static_cast<uint8_t>(text[i]); };
  const uint8_t first = at(0);
  if (first < 0x80) return 1;
  const size_t n = first >= 0xf0 && first <= 0xf4  ? 4
                   : first >= 0xe0 && first < 0xf0 ? 3
                   : first >= 0xc2 && first < 0xe0 ? 2
                                                   : 0;
  if (n == 0 || text.size() < n) return 0;
  for (size_t i = 1; i < n; ++i)
    if ((at(i) & 0xc0) != 0x80) return 0;
  // Overlong forms, surrogates, and values above U+10FFFF.
  if ((first == 0xe0 && at(1) < 0xa0) || (first == 0xed && at(1) > 0x9f)) return 0;
  if ((first == 0xf0 && at(1) < 0x90) || (first == 0xf4 && at(1) > 0x8f)) return 0;
  return n;
}

}  // namespace

std::string printable(std::string_view text, size_t max_bytes) {
  std::string out;
  for (size_t i = 0; i < text.size();) {
    const size_t n = sequence_bytes(text.substr(i, 4));
    const auto byte = static_cast<uint8_t>(text[i]);
    // C1 controls (U+0080..U+009F) and the line and paragraph separators break lines on some terminals.
    const std::string_view sequence = text.substr(i, n);
    const bool is_control = byte < 0x20 || byte == 0x7f ||
                            (n == 2 && byte == 0xc2 && static_cast<uint8_t>(text[i + 1]) < 0xa0) ||
                            sequence == "\u2028" || sequence == "\u2029";
    std::string piece;
    if (n == 0 || is_control)
      for (const char c : text.substr(i, n == 0 ? 1 : n))
        piece += fmt::format("\\x{:02x}", static_cast<uint8_t>(c));
    else piece = sequence;
    if (out.size() + piece.size() > max_bytes) return out + "...";
    out += piece;
    i += n == 0 ? 1 : n;
  }
  return out;
}

std::string counted(int64_t n, std::string_view noun) {
  return fmt::format("{} {}{}", n, noun, n == 1 ? "" : "s");
}

}  // namespace lily
