// POST /v1/messages and /v1/messages/count_tokens, as Anthropic's clients speak them (docs/api.md).
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "server/dialect.h"

namespace lily::server {

// Throw ApiError.
Call parse_message(const Json& body, const ServedModel& model);
engine::ChatRequest parse_count_tokens(const Json& body, const ServedModel& model);

struct MessageAnswer {
  std::string model;              // as the request named it
  std::vector<std::string> stop;  // ChatRequest::stop
};
std::unique_ptr<AnswerWriter> make_message_writer(MessageAnswer answer);

}  // namespace lily::server
