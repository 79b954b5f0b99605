// Which request goes to which engine: names, addresses, keys, the model's name in a body.
#include "server/upstream.h"

#include <gtest/gtest.h>

#include "tests/support/error_of.h"

namespace lily::server {
namespace {

using test::error_of;

TEST(Upstream, AnAddressWithoutAPathGetsItsVersion) {
  EXPECT_EQ(parse_upstream("big=http://GPU:8000").base, "http://gpu:8000/v1");
  EXPECT_EQ(parse_upstream("big=http://gpu:8000/").base, "http://gpu:8000/v1");
  EXPECT_EQ(parse_upstream("big=https://example.org/api/v1/").base, "https://example.org:443/api/v1");
  EXPECT_EQ(parse_upstream("Qwen/Qwen3-235B=http://[::1]:1/v1").name, "Qwen/Qwen3-235B");
}

TEST(Upstream, WhatIsNoNameAndAddressIsRefused) {
  for (const char* text : {"", "big", "=http://gpu", "b g=http://gpu", "http://gpu"})
    EXPECT_NE(error_of([&] { parse_upstream(text); }).find("this is not NAME=URL"), std::string::npos)
        << text;
  for (const char* text :
       {"big=", "big=ftp://gpu", "big=file:///etc/passwd", "big=http://", "big=http://a b"})
    EXPECT_NE(error_of([&] { parse_upstream(text); }).find("no http or https address"), std::string::npos)
        << text;
}

TEST(Upstream, SecretsInAnAddressAreRefusedAndNotRepeated) {
  for (const char* text : {"big=http://me:hidden@gpu/v1", "big=http://hidden@gpu/v1",
                           "big=http://gpu/v1?key=hidden", "big=http://gpu/v1#hidden"}) {
    const std::string error = error_of([&] { parse_upstream(text); });
    EXPECT_NE(error.find("LILY_UPSTREAM_KEY_BIG"), std::string::npos) << error;
    EXPECT_EQ(error.find("hidden"), std::string::npos) << error;
  }
}

TEST(Upstream, EachNameHasAVariableForItsKey) {
  EXPECT_EQ(key_variable_of("Qwen/Qwen3.5-x"), "LILY_UPSTREAM_KEY_QWEN_QWEN3_5_X");
  EXPECT_NE(error_of([] { check_upstreams({{.name = "a.b"}, {.name = "a-b"}}); }).find("the same variable"),
            std::string::npos);
  EXPECT_NE(error_of([] { check_upstreams({{.name = "a"}, {.name = "a"}}); }).find("given twice"),
            std::string::npos);
  const std::string error = error_of([] { check_upstreams({{.name = "a", .key = "sk-x\r\nX-Evil: 1"}}); });
  EXPECT_NE(error.find("LILY_UPSTREAM_KEY_A has a character that no key has"), std::string::npos);
  EXPECT_EQ(error.find("sk-x"), std::string::npos);
}

TEST(Upstream, AKeyOverPlainHttpIsNoticed) {
  EXPECT_TRUE(parse_upstream("big=http://gpu:8000").is_key_in_clear);
  for (const char* text :
       {"big=https://gpu", "big=http://localhost:1", "big=http://127.0.0.1:1", "big=http://[::1]:1"})
    EXPECT_FALSE(parse_upstream(text).is_key_in_clear) << text;
}

TEST(Upstream, TheLongestNameWinsAndTheLocalModelStays) {
  const Upstreams upstreams({.upstreams = {{.name = "cloud"}, {.name = "cloud/eu"}, {.name = "big"}}});
  const auto found = [&](const char* model) -> std::string {
    const auto route = upstreams.find(model, "cloud/tiny");
    return route ? upstreams.all()[route->index].name + " " + route->model : "here";
  };
  EXPECT_EQ(found("big"), "big ");
  EXPECT_EQ(found("cloud/x/y"), "cloud x/y");
  EXPECT_EQ(found("cloud/eu"), "cloud/eu ");
  EXPECT_EQ(found("cloud/eu/x"), "cloud/eu x");
  for (const char* model : {"cloud/tiny", "other", "", "bigger", "big/", "BIG"})
    EXPECT_EQ(found(model), "here") << model;
}

TEST(Upstream, OnlyTheModelOfABodyChanges) {
  EXPECT_EQ(with_model(R"({"model": "a/b", "n": 1e999})", "b"), R"({"model": "b", "n": 1e999})");
  EXPECT_EQ(
      with_model(R"( {"x":{"model":"a"},"y":["model",":"],"z":"model","mod\u0065l" :  "a\"b"} )", "b\"c"),
      R"( {"x":{"model":"a"},"y":["model",":"],"z":"model","mod\u0065l" :  "b\"c"} )");
  EXPECT_EQ(with_model(R"({"a": "\\", "b": "\"model\": ", "model":"x"})", "y"),
            R"({"a": "\\", "b": "\"model\": ", "model":"y"})");
}

}  // namespace
}  // namespace lily::server
