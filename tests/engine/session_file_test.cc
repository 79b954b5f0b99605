// Session files: what is written is read back bit for bit, and nothing else is.
#include <gtest/gtest.h>

#include <array>
#include <bit>
#include <cmath>
#include <cstring>
#include <random>

#include "engine/session_io.h"
#include "model/int8_group.h"
#include "tests/support/error_of.h"
#include "tests/support/temp_folder.h"

namespace lily::engine {
namespace {

using test::error_of;
using test::TempFolder;
namespace fs = std::filesystem;

SessionHeader small_header(KvEncoding encoding = KvEncoding::bf16) {
  SessionHeader h{.identity = std::string(64, 'a'),
                  .session = "one",
                  .conversation = std::string(64, 'b'),
                  .messages = "{\"messages\": []}",
                  .state_floats = {7, 0, 130},
                  .kv_floats = encoding == KvEncoding::int8 ? 128u : 6u,
                  .kv_encoding = encoding};
  for (int i = 0; i < 150; ++i) h.tokens.push_back(i * 3);
  h.replay = {1, 2, 3};
  return h;
}

// What an int8 cache holds: any scale, any codes with the largest among them, and a group of no numbers.
void fill_int8(std::vector<float>& values, std::mt19937& random) {
  constexpr size_t kGroup = model::kInt8Group;
  const auto least = to_f16(model::kLeastInt8Scale).bits, most = to_f16(model::kLargestInt8Scale).bits;
  for (size_t first = 0; first < values.size(); first += kGroup) {
    std::array<int8_t, kGroup> codes;
    for (int8_t& code : codes) code = static_cast<int8_t>(static_cast<int>(random() % 255) - 127);
    codes[random() % kGroup] = -127;
    F16 scale{static_cast<uint16_t>(least + random() % (most - least + 1u))};
    if (first == kGroup) {
      codes.fill(0);
      scale = to_f16(std::nanf(""));
    }
    model::from_int8_group(scale, codes, std::span(values).subspan(first).first<kGroup>());
  }
}

// Any bits, NaN and denormals among them; where the piece is stored so, bfloat16 or groups of int8.
std::vector<float> values_of(const SessionHeader& h, int piece) {
  std::mt19937 random(static_cast<uint32_t>(piece) + 1);
  std::vector<float> values(static_cast<size_t>(h.piece_floats(piece)));
  const bool is_kv = piece >= h.n_state_pieces();
  if (is_kv && h.kv_encoding == KvEncoding::int8) {
    fill_int8(values, random);
    return values;
  }
  const bool bf16 = is_kv && h.kv_encoding == KvEncoding::bf16;
  for (float& v : values)
    v = std::bit_cast<float>(static_cast<uint32_t>(random()) & (bf16 ? 0xffff0000u : ~0u));
  return values;
}

bool same_bits(const std::vector<float>& a, const std::vector<float>& b) {
  return a.size() == b.size() && (a.empty() || std::memcmp(a.data(), b.data(), 4 * a.size()) == 0);
}

void write(const fs::path& path, const SessionHeader& header) {
  SessionWriter writer(path, header);
  for (int i = 0; i < header.n_pieces(); ++i) writer.add(values_of(header, i));
  writer.publish();
}

// Reads all of it; throws Error for what is damaged.
SessionHeader read_whole(const fs::path& path, const SessionHeader& expected) {
  SessionReader reader(path);
  std::vector<float> values;
  for (int i = 0; i < reader.header().n_pieces(); ++i) {
    reader.next(values);
    EXPECT_TRUE(same_bits(values, values_of(expected, i))) << "piece " << i;
  }
  return reader.header();
}

TEST(SessionFile, IsReadBackBitForBit) {
  const TempFolder folder;
  for (const KvEncoding encoding : {KvEncoding::f32, KvEncoding::bf16, KvEncoding::int8}) {
    const SessionHeader h = small_header(encoding);
    const fs::path path = folder.path() / "a.lily";
    write(path, h);
    EXPECT_EQ(static_cast<int64_t>(fs::file_size(path)), h.file_bytes());
    const SessionHeader back = read_whole(path, h);
    EXPECT_EQ(back.kind, h.kind);
    EXPECT_EQ(back.identity, h.identity);
    EXPECT_EQ(back.session, h.session);
    EXPECT_EQ(back.tokens, h.tokens);
    EXPECT_EQ(back.conversation, h.conversation);
    EXPECT_EQ(back.replay, h.replay);
    EXPECT_EQ(back.messages, h.messages);
    EXPECT_EQ(back.state_floats, h.state_floats);
    EXPECT_EQ(back.kv_encoding, encoding);
  }
}

TEST(SessionFile, KeysAndValuesTakeTwoBytesWhereTheyAreBfloat16) {
  SessionHeader wide = small_header(KvEncoding::f32), narrow = small_header(KvEncoding::bf16);
  EXPECT_EQ(wide.file_bytes() - narrow.file_bytes(), 2 * 150 * 6);
}

TEST(SessionFile, KeysAndValuesOfAnInt8CacheTake66BytesAGroup) {
  SessionHeader wide = small_header(KvEncoding::int8), narrow = wide;
  wide.kv_encoding = KvEncoding::f32;
  EXPECT_EQ(wide.file_bytes() - narrow.file_bytes(), 150 * 2 * (4 * 64 - 66));
}

TEST(SessionFile, ValuesThatAreNoGroupOfInt8AreNotRounded) {
  const SessionHeader h{
      .identity = std::string(64, '0'), .tokens = {1}, .kv_floats = 64, .kv_encoding = KvEncoding::int8};
  std::string out;
  std::vector<float> values(64, 127);
  encode_piece(h, 0, values, out);
  values[5] = 126.5f;
  EXPECT_NE(error_of([&] { encode_piece(h, 0, values, out); }).find("int8"), std::string::npos);
}

TEST(SessionFile, AnInt8CacheOfPartsOfAGroupIsDamaged) {
  SessionHeader h = small_header(KvEncoding::int8);
  h.kv_floats = 96;
  const std::string bytes = encode_header(h);
  EXPECT_NE(error_of([&] {
              parse_header(std::as_bytes(std::span(bytes)), h.file_bytes(), "input");
            }).find("damaged"),
            std::string::npos);
}

TEST(SessionFile, AValueThatIsNoBfloat16IsNotRounded) {
  SessionHeader h{
      .identity = std::string(64, '0'), .tokens = {1}, .kv_floats = 1, .kv_encoding = KvEncoding::bf16};
  std::string out;
  const float values[] = {1.0000001f};
  EXPECT_NE(error_of([&] { encode_piece(h, 0, values, out); }).find("bfloat16"), std::string::npos);
}

// The same without a file, as there are many.
void check_whole(std::string_view bytes) {
  const auto all = std::as_bytes(std::span(bytes));
  const SessionHeader h = parse_header(all, std::ssize(all), "input");
  auto rest = all.subspan(static_cast<size_t>(h.header_bytes()));
  std::vector<float> values;
  for (int i = 0; i < h.n_pieces(); ++i) {
    const auto n = static_cast<size_t>(h.piece_bytes(i));
    if (!decode_piece(h, i, rest.first(n), values)) fail(Fault::user, "piece {} is damaged", i);
    rest = rest.subspan(n);
  }
}

std::string whole_file() {
  const TempFolder folder;
  write(folder.path() / "a", small_header());
  return test::read_file(folder.path() / "a");
}

TEST(SessionFile, AnyChangedByteIsNoticed) {
  const std::string whole = whole_file();
  EXPECT_NO_THROW(check_whole(whole));
  for (size_t i = 0; i < whole.size(); ++i) {
    std::string bytes = whole;
    bytes[i] = static_cast<char>(bytes[i] ^ (1 << (i % 8)));
    EXPECT_THROW(check_whole(bytes), Error) << "byte " << i;
  }
}

TEST(SessionFile, AnyCutOrTailIsNoticed) {
  const std::string whole = whole_file();
  for (size_t n = 0; n < whole.size(); ++n) EXPECT_THROW(check_whole(whole.substr(0, n)), Error) << n;
  EXPECT_THROW(check_whole(whole + "x"), Error);
  const TempFolder folder;
  for (const size_t n : {size_t{0}, size_t{100}, whole.size() - 1}) {
    test::write_file(folder.path() / "a", whole.substr(0, n));
    error_of([&] { SessionReader reader(folder.path() / "a"); });
  }
}

TEST(SessionFile, PiecesOfAnotherFileOrPlaceAreNoticed) {
  const TempFolder folder;
  SessionHeader h{.identity = std::string(64, 'a'), .tokens = {1}, .state_floats = {4, 4}};
  const auto write_same = [&](const char* name) {
    SessionWriter writer(folder.path() / name, h);
    for (int i = 0; i < 2; ++i) writer.add(std::vector<float>{1, 2, 3, static_cast<float>(i)});
    writer.publish();
    return test::read_file(folder.path() / name);
  };
  const std::string a = write_same("a"), b = write_same("b");
  const auto n_piece = static_cast<size_t>(h.piece_bytes(0));
  const auto whole = [&](const std::string& bytes) {
    test::write_file(folder.path() / "c", bytes);
    SessionReader reader(folder.path() / "c");
    std::vector<float> values;
    for (int i = 0; i < 2; ++i) reader.next(values);
  };
  EXPECT_NO_THROW(whole(a));
  EXPECT_THROW(whole(a.substr(0, a.size() - n_piece) + b.substr(b.size() - n_piece)), Error);
  std::string swapped = a.substr(0, a.size() - 2 * n_piece);
  swapped += a.substr(a.size() - n_piece) + a.substr(a.size() - 2 * n_piece, n_piece);
  EXPECT_THROW(whole(swapped), Error);
}

TEST(SessionFile, WhatIsNotPublishedLeavesNothing) {
  const TempFolder folder;
  {
    SessionWriter writer(folder.path() / "a", small_header());
    writer.add(values_of(small_header(), 0));
    EXPECT_FALSE(fs::exists(folder.path() / "a"));
    remove_left_over(folder.path());  // its writer lives
    EXPECT_FALSE(fs::is_empty(folder.path()));
  }
  EXPECT_TRUE(fs::is_empty(folder.path()));
}

TEST(SessionFile, LeftOversOfTheDeadAreRemoved) {
  const TempFolder folder;
  test::write_file(folder.path() / ".a.lily.1-2.lily-writing", "half");
  test::write_file(folder.path() / "notes.txt", "mine");
  remove_left_over(folder.path());
  EXPECT_FALSE(fs::exists(folder.path() / ".a.lily.1-2.lily-writing"));
  EXPECT_TRUE(fs::exists(folder.path() / "notes.txt"));
}

TEST(SessionFile, IsForItsOwnerOnly) {
  const TempFolder folder;
  write(folder.path() / "a", small_header());
  EXPECT_EQ(fs::status(folder.path() / "a").permissions(), fs::perms::owner_read | fs::perms::owner_write);
}

}  // namespace
}  // namespace lily::engine
