#include "base/trace.h"

#include <fmt/format.h>

#include <cerrno>
#include <cstring>

#include "base/error.h"
#include "base/log.h"
#include "base/printable.h"

namespace lily {
namespace {

double microseconds(Trace::Clock::duration d) { return std::chrono::duration<double, std::micro>(d).count(); }

}  // namespace

Trace::Trace(const std::filesystem::path& path)
    : path_(printable(path.string(), 400)), file_(std::fopen(path.c_str(), "we")) {
  if (file_ == nullptr)
    fail(Fault::user, "--profile {}: the file cannot be written: {}", path_, std::strerror(errno));
  std::fputs("[\n", file_);
  for (const auto& [track, name] : {std::pair{Track::steps, "steps"}, std::pair{Track::ops, "ops"}})
    fmt::print(file_,
               R"({{"name": "thread_name", "ph": "M", "pid": 1, "tid": {}, "args": {{"name": "{}"}}}},)"
               "\n",
               static_cast<int>(track), name);
}

Trace::~Trace() {
  // Each event ends with a comma; the last one closes the array.
  std::fputs(R"({"name": "end", "ph": "M", "pid": 1, "args": {}})"
             "\n]\n",
             file_);
  const bool is_whole = std::ferror(file_) == 0;
  if (std::fclose(file_) != 0 || !is_whole)
    log(LogLevel::warning, "--profile {}: could not be written as a whole", path_);
}

void Trace::add(Track track, std::string_view name, Clock::time_point begin, Clock::time_point end,
                std::string_view args) {
  const std::string line = fmt::format(
      R"({{"name": "{}", "ph": "X", "pid": 1, "tid": {}, "ts": {:.3f}, "dur": {:.3f}, "args": {}}},)"
      "\n",
      name, static_cast<int>(track), microseconds(begin - start_), microseconds(end - begin),
      args.empty() ? "{}" : args);
  const std::scoped_lock lock(mutex_);
  std::fwrite(line.data(), 1, line.size(), file_);
}

}  // namespace lily
