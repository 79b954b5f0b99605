// The list of findings of a device.
#pragma once

#include <cstdint>
#include <mutex>
#include <set>
#include <string>
#include <tuple>
#include <vector>

#include "emulator/emulated_device.h"

namespace lily::emulator {

class Findings {
 public:
  explicit Findings(Options::OnFinding on_finding) : on_finding_(on_finding) {}

  // Any thread. `place` tells findings of one kind and kernel apart: an instruction, an argument index.
  void add(Finding::Kind kind, const std::string& kernel, uint64_t place, const std::string& message);

  std::vector<Finding> list() const;
  void clear();
  uint64_t n_added() const;  // never falls, repetitions included
  Options::OnFinding on_finding() const { return on_finding_; }

 private:
  static constexpr size_t kKept = 100;
  const Options::OnFinding on_finding_;
  mutable std::mutex mutex_;
  std::vector<Finding> list_;
  std::set<std::tuple<Finding::Kind, std::string, uint64_t>> seen_;
  uint64_t n_added_ = 0;
};

}  // namespace lily::emulator
