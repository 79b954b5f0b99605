// The memory of this process as Linux tells it; nothing, or false, on other systems.
#pragma once

#include <cstdint>
#include <fstream>
#include <optional>
#include <string>

namespace lily::test {

// A line of /proc/self/status in bytes: "VmRSS", "VmHWM".
inline std::optional<int64_t> status_bytes(const std::string& key) {
  std::ifstream in("/proc/self/status");
  for (std::string line; std::getline(in, line);)
    if (line.starts_with(key + ":")) return std::stoll(line.substr(key.size() + 1)) * 1024;
  return std::nullopt;
}

// Starts the peak anew from the memory in use.
inline bool reset_peak() {
  std::ofstream out("/proc/self/clear_refs");
  return static_cast<bool>(out << "5" << std::flush);
}

}  // namespace lily::test
