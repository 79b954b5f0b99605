#include "engine/grammar/regex.h"

#include <algorithm>
#include <array>
#include <memory>
#include <set>

#include "base/error.h"

namespace lily::engine::grammar {
namespace {

constexpr int kMaxRegexNesting = 100;
constexpr int kMaxRepeat = 1000;
constexpr int kMaxNfaStates = 20'000;
constexpr uint32_t kLastCodePoint = 0x10ffff;

struct Range {
  uint32_t low, high;
};
using Ranges = std::vector<Range>;  // of code points

// Ascending, apart, without surrogates, which UTF-8 cannot write.
Ranges tidy(Ranges ranges) {
  Ranges cut;
  for (const Range& r : ranges) {
    if (r.low < 0xd800) cut.push_back({r.low, std::min<uint32_t>(r.high, 0xd7ff)});
    if (r.high > 0xdfff) cut.push_back({std::max<uint32_t>(r.low, 0xe000), r.high});
  }
  std::sort(cut.begin(), cut.end(), [](const Range& a, const Range& b) { return a.low < b.low; });
  Ranges out;
  for (const Range& r : cut) {
    if (!out.empty() && r.low <= out.back().high + 1) out.back().high = std::max(out.back().high, r.high);
    else out.push_back(r);
  }
  return out;
}

Ranges complement(const Ranges& ranges) {
  Ranges out;
  uint32_t next = 0;
  for (const Range& r : tidy(ranges)) {
    if (r.low > next) out.push_back({next, r.low - 1});
    next = r.high + 1;
  }
  if (next <= kLastCodePoint) out.push_back({next, kLastCodePoint});
  return tidy(out);
}

const Ranges kDigits = {{'0', '9'}};
const Ranges kWord = {{'0', '9'}, {'A', 'Z'}, {'_', '_'}, {'a', 'z'}};
const Ranges kSpace = {{'\t', '\r'},     {' ', ' '},       {0xa0, 0xa0},     {0x1680, 0x1680},
                       {0x2000, 0x200a}, {0x2028, 0x2029}, {0x202f, 0x202f}, {0x205f, 0x205f},
                       {0x3000, 0x3000}, {0xfeff, 0xfeff}};
const Ranges kLineEnds = {{'\n', '\n'}, {'\r', '\r'}, {0x2028, 0x2029}};

struct Tree {
  enum class Kind : uint8_t { empty, set, sequence, alternatives, repeat, begin, end };
  Kind kind = Kind::empty;
  Ranges set;
  std::vector<Tree> parts;
  int min = 0, max = -1;  // of repeat; max -1: no bound
};

class Parser {
 public:
  explicit Parser(std::string_view text) : text_(text) {}

  Tree parse() {
    Tree tree = alternatives(0);
    if (!at_end()) refuse("a ) without its (");
    return tree;
  }

 private:
  [[noreturn]] void refuse(std::string_view what) const {
    fail(Fault::user, "pattern: {} at character {} is not supported", what, at_);
  }
  bool at_end() const { return at_ >= text_.size(); }
  char peek() const { return at_end() ? '\0' : text_[at_]; }
  bool take(char c) {
    if (at_end() || text_[at_] != c) return false;
    ++at_;
    return true;
  }

  uint32_t code_point() {
    const auto lead = static_cast<uint8_t>(text_[at_++]);
    if (lead < 0x80) return lead;
    const int n = lead >= 0xf0 ? 3 : lead >= 0xe0 ? 2 : 1;
    uint32_t c = lead & (0x3fu >> n);
    for (int i = 0; i < n; ++i) {
      if (at_end() || (static_cast<uint8_t>(text_[at_]) & 0xc0) != 0x80) refuse("invalid UTF-8");
      c = c << 6 | (static_cast<uint8_t>(text_[at_++]) & 0x3f);
    }
    return c;
  }

  Tree alternatives(int depth) {
    if (depth > kMaxRegexNesting) refuse("nesting this deep");
    Tree all{.kind = Tree::Kind::alternatives};
    do {
      Tree sequence{.kind = Tree::Kind::sequence};
      while (!at_end() && peek() != '|' && peek() != ')') sequence.parts.push_back(repeated(depth));
      all.parts.push_back(std::move(sequence));
    } while (take('|'));
    return all;
  }

