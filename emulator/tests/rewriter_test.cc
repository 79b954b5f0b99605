#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <stdexcept>

#include "emulator/rewriter/lint.h"
#include "emulator/rewriter/rewrite.h"

namespace lily::emulator {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;

std::vector<std::string> lint_text(const std::string& text) { return lint(tokenize(text)); }
std::string rewritten(const std::string& text) { return rewrite(tokenize(text), "symbol", "file.metal"); }

TEST(Tokens, NumbersKeepExponentsAndSuffixes) {
  const auto tokens = tokenize("1.5e-3f+0x1p+4f .5f 7u");
  std::vector<std::string> texts;
  texts.reserve(tokens.size());
  for (const Token& t : tokens) texts.push_back(t.text);
  EXPECT_THAT(texts, ElementsAre("1.5e-3f", "+", "0x1p+4f", ".5f", "7u", ""));
}

TEST(Tokens, LineMarkersGiveFileAndLine) {
  const auto tokens = tokenize("# 40 \"a.metal\"\nx\n\ny\n#line 7 \"b.h\"\nz");
  EXPECT_EQ(tokens[1].file + std::to_string(tokens[1].line), "a.metal40");
  EXPECT_EQ(tokens[2].line, 42);
  EXPECT_EQ(tokens[4].file + std::to_string(tokens[4].line), "b.h7");
}

TEST(Lint, AcceptsPointersWithAddressSpaces) {
  EXPECT_THAT(lint_text("float f(device const float* p, constant uint& n, threadgroup half* h) {"
                        "thread float& x = y; return p[n] * float(h[0]) * x; }"),
              IsEmpty());
}
TEST(Lint, RefusesPointersWithout) {
  EXPECT_THAT(lint_text("void f(float* p);"), ElementsAre(HasSubstr("without an address space")));
  EXPECT_THAT(lint_text("void f(device float* p, float* q);"),
              ElementsAre(HasSubstr("without an address space")));
  EXPECT_THAT(lint_text("struct S {}; void f(const S& s);"),
              ElementsAre(HasSubstr("without an address space")));
  EXPECT_THAT(lint_text("template <typename T> void f(T* t);"),
              ElementsAre(HasSubstr("without an address space")));
}
TEST(Lint, RefusesDoubles) {
  EXPECT_THAT(lint_text("double x;"), ElementsAre(HasSubstr("no double")));
  EXPECT_THAT(lint_text("# 3 \"k.metal\"\nfloat x = 0.5;"),
              ElementsAre(HasSubstr("k.metal:3: error: literal 0.5")));
  EXPECT_THAT(lint_text("float x = 1e3;"), ElementsAre(HasSubstr("literal 1e3")));
  EXPECT_THAT(lint_text("float x = 0.5f + 1e-3f; uint y = 0x1e3;"), IsEmpty());
}
TEST(Lint, RefusesWordsOfOpenClAndOfHostCode) {
  EXPECT_THAT(lint_text("uint local = 1u;"), ElementsAre(HasSubstr("'local'")));
  EXPECT_THAT(lint_text("void f() { throw 1; }"), ElementsAre(HasSubstr("'throw'")));
}

TEST(Rewrite, TableHasTheAttributesOfKernelParameters) {
  const std::string out = rewritten(
      "kernel void f(device float* a [[buffer(0)]], device const uint* b [[buffer(2)]], constant P& p "
      "[[buffer(1)]], "
      "threadgroup half* t [[threadgroup(3)]], device int* q [[buffer(4), function_constant(kOn)]], "
      "uint i [[thread_position_in_grid]]) {}");
  EXPECT_THAT(out, HasSubstr("MSL_KERNEL(\"f\", (f), metal::entry::Buffer<0, true, false>, "
                             "metal::entry::Buffer<2, false, false>, metal::entry::Buffer<1, false, false>, "
                             "metal::entry::ThreadgroupMemory<3>, metal::entry::Buffer<4, true, true>, "
                             "metal::entry::Input_thread_position_in_grid)"));
  EXPECT_THAT(out, HasSubstr("symbol = {\"file.metal\", msl_kernels, 1, msl_constants, 0}"));
}
TEST(Rewrite, InstantiationsWithHostNamesAreKernels) {
  const std::string out = rewritten(
      "template <typename T> [[kernel]] void f(device T* a [[buffer(0)]]) {}\n"
      "template [[host_name(\"f_\" \"half\")]] [[kernel]] decltype(f<half>) f<half>;");
  EXPECT_THAT(out, HasSubstr("MSL_KERNEL(\"f_\"\"half\", (f<half>), metal::entry::Buffer<0, true, false>)"));
  EXPECT_THAT(out, HasSubstr("MSL_INSTANTIATE(template decltype(f<half>) f<half>;)"));
  EXPECT_THAT(out, HasSubstr("msl_kernels, 1,"));
}
TEST(Rewrite, ThreadgroupVariablesButNotPointers) {
  const std::string out = rewritten(
      "kernel void f(device uint* o [[buffer(0)]]) {\n threadgroup float a[4][8], b;\n threadgroup float* p "
      "= a[0];\n}");
  EXPECT_THAT(out, HasSubstr("MSL_THREADGROUP((float), a, ([4][8]), 1)"));
  EXPECT_THAT(out, HasSubstr("MSL_THREADGROUP((float), b, (), 2)"));
  EXPECT_THAT(out, HasSubstr("threadgroup float* p = a[0];"));
}
TEST(Rewrite, FunctionConstants) {
  const std::string out =
      rewritten("constant uint kRows [[function_constant(7)]];\nconstant uint kOther = 3u;");
  EXPECT_THAT(out, HasSubstr("MSL_FUNCTION_CONSTANT(uint, kRows, 7)"));
  EXPECT_THAT(out, HasSubstr("constant uint kOther = 3u;"));
}
TEST(Rewrite, LinesStayWhereTheyWere) {
  const std::string out =
      rewritten("# 1 \"f\"\nkernel void f(device uint* o\n  [[buffer(0)]]) {\n  o[0] = 1u;\n}\n");
  const size_t start = out.find("# 1 \"f\"\n"), end = out.find("o[0] = 1u");
  ASSERT_TRUE(start != std::string::npos && end != std::string::npos) << out;
  EXPECT_EQ(std::count(out.begin() + static_cast<long>(start), out.begin() + static_cast<long>(end), '\n'), 3)
      << out;
}
TEST(Rewrite, ParametersWithoutAttributesAreRefused) {
  EXPECT_THROW(rewritten("kernel void f(device uint* o) {}"), std::runtime_error);
}

}  // namespace
}  // namespace lily::emulator
