// The byte-level BPE tokenizer of Qwen3.5 and 3.6, read from a checkpoint's tokenizer.json and
// tokenizer_config.json.
//
// Text -> added tokens cut out -> NFC -> pieces (splitter.h) -> byte-pair encoding (bpe.h) -> ids.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "text/bpe.h"
#include "text/tokenizer_file.h"

namespace lily::text {

// Which spellings of added tokens (`<|im_end|>`, `<think>`) become those tokens. Elsewhere they are ordinary
// text, so that no one can write control tokens into a prompt from outside.
enum class AddedTokens {
  all,        // what the chat template itself writes
  none,       // text of users, tools and system messages
  assistant,  // earlier answers: <think>, </think>, <tool_call> and </tool_call> only
};

// A part of a text up to `end` (a byte offset; the part begins where the one before ends).
struct TextRange {
  size_t end = 0;
  AddedTokens active = AddedTokens::none;
};

// Immutable once loaded: every member may be called from any thread at any time.
class Tokenizer {
 public:
  // Reads both files of a checkpoint folder; tokenizer_config.json may be missing. Throws
  // Error(Fault::model).
  static Tokenizer load(const std::string& model_dir);
  explicit Tokenizer(TokenizerData data);

  // Any bytes are accepted, invalid UTF-8 too (unicode.h).
  std::vector<int32_t> encode(std::string_view text, AddedTokens active) const;
  void encode_append(std::string_view text, AddedTokens active, std::vector<int32_t>& out) const;
  // Ranges are ascending and the last one ends at text.size(). An added token is found only inside one range
  // or neighbours of the same kind; pieces and NFC run across ranges as if there were none.
  void encode_append(std::string_view text, std::span<const TextRange> ranges,
                     std::vector<int32_t>& out) const;

  // Special tokens and ids without text are skipped and do not break a character. Always valid UTF-8: each
  // maximal invalid part becomes U+FFFD.
  std::string decode(std::span<const int32_t> ids) const;
  // The bytes of all ids, special tokens included, as they are.
  std::string decode_bytes(std::span<const int32_t> ids) const;

  // Raw bytes, possibly part of a character; empty for ids without text and ids out of range.
  std::string_view token_bytes(int32_t id) const;
  bool is_special(int32_t id) const { return kind(id) == Kind::special; }
  bool is_added(int32_t id) const { return kind(id) != Kind::plain; }  // special or not
  // One more than the largest id; rows of the output matrix from here on are padding.
  int32_t n_tokens() const { return static_cast<int32_t>(bytes_begin_.size()) - 1; }
  // The id of an added token's spelling.
  std::optional<int32_t> id_of(std::string_view added_token) const;

 private:
  enum class Kind : uint8_t { plain, added, special };
  struct Match {
    size_t begin, end;
    int32_t id;
  };
  Kind kind(int32_t id) const;
  void find_added(std::string_view text, size_t begin, size_t end, AddedTokens active,
                  std::vector<Match>& out) const;

  std::string bytes_;                                          // of all tokens, one after the other
  std::vector<uint32_t> bytes_begin_;                          // [n_tokens + 1]
  std::vector<Kind> kinds_;                                    // [n_tokens]
  std::vector<AddedToken> added_;                              // ascending ids
  std::array<std::vector<int32_t>, 256> added_by_first_byte_;  // indices of added_, longest text first
  Bpe bpe_;
};

// Text of tokens as they come. The pieces joined equal Tokenizer::decode of all ids: a character split over
// tokens appears when it is complete, and what cannot become one is shown as U+FFFD.
class StreamingDetokenizer {
 public:
  explicit StreamingDetokenizer(const Tokenizer& tokenizer) : tokenizer_(&tokenizer) {}  // must outlive this

  std::string push(int32_t id);
  // Ends an incomplete character, as at the end of the text. More may be pushed afterwards.
  std::string finish();

 private:
  const Tokenizer* tokenizer_;
  std::string pending_;  // at most 3 bytes: the beginning of a character
};

}  // namespace lily::text