  Tree repeated(int depth) {
    Tree tree = atom(depth);
    int min = 0, max = -1;
    if (take('*')) {
    } else if (take('+')) {
      min = 1;
    } else if (take('?')) {
      max = 1;
    } else if (!bounds(min, max)) {
      return tree;
    }
    take('?');  // lazy: the same texts
    if (tree.kind == Tree::Kind::begin || tree.kind == Tree::Kind::end) refuse("a repeated anchor");
    if (!at_end() && (peek() == '*' || peek() == '+' || peek() == '?')) refuse("a repeat of a repeat");
    Tree out{.kind = Tree::Kind::repeat, .min = min, .max = max};
    out.parts.push_back(std::move(tree));
    return out;
  }

  bool bounds(int& min, int& max) {
    if (peek() != '{') return false;
    const size_t start = at_++;
    const auto number = [&](int& n) {
      if (at_end() || peek() < '0' || peek() > '9') return false;
      n = 0;
      while (!at_end() && peek() >= '0' && peek() <= '9') {
        n = n * 10 + (text_[at_++] - '0');
        if (n > kMaxRepeat) refuse(fmt::format("a repeat of more than {}", kMaxRepeat));
      }
      return true;
    };
    const auto rest = [&] {
      if (!number(min)) return false;
      max = min;
      if (take(',')) {
        max = -1;
        number(max);
      }
      return take('}');
    };
    if (!rest()) {
      at_ = start;
      refuse("a { that begins no repeat");
    }
    if (max >= 0 && max < min) refuse("a repeat whose bounds are the wrong way round");
    return true;
  }

  Tree atom(int depth) {
    if (peek() == '*' || peek() == '+' || peek() == '?' || peek() == '{') refuse("a repeat of nothing");
    if (take('^')) return {.kind = Tree::Kind::begin};
    if (take('$')) return {.kind = Tree::Kind::end};
    if (take('(')) {
      if (take('?')) {
        if (take('<')) {
          if (peek() == '=' || peek() == '!') refuse("a look-behind");
          while (!at_end() && peek() != '>') ++at_;
          if (!take('>')) refuse("an unfinished group name");
        } else if (!take(':')) {
          refuse("a look-ahead or flag");
        }
      }
      Tree tree = alternatives(depth + 1);
      if (!take(')')) refuse("a ( without its )");
      return tree;
    }
    if (take('.')) return {.kind = Tree::Kind::set, .set = complement(kLineEnds)};
    if (take('[')) return {.kind = Tree::Kind::set, .set = char_class()};
    if (take('\\')) return {.kind = Tree::Kind::set, .set = tidy(escape(false))};
    const uint32_t c = code_point();
    return {.kind = Tree::Kind::set, .set = tidy({{c, c}})};
  }

  uint32_t hex(int n) {
    uint32_t value = 0;
    for (int i = 0; i < n; ++i) {
      const char c = peek();
      const int digit = c >= '0' && c <= '9'   ? c - '0'
                        : c >= 'a' && c <= 'f' ? c - 'a' + 10
                        : c >= 'A' && c <= 'F' ? c - 'A' + 10
                                               : -1;
      if (digit < 0) refuse("an escape without its digits");
      value = value * 16 + static_cast<uint32_t>(digit);
      ++at_;
    }
    return value;
  }

