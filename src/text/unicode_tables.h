// Character classes as the split pattern of the tokenizer sees them; the ranges are generated
// (scripts/unicode_tables.py) and committed, so that text splits alike on every platform.
#pragma once

#include <cstdint>
#include <span>
#include <string_view>

namespace lily::text {

enum class CharClass : uint8_t {
  symbol,  // everything else: punctuation, symbols, controls, unassigned code points, invalid bytes
  letter,  // \p{L}
  mark,    // \p{M}
  number,  // \p{N}
  space,   // \s, the property White_Space
};

struct ClassRange {
  uint32_t first, last;  // code points, both included
  CharClass char_class;
};

extern const std::string_view kUnicodeVersion;
extern const std::span<const ClassRange> kClassRanges;  // ascending, disjoint, without `symbol`

}  // namespace lily::text
