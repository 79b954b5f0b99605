// What a client is told when its request cannot be answered: an HTTP status and the fields that every family
// of APIs writes in its own shape.
#pragma once

#include <nlohmann/json.hpp>
#include <string>
#include <utility>

#include "base/error.h"

namespace lily::server {

class ApiError : public Error {
 public:
  ApiError(int http_status, std::string kind, std::string short_code, std::string field,
           const std::string& message)
      : Error(http_status < 500 ? Fault::user : Fault::device, message),
        status(http_status),
        type(std::move(kind)),
        code(std::move(short_code)),
        param(std::move(field)) {}

  // 400: a field that is wrong, or that would change the answer and is not supported. `field` names it.
  static ApiError bad_field(std::string field, const std::string& message) {
    return {400, "invalid_request_error", "", std::move(field), message};
  }
  static ApiError bad_request(const std::string& message) { return bad_field("", message); }

  int status;
  std::string type;   // "invalid_request_error", in OpenAI's words
  std::string code;   // may be empty
  std::string param;  // may be empty
  nlohmann::ordered_json more = nlohmann::ordered_json::object();  // further members, n_ctx for example
  int retry_after_s = 0;                                           // 0: none
  std::string request_id;  // as in the log and in x-request-id; may be empty
};

// What the engine or a parser has thrown, as a client is told.
ApiError api_error_of(const std::exception& error);

}  // namespace lily::server
