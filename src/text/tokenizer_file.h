// Reads tokenizer.json and the added tokens of tokenizer_config.json, and checks that they describe the
// tokenizer this engine implements (byte-level BPE, NFC, the pattern of splitter.h).
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "text/bpe.h"

namespace lily::text {

struct AddedToken {
  int32_t id = 0;
  std::string text;
  bool special = false;  // left out of decoded text
};

struct TokenizerData {
  std::vector<std::string>
      token_bytes;            // by id; raw bytes, empty where an id has no text. Added tokens included
  std::vector<Merge> merges;  // by rank
  std::array<int32_t, 256> byte_tokens{};
  std::vector<AddedToken> added;  // ascending ids
};

// Larger files are refused.
inline constexpr size_t kMaxTokenizerBytes = size_t{64} << 20;
inline constexpr int32_t kMaxTokens = 1 << 20;  // ids beyond are refused

// `config_json` may be empty (no such file). Throws Error(Fault::model) naming the file, the member and the
// value. Both forms of merges ("a b" and ["a","b"]) are read. Where both files list an added token, `special`
// of the second counts; members that do not matter here, such as the tokenizer's class, are not looked at.
TokenizerData parse_tokenizer(std::string_view tokenizer_json, std::string_view config_json);

}  // namespace lily::text
