#include "engine/grammar/number.h"

#include <algorithm>
#include <compare>
#include <cstdlib>

#include "base/error.h"
#include "engine/grammar/regex.h"

namespace lily::engine::grammar {
namespace {

constexpr int64_t kMaxFactor = 10'000;  // of multipleOf, in units of its last digit

bool is_digit(char c) { return c >= '0' && c <= '9'; }

// Compares |a| and |b|.
int compare_magnitude(const Decimal& a, const Decimal& b) {
  if (a.is_zero() || b.is_zero()) return static_cast<int>(!a.is_zero()) - static_cast<int>(!b.is_zero());
  if (a.point != b.point) return a.point < b.point ? -1 : 1;
  const int order = a.digits.compare(b.digits);  // no trailing zeros: a prefix is smaller
  return order < 0 ? -1 : order > 0 ? 1 : 0;
}

// A factor as factor * 10^-scale.
struct Factor {
  int64_t factor = 1;
  int scale = 0;
};

Factor factor_of(const Decimal& value) {
  const int n = static_cast<int>(value.digits.size());
  Factor out{.factor = 0, .scale = std::max(0, n - value.point)};
  if (!value.is_zero() && !value.negative && n + std::max(0, value.point - n) <= 9) {
    for (const char c : value.digits) out.factor = out.factor * 10 + (c - '0');
    for (int i = n; i < value.point; ++i) out.factor *= 10;
  }
  if (out.factor < 1 || out.factor > kMaxFactor || out.scale > kMaxFractionDigits)
    fail(Fault::user,
         "multipleOf: it must be above 0 and have few digits (at most {} in units of its last digit)",
         kMaxFactor);
  return out;
}

bool is_multiple(const Decimal& value, const Factor& f) {
  if (value.is_zero()) return true;
  if (static_cast<int>(value.digits.size()) - value.point > f.scale) return false;
  int64_t rest = 0;
  for (const char c : value.digits) rest = (rest * 10 + (c - '0')) % f.factor;
  for (int i = static_cast<int>(value.digits.size()) - value.point; i < f.scale; ++i)
    rest = rest * 10 % f.factor;
  return rest == 0;
}

// One bound on a magnitude, compared digit by digit with what is written.
struct Comparison {
  std::string whole, fraction;  // of the bound; whole is "0" or begins with another digit
  bool is_upper = false, exclusive = false;

  Comparison(const Decimal& bound, bool upper, bool is_exclusive) : is_upper(upper), exclusive(is_exclusive) {
    const int n = static_cast<int>(bound.digits.size());
    if (bound.point > kMaxIntegerDigits || n - bound.point > kMaxFractionDigits)
      fail(Fault::user, "a bound with more than {} digits before or {} after the point is not supported",
           kMaxIntegerDigits, kMaxFractionDigits);
    for (int i = 0; i < bound.point; ++i) whole += i < n ? bound.digits[static_cast<size_t>(i)] : '0';
    if (whole.empty()) whole = "0";
    for (int i = bound.point; i < n; ++i) fraction += i < 0 ? '0' : bound.digits[static_cast<size_t>(i)];
  }
  // `order` of the written number and the bound.
  bool holds(int order) const { return order == 0 ? !exclusive : is_upper == (order < 0); }
};

// Where the text of a number stands. Orders: -1, 0, 1 of the digits so far and the same digits of each bound.
struct Place {
  enum class Part : uint8_t { start, sign, zero, whole, point, fraction };
  Part part = Part::start;
  bool negative = false;
  int n = 0;  // digits of this part, as far as they matter
  std::vector<int8_t> orders;
  std::vector<int64_t> rests;
  bool operator==(const Place&) const = default;
  std::weak_ordering operator<=>(const Place&) const = default;
};

class Numbers {
 public:
  explicit Numbers(const NumberBounds& bounds) : integer_(bounds.integer) {
    for (const bool negative : {false, true}) {
      auto& side = sides_[negative ? 1 : 0];
      for (const bool upper : {false, true})
        for (const auto& bound : upper ? bounds.high : bounds.low) {
          // Of a magnitude m with its sign: m >= bound, m <= bound, -m >= bound, -m <= bound.
          const bool zero = bound.value.is_zero();
          const bool same_sign = zero || bound.value.negative == negative;
          const bool bounds_above = upper != negative;
          if (same_sign) side.comparisons.emplace_back(bound.value, bounds_above, bound.exclusive);
          else if (bounds_above) side.possible = false;
        }
    }
    for (const Decimal& value : bounds.multiple_of) factors_.push_back(factor_of(value));
  }

