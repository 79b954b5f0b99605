// Names, keys and the ends of bodies, as texts.
#include "server/access.h"

#include <gtest/gtest.h>

#include "server/framing.h"

namespace lily::server {
namespace {

TEST(Access, OnlyNamesThatLeadNowhereElseAreLoopback) {
  for (const char* name : {"localhost", "LocalHost", "127.0.0.1", "127.9.9.9", "::1", "[::1]"})
    EXPECT_TRUE(is_loopback(name)) << name;
  // Whoever owns example.org may let its names point at this machine, to use it from a page of theirs.
  for (const char* name : {"127.example.org", "127.0.0.1.example.org", "localhost.example.org", "example.org",
                           "128.0.0.1", "::2", "::", "0.0.0.0", ""})
    EXPECT_FALSE(is_loopback(name)) << name;
}

TEST(Access, AuthoritiesAndTheirHosts) {
  EXPECT_EQ(authority_of("http://localhost:8080"), "localhost:8080");
  EXPECT_EQ(authority_of("null"), "null");
  EXPECT_EQ(host_of("localhost:8080"), "localhost");
  EXPECT_EQ(host_of("[::1]:8080"), "::1");
  EXPECT_EQ(host_of("["), "");
  EXPECT_EQ(host_of(""), "");
}

TEST(Access, AKeyIsTheSameOnlyAsAWhole) {
  EXPECT_TRUE(is_same_key("secret", "secret"));
  EXPECT_FALSE(is_same_key("secret", ""));
  EXPECT_TRUE(is_same_key("", ""));
  for (const char* given : {"", "secre", "secrets", "Secret", "secretsecret"})
    EXPECT_FALSE(is_same_key(given, "secret")) << given;
}

using Values = std::vector<std::string>;

TEST(Framing, OneLengthOrChunks) {
  EXPECT_FALSE(framing_of({}, {})->has_body());
  EXPECT_FALSE(framing_of({"0"}, {})->has_body());
  EXPECT_EQ(framing_of({"17"}, {})->length, 17u);
  EXPECT_EQ(framing_of({"17", "17"}, {})->length, 17u);
  EXPECT_EQ(framing_of({"18446744073709551615"}, {})->length, UINT64_MAX);
  EXPECT_TRUE(framing_of({}, {"Chunked"})->is_chunked);
}

TEST(Framing, WhatCanBeReadInTwoWaysIsNone) {
  for (const char* length : {"", "-5", "+5", "5 ", "0x5", "5, 5", "5;", "five", "18446744073709551616"})
    EXPECT_FALSE(framing_of({length}, {})) << length;
  EXPECT_FALSE(framing_of({"5", "6"}, {}));
  EXPECT_FALSE(framing_of({"5"}, {"chunked"}));
  for (const char* encoding : {"", "gzip, chunked", "identity", "xchunked", "chunked, identity"})
    EXPECT_FALSE(framing_of({}, {encoding})) << encoding;
  EXPECT_FALSE(framing_of({}, {"chunked", "chunked"}));
}

TEST(Framing, NamesOfHeadersHaveNoSpaces) {
  for (const char* name : {"Content-Length", "x_y", "X-1", "!#$%&'*+-.^_`|~"})
    EXPECT_TRUE(is_header_name(name)) << name;
  for (const char* name :
       {"", " Content-Length", "Content-Length ", "a\tb", "a:b", "a(b", "\xc3\xa4", "a\x7f"})
    EXPECT_FALSE(is_header_name(name)) << name;
}

}  // namespace
}  // namespace lily::server
