// Turns what clients send into a conversation that the chat template accepts, without changing anything that
// it accepts already.
#pragma once

#include <string_view>
#include <vector>

#include "text/chat.h"
#include "text/chat_template.h"

namespace lily::text {

struct Conversation {
  std::vector<Message> messages;
  RenderOptions options;  // for render()
};

// - System and developer messages at the start become one, joined by an empty line. Later ones stay in place
// as a user
//   turn "System: ..." that does not count as a query.
// - The role `function` is read as `tool`.
// - Tool arguments given as a string are parsed; an empty one means no parameters, and one that holds no JSON
// object is
//   kept as the single parameter `arguments`.
// - Without any user query the conversation is rendered all the same.
// - A last assistant message without tool calls is continued instead of answered.
// Throws Error(Fault::user) naming messages[i]: images and other media, a tool result that comes first,
// unknown roles, no messages.
Conversation normalise(std::vector<Message> messages, RenderOptions options);

// True for a system block that holds nothing but a client's billing header, which differs in every request:
// keeping it would make the cached prefix useless.
bool is_billing_header(std::string_view system_block);

}  // namespace lily::text
