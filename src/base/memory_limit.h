// How much memory this process may use.
#pragma once

#include <cstdint>
#include <filesystem>

namespace lily {

// Bytes: the machine's memory, or less where a control group (a container, a systemd unit) has a limit. 0 if
// it cannot be found out. Any thread.
int64_t memory_limit();

// The smallest memory limit of a process's control groups and their parents, of version 1 and 2; 0 for none.
// `cgroup_file` is /proc/self/cgroup, `mount` /sys/fs/cgroup.
int64_t cgroup_limit(const std::filesystem::path& cgroup_file, const std::filesystem::path& mount);

}  // namespace lily
