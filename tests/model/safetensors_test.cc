#include "model/safetensors.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <map>

#include "tests/support/checkpoint_writer.h"
#include "tests/support/error_of.h"
#include "tests/support/temp_folder.h"

namespace lily::model {
namespace {

using testing::AllOf;
using testing::HasSubstr;
using testing::StartsWith;

std::string with_length(const std::string& document, uint64_t n) {
  std::string bytes(8, '\0');
  for (int i = 0; i < 8; ++i) bytes[i] = static_cast<char>(n >> (8 * i) & 0xff);
  return bytes + document;
}

// A file with this header and n_data bytes of data.
std::string file_with(const std::string& document, size_t n_data = 0) {
  return with_length(document, document.size()) + std::string(n_data, 'd');
}

SafetensorsHeader parse(std::string_view bytes) {
  return parse_safetensors(std::as_bytes(std::span(bytes)), "x.safetensors");
}

std::string complaint(std::string_view bytes) {
  const std::string message = test::error_of([&] { parse(bytes); });
  EXPECT_THAT(message, StartsWith("x.safetensors: "));
  EXPECT_LT(message.size(), 700u);
  return message;
}

std::string entry(const std::string& dtype, const std::string& shape, const std::string& offsets) {
  return R"({"dtype":")" + dtype + R"(","shape":)" + shape + R"(,"data_offsets":)" + offsets + "}";
}

TEST(Safetensors, EntriesComeInTheOrderOfTheData) {
  const SafetensorsHeader header = parse(
      file_with(R"({"__metadata__":{"format":"mlx"},"a":)" + entry("U32", "[2,3]", "[6,30]") + R"(,"b":)" +
                    entry("BF16", "[3]", "[0,6]") + R"(,"c":)" + entry("F32", "[]", "[30,34]") + "}  \n",
                34));
  ASSERT_EQ(header.tensors.size(), 3u);
  EXPECT_EQ(header.data_bytes, 34u);
  EXPECT_EQ(header.tensors[0].name, "b");
  EXPECT_EQ(header.tensors[0].dtype, Dtype::bf16);
  EXPECT_EQ(header.tensors[1].name, "a");
  EXPECT_EQ(header.tensors[1].shape, (std::vector<int64_t>{2, 3}));
  EXPECT_EQ(header.tensors[1].begin, 6u);
  EXPECT_EQ(header.tensors[1].end, 30u);
  EXPECT_EQ(header.tensors[1].n_bytes(), 24);
  EXPECT_TRUE(header.tensors[2].shape.empty());
}

TEST(Safetensors, TheDataMayBeginAtAnOddOffset) {
  const std::vector<test::Tensor> tensors = {{"a", "BF16", {2}, std::vector<std::byte>(4)}};
  EXPECT_EQ(parse(test::safetensors_bytes(tensors, true)).data_start % 2, 1u);
  EXPECT_EQ(parse(test::safetensors_bytes(tensors, false)).data_start % 2, 0u);
}

TEST(Safetensors, AFileWithoutTensorsIsValid) {
  EXPECT_TRUE(parse(file_with("{}")).tensors.empty());
  EXPECT_TRUE(parse(file_with(R"({"__metadata__":{}})")).tensors.empty());
}

TEST(Safetensors, EmptyTensorsTakeNoRoom) {
  const auto header =
      parse(file_with(R"({"a":)" + entry("F32", "[0,7]", "[4,4]") + R"(,"b":)" +
                          entry("F32", "[1]", "[0,4]") + R"(,"c":)" + entry("F32", "[0]", "[0,0]") + "}",
                      4));
  EXPECT_EQ(header.tensors.size(), 3u);
  EXPECT_THAT(
      complaint(file_with(
          R"({"a":)" + entry("F32", "[0]", "[2,2]") + R"(,"b":)" + entry("F32", "[1]", "[0,4]") + "}", 4)),
      HasSubstr("overlaps"));
}

TEST(Safetensors, EveryTypeHasItsSize) {
  const std::map<std::string, int> sizes = {{"BF16", 2}, {"F16", 2},     {"F32", 4},     {"F64", 8},
                                            {"U8", 1},   {"I8", 1},      {"U16", 2},     {"I16", 2},
                                            {"U32", 4},  {"I32", 4},     {"U64", 8},     {"I64", 8},
                                            {"BOOL", 1}, {"F8_E4M3", 1}, {"F8_E5M2", 1}, {"F8_E8M0", 1}};
  for (const auto& [name, size] : sizes) {
    EXPECT_EQ(dtype_bytes(dtype_of(name)), size) << name;
    const std::string offsets = "[0," + std::to_string(3 * size) + "]";
    EXPECT_NO_THROW(parse(file_with(R"({"a":)" + entry(name, "[3]", offsets) + "}", 3 * size))) << name;
    EXPECT_THAT(complaint(file_with(R"({"a":)" + entry(name, "[4]", offsets) + "}", 3 * size)),
                HasSubstr("type and shape need"));
  }
  for (const char* name : {"", "F8", "bf16", "other", "F4"}) EXPECT_EQ(dtype_of(name), Dtype::other) << name;
}

TEST(Safetensors, AnUnknownTypeIsCarriedAlong) {
  const auto header = parse(file_with(R"({"a":)" + entry("F4", "[3]", "[0,2]") + "}", 2));
  EXPECT_EQ(header.tensors[0].dtype, Dtype::other);
  EXPECT_EQ(header.tensors[0].dtype_name, "F4");
  EXPECT_THAT(complaint(file_with(R"({"a":)" + entry("F4", "[3]", "[0,3]") + "}", 2)),
              HasSubstr("do not lie in"));
}

TEST(Safetensors, TheFileMayNotBeShorterThanItsHeader) {
  for (size_t n = 0; n < 8; ++n) EXPECT_THAT(complaint(std::string(n, 'x')), HasSubstr("too few"));
  EXPECT_THAT(complaint(with_length("{}", 0)), HasSubstr("header length 0"));
  EXPECT_THAT(complaint(with_length("{}", 1)), HasSubstr("header length 1"));
  EXPECT_THAT(complaint(with_length("{}", 3)), HasSubstr("is the file complete?"));
  EXPECT_THAT(complaint(with_length("{}", 100'000'000)), HasSubstr("is the file complete?"));
  for (const uint64_t n :
       {uint64_t{100'000'001}, uint64_t{1} << 32, uint64_t{1} << 63, UINT64_MAX, UINT64_MAX - 7})
    EXPECT_THAT(complaint(with_length("{}", n)), HasSubstr("is this a safetensors file?")) << n;
}

TEST(Safetensors, TheHeaderIsAnObjectThatBeginsAtItsFirstByte) {
  for (const char* document : {" {}", "[]", "12", "\"a\"", "null", "\xef\xbb\xbf{}"})
    EXPECT_THAT(complaint(file_with(document)), HasSubstr("does not begin with {"));
  EXPECT_THAT(complaint(file_with("{} {}")), HasSubstr("not valid JSON"));
  EXPECT_THAT(complaint(file_with(std::string("{}\0\0", 4))), HasSubstr("zero"));
  EXPECT_THAT(complaint(file_with("{\"\xff\":1}")), HasSubstr("not valid JSON"));
}

TEST(Safetensors, DeepJsonIsRefused) {
  EXPECT_THAT(complaint(file_with(R"({"a":)" + std::string(100'000, '['))),
              HasSubstr("\"a\" is not a JSON object"));
  std::string document = R"({"a":{"x":)";
  for (int i = 0; i < 100'000; ++i) document += R"({"x":)";
  EXPECT_THAT(complaint(file_with(document)), HasSubstr("deeper than 8"));
}

TEST(Safetensors, KeysMayNotRepeat) {
  const std::string a = entry("U8", "[1]", "[0,1]");
  EXPECT_THAT(complaint(file_with(R"({"a":)" + a + R"(,"a":)" + a + "}", 1)),
              HasSubstr("\"a\" appears twice"));
  EXPECT_THAT(
      complaint(file_with(R"({"a":{"dtype":"U8","dtype":"U8","shape":[1],"data_offsets":[0,1]}})", 1)),
      HasSubstr("\"dtype\" appears twice"));
  EXPECT_THAT(complaint(file_with(R"({"__metadata__":{"f":"1","f":"2"}})")),
              HasSubstr("\"f\" appears twice"));
  EXPECT_THAT(
      complaint(file_with(R"({"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1],"z":[{"q":1,"q":2}]}})", 1)),
      HasSubstr("\"q\" appears twice"));
}

TEST(Safetensors, AnEntryNeedsItsThreeFields) {
  EXPECT_THAT(complaint(file_with(R"({"a":{"shape":[1],"data_offsets":[0,1]}})", 1)),
              HasSubstr("no \"dtype\""));
  EXPECT_THAT(complaint(file_with(R"({"a":{"dtype":"U8","data_offsets":[0,1]}})", 1)),
              HasSubstr("no \"shape\""));
  EXPECT_THAT(complaint(file_with(R"({"a":{"dtype":"U8","shape":[1]}})", 1)), HasSubstr("0 data_offsets"));
  for (const char* value : {"1", "null", "[]", "\"x\""})
    EXPECT_THAT(complaint(file_with(std::string(R"({"a":)") + value + "}")), HasSubstr("not a JSON object"));
}

TEST(Safetensors, FieldsThatTheFormatDoesNotDefineAreIgnored) {
  EXPECT_EQ(
      parse(
          file_with(
              R"({"a":{"dtype":"U8","shape":[1],"x":{"shape":["q",[]],"dtype":7},"data_offsets":[0,1],"y":[[1],{}]}})",
              1))
          .tensors[0]
          .shape,
      std::vector<int64_t>{1});
}

TEST(Safetensors, FieldsOfTheWrongKindAreRefused) {
  for (const char* dtype : {"1", "null", "[\"U8\"]", "{}"})
    EXPECT_THAT(complaint(file_with(
                    std::string(R"({"a":{"dtype":)") + dtype + R"(,"shape":[1],"data_offsets":[0,1]}})", 1)),
                HasSubstr("\"dtype\" is not a string"));
  for (const char* shape : {"1", "null", "\"[1]\"", "{}", "{\"0\":1}", "[[1]]", "[{}]"})
    EXPECT_THAT(complaint(file_with(
                    std::string(R"({"a":{"dtype":"U8","shape":)") + shape + R"(,"data_offsets":[0,1]}})", 1)),
                HasSubstr("\"shape\" is not a list"));
  for (const char* dim : {"-1", "1.0", "1e0", "\"1\"", "null", "true", "1099511627777",
                          "18446744073709551615", "99999999999999999999"})
    EXPECT_THAT(complaint(file_with(
                    std::string(R"({"a":{"dtype":"U8","shape":[)") + dim + R"(],"data_offsets":[0,1]}})", 1)),
                HasSubstr("a dimension is"));
  for (const char* offsets : {"0", "null", "{}", "[0,1,1]", "[0,-1]", "[0.0,1]", "[0,\"1\"]", "[[0,1]]",
                              "[0,99999999999999999999]"})
    EXPECT_THAT(complaint(file_with(
                    std::string(R"({"a":{"dtype":"U8","shape":[1],"data_offsets":)") + offsets + "}}", 1)),
                HasSubstr("\"data_offsets\" is not a list of two"));
  for (const char* offsets : {"[]", "[0]"})
    EXPECT_THAT(complaint(file_with(
                    std::string(R"({"a":{"dtype":"U8","shape":[1],"data_offsets":)") + offsets + "}}", 1)),
                HasSubstr("expected 2"));
  for (const char* metadata : {"[]", "1", "{\"a\":1}", "{\"a\":{}}", "{\"a\":[]}", "null"})
    complaint(file_with(std::string(R"({"__metadata__":)") + metadata + "}"));
}

TEST(Safetensors, RankIsLimited) {
  EXPECT_NO_THROW(parse(file_with(R"({"a":)" + entry("U8", "[1,1,1,1,1,1,1,1]", "[0,1]") + "}", 1)));
  EXPECT_THAT(complaint(file_with(R"({"a":)" + entry("U8", "[1,1,1,1,1,1,1,1,1]", "[0,1]") + "}", 1)),
              HasSubstr("more than 8 dimensions"));
  std::string many = "[1";
  for (int i = 0; i < 1'000'000; ++i) many += ",1";
  EXPECT_THAT(complaint(file_with(R"({"a":)" + entry("U8", many + "]", "[0,1]") + "}", 1)),
              HasSubstr("more than 8 dimensions"));
}

TEST(Safetensors, ProductsThatOverflowAreRefused) {
  // 2^40 * 2^24 = 2^64 wraps to 0; 2^40 * 2^23 = 2^63 wraps to a negative number; bytes can overflow where
  // elements do not.
  for (const char* shape :
       {"[1099511627776,16777216]", "[1099511627776,8388608]", "[1099511627776,1099511627776,1099511627776]",
        "[1099511627776,4194304]", "[1099511627776,2097152]"})
    for (const char* offsets : {"[0,0]", "[0,4]"})
      EXPECT_THAT(complaint(file_with(std::string(R"({"a":)") + entry("F32", shape, offsets) + "}", 4)),
                  HasSubstr("overflows"))
          << shape;
}

TEST(Safetensors, RangesLieInTheData) {
  const auto one = [](const char* offsets) {
    return std::string(R"({"a":)") + entry("U8", "[4]", offsets) + "}";
  };
  for (const char* offsets : {"[0,5]", "[4,0]", "[1,5]", "[18446744073709551615,3]",
                              "[0,18446744073709551615]", "[18446744073709551612,18446744073709551615]"})
    EXPECT_THAT(complaint(file_with(one(offsets), 4)), HasSubstr("do not lie in")) << offsets;
  EXPECT_THAT(complaint(file_with(one("[0,3]"), 4)), HasSubstr("type and shape need 4"));
}

TEST(Safetensors, OverlapsHolesAndTrailingBytesAreRefused) {
  const auto two = [](const char* a, const char* b) {
    return std::string(R"({"a":)") + entry("U8", "[4]", a) + R"(,"b":)" + entry("U8", "[4]", b) + "}";
  };
  EXPECT_NO_THROW(parse(file_with(two("[0,4]", "[4,8]"), 8)));
  EXPECT_NO_THROW(parse(file_with(two("[4,8]", "[0,4]"), 8)));
  EXPECT_THAT(complaint(file_with(two("[0,4]", "[3,7]"), 7)),
              AllOf(HasSubstr("b: "), HasSubstr("overlaps the tensor before it by 1")));
  EXPECT_THAT(complaint(file_with(two("[0,4]", "[0,4]"), 4)), HasSubstr("overlaps"));
  EXPECT_THAT(complaint(file_with(two("[0,4]", "[5,9]"), 9)), HasSubstr("1 bytes before the data of b"));
  EXPECT_THAT(complaint(file_with(two("[1,5]", "[5,9]"), 9)), HasSubstr("1 bytes before the data of a"));
  EXPECT_THAT(complaint(file_with(two("[0,4]", "[4,8]"), 11)), HasSubstr("3 bytes at the end"));
  EXPECT_THAT(complaint(file_with("{}", 1)), HasSubstr("1 bytes at the end"));
}

TEST(Safetensors, NamesAreLimited) {
  EXPECT_NO_THROW(
      parse(file_with(R"({")" + std::string(512, 'n') + R"(":)" + entry("U8", "[1]", "[0,1]") + "}", 1)));
  EXPECT_THAT(
      complaint(file_with(R"({")" + std::string(513, 'n') + R"(":)" + entry("U8", "[1]", "[0,1]") + "}", 1)),
      HasSubstr("513 bytes"));
  EXPECT_THAT(complaint(file_with(R"({"a\u0000b":)" + entry("U8", "[1]", "[0,1]") + "}", 1)),
              HasSubstr("zero byte"));
  EXPECT_THAT(complaint(file_with(R"({"a\nb":)" + entry("U8", "[2]", "[0,1]") + "}", 1)),
              HasSubstr("a\\x0ab"));
}

TEST(Safetensors, TheNumberOfTensorsIsLimited) {
  const auto many = [](int n) {
    std::string document = "{";
    for (int i = 0; i < n; ++i)
      document += (i ? ",\"" : "\"") + std::to_string(i) + "\":" + entry("U8", "[0]", "[0,0]");
    return file_with(document + "}");
  };
  EXPECT_EQ(parse(many(100'000)).tensors.size(), 100'000u);
  EXPECT_THAT(complaint(many(100'001)), HasSubstr("more than 100000"));
}

// What an accepted header promises.
void expect_sound(const SafetensorsHeader& header, uint64_t file_bytes) {
  EXPECT_EQ(header.data_start + header.data_bytes, file_bytes);
  uint64_t end = 0;
  for (const TensorEntry& tensor : header.tensors) {
    EXPECT_EQ(tensor.begin, end);
    EXPECT_LE(tensor.end, header.data_bytes);
    int64_t n = dtype_bytes(tensor.dtype);
    for (const int64_t dim : tensor.shape) n *= dim;
    if (tensor.dtype != Dtype::other) {
      EXPECT_EQ(n, tensor.n_bytes());
    }
    end = tensor.end;
  }
  EXPECT_EQ(end, header.data_bytes);
}

std::string sample_file() {
  return test::safetensors_bytes({{"b.weight", "U32", {3, 5}, std::vector<std::byte>(60)},
                                  {"a.scales", "BF16", {3, 1}, std::vector<std::byte>(6)},
                                  {"c", "F32", {2}, std::vector<std::byte>(8)}});
}

TEST(Safetensors, EveryTruncationIsRefused) {
  const std::string bytes = sample_file();
  parse(bytes);
  for (size_t n = 0; n < bytes.size(); ++n) complaint(std::string_view(bytes).substr(0, n));
}

TEST(Safetensors, EveryFlippedBitOfTheHeaderIsRefusedOrHarmless) {
  const std::string bytes = sample_file();
  const uint64_t data_start = parse(bytes).data_start;
  int n_refused = 0;
  for (size_t i = 0; i < data_start; ++i) {
    for (int bit = 0; bit < 8; ++bit) {
      std::string flipped = bytes;
      flipped[i] = static_cast<char>(flipped[i] ^ (1 << bit));
      try {
        expect_sound(parse(flipped), flipped.size());
      } catch (const Error& error) {
        EXPECT_EQ(error.fault(), Fault::model);
        EXPECT_EQ(std::string(error.what()).find('\n'), std::string::npos) << error.what();
        ++n_refused;
      }
    }
  }
  EXPECT_GT(n_refused, static_cast<int>(data_start) * 4);
}

TEST(Safetensors, AFileOnDiskReadsAsInMemory) {
  const test::TempFolder folder;
  const std::string bytes = sample_file();
  test::write_file(folder.path() / "x.safetensors", bytes);
  std::string raw;
  const SafetensorsHeader header = read_safetensors_header(File::open(folder.path() / "x.safetensors"), &raw);
  expect_sound(header, bytes.size());
  EXPECT_EQ(raw, bytes.substr(8, header.data_start - 8));
  test::write_file(folder.path() / "x.safetensors", "abc");
  EXPECT_THAT(test::error_of([&] { read_safetensors_header(File::open(folder.path() / "x.safetensors")); }),
              HasSubstr("x.safetensors: has 3 bytes"));
}

}  // namespace
}  // namespace lily::model
