#include "base/memory_limit.h"

#include <unistd.h>

#include <algorithm>
#include <fstream>
#include <string>

namespace lily {
namespace {

namespace fs = std::filesystem;

// Version 1 writes a number near 2^63 for "no limit", version 2 the word max.
constexpr int64_t kNoLimit = int64_t{1} << 60;

int64_t limit_in(const fs::path& file) {
  std::ifstream in(file);
  int64_t limit = 0;
  return in >> limit && limit > 0 && limit < kNoLimit ? limit : 0;
}

int64_t smaller(int64_t a, int64_t b) { return a == 0 ? b : b == 0 ? a : std::min(a, b); }

}  // namespace

int64_t cgroup_limit(const fs::path& cgroup_file, const fs::path& mount) {
  int64_t limit = 0;
  std::ifstream in(cgroup_file);
  // "0::/user.slice/unit" (version 2) or "5:memory:/container" (version 1)
  for (std::string line; std::getline(in, line);) {
    const size_t first = line.find(':'), second = line.find(':', first + 1);
    if (first == std::string::npos || second == std::string::npos) continue;
    const std::string controllers = "," + line.substr(first + 1, second - first - 1) + ",";
    const bool is_v2 = controllers == ",,", is_memory = controllers.find(",memory,") != std::string::npos;
    if (!is_v2 && !is_memory) continue;
    const fs::path root = is_v2 ? mount : mount / "memory";
    const char* const name = is_v2 ? "memory.max" : "memory.limit_in_bytes";
    fs::path group = fs::path(line.substr(second + 1)).relative_path();
    while (true) {
      limit = smaller(limit, limit_in(root / group / name));
      if (group.empty()) break;
      group = group.parent_path();
    }
  }
  return limit;
}

int64_t memory_limit() {
  const int64_t pages = sysconf(_SC_PHYS_PAGES), page_bytes = sysconf(_SC_PAGESIZE);
  const int64_t physical = pages > 0 && page_bytes > 0 ? pages * page_bytes : 0;
  return smaller(physical, cgroup_limit("/proc/self/cgroup", "/sys/fs/cgroup"));
}

}  // namespace lily
