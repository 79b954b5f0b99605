// Exact replay: what the engine wrote in earlier turns, token for token, so that a conversation that comes
// back goes on from the state that is there instead of from a rendering that differs.
//
// Clients send back what they were shown: most drop the thinking, and some reformat the arguments of calls.
// The chat template drops the thinking of turns before the last user query too. Each makes the prompt differ
// from what the model has read and written, and a recurrent state cannot be rewound: everything after the
// first difference would be read again. So an assistant turn that shows what an earlier answer showed - the
// same text, white space at its ends aside, and calls of the same functions with equal arguments, after the
// same visible conversation - is replaced by the tokens of that answer, thinking included. A turn that brings
// back the ids of all calls of that answer, after the same conversation, is that answer too, whatever the
// client has made of its text and arguments.
//
// Threads: every member may be called from any thread at any time.
#pragma once

#include <cstddef>
#include <cstdint>
#include <list>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <unordered_map>
#include <vector>

#include "text/chat.h"
#include "text/output_parser.h"

namespace lily::engine {

// Names a visible conversation: tools and all messages so far. Conversations of strangers meet in one book,
// so it is a hash (SHA-256, in hexadecimal digits) that nobody can make collide.
struct VisibleHash {
  std::string digits;
  bool operator==(const VisibleHash&) const = default;
};

// Of an id of a call. Clients may change what stands before them, such as call_ or toolu_.
inline constexpr int kCallIdLetters = 24;

// Where answers are kept beside memory; from any thread.
class ReplayStore {
 public:
  virtual ~ReplayStore() = default;
  virtual void keep(const std::string& conversation, const std::vector<int32_t>& ids) = 0;
  virtual std::optional<std::vector<int32_t>> find(const std::string& conversation) = 0;
};

class ReplayBook {
 public:
  // Conversations are forgotten, those not used for the longest time first, beyond so many bytes of tokens;
  // what the store still has is found there. `store` may be null; it outlives the book.
  explicit ReplayBook(size_t max_bytes, ReplayStore* store = nullptr)
      : max_bytes_(max_bytes), store_(store) {}

  // [i]: the conversation before message i; one more entry than messages. Of normalised messages. A turn that
  // is known by the ids of its calls counts as it was written.
  std::vector<VisibleHash> hashes_of(std::span<const text::Message> messages,
                                     const nlohmann::ordered_json& tools) const;
  // The conversation `before`, and this answer to it.
  static VisibleHash hash_after(const VisibleHash& before, const text::ParsedOutput& answer);

  // `answer` to the conversation `before`. `ids`: everything that was read and written, without the stop
  // token.
  void remember(const VisibleHash& before, const text::ParsedOutput& answer, std::vector<int32_t> ids);
  // The same of an earlier process, which is known by what it shows alone.
  void bring_back(const VisibleHash& conversation, std::vector<int32_t> ids);
  std::optional<std::vector<int32_t>> find(const VisibleHash& conversation);

  size_t n_bytes() const;

 private:
  struct Entry {
    VisibleHash before, conversation;
    std::string calls;  // their ids; empty: none
    std::vector<int32_t> ids;
    size_t n_bytes() const { return ids.size() * sizeof(int32_t) + calls.size(); }
  };
  using Entries = std::list<Entry>;
  void take_up(Entry entry);
  void drop(Entries::iterator entry);

  const size_t max_bytes_;
  ReplayStore* const store_;
  mutable std::mutex mutex_;
  size_t n_bytes_ = 0;
  Entries entries_;  // most recently used first
  std::unordered_map<std::string, Entries::iterator> by_hash_, by_calls_;
};

}  // namespace lily::engine
