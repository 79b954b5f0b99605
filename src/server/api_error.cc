#include "server/api_error.h"

#include <new>

#include "engine/chat_request.h"

namespace lily::server {

ApiError api_error_of(const std::exception& error) {
  if (const auto* e = dynamic_cast<const ApiError*>(&error)) return *e;
  if (const auto* e = dynamic_cast<const engine::ContextExceeded*>(&error)) {
    ApiError out(400, "invalid_request_error", "context_length_exceeded", "messages", e->what());
    out.more = {{"n_prompt_tokens", e->n_prompt}, {"n_ctx", e->n_context}};
    return out;
  }
  if (const auto* e = dynamic_cast<const engine::SchemaRefused*>(&error))
    return ApiError::bad_field(e->field, e->what());
  if (dynamic_cast<const engine::QueueFull*>(&error) != nullptr) {
    ApiError out(503, "overloaded_error", "queue_full", "", error.what());
    out.retry_after_s = 1;
    return out;
  }
  if (dynamic_cast<const std::bad_alloc*>(&error) != nullptr) {
    ApiError out(503, "overloaded_error", "out_of_memory", "",
                 "the server is out of memory; try again later");
    out.retry_after_s = 5;
    return out;
  }
  if (const auto* e = dynamic_cast<const Error*>(&error))
    return e->fault() == Fault::user ? ApiError::bad_request(e->what())
                                     : ApiError(500, "server_error", "", "", e->what());
  return {500, "server_error", "", "", error.what()};
}

}  // namespace lily::server