  Ranges escape(bool in_class) {
    if (at_end()) refuse("a \\ at the end");
    const char c = text_[at_];
    if (static_cast<uint8_t>(c) >= 0x80) {
      const uint32_t p = code_point();
      return {{p, p}};
    }
    ++at_;
    const auto one = [](uint32_t p) { return Ranges{{p, p}}; };
    switch (c) {
      case 'd':
        return kDigits;
      case 'D':
        return complement(kDigits);
      case 'w':
        return kWord;
      case 'W':
        return complement(kWord);
      case 's':
        return kSpace;
      case 'S':
        return complement(kSpace);
      case 't':
        return one('\t');
      case 'n':
        return one('\n');
      case 'r':
        return one('\r');
      case 'f':
        return one('\f');
      case 'v':
        return one('\v');
      case 'x':
        return one(hex(2));
      case 'u': {
        uint32_t p = hex(4);
        if (p >= 0xd800 && p < 0xdc00 && text_.substr(at_).starts_with("\\u")) {
          at_ += 2;
          const uint32_t low = hex(4);
          if (low < 0xdc00 || low > 0xdfff) refuse("half a surrogate pair");
          p = 0x10000 + ((p - 0xd800) << 10) + (low - 0xdc00);
        } else if (p >= 0xd800 && p < 0xe000) {
          refuse("half a surrogate pair");
        }
        return one(p);
      }
      case 'c': {
        const char letter = peek();
        if (!((letter >= 'a' && letter <= 'z') || (letter >= 'A' && letter <= 'Z')))
          refuse("\\c without a letter");
        ++at_;
        return one(static_cast<uint32_t>(letter) % 32);
      }
      case '0':
        if (peek() >= '0' && peek() <= '9') refuse("an octal escape");
        return one(0);
      case 'b':
        if (in_class) return one('\b');
        refuse("\\b");
      default:
        break;
    }
    const bool is_letter_or_digit =
        (c >= '0' && c <= '9') || (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z');
    if (is_letter_or_digit) refuse(fmt::format("\\{}", c));
    return one(static_cast<uint8_t>(c));
  }

  Ranges char_class() {
    const bool negated = take('^');
    Ranges all;
    while (!take(']')) {
      if (at_end()) refuse("a [ without its ]");
      const Ranges first = class_atom();
      const bool is_range = peek() == '-' && at_ + 1 < text_.size() && text_[at_ + 1] != ']';
      if (!is_range) {
        all.insert(all.end(), first.begin(), first.end());
        continue;
      }
      ++at_;
      const Ranges last = class_atom();
      const auto single = [](const Ranges& r) { return r.size() == 1 && r[0].low == r[0].high; };
      if (!single(first) || !single(last) || last[0].low < first[0].low) refuse("this range of characters");
      all.push_back({first[0].low, last[0].low});
    }
    return negated ? complement(all) : tidy(all);
  }
  Ranges class_atom() {
    if (take('\\')) return escape(true);
    const uint32_t c = code_point();
    return {{c, c}};
  }

  std::string_view text_;
  size_t at_ = 0;
};

// Thompson's construction, over bytes.
class Nfa {
 public:
  struct State {
    std::vector<Dfa::Edge> edges;
    std::vector<int32_t> free;              // without reading
    std::vector<int32_t> at_begin, at_end;  // the same, at the text's ends only
  };

  Nfa(const Tree& tree, int64_t& budget) : budget_(budget) {
    const int32_t start = add(), before = add(), after = add();
    states_[0].free.push_back(before);
    const Ranges any = complement({});
    const int32_t skipped = add_set(any, start);
    state(skipped).free.push_back(start);
    const int32_t end = build(tree, before);
    state(end).free.push_back(after);
    const int32_t more = add_set(any, after);
    state(more).free.push_back(after);
    accept_ = after;
  }

  Dfa determinised() {
    using Set = std::vector<int32_t>;
    const Set start = closure({0}, true, false);
    // Whether the set that a text begins with may still use `at_begin` decides nothing later: it was followed
    // here.
    return explore<Set>(
        start,
        [&](const Set& set) {
          std::array<Set, 256> targets;
          for (const int32_t s : set)
            for (const Dfa::Edge& e : state(s).edges) {
              for (int b = e.low; b <= e.high; ++b) targets[static_cast<size_t>(b)].push_back(e.to);
              spend(e.high - e.low + 1);
            }
          std::vector<std::pair<std::pair<uint8_t, uint8_t>, Set>> out;
          Set last_raw;
          for (int b = 0; b < 256; ++b) {
            Set& raw = targets[static_cast<size_t>(b)];
            if (raw.empty()) continue;
            const auto byte = static_cast<uint8_t>(b);
            if (!out.empty() && out.back().first.second == b - 1 && raw == last_raw) {
              out.back().first.second = byte;
              continue;
            }
            last_raw = raw;
            out.push_back({{byte, byte}, closure(raw, false, false)});
          }
          return out;
        },
        [&](const Set& set) {
          const bool is_start = set == start;
          const Set all = closure(set, is_start, true);
          return std::binary_search(all.begin(), all.end(), accept_);
        });
  }

 private:
  State& state(int32_t id) { return states_[static_cast<size_t>(id)]; }
  int32_t add() {
    if (states_.size() >= static_cast<size_t>(kMaxNfaStates)) fail_too_large();
    states_.emplace_back();
    return static_cast<int32_t>(states_.size()) - 1;
  }

