// POST /v1/responses, as OpenAI's Responses clients speak it (docs/api.md).
#pragma once

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "server/dialect.h"
#include "server/response_store.h"

namespace lily::server {

// Throws ApiError. The store outlives the call.
Call parse_response(const Json& body, const ServedModel& model, ResponseStore& store);

// How a tool that the model sees as a function is called on the wire.
struct WireTool {
  std::string name;
  std::string name_space;  // empty: none
  bool is_custom = false;  // takes free text, which the model writes as the parameter kCustomInput
};
inline constexpr const char* kCustomInput = "input";
// The name that the model sees of a function in a namespace.
std::string flat_name(const std::string& name_space, const std::string& name);

// The items of `input`, appended to a conversation.
void append_input(const Json& input, std::vector<text::Message>& messages);

struct ResponseAnswer {
  Json echo;                              // members of the response object that repeat the request
  std::map<std::string, WireTool> tools;  // by the name that the model sees
  std::vector<text::Message> messages;    // the conversation so far, without instructions
  ResponseStore* store = nullptr;         // null: the answer is not kept
};
std::unique_ptr<AnswerWriter> make_response_writer(ResponseAnswer answer);

}  // namespace lily::server
