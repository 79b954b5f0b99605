#include "text/bpe.h"

#include <algorithm>
#include <bit>
#include <limits>

#include "base/error.h"

namespace lily::text {
namespace {

constexpr size_t kCacheSlots = 8192;   // a power of two
constexpr size_t kLongestCached = 64;  // bytes; longer pieces hardly ever come twice

uint64_t mixed(uint64_t x) {
  x ^= x >> 32;
  x *= 0x9e3779b97f4a7c15u;
  return x ^ (x >> 29);
}

uint64_t hash_of(std::string_view piece) {
  uint64_t hash = 0xcbf29ce484222325u;
  for (const char c : piece) hash = (hash ^ static_cast<uint8_t>(c)) * 0x100000001b3u;
  return mixed(hash);
}

uint64_t pair_key(int32_t left, int32_t right) {
  return (static_cast<uint64_t>(static_cast<uint32_t>(left)) << 32) | static_cast<uint32_t>(right);
}

}  // namespace

Bpe::Workspace::Workspace() : cache_(kCacheSlots) {}

Bpe::Bpe(const std::array<int32_t, 256>& byte_tokens, const std::vector<Merge>& merges)
    : byte_tokens_(byte_tokens),
      table_(std::bit_ceil(std::max<size_t>(2 * merges.size(), 2))),
      mask_(table_.size() - 1) {
  LILY_CHECK(merges.size() < static_cast<size_t>(std::numeric_limits<int32_t>::max()));
  int32_t rank = 0;
  for (const Merge& merge : merges) {
    const uint64_t key = pair_key(merge.left, merge.right);
    uint64_t at = mixed(key) & mask_;
    while (table_[at].rank >= 0 && table_[at].pair != key) at = (at + 1) & mask_;
    if (table_[at].rank < 0) table_[at] = {key, rank, merge.result};  // of equal pairs the first counts
    ++rank;
  }
}

const Bpe::Slot* Bpe::find(int32_t left, int32_t right) const {
  const uint64_t key = pair_key(left, right);
  for (uint64_t at = mixed(key) & mask_; table_[at].rank >= 0; at = (at + 1) & mask_)
    if (table_[at].pair == key) return &table_[at];
  return nullptr;
}

void Bpe::encode_append(std::string_view piece, Workspace& workspace, std::vector<int32_t>& out) const {
  if (piece.size() == 1) {
    out.push_back(byte_tokens_[static_cast<uint8_t>(piece[0])]);
    return;
  }
  if (piece.size() > kLongestCached) {
    merge_append(piece, workspace, out);
    return;
  }
  auto& cached = workspace.cache_[hash_of(piece) & (kCacheSlots - 1)];
  if (cached.piece == piece && cached.n_tokens > 0) {
    for (size_t i = 0; i < cached.n_tokens; ++i) out.push_back(out[cached.out_begin + i]);
    return;
  }
  const size_t out_begin = out.size();
  merge_append(piece, workspace, out);
  cached = {piece, out_begin, out.size() - out_begin};
}

void Bpe::merge_append(std::string_view piece, Workspace& workspace, std::vector<int32_t>& out) const {
  LILY_CHECK(piece.size() < static_cast<size_t>(std::numeric_limits<int32_t>::max()), "{} bytes",
             piece.size());
  auto& symbols = workspace.symbols_;
  auto& heap = workspace.heap_;
  const auto n = static_cast<int32_t>(piece.size());
  symbols.resize(piece.size());
  heap.clear();

  // A heap by (rank, position). Entries are not removed when a symbol of theirs changes; those are told by
  // their rank.
  const auto later = [](const auto& a, const auto& b) {
    return a.rank != b.rank ? a.rank > b.rank : a.position > b.position;
  };
  const auto rank_at = [&](int32_t left) -> const Slot* {
    const auto& symbol = symbols[left];
    return symbol.token < 0 || symbol.next < 0 ? nullptr : find(symbol.token, symbols[symbol.next].token);
  };
  const auto push = [&](int32_t left) {
    if (const Slot* slot = left < 0 ? nullptr : rank_at(left)) {
      heap.push_back({slot->rank, left});
      std::push_heap(heap.begin(), heap.end(), later);
    }
  };

  for (int32_t i = 0; i < n; ++i)
    symbols[i] = {byte_tokens_[static_cast<uint8_t>(piece[i])], i - 1, i + 1 < n ? i + 1 : -1};
  for (int32_t i = 0; i + 1 < n; ++i)
    if (const Slot* slot = rank_at(i)) heap.push_back({slot->rank, i});
  std::make_heap(heap.begin(), heap.end(), later);

  while (!heap.empty()) {
    const auto best = heap.front();
    std::pop_heap(heap.begin(), heap.end(), later);
    heap.pop_back();
    const Slot* slot = rank_at(best.position);
    if (slot == nullptr || slot->rank != best.rank) continue;
    auto& left = symbols[best.position];
    auto& right = symbols[left.next];
    left.token = slot->result;
    right.token = -1;
    left.next = right.next;
    if (left.next >= 0) symbols[left.next].previous = best.position;
    push(left.previous);
    push(best.position);
  }
  if (n > 0)
    for (int32_t i = 0; i >= 0; i = symbols[i].next) out.push_back(symbols[i].token);
}

}  // namespace lily::text
