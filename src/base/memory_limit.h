// How much memory this process may use.
#pragma once

#include <cstdint>
#include <filesystem>

namespace lily {

// Bytes: the machine's memory, or less where a control group (a container, a systemd unit) has a limit. 0 if
// it cannot be found out. Any thread.
int64_t memory_limit();

// Bytes that can be had without taking them from another program: what the system calls available, or what is
// left under the limit of a control group, whose file cache counts as free. -1 if it cannot be found out. Any
// thread; takes some 20 microseconds.
int64_t available_memory();
// Bytes of memory that this process occupies; 0 if it cannot be found out.
int64_t resident_memory();

// What is left under the control groups' limits, -1 without one. Files as for cgroup_limit().
int64_t cgroup_available(const std::filesystem::path& cgroup_file, const std::filesystem::path& mount);

// The smallest memory limit of a process's control groups and their parents, of version 1 and 2; 0 for none.
// `cgroup_file` is /proc/self/cgroup, `mount` /sys/fs/cgroup.
int64_t cgroup_limit(const std::filesystem::path& cgroup_file, const std::filesystem::path& mount);

}  // namespace lily