  Dfa build() {
    using Edge = std::pair<std::pair<uint8_t, uint8_t>, Place>;
    return explore<Place>(
        Place{},
        [&](const Place& p) {
          std::vector<Edge> out;
          const auto add = [&](char c, const std::optional<Place>& to) {
            if (to) out.push_back({{static_cast<uint8_t>(c), static_cast<uint8_t>(c)}, *to});
          };
          if (p.part == Place::Part::start) {
            Place minus = p;
            minus.part = Place::Part::sign;
            minus.negative = true;
            if (sides_[1].possible) add('-', minus);
          }
          const bool after_whole = p.part == Place::Part::zero || p.part == Place::Part::whole;
          if (after_whole && !integer_) add('.', after_point(p));
          if (p.part != Place::Part::zero)
            for (char c = '0'; c <= '9'; ++c) add(c, digit(p, c - '0'));
          return out;
        },
        [&](const Place& p) { return complete(p); });
  }

 private:
  struct Side {
    bool possible = true;
    std::vector<Comparison> comparisons;
  };
  const Side& side(const Place& p) const { return sides_[p.negative ? 1 : 0]; }

  static void compare_digit(int8_t& order, int digit, char bound) {
    if (order == 0) order = static_cast<int8_t>(digit < bound - '0' ? -1 : digit > bound - '0' ? 1 : 0);
  }

  std::optional<Place> digit(Place p, int d) const {
    using Part = Place::Part;
    const auto& comparisons = side(p).comparisons;
    switch (p.part) {
      case Part::start:
      case Part::sign:
        if (!side(p).possible) return std::nullopt;
        p.part = d == 0 ? Part::zero : Part::whole;
        p.n = 1;
        p.orders.assign(comparisons.size(), 0);
        for (size_t i = 0; i < comparisons.size(); ++i)
          compare_digit(p.orders[i], d, comparisons[i].whole[0]);
        for (const Factor& f : factors_) p.rests.push_back(d % f.factor);
        return p;
      case Part::whole:
        if (p.n == kMaxIntegerDigits) return std::nullopt;
        for (size_t i = 0; i < comparisons.size(); ++i)
          if (static_cast<size_t>(p.n) < comparisons[i].whole.size())
            compare_digit(p.orders[i], d, comparisons[i].whole[static_cast<size_t>(p.n)]);
        ++p.n;
        break;
      case Part::point:
      case Part::fraction:
        if (p.part == Part::point) p.n = 0;
        p.part = Part::fraction;
        if (p.n == kMaxFractionDigits) return std::nullopt;
        for (size_t i = 0; i < comparisons.size(); ++i) {
          const std::string& f = comparisons[i].fraction;
          compare_digit(p.orders[i], d,
                        static_cast<size_t>(p.n) < f.size() ? f[static_cast<size_t>(p.n)] : '0');
        }
        for (size_t i = 0; i < factors_.size(); ++i)
          if (p.n >= factors_[i].scale) {
            if (d != 0) return std::nullopt;  // finer than the factor
          } else {
            p.rests[i] = (p.rests[i] * 10 + d) % factors_[i].factor;
          }
        ++p.n;
        return p;
      case Part::zero:
        return std::nullopt;
    }
    for (size_t i = 0; i < factors_.size(); ++i) p.rests[i] = (p.rests[i] * 10 + d) % factors_[i].factor;
    return p;
  }

  // The whole part is complete: its length counts before its digits.
  void settle_whole(Place& p) const {
    const auto& comparisons = side(p).comparisons;
    for (size_t i = 0; i < comparisons.size(); ++i) {
      const auto wanted = static_cast<int>(comparisons[i].whole.size());
      if (p.n != wanted) p.orders[i] = static_cast<int8_t>(p.n < wanted ? -1 : 1);
    }
  }
  std::optional<Place> after_point(Place p) const {
    settle_whole(p);
    p.part = Place::Part::point;
    p.n = 0;
    return p;
  }

