#include "text/chat_template.h"

#include <algorithm>
#include <nlohmann/json.hpp>

#include "base/error.h"
#include "base/sha256.h"
#include "text/json_text.h"
#include "text/unicode.h"

namespace lily::text {
namespace {

constexpr std::string_view kToolInstructions =
    "\n\nIf you choose to call a function ONLY reply in the following format with NO suffix:\n\n<tool_call>\n"
    "<function=example_function_name>\n<parameter=example_parameter_1>\nvalue_1\n</parameter>\n"
    "<parameter=example_parameter_2>\nThis is the value for the second parameter\nthat can span\nmultiple "
    "lines\n"
    "</parameter>\n</function>\n</tool_call>\n\n<IMPORTANT>\nReminder:\n"
    "- Function calls MUST follow the specified format: an inner <function=...></function> block must be "
    "nested within "
    "<tool_call></tool_call> XML tags\n"
    "- Required parameters MUST be specified\n"
    "- You may provide optional reasoning for your function call in natural language BEFORE the function "
    "call, but NOT "
    "after\n"
    "- If there is no function call available, answer the question like normal with your current knowledge "
    "and do not "
    "tell the user about function calls\n</IMPORTANT>";

class Renderer {
 public:
  Renderer(std::span<const Message> messages, const ordered_json& tools, const RenderOptions& options)
      : messages_(messages), tools_(tools), options_(options) {}

  RenderedPrompt run() {
    if (messages_.empty()) fail(Fault::user, "No messages provided.");
    system_block();
    prompt_.end_system();
    last_query_ = find_last_query();
    for (size_t i = 0; i < messages_.size(); ++i) {
      message(i);
      prompt_.end_message();
    }
    if (options_.add_generation_prompt && !options_.continue_last) {
      scaffold("<|im_start|>assistant\n");
      scaffold(options_.enable_thinking ? "<think>\n" : "<think>\n\n</think>\n\n");
      if (options_.enable_thinking) prompt_.set_starts_in_thinking();
    }
    return std::move(prompt_);
  }

 private:
  enum class Counting { no, yes };

  void scaffold(std::string_view text) { prompt_.append(text, AddedTokens::all); }
  void untrusted(std::string_view text) { prompt_.append(text, AddedTokens::none); }

  std::string content_of(const Message& message, Counting counting, bool is_system = false) {
    std::string text;
    for (const ContentPart& part : message.content) {
      if (part.kind == ContentPart::Kind::text) {
        text += part.text;
        continue;
      }
      const bool is_image = part.kind == ContentPart::Kind::image;
      if (is_system) fail(Fault::user, "System message cannot contain {}.", is_image ? "images" : "videos");
      int& count = is_image ? n_images_ : n_videos_;
      if (counting == Counting::yes) ++count;
      if (options_.add_vision_id) text += fmt::format("{} {}: ", is_image ? "Picture" : "Video", count);
      text += is_image ? "<|vision_start|><|image_pad|><|vision_end|>"
                       : "<|vision_start|><|video_pad|><|vision_end|>";
    }
    return text;
  }

  void system_block() {
    const Message& first = messages_.front();
    const bool has_system = first.role == "system";
    const std::string content = has_system ? content_of(first, Counting::no, true) : std::string();
    const std::string_view text = strip(content);
    if (tools_.is_array() && !tools_.empty()) {
      scaffold("<|im_start|>system\n# Tools\n\nYou have access to the following functions:\n\n<tools>");
      for (const ordered_json& tool : tools_) {
        scaffold("\n");
        untrusted(dump_json(tool));
      }
      scaffold("\n</tools>");
      scaffold(kToolInstructions);
      if (!text.empty()) {
        scaffold("\n\n");
        untrusted(text);
      }
      scaffold("<|im_end|>\n");
    } else if (has_system) {
      scaffold("<|im_start|>system\n");
      untrusted(text);
      scaffold("<|im_end|>\n");
    }
  }

  // Index of the last user message that is not a wrapped tool result.
  size_t find_last_query() {
    for (size_t i = messages_.size(); i-- > 0;) {
      if (messages_[i].role != "user" || !messages_[i].is_query) continue;
      const std::string content = content_of(messages_[i], Counting::no);
      const std::string_view text = strip(content);
      if (!(text.starts_with("<tool_response>") && text.ends_with("</tool_response>"))) return i;
    }
    if (!options_.allow_no_query) fail(Fault::user, "No user query found in messages.");
    return messages_.size();
  }

  void message(size_t i) {
    const Message& message = messages_[i];
    const std::string raw = content_of(message, Counting::yes);
    if (message.role == "system") {
      if (i != 0) fail(Fault::user, "System message must be at the beginning.");
    } else if (message.role == "user") {
      scaffold("<|im_start|>user\n");
      untrusted(strip(raw));
      scaffold("<|im_end|>\n");
    } else if (message.role == "assistant") {
      if (options_.continue_last && i + 1 == messages_.size()) open_answer(message, raw);
      else answer(i, message, raw);
    } else if (message.role == "tool") {
      tool_result(i, strip(raw));
    } else {
      fail(Fault::user, "Unexpected message role.");
    }
  }

  void tool_result(size_t i, std::string_view text) {
    // Without a message before it the original leaves the header out; normalise() refuses such a
    // conversation.
    if (i > 0 && messages_[i - 1].role != "tool") scaffold("<|im_start|>user");
    scaffold("\n<tool_response>\n");
    untrusted(text);
    scaffold("\n</tool_response>");
    if (i + 1 == messages_.size() || messages_[i + 1].role != "tool") scaffold("<|im_end|>\n");
  }

