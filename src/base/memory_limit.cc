#include "base/memory_limit.h"

#include <unistd.h>

#include <algorithm>
#include <fstream>
#include <sstream>
#include <string>

#if defined(__APPLE__)
#include <sys/sysctl.h>
#endif

namespace lily {
namespace {

namespace fs = std::filesystem;

// Version 1 writes a number near 2^63 for "no limit", version 2 the word max.
constexpr int64_t kNoLimit = int64_t{1} << 60;

int64_t limit_in(const std::string& file) {
  std::ifstream in(file);
  int64_t limit = 0;
  return in >> limit && limit > 0 && limit < kNoLimit ? limit : 0;
}

int64_t smaller(int64_t a, int64_t b) { return a == 0 ? b : b == 0 ? a : std::min(a, b); }

// Calls visit(folder, is_v2) for the memory controller's groups of a process and their parents. Folders are
// strings, and end with a slash: where memory is short, libstdc++ 12's operator/ of paths frees twice.
template <typename F>
void for_each_group(const fs::path& cgroup_file, const fs::path& mount, F visit) {
  std::ifstream in(cgroup_file);
  // "0::/user.slice/unit" (version 2) or "5:memory:/container" (version 1)
  for (std::string line; std::getline(in, line);) {
    const size_t first = line.find(':'), second = line.find(':', first + 1);
    if (first == std::string::npos || second == std::string::npos) continue;
    const std::string controllers = "," + line.substr(first + 1, second - first - 1) + ",";
    const bool is_v2 = controllers == ",,", is_memory = controllers.find(",memory,") != std::string::npos;
    if (!is_v2 && !is_memory) continue;
    const std::string root = mount.string() + (is_v2 ? "/" : "/memory/");
    std::string group = line.substr(second + 1);
    group.erase(0, group.find_first_not_of('/'));
    while (!group.empty()) {
      if (group.back() != '/') group += '/';
      visit(root + group, is_v2);
      group.erase(group.find_last_not_of('/') + 1);
      group.erase(group.rfind('/') + 1);  // the parent, or nothing
    }
    visit(root, is_v2);
  }
}

int64_t limit_of(const std::string& group, bool is_v2) {
  return limit_in(group + (is_v2 ? "memory.max" : "memory.limit_in_bytes"));
}

// The number behind a name in a file of lines "name number"; 0 without one.
int64_t number_of(const std::string& file, std::string_view name) {
  std::ifstream in(file);
  int64_t value = 0;
  for (std::string line; std::getline(in, line);) {
    std::istringstream words(line);
    std::string word;
    if (words >> word && word == name && words >> value) return value;
  }
  return 0;
}

}  // namespace

int64_t cgroup_limit(const fs::path& cgroup_file, const fs::path& mount) {
  int64_t limit = 0;
  for_each_group(cgroup_file, mount, [&](const std::string& group, bool is_v2) {
    limit = smaller(limit, limit_of(group, is_v2));
  });
  return limit;
}

int64_t cgroup_available(const fs::path& cgroup_file, const fs::path& mount) {
  int64_t least = -1;
  for_each_group(cgroup_file, mount, [&](const std::string& group, bool is_v2) {
    const int64_t limit = limit_of(group, is_v2);
    int64_t used = 0;
    if (limit == 0 || !(std::ifstream(group + (is_v2 ? "memory.current" : "memory.usage_in_bytes")) >> used))
      return;
    const int64_t files = number_of(group + "memory.stat", is_v2 ? "inactive_file" : "total_inactive_file");
    const int64_t left = std::max<int64_t>(0, limit - used + files);
    least = least < 0 ? left : std::min(least, left);
  });
  return least;
}

int64_t available_memory() {
  int64_t available = -1;
#if defined(__APPLE__)
  // Of 100, what is not in use by anybody; the system's own measure of pressure.
  int level = 0;
  size_t size = sizeof level;
  if (sysctlbyname("kern.memorystatus_level", &level, &size, nullptr, 0) == 0)
    available = memory_limit() / 100 * level;
#else
  if (const int64_t kb = number_of("/proc/meminfo", "MemAvailable:"); kb > 0) available = kb * 1024;
#endif
  const int64_t in_group = cgroup_available("/proc/self/cgroup", "/sys/fs/cgroup");
  if (in_group < 0) return available;
  return available < 0 ? in_group : std::min(available, in_group);
}

int64_t resident_memory() {
  int64_t n_total = 0, n_resident = 0;
  std::ifstream("/proc/self/statm") >> n_total >> n_resident;
  return n_resident * sysconf(_SC_PAGESIZE);
}

int64_t memory_limit() {
  const int64_t pages = sysconf(_SC_PHYS_PAGES), page_bytes = sysconf(_SC_PAGESIZE);
  const int64_t physical = pages > 0 && page_bytes > 0 ? pages * page_bytes : 0;
  return smaller(physical, cgroup_limit("/proc/self/cgroup", "/sys/fs/cgroup"));
}

}  // namespace lily
