#include "engine/grammar/matcher.h"

#include <algorithm>
#include <string>
#include <utility>

#include "base/error.h"
#include "engine/grammar/utf8.h"

namespace lily::engine::grammar {
namespace {

using Kind = Node::Kind;

constexpr uint32_t kLineEnd = 1u << 31;

// Counts one more byte of white space; false if it is too much.
bool take_blank(uint32_t& blanks, uint8_t byte) {
  if (byte != ' ' && byte != '\t' && byte != '\n') return false;
  if ((blanks & ~kLineEnd) == kMaxBlanks) return false;
  if (byte == '\n') {
    if ((blanks & kLineEnd) != 0) return false;
    blanks |= kLineEnd;
  }
  ++blanks;
  return true;
}

bool is_hex(uint8_t c) { return (c >= '0' && c <= '9') || (c >= 'a' && c <= 'f') || (c >= 'A' && c <= 'F'); }

// Phases of an array and of an object.
enum : uint32_t {
  before_open,
  after_open,
  after_key,  // object: its colon comes
  before_value,
  after_value,
  after_comma,
};
// Phases of a string; below eight they are those of utf8.h.
enum : uint32_t {
  escape = 8,
  hex_first,
  hex_second,       // of four, the value may be anything but a surrogate
  hex_second_of_d,  // after \ud: 0 to 7 is a character, 8 to b half a pair
  hex_third,
  hex_last,
  high_third,
  high_last,
  low_backslash,
  low_u,
  low_d,
  low_second,
  before_quote,
};
// Phases of a text: in it, then the states of the tree of escapes.
enum : uint32_t { in_text = 0, before_text = 1, in_escape = 2 };

// How characters of a text that must be escaped are written, as a tree of bytes.
struct Escapes {
  struct State {
    std::vector<std::pair<uint8_t, uint32_t>> children;
    int character = -1;              // the escape is complete
    std::vector<uint8_t> reachable;  // characters
  };
  std::vector<State> states{1};

