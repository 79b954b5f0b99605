#include "engine/replay.h"

#include "base/sha256.h"

namespace lily::engine {
namespace {

std::string_view trimmed(std::string_view text) {
  constexpr std::string_view kSpace = " \t\r\n";
  const size_t first = text.find_first_not_of(kSpace);
  if (first == std::string_view::npos) return {};
  return text.substr(first, text.find_last_not_of(kSpace) - first + 1);
}

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

}  // namespace

std::vector<VisibleHash> ReplayBook::hashes_of(std::span<const text::Message> messages,
                                               const nlohmann::ordered_json& tools) {
  std::vector<VisibleHash> hashes;
  hashes.push_back(chained({}, tools.dump(-1, ' ', false, nlohmann::ordered_json::error_handler_t::replace)));
  for (const text::Message& message : messages) {
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

void ReplayBook::remember(const VisibleHash& conversation, std::vector<int32_t> ids) {
  const size_t n_new = ids.size() * sizeof(int32_t);
  if (n_new > max_bytes_) return;
  const std::lock_guard lock(mutex_);
  if (const auto old = by_hash_.find(conversation.digits); old != by_hash_.end()) {
    n_bytes_ -= old->second->ids.size() * sizeof(int32_t);
    entries_.erase(old->second);
    by_hash_.erase(old);
  }
  entries_.push_front({conversation, std::move(ids)});
  by_hash_[conversation.digits] = entries_.begin();
  n_bytes_ += n_new;
  while (n_bytes_ > max_bytes_) {
    n_bytes_ -= entries_.back().ids.size() * sizeof(int32_t);
    by_hash_.erase(entries_.back().conversation.digits);
    entries_.pop_back();
  }
}

std::optional<std::vector<int32_t>> ReplayBook::find(const VisibleHash& conversation) {
  const std::lock_guard lock(mutex_);
  const auto at = by_hash_.find(conversation.digits);
  if (at == by_hash_.end()) return {};
  entries_.splice(entries_.begin(), entries_, at->second);
  return at->second->ids;
}

size_t ReplayBook::n_bytes() const {
  const std::lock_guard lock(mutex_);
  return n_bytes_;
}

}  // namespace lily::engine
