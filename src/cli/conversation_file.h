// A conversation as a JSON file, {"messages": [...]} in OpenAI's form, and which files /save may replace.
#pragma once

#include <nlohmann/json_fwd.hpp>
#include <string>
#include <vector>

#include "text/chat.h"

namespace lily::cli {

nlohmann::ordered_json conversation_json(const std::vector<text::Message>& messages);
// One that lacks a question is a conversation too. Throws Error(Fault::user), naming the path.
std::vector<text::Message> parse_conversation(const std::string& json, const nlohmann::ordered_json& tools,
                                              const std::string& path);
// The file has its name only when it is whole.
void write_conversation(const std::vector<text::Message>& messages, const std::string& path);
std::string read_conversation(const std::string& path);

// Throws Error(Fault::user) for a file that is there and that no /save has written.
void check_replaceable(const std::string& path);

}  // namespace lily::cli