  // A state after one character of the set, read from `from`.
  int32_t add_set(const Ranges& set, int32_t from) {
    const int32_t to = add();
    for (const Range& r : set) add_range(r.low, r.high, from, to);
    return to;
  }
  // Cuts a range of code points where the lengths or the leading bytes of their UTF-8 change.
  void add_range(uint32_t low, uint32_t high, int32_t from, int32_t to) {
    for (const uint32_t last : {0x7fu, 0x7ffu, 0xffffu})
      if (low <= last && last < high) {
        add_range(low, last, from, to);
        return add_range(last + 1, high, from, to);
      }
    if (high < 0x80) {
      state(from).edges.push_back({static_cast<uint8_t>(low), static_cast<uint8_t>(high), to});
      return;
    }
    for (int i = 1; i < 4; ++i) {
      const uint32_t mask = (1u << (6 * i)) - 1;
      if ((low & ~mask) == (high & ~mask)) continue;
      if ((low & mask) != 0) {
        add_range(low, low | mask, from, to);
        return add_range((low | mask) + 1, high, from, to);
      }
      if ((high & mask) != mask) {
        add_range(low, (high & ~mask) - 1, from, to);
        return add_range(high & ~mask, high, from, to);
      }
    }
    const std::string a = utf8(low), b = utf8(high);
    int32_t at = from;
    for (size_t i = 0; i < a.size(); ++i) {
      const int32_t next = i + 1 == a.size() ? to : add();
      state(at).edges.push_back({static_cast<uint8_t>(a[i]), static_cast<uint8_t>(b[i]), next});
      at = next;
    }
  }
  static std::string utf8(uint32_t c) {
    std::string out;
    const auto tail = [&](int shift) { out += static_cast<char>(0x80 | (c >> shift & 0x3f)); };
    if (c < 0x800) {
      out += static_cast<char>(0xc0 | c >> 6);
    } else if (c < 0x10000) {
      out += static_cast<char>(0xe0 | c >> 12);
      tail(6);
    } else {
      out += static_cast<char>(0xf0 | c >> 18);
      tail(12);
      tail(6);
    }
    tail(0);
    return out;
  }

  // The state after the tree, read from `from`.
  int32_t build(const Tree& tree, int32_t from) {
    switch (tree.kind) {
      case Tree::Kind::empty:
        return from;
      case Tree::Kind::set:
        return add_set(tree.set, from);
      case Tree::Kind::begin:
      case Tree::Kind::end: {
        const int32_t to = add();
        (tree.kind == Tree::Kind::begin ? state(from).at_begin : state(from).at_end).push_back(to);
        return to;
      }
      case Tree::Kind::sequence:
        for (const Tree& part : tree.parts) from = build(part, from);
        return from;
      case Tree::Kind::alternatives: {
        if (tree.parts.size() == 1) return build(tree.parts[0], from);
        const int32_t to = add();
        for (const Tree& part : tree.parts) {
          const int32_t begin = add();
          state(from).free.push_back(begin);
          const int32_t end = build(part, begin);
          state(end).free.push_back(to);
        }
        return to;
      }
      case Tree::Kind::repeat: {
        for (int i = 0; i < tree.min; ++i) from = build(tree.parts[0], from);
        const int32_t to = add();
        if (tree.max < 0) {
          const int32_t loop = add();
          state(from).free.push_back(loop);
          const int32_t end = build(tree.parts[0], loop);
          state(end).free.push_back(loop);
          state(loop).free.push_back(to);
          return to;
        }
        state(from).free.push_back(to);
        for (int i = tree.min; i < tree.max; ++i) {
          from = build(tree.parts[0], from);
          state(from).free.push_back(to);
        }
        return to;
      }
    }
    return from;
  }

  void spend(int64_t steps) {
    budget_ -= steps;
    if (budget_ < 0)
      fail(Fault::user,
           "the states of its automaton take too long to find; use fewer repeats of what may be read in "
           "several ways");
  }

