// A trace of what ran when, in the Trace Event Format (a JSON array of complete events, "ph": "X"), which
// chrome://tracing and Perfetto open. The closing bracket of that array is optional by the format, so the
// file of a run that was interrupted opens as well.
#pragma once

#include <chrono>
#include <cstdint>
#include <cstdio>
#include <filesystem>
#include <mutex>
#include <string>
#include <string_view>

namespace lily {

// add() may be called from any thread.
class Trace {
 public:
  using Clock = std::chrono::steady_clock;

  // Rows of the trace.
  enum class Track : uint8_t { steps = 1, ops = 2 };

  // Creates the file, or throws Error(Fault::user) naming it. Times in it count from now.
  explicit Trace(const std::filesystem::path& path);
  Trace(const Trace&) = delete;
  Trace& operator=(const Trace&) = delete;
  ~Trace();

  // One event. `args` is a JSON object, or empty. Numbers and names of ops only: never text of a prompt.
  void add(Track track, std::string_view name, Clock::time_point begin, Clock::time_point end,
           std::string_view args = {});

 private:
  const Clock::time_point start_ = Clock::now();
  std::mutex mutex_;
  std::string path_;  // for messages
  std::FILE* file_;
};

}  // namespace lily