  bool complete(Place p) const {
    using Part = Place::Part;
    if (p.part == Part::start || p.part == Part::sign || p.part == Part::point) return false;
    int n_fraction = p.n;
    if (p.part != Part::fraction) {
      settle_whole(p);
      n_fraction = 0;
    }
    const auto& comparisons = side(p).comparisons;
    for (size_t i = 0; i < comparisons.size(); ++i) {
      int order = p.orders[i];
      if (order == 0 && static_cast<size_t>(n_fraction) < comparisons[i].fraction.size()) order = -1;
      if (!comparisons[i].holds(order)) return false;
    }
    for (size_t i = 0; i < factors_.size(); ++i) {
      int64_t rest = p.rests[i];
      for (int j = n_fraction; j < factors_[i].scale; ++j) rest = rest * 10 % factors_[i].factor;
      if (rest % factors_[i].factor != 0) return false;
    }
    return true;
  }

  bool integer_;
  Side sides_[2];  // positive, negative
  std::vector<Factor> factors_;
};

}  // namespace

std::optional<Decimal> Decimal::parse(std::string_view text) {
  Decimal out;
  size_t i = 0;
  if (i < text.size() && text[i] == '-') {
    out.negative = true;
    ++i;
  }
  const size_t first = i;
  int point = 0;
  while (i < text.size() && is_digit(text[i])) {
    out.digits += text[i++];
    ++point;
  }
  if (i == first) return std::nullopt;
  if (i < text.size() && text[i] == '.')
    for (++i; i < text.size() && is_digit(text[i]); ++i) out.digits += text[i];
  if (i < text.size() && (text[i] == 'e' || text[i] == 'E')) {
    const std::string exponent(text.substr(i + 1));
    if (exponent.empty() || exponent.size() > 5) return std::nullopt;
    char* end = nullptr;
    point += static_cast<int>(std::strtol(exponent.c_str(), &end, 10));
    if (*end != '\0') return std::nullopt;
    i = text.size();
  }
  if (i != text.size()) return std::nullopt;
  const size_t leading = std::min(out.digits.find_first_not_of('0'), out.digits.size());
  out.digits.erase(0, leading);
  out.point = point - static_cast<int>(leading);
  while (!out.digits.empty() && out.digits.back() == '0') out.digits.pop_back();
  if (out.is_zero()) {
    out.negative = false;
    out.point = 0;
  }
  return out;
}

int compare(const Decimal& a, const Decimal& b) {
  if (a.negative != b.negative) return a.negative ? -1 : 1;
  return a.negative ? -compare_magnitude(a, b) : compare_magnitude(a, b);
}

bool NumberBounds::contains(const Decimal& value) const {
  const auto outside = [&](const Bound& bound, int wanted) {
    const int order = compare(value, bound.value);
    return order == 0 ? bound.exclusive : order != wanted;
  };
  if (integer && !value.is_integer()) return false;
  for (const Bound& bound : low)
    if (outside(bound, 1)) return false;
  for (const Bound& bound : high)
    if (outside(bound, -1)) return false;
  return std::all_of(multiple_of.begin(), multiple_of.end(),
                     [&](const Decimal& m) { return is_multiple(value, factor_of(m)); });
}

Dfa numbers(const NumberBounds& bounds) {
  if (!bounds.free()) return Numbers(bounds).build();
  std::string pattern = fmt::format("-?(0|[1-9][0-9]{{0,{}}})", kMaxIntegerDigits - 1);
  if (!bounds.integer)
    pattern +=
        fmt::format("(\\.[0-9]{{1,{}}})?([eE](-[0-9]{{1,3}}|\\+?(0?[0-9]{{1,2}}|1[0-9]{{2}}|2[0-7][0-9])))?",
                    kMaxFractionDigits);
  return regex("^" + pattern + "$");
}

}  // namespace lily::engine::grammar
