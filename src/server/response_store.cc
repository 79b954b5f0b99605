#include "server/response_store.h"

#include <utility>

namespace lily::server {
namespace {

size_t bytes_of(const StoredResponse& stored) {
  constexpr size_t kOverhead = 512;
  size_t bytes = kOverhead + to_text(stored.response).size();
  for (const text::Message& message : stored.messages) {
    bytes += kOverhead + message.reasoning_content.value_or("").size();
    for (const text::ContentPart& part : message.content) bytes += part.text.size();
    for (const text::ToolCall& call : message.tool_calls)
      bytes += kOverhead + (call.arguments ? to_text(*call.arguments).size() : 0);
  }
  return bytes;
}

}  // namespace

void ResponseStore::put(const std::string& id, StoredResponse stored) {
  const size_t bytes = bytes_of(stored);
  const std::lock_guard lock(mutex_);
  if (const auto at = entries_.find(id); at != entries_.end()) drop(at);
  if (bytes > max_bytes_ || max_entries_ == 0) return;
  while (entries_.size() >= max_entries_ || bytes_ + bytes > max_bytes_) drop(entries_.find(uses_.front()));
  uses_.push_back(id);
  entries_.emplace(id, Entry{std::move(stored), bytes, std::prev(uses_.end())});
  bytes_ += bytes;
}

std::optional<StoredResponse> ResponseStore::find(std::string_view id) {
  const std::lock_guard lock(mutex_);
  const auto at = entries_.find(id);
  if (at == entries_.end()) return {};
  uses_.splice(uses_.end(), uses_, at->second.use);
  return at->second.stored;
}

bool ResponseStore::erase(std::string_view id) {
  const std::lock_guard lock(mutex_);
  const auto at = entries_.find(id);
  if (at == entries_.end()) return false;
  drop(at);
  return true;
}

void ResponseStore::drop(Entries::iterator at) {
  bytes_ -= at->second.bytes;
  uses_.erase(at->second.use);
  entries_.erase(at);
}

size_t ResponseStore::n_entries() const {
  const std::lock_guard lock(mutex_);
  return entries_.size();
}

size_t ResponseStore::n_bytes() const {
  const std::lock_guard lock(mutex_);
  return bytes_;
}

}  // namespace lily::server