  std::vector<int32_t> closure(std::vector<int32_t> set, bool at_begin, bool at_end) {
    std::vector<bool> seen(states_.size());
    std::vector<int32_t> out;
    const auto visit = [&](int32_t s) {
      if (seen[static_cast<size_t>(s)]) return;
      seen[static_cast<size_t>(s)] = true;
      out.push_back(s);
    };
    for (const int32_t s : set) visit(s);
    for (size_t i = 0; i < out.size(); ++i) {
      const State& s = states_[static_cast<size_t>(out[i])];
      for (const int32_t to : s.free) visit(to);
      if (at_begin)
        for (const int32_t to : s.at_begin) visit(to);
      if (at_end)
        for (const int32_t to : s.at_end) visit(to);
    }
    spend(static_cast<int64_t>(4 * out.size() + states_.size() / 64));
    std::sort(out.begin(), out.end());
    return out;
  }

  std::vector<State> states_;
  int64_t& budget_;
  int32_t accept_ = 0;
};

constexpr std::string_view kDate =
    "([1-9][0-9]{3}-((0[13578]|1[02])-(0[1-9]|[12][0-9]|3[01])|(0[469]|11)-(0[1-9]|[12][0-9]|30)|02-(0[1-9]|"
    "1[0-9]|2["
    "0-8]))|([1-9][0-9](0[48]|[2468][048]|[13579][26])|([2468][048]|[13579][26])00)-02-29)";
constexpr std::string_view kTime =
    "([01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](\\.[0-9]{1,9})?(Z|[+-]([01][0-9]|2[0-3]):[0-5][0-9])";
constexpr std::string_view kLabel = "[A-Za-z0-9]([A-Za-z0-9]{0,30}-[A-Za-z0-9]{1,30}|[A-Za-z0-9]{0,30})";
constexpr std::string_view kByte = "(25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])";

std::string format_pattern(std::string_view format) {
  if (format == "date") return fmt::format("^{}$", kDate);
  if (format == "time") return fmt::format("^{}$", kTime);
  if (format == "date-time") return fmt::format("^{}T{}$", kDate, kTime);
  if (format == "duration")
    return "^P([1-9][0-9]{0,3}W|([0-9]{1,4}Y([0-9]{1,4}M([0-9]{1,4}D)?)?|[0-9]{1,4}M([0-9]{1,4}D)?|[0-9]{1,4}"
           "D)(T([0-9]{1,4}"
           "H([0-9]{1,4}M([0-9]{1,4}S)?)?|[0-9]{1,4}M([0-9]{1,4}S)?|[0-9]{1,4}S))?|T([0-9]{1,4}H([0-9]{1,4}M("
           "[0-9]{1,4}S)"
           "?)?|[0-9]{1,4}M([0-9]{1,4}S)?|[0-9]{1,4}S))$";
  if (format == "email")
    return fmt::format("^[A-Za-z0-9_+-]+(\\.[A-Za-z0-9_+-]+)*@{0}(\\.{0}){{0,3}}\\.[A-Za-z]{{2,12}}$",
                       kLabel);
  if (format == "hostname") return fmt::format("^{0}(\\.{0}){{0,3}}$", kLabel);
  if (format == "ipv4") return fmt::format("^{0}(\\.{0}){{3}}$", kByte);
  if (format == "uri")
    return fmt::format(
        "^(https?|ftp|file)://{0}(\\.{0}){{0,3}}(:[1-9][0-9]{{0,3}})?(/"
        "[A-Za-z0-9._~!$&'()*+,;=:@-]*)*(\\?[A-Za-"
        "z0-9._~!$&'()*+,;=:@/-]*)?(#[A-Za-z0-9._~!$&'()*+,;=:@/-]*)?$",
        kLabel);
  if (format == "uuid") return "^[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}$";
  return {};
}

}  // namespace

Dfa regex(std::string_view pattern, int64_t& budget) {
  if (pattern.size() > 4096)
    fail(Fault::user, "pattern: {} bytes; at most 4096 are supported", pattern.size());
  return Nfa(Parser(pattern).parse(), budget).determinised();
}

Dfa regex(std::string_view pattern) {
  int64_t budget = kPatternSteps;
  return regex(pattern, budget);
}

std::optional<Dfa> format_texts(std::string_view format, int64_t& budget) {
  const std::string pattern = format_pattern(format);
  if (pattern.empty()) return std::nullopt;
  return regex(pattern, budget);
}

std::optional<Dfa> format_texts(std::string_view format) {
  int64_t budget = kPatternSteps;
  return format_texts(format, budget);
}

}  // namespace lily::engine::grammar
