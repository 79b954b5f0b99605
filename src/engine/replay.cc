#include "engine/replay.h"

#include <iterator>
#include <utility>

#include "base/ascii.h"
#include "base/sha256.h"

namespace lily::engine {
namespace {

// A part of a message, its length first, so that parts cannot run into each other.
void add(std::string& out, std::string_view part) {
  out += std::to_string(part.size());
  out += ':';
  out += part;
}

VisibleHash chained(const VisibleHash& before, const std::string& parts) {
  std::string text = before.digits;
  add(text, parts);
  return {sha256_hex(text)};
}

// Arguments that are equal as JSON are equal here, whatever their spelling and the order of their keys.
std::string canonical(const nlohmann::ordered_json& arguments) {
  const nlohmann::json sorted = nlohmann::json::parse(
      arguments.dump(-1, ' ', false, nlohmann::ordered_json::error_handler_t::replace), nullptr, false);
  return sorted.is_object() && sorted.empty() ? "" : sorted.dump();
}

// What a client sees of an assistant's turn; thinking that some leave in the text is not part of it.
std::string visible_answer(std::string_view content) {
  constexpr std::string_view kClose = "</think>";
  if (const size_t at = content.rfind(kClose); at != std::string_view::npos)
    content.remove_prefix(at + kClose.size());
  return std::string(trimmed(content));
}

// The ids of all calls, without what clients may have changed; empty if one has none.
template <typename Calls>
std::string ids_of(const Calls& calls) {
  std::string all;
  for (const auto& call : calls) {
    if (call.id.size() < kCallIdLetters) return {};
    all += call.id.substr(call.id.size() - kCallIdLetters);
  }
  return all;
}

}  // namespace

std::vector<VisibleHash> ReplayBook::hashes_of(std::span<const text::Message> messages,
                                               const nlohmann::ordered_json& tools) const {
  std::vector<VisibleHash> hashes;
  hashes.push_back(chained({}, tools.dump(-1, ' ', false, nlohmann::ordered_json::error_handler_t::replace)));
  for (const text::Message& message : messages) {
    if (const std::string calls = ids_of(message.tool_calls); !calls.empty()) {
      const std::lock_guard lock(mutex_);
      const auto at = by_calls_.find(calls);
      if (at != by_calls_.end() && at->second->before == hashes.back()) {
        hashes.push_back(at->second->conversation);
        continue;
      }
    }
    std::string text, parts;
    for (const text::ContentPart& part : message.content) text += part.text;
    add(parts, message.role);
    add(parts, message.role == "assistant" ? visible_answer(text) : text);
    for (const text::ToolCall& call : message.tool_calls) {
      add(parts, call.name);
      add(parts, call.arguments ? canonical(*call.arguments) : "");
    }
    hashes.push_back(chained(hashes.back(), parts));
  }
  return hashes;
}

VisibleHash ReplayBook::hash_after(const VisibleHash& before, const text::ParsedOutput& answer) {
  std::string parts;
  add(parts, "assistant");
  add(parts, visible_answer(answer.content));
  for (const text::ParsedOutput::Call& call : answer.calls) {
    add(parts, call.name);
    add(parts, canonical(nlohmann::ordered_json::parse(call.arguments, nullptr, false)));
  }
  return chained(before, parts);
}

void ReplayBook::remember(const VisibleHash& before, const text::ParsedOutput& answer,
                          std::vector<int32_t> ids) {
  Entry entry{before, hash_after(before, answer), ids_of(answer.calls), std::move(ids)};
  if (store_ != nullptr) store_->keep(entry.conversation.digits, entry.ids);
  take_up(std::move(entry));
}

void ReplayBook::bring_back(const VisibleHash& conversation, std::vector<int32_t> ids) {
  take_up(Entry{{}, conversation, {}, std::move(ids)});
}

void ReplayBook::take_up(Entry entry) {
  if (entry.n_bytes() > max_bytes_) return;
  const std::lock_guard lock(mutex_);
  if (const auto old = by_hash_.find(entry.conversation.digits); old != by_hash_.end()) drop(old->second);
  n_bytes_ += entry.n_bytes();
  entries_.push_front(std::move(entry));
  const Entry& added = entries_.front();
  by_hash_[added.conversation.digits] = entries_.begin();
  if (!added.calls.empty()) by_calls_[added.calls] = entries_.begin();
  while (n_bytes_ > max_bytes_) drop(std::prev(entries_.end()));
}

void ReplayBook::drop(Entries::iterator entry) {
  n_bytes_ -= entry->n_bytes();
  by_hash_.erase(entry->conversation.digits);
  by_calls_.erase(entry->calls);
  entries_.erase(entry);
}

std::optional<std::vector<int32_t>> ReplayBook::find(const VisibleHash& conversation) {
  {
    const std::lock_guard lock(mutex_);
    if (const auto at = by_hash_.find(conversation.digits); at != by_hash_.end()) {
      entries_.splice(entries_.begin(), entries_, at->second);
      return at->second->ids;
    }
  }
  if (store_ == nullptr) return {};
  std::optional<std::vector<int32_t>> ids = store_->find(conversation.digits);
  if (ids) bring_back(conversation, *ids);
  return ids;
}

size_t ReplayBook::n_bytes() const {
  const std::lock_guard lock(mutex_);
  return n_bytes_;
}

}  // namespace lily::engine
