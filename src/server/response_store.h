// Answers that a client may go on from by their id (previous_response_id): in memory, bounded, the one that
// was used longest ago goes first. Any thread.
#pragma once

#include <cstddef>
#include <list>
#include <map>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "server/body.h"
#include "text/chat.h"

namespace lily::server {

struct StoredResponse {
  Json response;                        // as GET /v1/responses/{id} shows it
  std::vector<text::Message> messages;  // the conversation with the answer; instructions are not part of it
};

class ResponseStore {
 public:
  static constexpr size_t kMaxEntries = 1000;
  static constexpr size_t kMaxBytes = size_t{64} << 20;

  explicit ResponseStore(size_t max_entries = kMaxEntries, size_t max_bytes = kMaxBytes)
      : max_entries_(max_entries), max_bytes_(max_bytes) {}

  // One that is larger than the whole store is not kept.
  void put(const std::string& id, StoredResponse stored);
  std::optional<StoredResponse> find(std::string_view id);
  bool erase(std::string_view id);
  size_t n_entries() const;
  size_t n_bytes() const;

 private:
  struct Entry {
    StoredResponse stored;
    size_t bytes = 0;
    std::list<std::string>::iterator use;
  };
  using Entries = std::map<std::string, Entry, std::less<>>;
  void drop(Entries::iterator at);

  const size_t max_entries_, max_bytes_;
  mutable std::mutex mutex_;
  Entries entries_;
  std::list<std::string> uses_;  // the oldest first
  size_t bytes_ = 0;
};

}  // namespace lily::server
