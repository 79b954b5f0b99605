// POST /v1/completions: OpenAI's text completions, streamed and whole.
#pragma once

#include "server/dialect.h"

namespace lily::server {

Call parse_text_completion(const Json& body, const ServedModel& model);

}  // namespace lily::server
