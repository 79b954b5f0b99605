#include "engine/session_file.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstring>
#include <utility>

#include "backend/backend.h"
#include "base/error.h"
#include "base/half.h"
#include "model/int8_group.h"

namespace lily::engine {
namespace {

using backend::kKvBlockTokens;
using model::kInt8Group;
using model::kInt8GroupBytes;

static_assert(std::endian::native == std::endian::little, "session files are little-endian");

constexpr std::array<char, 8> kMagic = {'l', 'i', 'l', 'y', 's', 'e', 's', 's'};
constexpr uint32_t kVersion = 1;
constexpr size_t kIdentityDigits = 64;
constexpr int64_t kChecksumBytes = 8;
// Beyond what any model here has; they keep the sums below far from 2^63.
constexpr uint64_t kMaxTokens = uint64_t{1} << 24;
constexpr uint64_t kMaxTextBytes = uint64_t{1} << 30;
constexpr uint32_t kMaxStatePieces = 1 << 16;
constexpr uint32_t kMaxPieceFloats = 1 << 28;
constexpr uint32_t kMaxKvFloats = 1 << 20;

// The fixed part as it lies in the file.
struct Fixed {
  std::array<char, 8> magic = kMagic;
  uint32_t version = kVersion;
  uint32_t kind = 0;
  std::array<char, kIdentityDigits> identity{};
  uint64_t nonce = 0;
  uint64_t n_tokens = 0, n_replay = 0;
  uint64_t n_session = 0, n_conversation = 0, n_messages = 0;  // bytes
  uint32_t n_state_pieces = 0, kv_floats = 0;
  uint32_t kv_encoding = 0;
  std::array<uint32_t, 13> reserved{};
};
static_assert(sizeof(Fixed) == kSessionFixedBytes && std::is_trivially_copyable_v<Fixed>);

uint64_t mixed(uint64_t x) {
  x = (x ^ (x >> 32)) * 0xd6e8feb86659fd93ull;
  x = (x ^ (x >> 32)) * 0xd6e8feb86659fd93ull;
  return x ^ (x >> 32);
}

template <typename T>
void append(std::string& out, std::span<const T> values) {
  if (!values.empty()) out.append(reinterpret_cast<const char*>(values.data()), values.size_bytes());
}

int64_t header_bytes_of(const Fixed& f) {
  return kSessionFixedBytes + 4 * int64_t{f.n_state_pieces} +
         static_cast<int64_t>(4 * (f.n_tokens + f.n_replay)) +
         static_cast<int64_t>(f.n_session + f.n_conversation + f.n_messages) + kChecksumBytes;
}

bool is_digits(std::string_view text) {
  return std::all_of(text.begin(), text.end(),
                     [](char c) { return (c >= '0' && c <= '9') || (c >= 'a' && c <= 'f'); });
}

Fixed fixed_of(std::span<const std::byte> bytes, int64_t n_file_bytes, std::string_view name) {
  if (std::ssize(bytes) < kSessionFixedBytes || n_file_bytes < kSessionFixedBytes + kChecksumBytes)
    fail(Fault::user, "{}: has {} bytes, too few for a saved session", name, n_file_bytes);
  Fixed f;
  std::memcpy(&f, bytes.data(), sizeof f);
  if (f.magic != kMagic) fail(Fault::user, "{}: is not a saved session of lily", name);
  if (f.version != kVersion)
    fail(Fault::user, "{}: is of version {} of the format; this program reads version {}", name, f.version,
         kVersion);
  const bool has_sense =
      f.kind <= static_cast<uint32_t>(SessionKind::chat) &&
      is_digits({f.identity.data(), f.identity.size()}) && f.n_tokens <= kMaxTokens &&
      f.n_replay <= kMaxTokens && f.n_session <= kMaxTextBytes &&
      (f.n_conversation == 0 || f.n_conversation == kIdentityDigits) && f.n_messages <= kMaxTextBytes &&
      f.n_state_pieces <= kMaxStatePieces && f.kv_floats <= kMaxKvFloats &&
      f.kv_encoding <= static_cast<uint32_t>(KvEncoding::int8) &&
      (f.kv_encoding != static_cast<uint32_t>(KvEncoding::int8) || f.kv_floats % kInt8Group == 0) &&
      std::all_of(f.reserved.begin(), f.reserved.end(), [](uint32_t x) { return x == 0; });
  if (!has_sense) fail(Fault::user, "{}: its header is damaged", name);
  if (header_bytes_of(f) > n_file_bytes)
    fail(Fault::user, "{}: has {} bytes, but its header alone {}: it is cut off", name, n_file_bytes,
         header_bytes_of(f));
  return f;
}

// Hands out what follows the fixed part, in order.
class Parts {
 public:
  explicit Parts(std::span<const std::byte> bytes) : bytes_(bytes) {}
  template <typename T>
  std::vector<T> values(uint64_t n) {
    std::vector<T> out(n);
    if (n > 0) std::memcpy(out.data(), take(n * sizeof(T)).data(), n * sizeof(T));
    return out;
  }
  std::string text(uint64_t n) {
    const auto part = take(n);
    return {reinterpret_cast<const char*>(part.data()), part.size()};
  }

