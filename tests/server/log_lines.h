// What is logged while this lives, by any thread; the sink is empty again before it goes.
#pragma once

#include <memory>
#include <mutex>
#include <string>
#include <string_view>

#include "base/log.h"

namespace lily::test {

class LogLines {
 public:
  LogLines() {
    set_log_sink([lines = lines_](LogLevel, std::string_view line) {
      const std::lock_guard lock(lines->mutex);
      lines->all += std::string(line) + "\n";
    });
  }
  ~LogLines() { set_log_sink({}); }
  LogLines(const LogLines&) = delete;
  LogLines& operator=(const LogLines&) = delete;

  std::string all() const {
    const std::lock_guard lock(lines_->mutex);
    return lines_->all;
  }

 private:
  struct Shared {
    std::mutex mutex;
    std::string all;
  };
  std::shared_ptr<Shared> lines_ = std::make_shared<Shared>();
};

}  // namespace lily::test
