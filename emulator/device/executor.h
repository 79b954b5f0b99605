// Executes the commands of command buffers: checks each dispatch's arguments, runs its threadgroups on all
// cores.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <random>
#include <string>
#include <vector>

#include "base/thread_pool.h"
#include "emulator/device/objects.h"
#include "emulator/runtime/dispatch.h"

namespace lily::emulator {

// Belongs to the GPU's thread.
class Executor {
 public:
  Executor(const Options& options, Findings& findings);

  // Returns what went wrong, if anything did.
  std::optional<std::string> run(const EmulatedCommandBuffer& command_buffer,
                                 const std::function<void(DispatchCounters)>& count);

 private:
  struct Outcome {
    bool completed = true;
    DispatchCounters counters;
  };
  Outcome dispatch(const DispatchCommand& command, uint32_t serial);
  bool check(const DispatchCommand& command);
  bool check_argument(const DispatchCommand& command, const ArgumentInfo& info);
  bool read_indirect(const DispatchCommand& command, uint32_t serial, Dispatch& dispatch);
  void bind(const DispatchCommand& command, Dispatch& dispatch);
  void delay();

  const Options& options_;
  Findings& findings_;
  ThreadPool pool_;
  std::mt19937_64 random_;
  uint32_t n_dispatches_ = 0;
  uint32_t interval_start_ = 1;     // serial of the first dispatch after the last barrier
  std::vector<std::string> names_;  // kernels of the dispatches from interval_start_ on
};

}  // namespace lily::emulator
