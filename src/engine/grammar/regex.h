// Regular expressions of JSON Schema (`pattern`) as automata over UTF-8.
//
// A subset of ECMA-262 that is regular: characters, escapes \d \D \w \W \s \S \t \n \r \f \v \0 \xHH \uHHHH
// \cX and escaped punctuation, `.`, classes with ranges and negation, groups (also (?:...) and (?<name>...)),
// alternatives,
// * + ? {m} {m,} {m,n} with or without the lazy ?, and the anchors ^ and $. As in the schema language a
// pattern may match anywhere unless it is anchored. Refused: assertions other than ^ and $, back references,
// \p.
#pragma once

#include <cstdint>
#include <optional>
#include <string_view>

#include "engine/grammar/dfa.h"

namespace lily::engine::grammar {

// What making the automata of patterns may cost, in steps of their sets of states: a pattern of a few
// characters can need any amount of it. A second at most; `^.{1,200}$` takes 1.9 million, an address of mail
// 0.2 million.
inline constexpr int64_t kPatternSteps = 10'000'000;

// The texts in which the pattern is found. Throws Error(Fault::user), also when more than the budget, from
// which its steps are taken, is needed.
Dfa regex(std::string_view pattern, int64_t& budget);
Dfa regex(std::string_view pattern);  // with a budget of its own

// Texts of a `format`: date, time, date-time, duration, email, hostname, ipv4, uri, uuid. A part of what the
// format allows, all of it valid. Nothing if it is not one of these.
std::optional<Dfa> format_texts(std::string_view format, int64_t& budget);
std::optional<Dfa> format_texts(std::string_view format);

}  // namespace lily::engine::grammar
