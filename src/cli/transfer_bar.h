// How far a download is: a bar on a terminal, elsewhere a line now and then.
#pragma once

#include <string>

#include "hub/pull.h"

namespace lily::cli {

class TransferBar {
 public:
  TransferBar();
  ~TransferBar();  // clears the bar
  void update(const hub::PullProgress& progress);
  void note(const std::string& line);  // a line of its own, above the bar

 private:
  std::string line(const hub::PullProgress& progress);

  bool is_terminal_, is_drawn_ = false;
  double start_s_, spoken_s_;
  // The rate is that of the last seconds, so that a pause shows.
  double rate_s_, rate_ = 0;
  uint64_t rate_bytes_ = 0;
};

// "45 s", "3 min", "1 h 20 min".
std::string human_time(double seconds);

}  // namespace lily::cli
