// The format of a saved session (docs/formats.md, "Sessions"): bytes in, values out, no files.
//
// A header says what the state belongs to and which tokens it stands for; pieces follow, each with a checksum
// of its own, so that a file can be read and checked in one pass without holding it whole. The state comes
// first, one piece a layer or so, then K and V, one piece a block of kKvBlockTokens tokens. Nothing that a
// file says about sizes is believed before the file has been found to be that large.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "plan/policy.h"

namespace lily::engine {

enum class SessionKind : uint32_t {
  turn,    // the state at the end of a turn
  stable,  // before a generation prompt
  shared,  // any other prefix
  replay,  // tokens of an answer, without a state
  chat,    // a conversation that a user has saved
};

// How a file holds K and V; each is exact for the cache type of its name.
enum class KvEncoding : uint32_t { f32, bf16, int8 };
KvEncoding encoding_of(plan::KvType type);

struct SessionHeader {
  SessionKind kind = SessionKind::turn;
  std::string identity;                // 64 digits: of model, template and arithmetic
  std::string session;                 // the client's name of the conversation, or empty
  std::vector<int32_t> tokens;         // that the state stands for
  std::string conversation;            // VisibleHash of the replayed answer, or empty
  std::vector<int32_t> replay;         // its tokens and all before them
  std::string messages;                // of `chat`: the conversation as JSON
  std::vector<uint32_t> state_floats;  // of each piece of the state
  uint32_t kv_floats = 0;              // of a token: K and V of all layers; int8: a multiple of 64
  KvEncoding kv_encoding = KvEncoding::f32;
  uint64_t nonce = 0;  // another for each file, so that pieces of two files are not mistaken for each other

  int n_state_pieces() const { return static_cast<int>(state_floats.size()); }
  int n_pieces() const;
  int piece_tokens(int piece) const;      // of a KV piece
  int64_t piece_floats(int piece) const;  // what it decodes to
  int64_t piece_bytes(int piece) const;   // in the file, the checksum included
  int64_t header_bytes() const;
  int64_t file_bytes() const;
};

// Bytes that header_bytes() needs.
inline constexpr int64_t kSessionFixedBytes = 192;

std::string encode_header(const SessionHeader& header);
// Where the header ends, from the first kSessionFixedBytes of a file of n_file_bytes. This and parse_header
// throw Error(Fault::user) for what is not a whole session of this version; `name` is for the message.
int64_t header_bytes(std::span<const std::byte> fixed, int64_t n_file_bytes, std::string_view name);
// `bytes` are the first header_bytes() of the file.
SessionHeader parse_header(std::span<const std::byte> bytes, int64_t n_file_bytes, std::string_view name);

// Appends. A value that its encoding cannot hold exactly is Error(Fault::device): what would be read back is
// not the state.
void encode_piece(const SessionHeader& header, int piece, std::span<const float> values, std::string& out);
// False if the piece is damaged. `bytes` has piece_bytes(piece) bytes, `values` is given piece_floats(piece).
bool decode_piece(const SessionHeader& header, int piece, std::span<const std::byte> bytes,
                  std::vector<float>& values);

// Of the first n tokens, for names of files: tokens in the header decide.
class TokenHash {
 public:
  void add(int32_t token);
  uint64_t value() const { return hash_; }

 private:
  uint64_t hash_ = 0x6c696c7973657373ull;
};
uint64_t hash_of(std::span<const int32_t> tokens);

// Against accidents, not against people who can write into the folder.
uint64_t checksum(uint64_t seed, std::span<const std::byte> bytes);

}  // namespace lily::engine