 private:
  std::span<const std::byte> take(uint64_t n) {
    const auto part = bytes_.first(n);
    bytes_ = bytes_.subspan(n);
    return part;
  }
  std::span<const std::byte> bytes_;
};

uint64_t stored_checksum(std::span<const std::byte> bytes) {
  uint64_t value = 0;
  std::memcpy(&value, bytes.last(kChecksumBytes).data(), sizeof value);
  return value;
}

uint64_t seed_of(const SessionHeader& header, int piece) {
  return header.nonce + static_cast<uint64_t>(piece) + 1;
}

// Of a piece: the state is fp32 whatever KV is.
KvEncoding encoding_of_piece(const SessionHeader& header, int piece) {
  return piece >= header.n_state_pieces() ? header.kv_encoding : KvEncoding::f32;
}

void encode_bf16(std::span<const float> values, char* at) {
  uint32_t lost = 0;
  for (const float value : values) {
    const auto bits = std::bit_cast<uint32_t>(value);
    lost |= bits & 0xffffu;
    const auto upper = static_cast<uint16_t>(bits >> 16);
    std::memcpy(at, &upper, sizeof upper);
    at += sizeof upper;
  }
  if (lost != 0) fail(Fault::device, "a value of the KV cache is no bfloat16; the session is not saved");
}

void decode_bf16(const std::byte* at, std::span<float> values) {
  for (float& value : values) {
    Bf16 x;
    std::memcpy(&x.bits, at, sizeof x.bits);
    value = to_float(x);
    at += sizeof x.bits;
  }
}

// A group is its scale and its 64 codes.
void decode_int8(const std::byte* at, std::span<float> values) {
  std::array<int8_t, kInt8Group> codes;
  for (; !values.empty(); values = values.subspan(kInt8Group), at += kInt8GroupBytes) {
    F16 scale;
    std::memcpy(&scale.bits, at, sizeof scale.bits);
    std::memcpy(codes.data(), at + sizeof scale.bits, sizeof codes);
    model::from_int8_group(scale, codes, values.first<kInt8Group>());
  }
}

void encode_int8(std::span<const float> values, char* at) {
  std::array<int8_t, kInt8Group> codes;
  std::array<float, kInt8Group> back;
  for (; !values.empty(); values = values.subspan(kInt8Group), at += kInt8GroupBytes) {
    const auto group = values.first<kInt8Group>();
    const F16 scale = model::to_int8_group(group, codes);
    std::memcpy(at, &scale.bits, sizeof scale.bits);
    std::memcpy(at + sizeof scale.bits, codes.data(), sizeof codes);
    model::from_int8_group(scale, codes, back);
    const auto same = [](float a, float b) { return a == b || (std::isnan(a) && std::isnan(b)); };
    if (!std::equal(group.begin(), group.end(), back.begin(), same))
      fail(Fault::device, "values of the KV cache are no group of int8; the session is not saved");
  }
}

}  // namespace

KvEncoding encoding_of(plan::KvType type) {
  switch (type) {
    case plan::KvType::f32:
      return KvEncoding::f32;
    case plan::KvType::bf16:
      return KvEncoding::bf16;
    case plan::KvType::int8:
      break;
  }
  return KvEncoding::int8;
}

// Every step maps a lane one to one, so a changed word always changes the sum.
uint64_t checksum(uint64_t seed, std::span<const std::byte> bytes) {
  constexpr uint64_t kFactor = 0x9e3779b97f4a7c15ull;
  std::array<uint64_t, 4> lanes{};
  for (size_t i = 0; i < lanes.size(); ++i) lanes[i] = mixed(seed + (i + 1) * kFactor);
  const std::byte* at = bytes.data();
  size_t n = bytes.size();
  std::array<uint64_t, 4> words{};
  for (; n >= sizeof words; n -= sizeof words, at += sizeof words) {
    std::memcpy(words.data(), at, sizeof words);
    for (size_t i = 0; i < lanes.size(); ++i) lanes[i] = std::rotl((lanes[i] ^ words[i]) * kFactor, 29);
  }
  words = {};
  if (n > 0) std::memcpy(words.data(), at, n);
  uint64_t sum = bytes.size();
  for (size_t i = 0; i < lanes.size(); ++i)
    sum = mixed(sum ^ std::rotl((lanes[i] ^ words[i]) * kFactor, 29)) + kFactor;
  return sum;
}

void TokenHash::add(int32_t token) {
  hash_ = mixed((hash_ ^ static_cast<uint32_t>(token)) + 0x9e3779b97f4a7c15ull);
}

uint64_t hash_of(std::span<const int32_t> tokens) {
  TokenHash hash;
  for (const int32_t token : tokens) hash.add(token);
  return hash.value();
}

int SessionHeader::n_pieces() const {
  if (kv_floats == 0) return n_state_pieces();
  return n_state_pieces() + static_cast<int>((std::ssize(tokens) + kKvBlockTokens - 1) / kKvBlockTokens);
}

int SessionHeader::piece_tokens(int piece) const {
  const int64_t first = int64_t{piece - n_state_pieces()} * kKvBlockTokens;
  return static_cast<int>(std::min<int64_t>(kKvBlockTokens, std::ssize(tokens) - first));
}

int64_t SessionHeader::piece_floats(int piece) const {
  if (piece < n_state_pieces()) return state_floats[static_cast<size_t>(piece)];
  return int64_t{piece_tokens(piece)} * kv_floats;
}

int64_t SessionHeader::piece_bytes(int piece) const {
  const int64_t n = piece_floats(piece);
  switch (encoding_of_piece(*this, piece)) {
    case KvEncoding::f32:
      return 4 * n + kChecksumBytes;
    case KvEncoding::bf16:
      return 2 * n + kChecksumBytes;
    case KvEncoding::int8:
      break;
  }
  return n / kInt8Group * kInt8GroupBytes + kChecksumBytes;
}

int64_t SessionHeader::header_bytes() const {
  return kSessionFixedBytes + 4 * (std::ssize(state_floats) + std::ssize(tokens) + std::ssize(replay)) +
         std::ssize(session) + std::ssize(conversation) + std::ssize(messages) + kChecksumBytes;
}

int64_t SessionHeader::file_bytes() const {
  int64_t n = header_bytes();
  for (int i = 0; i < n_pieces(); ++i) n += piece_bytes(i);
  return n;
}

std::string encode_header(const SessionHeader& h) {
  LILY_CHECK(h.identity.size() == kIdentityDigits && is_digits(h.identity), "identity '{}'", h.identity);
  LILY_CHECK(h.conversation.empty() || h.conversation.size() == kIdentityDigits);
  Fixed f{.kind = static_cast<uint32_t>(h.kind),
          .nonce = h.nonce,
          .n_tokens = h.tokens.size(),
          .n_replay = h.replay.size(),
          .n_session = h.session.size(),
          .n_conversation = h.conversation.size(),
          .n_messages = h.messages.size(),
          .n_state_pieces = static_cast<uint32_t>(h.state_floats.size()),
          .kv_floats = h.kv_floats,
          .kv_encoding = static_cast<uint32_t>(h.kv_encoding)};
  std::copy(h.identity.begin(), h.identity.end(), f.identity.begin());
  std::string out;
  out.reserve(static_cast<size_t>(h.header_bytes()));
  append(out, std::span<const Fixed>(&f, 1));
  append(out, std::span(h.state_floats));
  append(out, std::span(h.tokens));
  append(out, std::span(h.replay));
  out += h.session;
  out += h.conversation;
  out += h.messages;
  const uint64_t sum = checksum(0, std::as_bytes(std::span(out)));
  append(out, std::span<const uint64_t>(&sum, 1));
  return out;
}

int64_t header_bytes(std::span<const std::byte> fixed, int64_t n_file_bytes, std::string_view name) {
  return header_bytes_of(fixed_of(fixed, n_file_bytes, name));
}

SessionHeader parse_header(std::span<const std::byte> bytes, int64_t n_file_bytes, std::string_view name) {
  const Fixed f = fixed_of(bytes, n_file_bytes, name);
  const int64_t n = header_bytes_of(f);
  if (std::ssize(bytes) < n) fail(Fault::user, "{}: its header is cut off", name);
  bytes = bytes.first(static_cast<size_t>(n));
  if (checksum(0, bytes.first(bytes.size() - kChecksumBytes)) != stored_checksum(bytes))
    fail(Fault::user, "{}: its header is damaged: the checksum is wrong", name);
  SessionHeader h{.kind = static_cast<SessionKind>(f.kind),
                  .identity = {f.identity.data(), f.identity.size()},
                  .kv_floats = f.kv_floats,
                  .kv_encoding = static_cast<KvEncoding>(f.kv_encoding),
                  .nonce = f.nonce};
  Parts parts(bytes.subspan(kSessionFixedBytes));
  h.state_floats = parts.values<uint32_t>(f.n_state_pieces);
  h.tokens = parts.values<int32_t>(f.n_tokens);
  h.replay = parts.values<int32_t>(f.n_replay);
  h.session = parts.text(f.n_session);
  h.conversation = parts.text(f.n_conversation);
  h.messages = parts.text(f.n_messages);
  const auto is_large = [](uint32_t n_floats) { return n_floats > kMaxPieceFloats; };
  if (std::any_of(h.state_floats.begin(), h.state_floats.end(), is_large))
    fail(Fault::user, "{}: its header is damaged", name);
  if (h.file_bytes() != n_file_bytes)
    fail(Fault::user, "{}: has {} bytes, where its header says {}: it is cut off or damaged", name,
         n_file_bytes, h.file_bytes());
  return h;
}

void encode_piece(const SessionHeader& header, int piece, std::span<const float> values, std::string& out) {
  LILY_CHECK(std::ssize(values) == header.piece_floats(piece), "piece {}: {} values of {}", piece,
             values.size(), header.piece_floats(piece));
  const size_t start = out.size();
  out.reserve(start + static_cast<size_t>(header.piece_bytes(piece)));
  out.resize(start + static_cast<size_t>(header.piece_bytes(piece) - kChecksumBytes));
  char* const at = out.data() + start;
  switch (encoding_of_piece(header, piece)) {
    case KvEncoding::f32:
      if (!values.empty()) std::memcpy(at, values.data(), values.size_bytes());
      break;
    case KvEncoding::bf16:
      encode_bf16(values, at);
      break;
    case KvEncoding::int8:
      encode_int8(values, at);
      break;
  }
  const uint64_t sum = checksum(seed_of(header, piece), std::as_bytes(std::span(out)).subspan(start));
  append(out, std::span<const uint64_t>(&sum, 1));
}

bool decode_piece(const SessionHeader& header, int piece, std::span<const std::byte> bytes,
                  std::vector<float>& values) {
  LILY_CHECK(std::ssize(bytes) == header.piece_bytes(piece), "piece {}: {} bytes of {}", piece, bytes.size(),
             header.piece_bytes(piece));
  const auto payload = bytes.first(bytes.size() - kChecksumBytes);
  if (checksum(seed_of(header, piece), payload) != stored_checksum(bytes)) return false;
  values.resize(static_cast<size_t>(header.piece_floats(piece)));
  if (values.empty()) return true;
  switch (encoding_of_piece(header, piece)) {
    case KvEncoding::f32:
      std::memcpy(values.data(), payload.data(), payload.size());
      break;
    case KvEncoding::bf16:
      decode_bf16(payload.data(), values);
      break;
    case KvEncoding::int8:
      decode_int8(payload.data(), values);
      break;
  }
  return true;
}

}  // namespace lily::engine
