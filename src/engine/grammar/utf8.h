// UTF-8 a byte at a time: shortest forms only, no surrogates, nothing above U+10FFFF.
#pragma once

#include <cstdint>
#include <optional>

namespace lily::engine::grammar {

// What has been read of a character.
enum class Utf8State : uint8_t {
  boundary,
  one_left,
  two_left,
  three_left,
  after_e0,
  after_ed,
  after_f0,
  after_f4
};

inline std::optional<Utf8State> utf8_next(Utf8State state, uint8_t byte) {
  using S = Utf8State;
  const auto within = [&](uint8_t low, uint8_t high, S to) -> std::optional<S> {
    if (byte < low || byte > high) return std::nullopt;
    return to;
  };
  switch (state) {
    case S::boundary:
      if (byte < 0x80) return S::boundary;
      if (byte < 0xc2 || byte > 0xf4) return std::nullopt;
      if (byte < 0xe0) return S::one_left;
      if (byte == 0xe0) return S::after_e0;
      if (byte == 0xed) return S::after_ed;
      if (byte < 0xf0) return S::two_left;
      if (byte == 0xf0) return S::after_f0;
      return byte == 0xf4 ? S::after_f4 : S::three_left;
    case S::one_left:
      return within(0x80, 0xbf, S::boundary);
    case S::two_left:
      return within(0x80, 0xbf, S::one_left);
    case S::three_left:
      return within(0x80, 0xbf, S::two_left);
    case S::after_e0:
      return within(0xa0, 0xbf, S::one_left);
    case S::after_ed:
      return within(0x80, 0x9f, S::one_left);
    case S::after_f0:
      return within(0x90, 0xbf, S::two_left);
    case S::after_f4:
      return within(0x80, 0x8f, S::two_left);
  }
  return std::nullopt;
}

}  // namespace lily::engine::grammar