  struct Answer {
    std::string_view reasoning, content;
  };
  // Thinking that stands in the content is moved to the reasoning, unless the message has reasoning of its
  // own.
  static Answer split_thinking(const Message& message, std::string_view content) {
    constexpr std::string_view kOpen = "<think>", kClose = "</think>";
    if (message.reasoning_content) return {strip(*message.reasoning_content), content};
    const size_t first = content.find(kClose);
    if (first == std::string_view::npos) return {{}, content};
    std::string_view reasoning = strip_trailing_newlines(content.substr(0, first));
    if (const size_t open = reasoning.rfind(kOpen); open != std::string_view::npos)
      reasoning.remove_prefix(open + kOpen.size());
    content.remove_prefix(content.rfind(kClose) + kClose.size());
    return {strip(strip_leading_newlines(reasoning)), strip_leading_newlines(content)};
  }

  // Quoted tags in reasoning stay text, so that they cannot end it.
  void think_block(std::string_view reasoning) {
    scaffold("<think>\n");
    untrusted(reasoning);
    scaffold("\n</think>\n\n");
  }

  void answer(size_t i, const Message& message, std::string_view raw) {
    const auto [reasoning, content] = split_thinking(message, strip(raw));
    scaffold("<|im_start|>assistant\n");
    if (options_.preserve_thinking || i > last_query_) think_block(reasoning);
    prompt_.append(content, AddedTokens::assistant);
    bool is_first = true;
    for (const ToolCall& call : message.tool_calls) {
      if (!is_first) scaffold("\n");
      else if (!strip(content).empty()) scaffold("\n\n");
      is_first = false;
      tool_call(call);
    }
    scaffold("<|im_end|>\n");
  }

  void tool_call(const ToolCall& call) {
    scaffold("<tool_call>\n<function=");
    untrusted(call.name);
    scaffold(">\n");
    if (call.arguments) {
      if (!call.arguments->is_object()) fail(Fault::user, "Can only get item pairs from a mapping.");
      for (const auto& [name, value] : call.arguments->items()) {
        scaffold("<parameter=");
        untrusted(name);
        scaffold(">\n");
        untrusted(value.is_string() ? value.get_ref<const std::string&>() : dump_json(value));
        scaffold("\n</parameter>\n");
      }
    }
    scaffold("</function>\n</tool_call>");
  }

  void open_answer(const Message& message, std::string_view raw) {
    const std::string_view trimmed = strip(raw);
    // White space at the end is part of what is to be continued.
    const std::string_view text =
        trimmed.empty() ? trimmed : raw.substr(static_cast<size_t>(trimmed.data() - raw.data()));
    const auto [reasoning, content] = split_thinking(message, text);
    scaffold("<|im_start|>assistant\n");
    prompt_.set_continues_text();
    if (!message.reasoning_content && content.starts_with("<think>")) prompt_.set_starts_in_thinking();
    else think_block(reasoning);
    prompt_.append(content, AddedTokens::assistant);
  }

  std::span<const Message> messages_;
  const ordered_json& tools_;
  const RenderOptions& options_;
  RenderedPrompt prompt_;
  size_t last_query_ = 0;
  int n_images_ = 0, n_videos_ = 0;
};

}  // namespace

void RenderedPrompt::append(std::string_view text, AddedTokens active) {
  if (text.empty()) return;
  text_ += text;
  if (!ranges_.empty() && ranges_.back().active == active) ranges_.back().end = text_.size();
  else ranges_.push_back({text_.size(), active});
}

std::vector<RenderedPrompt::Segment> RenderedPrompt::segments() const {
  std::vector<Segment> out;
  size_t begin = 0;
  for (const TextRange& range : ranges_) {
    out.push_back({std::string_view(text_).substr(begin, range.end - begin), range.active});
    begin = range.end;
  }
  return out;
}

RenderedPrompt render(std::span<const Message> messages, const ordered_json& tools,
                      const RenderOptions& options) {
  return Renderer(messages, tools, options).run();
}

std::vector<int32_t> tokenize(const RenderedPrompt& prompt, const Tokenizer& tokenizer) {
  std::vector<int32_t> ids;
  tokenize_append(prompt, 0, prompt.text().size(), tokenizer, ids);
  return ids;
}

void tokenize_append(const RenderedPrompt& prompt, size_t begin, size_t end, const Tokenizer& tokenizer,
                     std::vector<int32_t>& ids) {
  std::vector<TextRange> ranges;
  for (const TextRange& range : prompt.ranges()) {
    if (range.end <= begin) continue;
    ranges.push_back({std::min(range.end, end) - begin, range.active});
    if (range.end >= end) break;
  }
  tokenizer.encode_append(std::string_view(prompt.text()).substr(begin, end - begin), ranges, ids);
}

KnownTemplate identify_template(std::string_view jinja) {
  const std::string hash = sha256_hex(jinja);
  if (hash == "e84f32a23fdda27689f868aa4a1a5621f41133e51a48d7f3efcbea2839574259")
    return KnownTemplate::qwen36;
  if (hash == "a4aee8afcf2e0711942cf848899be66016f8d14a889ff9ede07bca099c28f715")
    return KnownTemplate::qwen35;
  return KnownTemplate::unknown;
}

}  // namespace lily::text
