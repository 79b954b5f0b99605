// Errors and checks (docs/architecture.md, "Errors").
//
// lily::Error ends the current job and is caught in main, per request and in the engine loop. LILY_CHECK is
// for our own mistakes only: no input and no device state may reach one.
#pragma once

#include <fmt/format.h>

#include <stdexcept>
#include <string>
#include <utility>

namespace lily {

enum class Fault {
  user,    // bad argument or request: HTTP 4xx, exit code 2
  model,   // the checkpoint does not match the catalogue: exit code 1
  device,  // GPU, memory or file system failed: HTTP 503, exit code 1
};

// what() is one line that names the thing, the value found and the way out.
class Error : public std::runtime_error {
 public:
  Error(Fault fault, const std::string& message) : std::runtime_error(message), fault_(fault) {}
  Fault fault() const { return fault_; }

 private:
  Fault fault_;
};

template <typename... Args>
[[noreturn]] void fail(Fault fault, fmt::format_string<Args...> format, Args&&... args) {
  throw Error(fault, fmt::format(format, std::forward<Args>(args)...));
}

[[noreturn]] void check_failed(const char* file, int line, const char* condition, const std::string& values);

}  // namespace lily

// LILY_CHECK(rows > 0, "rows {}", rows): prints the condition and the values, then aborts, release included.
#define LILY_CHECK(condition, ...)                                                                       \
  do {                                                                                                   \
    if (!(condition)) ::lily::check_failed(__FILE__, __LINE__, #condition, fmt::format("" __VA_ARGS__)); \
  } while (false)
