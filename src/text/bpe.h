// Byte-pair encoding of one piece of text: start from its bytes, then merge the adjacent pair of lowest rank
// (leftmost on ties) until no pair of the list is left.
#pragma once

#include <array>
#include <cstdint>
#include <string_view>
#include <utility>
#include <vector>

namespace lily::text {

struct Merge {
  int32_t left, right, result;  // token ids; the rank is the place in the list
};

// Immutable after construction: any number of threads may encode at once, each with a Workspace of its own.
class Bpe {
 public:
  Bpe() = default;
  // byte_tokens[b] is the token that stands for the single byte b.
  Bpe(const std::array<int32_t, 256>& byte_tokens, const std::vector<Merge>& merges);

  // Memory that is reused between pieces, and a cache of pieces seen before. The cache remembers where in
  // `out` an earlier equal piece was encoded, so all calls with one Workspace must append to one and the same
  // `out`, and the pieces must stay alive and unchanged.
  class Workspace {
   public:
    Workspace();

   private:
    friend class Bpe;
    struct Symbol {
      int32_t token;           // -1 once it was merged into its left neighbour
      int32_t previous, next;  // -1 at the ends
    };
    struct Candidate {
      int32_t rank;
      int32_t position;  // of the left symbol
    };
    struct CachedPiece {
      std::string_view piece;
      size_t out_begin = 0, n_tokens = 0;
    };
    std::vector<Symbol> symbols_;
    std::vector<Candidate> heap_;
    std::vector<CachedPiece> cache_;  // direct mapped
  };

  // Appends the tokens of `piece`. O(n log n) in its bytes; at most 2^31 - 1 of them.
  void encode_append(std::string_view piece, Workspace& workspace, std::vector<int32_t>& out) const;

 private:
  struct Slot {
    uint64_t pair = ~uint64_t{0};  // left << 32 | right
    int32_t rank = -1, result = -1;
  };
  const Slot* find(int32_t left, int32_t right) const;
  void merge_append(std::string_view piece, Workspace& workspace, std::vector<int32_t>& out) const;

  std::array<int32_t, 256> byte_tokens_{};
  std::vector<Slot> table_;  // open addressing, a power of two, at most half full
  uint64_t mask_ = 0;
};

}  // namespace lily::text
