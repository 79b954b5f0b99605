// JSON numbers within bounds as automata over their decimal digits, exactly: no bound is ever rounded.
#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "engine/grammar/dfa.h"

namespace lily::engine::grammar {

// How many digits a number may have, so that a model cannot write one for ever.
inline constexpr int kMaxIntegerDigits = 20, kMaxFractionDigits = 20;

// sign * 0.d1d2... * 10^point, without leading or trailing zeros among the digits; zero has none.
struct Decimal {
  bool negative = false;
  std::string digits;
  int point = 0;

  // Nothing if the text is no JSON number or its exponent is absurd.
  static std::optional<Decimal> parse(std::string_view text);
  bool is_zero() const { return digits.empty(); }
  bool is_integer() const { return point >= static_cast<int>(digits.size()); }
};
// -1, 0, 1.
int compare(const Decimal& a, const Decimal& b);

struct NumberBounds {
  struct Bound {
    Decimal value;
    bool exclusive = false;
  };
  bool integer = false;          // written without point and exponent
  std::vector<Bound> low, high;  // all of them hold
  std::vector<Decimal> multiple_of;

  bool free() const { return low.empty() && high.empty() && multiple_of.empty(); }
  bool contains(const Decimal& value) const;
};

// Numbers without bounds may have an exponent of -999 to 279 (unless they are integers), so that with all
// their digits they are finite doubles; others have none. Throws Error(Fault::user) for bounds or factors
// with more digits than kMaxIntegerDigits and kMaxFractionDigits.
Dfa numbers(const NumberBounds& bounds);

}  // namespace lily::engine::grammar
