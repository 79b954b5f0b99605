// The library logs through one sink that the program sets at start; it never prints by itself.
#pragma once

#include <fmt/format.h>

#include <functional>
#include <string>
#include <string_view>
#include <utility>

namespace lily {

enum class LogLevel { debug, info, notice, warning, error };

using LogSink = std::function<void(LogLevel, std::string_view line)>;

// Set before threads start; an empty sink drops everything. The sink must be callable from any thread.
void set_log_sink(LogSink sink);
void log_line(LogLevel level, std::string_view line);

template <typename... Args>
void log(LogLevel level, fmt::format_string<Args...> format, Args&&... args) {
  log_line(level, fmt::format(format, std::forward<Args>(args)...));
}

}  // namespace lily