  Escapes() {
    add("\"", '"');
    add("\\", '\\');
    const std::string shorts = "b\bf\fn\nr\rt\t";
    for (size_t i = 0; i < shorts.size(); i += 2)
      add(shorts.substr(i, 1), static_cast<uint8_t>(shorts[i + 1]));
    for (uint8_t c = 0; c < 0x20; ++c) {
      if (c == '\b' || c == '\f' || c == '\n' || c == '\r' || c == '\t') continue;
      add(fmt::format("u{:04x}", c), c);
      if (c % 16 > 9) add(fmt::format("u{:04X}", c), c);
    }
  }
  void add(std::string_view text, uint8_t character) {
    uint32_t at = 0;
    states[at].reachable.push_back(character);
    for (const char c : text) {
      const auto byte = static_cast<uint8_t>(c);
      auto& children = states[at].children;
      const auto found =
          std::find_if(children.begin(), children.end(), [&](const auto& e) { return e.first == byte; });
      if (found != children.end()) {
        at = found->second;
      } else {
        const auto id = static_cast<uint32_t>(states.size());
        children.emplace_back(byte, id);
        states.emplace_back();
        at = id;
      }
      states[at].reachable.push_back(character);
    }
    states[at].character = character;
  }
};
const Escapes& escapes() {
  static const Escapes kEscapes;
  return kEscapes;
}

}  // namespace

size_t Matcher::FrameHash::operator()(const Frame& f) const {
  uint64_t h = 0x9e3779b97f4a7c15ull;
  for (const uint32_t value : {f.node, f.phase, f.place, f.blanks, f.count, f.parent}) {
    h = (h ^ value) * 0xbf58476d1ce4e5b9ull;
    h ^= h >> 29;
  }
  return static_cast<size_t>(h);
}

Matcher::Matcher(const Grammar& grammar) : grammar_(grammar) {}

Matcher::State Matcher::start() {
  if (start_ == kDead) {
    Draft draft;
    enter(grammar_.root, kBottom, draft);
    start_ = intern(std::move(draft));
  }
  return start_;
}

Matcher::State Matcher::next(State state, std::string_view bytes) {
  for (const char c : bytes) {
    if (state == kDead) break;
    state = next(state, static_cast<uint8_t>(c));
  }
  return state;
}

Matcher::State Matcher::compute(State state, uint8_t byte) {
  Draft draft;
  const std::vector<FrameId> frames = sets_[state].frames;
  for (const FrameId id : frames) {
    const Frame frame = frames_[id];
    advance(frame, byte, draft);
  }
  const State to = intern(std::move(draft));
  sets_[state].next[byte] = static_cast<int32_t>(to);
  return to;
}

Matcher::State Matcher::intern(Draft draft) {
  if (draft.frames.empty() && !draft.complete) return kDead;
  // Literals come and go within a few bytes; the others may stay.
  size_t n_lasting = 0;
  std::erase_if(draft.frames, [&](FrameId id) {
    return grammar_[frames_[id].node].kind != Kind::literal && ++n_lasting > kMaxReadings;
  });
  uint64_t hash = draft.complete ? 1 : 0;
  for (const FrameId id : draft.frames) {
    hash = (hash ^ id) * 0x94d049bb133111ebull;
    hash ^= hash >> 31;
  }
  const auto [first, last] = set_ids_.equal_range(hash);
  for (auto at = first; at != last; ++at) {
    const Set& set = sets_[at->second];
    if (set.complete == draft.complete && set.frames == draft.frames) return at->second;
  }
  const auto id = static_cast<State>(sets_.size());
  n_bytes_ += sizeof(Set) + (draft.frames.size() * sizeof(FrameId)) + 64;
  Set set{.frames = std::move(draft.frames), .complete = draft.complete};
  set.next.fill(kUnknown);
  sets_.push_back(std::move(set));
  set_ids_.emplace(hash, id);
  return id;
}

Matcher::FrameId Matcher::intern(const Frame& frame) {
  const auto [at, is_new] = frame_ids_.emplace(frame, static_cast<FrameId>(frames_.size()));
  if (is_new) {
    frames_.push_back(frame);
    n_bytes_ += 2 * sizeof(Frame) + 64;
  }
  return at->second;
}

uint32_t Matcher::seen_set(std::vector<bool> seen) {
  const auto [at, is_new] = seen_ids_.emplace(std::move(seen), static_cast<uint32_t>(seen_.size()));
  if (is_new) {
    seen_.push_back(at->first);
    n_bytes_ += 128 + at->first.size() / 4;
  }
  return at->second;
}

void Matcher::keep(const Frame& frame, Draft& out) {
  const FrameId id = intern(frame);
  if (std::find(out.frames.begin(), out.frames.end(), id) == out.frames.end()) out.frames.push_back(id);
}

void Matcher::resume(FrameId parent, Draft& out) {
  if (parent == kBottom) {
    out.complete = true;
    return;
  }
  const Frame frame = frames_[parent];
  activate(frame, out);
}

void Matcher::enter(NodeId node, FrameId parent, Draft& out) {
  LILY_CHECK(++out.depth < 10'000, "a grammar calls itself without reading");
  const Node& n = grammar_[node];
  Frame frame{.node = node, .parent = parent};
  switch (n.kind) {
    case Kind::never:
      break;
    case Kind::any_of:
      for (const NodeId child : n.children) enter(child, parent, out);
      break;
    case Kind::literal:
      if (n.literal.empty()) resume(parent, out);
      else keep(frame, out);
      break;
    case Kind::bytes:
      activate(frame, out);
      break;
    case Kind::string:
      frame.phase = before_quote;
      keep(frame, out);
      break;
    case Kind::text:
      frame.phase = before_text;
      keep(frame, out);
      break;
    case Kind::members:
      frame.place = seen_set(std::vector<bool>(n.members.size()));
      activate(frame, out);
      break;
    case Kind::array:
    case Kind::object:
    case Kind::sequence:
      activate(frame, out);
      break;
  }
  --out.depth;
}

void Matcher::activate(const Frame& frame, Draft& out) {
  const Node& node = grammar_[frame.node];
  switch (node.kind) {
    case Kind::bytes: {
      const auto state = static_cast<int32_t>(frame.place);
      if (!node.dfa.edges(state).empty()) keep(frame, out);
      if (node.dfa.accepts(state)) resume(frame.parent, out);
      break;
    }
    case Kind::sequence: {
      if (frame.place == node.children.size()) return resume(frame.parent, out);
      Frame after = frame;
      ++after.place;
      // The last one need not come back here.
      const bool is_last = after.place == node.children.size();
      enter(node.children[frame.place], is_last ? frame.parent : intern(after), out);
      break;
    }
    case Kind::array:
      return activate_array(frame, out);
    case Kind::object:
      return activate_object(frame, out);
    case Kind::members:
      return activate_members(frame, out);
    default:
      keep(frame, out);
  }
}

void Matcher::advance(const Frame& frame, uint8_t byte, Draft& out) {
  const Node& node = grammar_[frame.node];
  Frame to = frame;
  switch (node.kind) {
    case Kind::literal:
      if (static_cast<uint8_t>(node.literal[frame.place]) != byte) return;
      ++to.place;
      if (to.place == node.literal.size()) return resume(frame.parent, out);
      return keep(to, out);
    case Kind::bytes: {
      const int32_t state = node.dfa.next(static_cast<int32_t>(frame.place), byte);
      if (state < 0) return;
      to.place = static_cast<uint32_t>(state);
      return activate(to, out);
    }
    case Kind::text:
      return advance_text(frame, byte, out);
    case Kind::string:
      return advance_string(frame, byte, out);
    case Kind::array:
      return advance_array(frame, byte, out);
    case Kind::object:
      return advance_object(frame, byte, out);
    default:
      LILY_CHECK(false, "a frame of kind {} cannot read", static_cast<int>(node.kind));
  }
}

// ---- Arrays: place is the number of items before.

void Matcher::activate_array(const Frame& frame, Draft& out) {
  const Node& node = grammar_[frame.node];
  keep(frame, out);
  if (frame.phase != after_open && frame.phase != after_comma) return;
  if (node.max >= 0 && frame.place >= node.max) return;
  const bool is_first = frame.place < node.children.size();
  Frame after = frame;
  after.phase = after_value;
  after.blanks = 0;
  // Beyond what anything depends on, items are not counted.
  const auto enough = std::max<int64_t>(node.min, static_cast<int64_t>(node.children.size()));
  if (node.max >= 0 || after.place < enough) ++after.place;
  enter(is_first ? node.children[frame.place] : node.rest, intern(after), out);
}

void Matcher::advance_array(Frame frame, uint8_t byte, Draft& out) {
  const Node& node = grammar_[frame.node];
  const bool may_close = (frame.phase == after_open || frame.phase == after_value) && frame.place >= node.min;
  if (frame.phase == before_open) {
    if (byte != '[') return;
    frame.phase = after_open;
    return activate(frame, out);
  }
  if (byte == ']') {
    if (may_close) resume(frame.parent, out);
  } else if (byte == ',') {
    if (frame.phase != after_value || (node.max >= 0 && frame.place >= node.max)) return;
    frame.phase = after_comma;
    frame.blanks = 0;
    activate(frame, out);
  } else if (take_blank(frame.blanks, byte)) {
    activate(frame, out);
  }
}

// ---- Objects: place is the index of the first declared member that may still come; while a member is read,
// its own index (that of an undeclared one is the number of the declared ones). count is the number of
// members, where their number is bounded.

// Which member may come next: (index, required). Optional ones may be left out as long as enough can follow.
template <typename Visit>
void Matcher::each_next_member(const Node& node, uint32_t place, uint32_t count, Visit&& visit) const {
  const auto n = static_cast<uint32_t>(node.members.size());
  const bool counts = node.min > 0 || node.max >= 0;
  if (!counts) {
    for (uint32_t i = place; i < n; ++i) {
      visit(i);
      if (node.members[i].required) return;
    }
    if (node.rest != kNoNode) visit(n);
    return;
  }
  int64_t n_required = 0;
  for (uint32_t i = place; i < n; ++i) n_required += node.members[i].required ? 1 : 0;
  for (uint32_t i = place; i < n; ++i) {
    const bool required = node.members[i].required;
    const bool has_room = node.max < 0 || count + 1 + n_required - (required ? 1 : 0) <= node.max;
    // Those before i are left out: what remains must be able to reach min.
    const bool reaches = node.rest != kNoNode || count + (n - i) >= node.min;
    if (has_room && reaches) visit(i);
    if (required) return;
  }
  if (node.rest != kNoNode && (node.max < 0 || count + 1 <= node.max)) visit(n);
}

bool Matcher::object_may_close(const Node& node, const Frame& frame) const {
  if (node.min > 0 && frame.count < node.min) return false;
  return std::none_of(node.members.begin() + std::min<ptrdiff_t>(frame.place, std::ssize(node.members)),
                      node.members.end(), [](const Node::Member& m) { return m.required; });
}

void Matcher::activate_object(const Frame& frame, Draft& out) {
  const Node& node = grammar_[frame.node];
  keep(frame, out);
  const auto n = static_cast<uint32_t>(node.members.size());
  if (frame.phase == after_open || frame.phase == after_comma) {
    each_next_member(node, frame.place, frame.count, [&](uint32_t i) {
      Frame after = frame;
      after.phase = after_key;
      after.place = i;
      after.blanks = 0;
      enter(i == n ? node.rest_key : node.members[i].key, intern(after), out);
    });
  } else if (frame.phase == before_value) {
    Frame after = frame;
    after.phase = after_value;
    after.blanks = 0;
    if (frame.place < n) ++after.place;
    if (node.min > 0 || node.max >= 0) {
      // Above all bounds the number no longer matters.
      const auto bound = static_cast<uint32_t>(std::max(node.min, node.max));
      after.count = std::min(after.count + 1, bound);
    }
    enter(frame.place == n ? node.rest : node.members[frame.place].value, intern(after), out);
  }
}

void Matcher::advance_object(Frame frame, uint8_t byte, Draft& out) {
  const Node& node = grammar_[frame.node];
  if (frame.phase == before_open) {
    if (byte != '{') return;
    frame.phase = after_open;
    return activate(frame, out);
  }
  if (frame.phase == after_key) {
    if (byte != ':') return;
    frame.phase = before_value;
    return activate(frame, out);
  }
  if (byte == '}') {
    const bool may_close = frame.phase == after_open || frame.phase == after_value;
    if (may_close && object_may_close(node, frame)) resume(frame.parent, out);
  } else if (byte == ',') {
    if (frame.phase != after_value) return;
    bool more = false;
    each_next_member(node, frame.place, frame.count, [&](uint32_t) { more = true; });
    if (!more) return;
    frame.phase = after_comma;
    frame.blanks = 0;
    activate(frame, out);
  } else if (take_blank(frame.blanks, byte)) {
    activate(frame, out);
  }
}

// ---- Members in any order: place is the set of those that have been.

void Matcher::activate_members(const Frame& frame, Draft& out) {
  const Node& node = grammar_[frame.node];
  const std::vector<bool> seen = seen_[frame.place];
  bool may_end = true;
  for (size_t i = 0; i < node.members.size(); ++i) {
    if (seen[i]) continue;
    may_end = may_end && !node.members[i].required;
    std::vector<bool> with = seen;
    with[i] = true;
    Frame after = frame;
    after.place = seen_set(std::move(with));
    enter(node.members[i].value, intern(after), out);
  }
  if (node.rest != kNoNode) enter(node.rest, intern(frame), out);
  if (may_end) resume(frame.parent, out);
}

// ---- Strings: phase is what has been read of a character, count the characters.

void Matcher::advance_string(Frame frame, uint8_t byte, Draft& out) {
  const Node& node = grammar_[frame.node];
  const auto go = [&](uint32_t phase) {
    frame.phase = phase;
    keep(frame, out);
  };
  const auto character = [&] {
    const int64_t most = node.max < 0 ? node.min : node.max;
    if (frame.count < most) ++frame.count;
    go(0);
  };
  const bool full = node.max >= 0 && frame.count >= node.max;
  switch (frame.phase) {
    case before_quote:
      if (byte == '"') go(0);
      return;
    case 0:
      if (byte == '"') {
        if (frame.count >= node.min) resume(frame.parent, out);
        return;
      }
      if (full) return;
      if (byte == '\\') return go(escape);
      if (byte < 0x20) return;
      break;
    case escape:
      if (byte == 'u') return go(hex_first);
      if (std::string_view("\"\\/bfnrt").find(static_cast<char>(byte)) != std::string_view::npos) character();
      return;
    case hex_first:
      if (is_hex(byte)) go(byte == 'd' || byte == 'D' ? hex_second_of_d : hex_second);
      return;
    case hex_second:
      if (is_hex(byte)) go(hex_third);
      return;
    case hex_second_of_d:
      if (byte >= '0' && byte <= '7') go(hex_third);
      else if (byte == '8' || byte == '9' || byte == 'a' || byte == 'b' || byte == 'A' || byte == 'B')
        go(high_third);
      return;
    case hex_third:
      if (is_hex(byte)) go(hex_last);
      return;
    case hex_last:
      if (is_hex(byte)) character();
      return;
    case high_third:
      if (is_hex(byte)) go(high_last);
      return;
    case high_last:
      if (is_hex(byte)) go(low_backslash);
      return;
    case low_backslash:
      if (byte == '\\') go(low_u);
      return;
    case low_u:
      if (byte == 'u') go(low_d);
      return;
    case low_d:
      if (byte == 'd' || byte == 'D') go(low_second);
      return;
    case low_second:
      if ((byte >= 'c' && byte <= 'f') || (byte >= 'C' && byte <= 'F')) go(hex_third);
      return;
    default:
      break;
  }
  const std::optional<Utf8State> to = utf8_next(static_cast<Utf8State>(frame.phase), byte);
  if (!to) return;
  if (*to == Utf8State::boundary) character();
  else go(static_cast<uint32_t>(*to));
}

// ---- Texts: place is the automaton's state.

void Matcher::advance_text(Frame frame, uint8_t byte, Draft& out) {
  const Dfa& dfa = grammar_[frame.node].dfa;
  const auto state = static_cast<int32_t>(frame.place);
  if (frame.phase == before_text) {
    if (byte != '"') return;
    frame.phase = in_text;
    return keep(frame, out);
  }
  const auto read = [&](uint8_t character) {
    const int32_t to = dfa.next(state, character);
    if (to < 0) return;
    frame.phase = in_text;
    frame.place = static_cast<uint32_t>(to);
    keep(frame, out);
  };
  uint32_t at = 0;
  if (frame.phase == in_text) {
    if (byte == '"') {
      if (dfa.accepts(state)) resume(frame.parent, out);
      return;
    }
    if (byte >= 0x20 && byte != '\\') return read(byte);
    if (byte != '\\') return;
  } else {
    const auto& children = escapes().states[frame.phase - in_escape].children;
    const auto found =
        std::find_if(children.begin(), children.end(), [&](const auto& e) { return e.first == byte; });
    if (found == children.end()) return;
    at = found->second;
  }
  const Escapes::State& to = escapes().states[at];
  if (to.character >= 0) return read(static_cast<uint8_t>(to.character));
  const bool goes_on = std::any_of(to.reachable.begin(), to.reachable.end(),
                                   [&](uint8_t c) { return dfa.next(state, c) >= 0; });
  if (!goes_on) return;
  frame.phase = in_escape + at;
  keep(frame, out);
}

// ---- Memory

void Matcher::forget(std::span<State* const> kept) {
  const std::vector<Frame> frames = std::exchange(frames_, {});
  const std::vector<Set> sets = std::exchange(sets_, {});
  const std::deque<std::vector<bool>> seen = std::exchange(seen_, {});
  frame_ids_.clear();
  set_ids_.clear();
  seen_ids_.clear();
  start_ = kDead;
  n_bytes_ = 0;
  std::unordered_map<FrameId, FrameId> moved;
  const auto move_frame = [&](FrameId id) {
    std::vector<FrameId> stack;  // from the top down to one that has been moved
    for (FrameId at = id; at != kBottom && !moved.contains(at); at = frames[at].parent) stack.push_back(at);
    while (!stack.empty()) {
      Frame frame = frames[stack.back()];
      if (frame.parent != kBottom) frame.parent = moved.at(frame.parent);
      if (grammar_[frame.node].kind == Kind::members) frame.place = seen_set(seen[frame.place]);
      moved.emplace(stack.back(), intern(frame));
      stack.pop_back();
    }
    return moved.at(id);
  };
  for (State* const state : kept) {
    if (*state == kDead) continue;
    Draft draft{.complete = sets[*state].complete};
    for (const FrameId id : sets[*state].frames) draft.frames.push_back(move_frame(id));
    *state = intern(std::move(draft));
  }
}

}  // namespace lily::engine::grammar
