// The chat template of Qwen3.6-35B-A3B as native code: the same bytes as the checkpoint's chat_template.jinja
// on everything that template accepts, and its errors as Error(Fault::user).
#pragma once

#include <cstdint>
#include <nlohmann/json_fwd.hpp>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "text/chat.h"
#include "text/tokenizer.h"

namespace lily::text {

struct RenderOptions {
  bool add_generation_prompt = false;
  bool enable_thinking = true;
  bool preserve_thinking = false;  // keep the thinking of turns before the last user query
  bool add_vision_id = false;

  // Two things the original cannot do; normalise() asks for them.
  // Conversations without a user query are rendered as if one stood after the last message.
  bool allow_no_query = false;
  // The last message is an assistant's without tool calls; it is left open, after a closed think block unless
  // it has one or opens one itself. No generation prompt follows.
  bool continue_last = false;
};

// A prompt and where its text comes from: what the template writes may hold control tokens, what users, tools
// and system messages say may not.
class RenderedPrompt {
 public:
  struct Segment {
    std::string_view text;  // into text()
    AddedTokens active;
  };

  const std::string& text() const { return text_; }
  std::span<const TextRange> ranges() const { return ranges_; }
  std::vector<Segment> segments() const;
  // Where each message ends, in bytes of text().
  std::span<const size_t> message_ends() const { return message_ends_; }
  // Where tools and system message end, in bytes of text(); 0 where there are none.
  size_t system_end() const { return system_end_; }
  // True if the prompt ends inside a think block, where the answer begins with reasoning.
  bool starts_in_thinking() const { return starts_in_thinking_; }
  // True if the answer continues text of the client, so that its leading newlines count.
  bool continues_text() const { return continues_text_; }

  void append(std::string_view text, AddedTokens active);
  void end_message() { message_ends_.push_back(text_.size()); }
  void end_system() { system_end_ = text_.size(); }
  void set_starts_in_thinking() { starts_in_thinking_ = true; }
  void set_continues_text() { continues_text_ = true; }

 private:
  std::string text_;
  std::vector<TextRange> ranges_;  // neighbours differ in kind
  std::vector<size_t> message_ends_;
  size_t system_end_ = 0;
  bool starts_in_thinking_ = false;
  bool continues_text_ = false;
};

// `tools` is an array of tool objects, written as they are, or null.
RenderedPrompt render(std::span<const Message> messages, const nlohmann::ordered_json& tools,
                      const RenderOptions& options);

std::vector<int32_t> tokenize(const RenderedPrompt& prompt, const Tokenizer& tokenizer);
// Of the bytes [begin, end) alone. Cut where the template writes a token, the pieces are those of the whole.
void tokenize_append(const RenderedPrompt& prompt, size_t begin, size_t end, const Tokenizer& tokenizer,
                     std::vector<int32_t>& ids);

// Which template a checkpoint has, by the bytes of its chat_template.jinja.
enum class KnownTemplate {
  qwen36,   // the one that render() implements
  qwen35,   // its predecessor: no preserve_thinking, and scalars of tool arguments printed as Python does
  unknown,  // the caller warns, or refuses with --strict
};
KnownTemplate identify_template(std::string_view jinja);

}  // namespace lily::text
