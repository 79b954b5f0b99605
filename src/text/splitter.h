// Splits text into the pieces that byte-pair encoding works on, as this pattern does (alternatives in order):
//
//   (?i:'s|'t|'re|'ve|'m|'ll|'d) | [^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+ | \p{N} | ?[^\s\p{L}\p{M}\p{N}]+[\r\n]* |
//   \s*[\r\n]+ | \s+(?!\S) | \s+
//
// (the fourth begins with an optional space). Every byte lands in exactly one piece.
#pragma once

#include <cstddef>
#include <string_view>

namespace lily::text {

// The pattern as tokenizer.json spells it.
extern const std::string_view kSplitPattern;

// Bytes of the piece that starts at `pos`, which must be less than text.size() and the end of the piece
// before; >= 1. Invalid UTF-8: each invalid byte counts as a symbol. Linear over a whole text.
size_t piece_size(std::string_view text, size_t pos);

}  // namespace lily::text
