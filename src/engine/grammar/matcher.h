// Follows a grammar byte by byte. The state is a set of stacks, since the same bytes may be the beginning of
// several alternatives; sets are numbered when they are first met and their transitions remembered, so that a
// text that has been seen before costs one table look-up a byte.
//
// Every stack can be completed, hence a matcher is never in a state without a way on.
#pragma once

#include <array>
#include <cstdint>
#include <deque>
#include <memory>
#include <span>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "engine/grammar/grammar.h"

namespace lily::engine::grammar {

// One reader at a time.
class Matcher {
 public:
  using State = uint32_t;
  static constexpr State kDead = ~State{0};
  // More ways to read a text at once than this are not followed: the first ones in the order of the grammar
  // count.
  static constexpr size_t kMaxReadings = 128;

  // The grammar must be pruned and outlive this.
  explicit Matcher(const Grammar& grammar);

  State start();
  // kDead if no text goes on so.
  State next(State state, uint8_t byte) {
    const int32_t known = sets_[state].next[byte];
    return known != kUnknown ? static_cast<State>(known) : compute(state, byte);
  }
  State next(State state, std::string_view bytes);
  bool complete(State state) const { return sets_[state].complete; }
  // Nothing but the end may come.
  bool finished(State state) const { return sets_[state].complete && sets_[state].frames.empty(); }

  size_t n_bytes() const { return n_bytes_; }
  // Forgets all states but these, which are given their new numbers.
  void forget(std::span<State* const> kept);

 private:
  using FrameId = uint32_t;
  static constexpr int32_t kUnknown = -2;
  static constexpr FrameId kBottom = ~FrameId{0};

  // A node that is being read, and who goes on when it is done. What the numbers mean depends on the node's
  // kind.
  struct Frame {
    NodeId node = 0;
    uint32_t phase = 0;
    uint32_t place =
        0;  // offset in a literal, state of an automaton, index of an item or member, set of members
    uint32_t blanks = 0;  // bytes of white space, with kLineEnd
    uint32_t count = 0;   // characters or members
    FrameId parent = kBottom;
    bool operator==(const Frame&) const = default;
  };
  struct FrameHash {
    size_t operator()(const Frame& f) const;
  };
  struct Set {
    std::array<int32_t, 256> next;
    std::vector<FrameId> frames;
    bool complete = false;
  };
  // A set being made.
  struct Draft {
    std::vector<FrameId> frames;
    bool complete = false;
    int depth = 0;
  };

  State compute(State state, uint8_t byte);
  State intern(Draft draft);
  FrameId intern(const Frame& frame);

  // Adds the frame and all that may come before its next byte.
  void activate(const Frame& frame, Draft& out);
  void resume(FrameId parent, Draft& out);
  void enter(NodeId node, FrameId parent, Draft& out);
  void keep(const Frame& frame, Draft& out);
  void advance(const Frame& frame, uint8_t byte, Draft& out);

  void activate_array(const Frame& frame, Draft& out);
  void activate_object(const Frame& frame, Draft& out);
  void activate_members(const Frame& frame, Draft& out);
  void advance_array(Frame frame, uint8_t byte, Draft& out);
  void advance_object(Frame frame, uint8_t byte, Draft& out);
  void advance_string(Frame frame, uint8_t byte, Draft& out);
  void advance_text(Frame frame, uint8_t byte, Draft& out);

  bool object_may_close(const Node& node, const Frame& frame) const;
  template <typename Visit>
  void each_next_member(const Node& node, uint32_t place, uint32_t count, Visit&& visit) const;
  uint32_t seen_set(std::vector<bool> seen);

  const Grammar& grammar_;
  std::vector<Frame> frames_;
  std::unordered_map<Frame, FrameId, FrameHash> frame_ids_;
  std::vector<Set> sets_;
  std::unordered_multimap<uint64_t, State> set_ids_;  // by a hash of the frames
  std::deque<std::vector<bool>> seen_;                // sets of members that have been written
  std::unordered_map<std::vector<bool>, uint32_t> seen_ids_;
  State start_ = kDead;
  size_t n_bytes_ = 0;
};

}  // namespace lily::engine::grammar
