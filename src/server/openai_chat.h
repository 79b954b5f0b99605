// POST /v1/chat/completions: OpenAI's chat completions, streamed and whole.
#pragma once

#include "server/dialect.h"

namespace lily::server {

Call parse_chat_completion(const Json& body, const ServedModel& model);

}  // namespace lily::server
