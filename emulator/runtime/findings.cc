#include "emulator/runtime/findings.h"

#include <cstdio>
#include <cstdlib>

namespace lily::emulator {

const char* to_string(Finding::Kind kind) {
  switch (kind) {
    case Finding::Kind::race_in_threadgroup:
      return "race in a threadgroup";
    case Finding::Kind::race_between_threadgroups:
      return "race between threadgroups";
    case Finding::Kind::missing_dispatch_barrier:
      return "missing barrier between dispatches";
    case Finding::Kind::divergent_collective:
      return "divergent simdgroup operation";
    case Finding::Kind::divergent_barrier:
      return "divergent threadgroup_barrier";
    case Finding::Kind::early_return:
      return "early return";
    case Finding::Kind::deadlock:
      return "deadlock";
    case Finding::Kind::inactive_lane:
      return "inactive lane";
    case Finding::Kind::out_of_bounds:
      return "out of bounds";
    case Finding::Kind::unbound_buffer:
      return "unbound buffer";
    case Finding::Kind::immutable_write:
      return "write to an immutable buffer";
    case Finding::Kind::undeclared_access:
      return "undeclared access";
    case Finding::Kind::host_race:
      return "host race";
    case Finding::Kind::bad_argument:
      return "bad argument";
    case Finding::Kind::limit:
      return "limit";
    case Finding::Kind::undefined_constant:
      return "undefined function constant";
    case Finding::Kind::misuse:
      return "misuse";
  }
  return "";
}

void Findings::add(Finding::Kind kind, const std::string& kernel, uint64_t place,
                   const std::string& message) {
  const std::lock_guard lock(mutex_);
  ++n_added_;
  if (list_.size() >= kKept || !seen_.emplace(kind, kernel, place).second) return;
  list_.push_back({kind, kernel, message});
  if (on_finding_ != Options::OnFinding::abort) return;
  std::fprintf(stderr, "%s: %s: %s\n", kernel.c_str(), to_string(kind), message.c_str());
  std::abort();
}

std::vector<Finding> Findings::list() const {
  const std::lock_guard lock(mutex_);
  return list_;
}

void Findings::clear() {
  const std::lock_guard lock(mutex_);
  list_.clear();
  seen_.clear();
}

uint64_t Findings::n_added() const {
  const std::lock_guard lock(mutex_);
  return n_added_;
}

}  // namespace lily::emulator
