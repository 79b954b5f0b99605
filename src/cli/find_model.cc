// Where a model lies on this machine.
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <string>
#include <vector>

#ifdef __APPLE__
#include <mach-o/dyld.h>
#endif

#include "base/error.h"
#include "cli/command.h"

namespace lily::cli {
namespace {

namespace fs = std::filesystem;

constexpr const char* kRealModel = "mlx-community/Qwen3.6-35B-A3B-4bit";

std::string environment(const char* name) {
  const char* value = std::getenv(name);
  return value == nullptr ? "" : value;
}

bool is_model(const fs::path& folder) {
  std::error_code ignored;
  return fs::is_regular_file(folder / "config.json", ignored);
}

fs::path program_path() {
#ifdef __APPLE__
  char buffer[4096];
  uint32_t size = sizeof buffer;
  if (_NSGetExecutablePath(buffer, &size) == 0) return fs::weakly_canonical(buffer);
  return {};
#else
  std::error_code ignored;
  return fs::read_symlink("/proc/self/exe", ignored);
#endif
}

// A hub name in the cache layouts of lily and of the Hugging Face tools:
// models--OWNER--NAME/snapshots/REVISION.
fs::path find_in_cache(const fs::path& cache, const std::string& name) {
  std::string folder = "models--" + name;
  for (size_t at; (at = folder.find('/')) != std::string::npos;) folder.replace(at, 1, "--");
  std::error_code ignored;
  fs::path newest;
  fs::file_time_type newest_time{};
  for (const auto& entry : fs::directory_iterator(cache / folder / "snapshots", ignored)) {
    if (!is_model(entry.path())) continue;
    const auto time = fs::last_write_time(entry.path(), ignored);
    if (newest.empty() || time > newest_time) newest = entry.path(), newest_time = time;
  }
  return newest;
}

fs::path find_pulled(const std::string& name) {
  const std::string home = environment("HOME");
  std::vector<fs::path> caches;
  if (const std::string own = environment("LILY_CACHE"); !own.empty()) caches.emplace_back(own);
  else if (!home.empty()) caches.emplace_back(fs::path(home) / ".cache/lily");
  if (const std::string hub = environment("HF_HUB_CACHE"); !hub.empty()) caches.emplace_back(hub);
  if (const std::string hf = environment("HF_HOME"); !hf.empty()) caches.emplace_back(fs::path(hf) / "hub");
  if (!home.empty()) caches.emplace_back(fs::path(home) / ".cache/huggingface/hub");
  for (const fs::path& cache : caches)
    if (fs::path found = find_in_cache(cache, name); !found.empty()) return found;
  return {};
}

// Beside the program in the build tree, or where `make install` puts it.
fs::path find_bundled() {
  const fs::path program = program_path().parent_path();
  for (const char* place : {"../../models/lily-tiny", "../share/lily/models/lily-tiny", "models/lily-tiny"})
    if (is_model(program / place)) return fs::weakly_canonical(program / place);
  return {};
}

bool looks_like_hub_name(const std::string& name) {
  return std::count(name.begin(), name.end(), '/') == 1 && name.front() != '/' && name.front() != '.' &&
         name.back() != '/';
}

}  // namespace

std::string find_model(const std::string& asked) {
  const std::string name = asked.empty() ? environment("LILY_MODEL") : asked;
  if (!name.empty()) {
    if (is_model(name)) return name;
    if (looks_like_hub_name(name)) {
      if (const fs::path found = find_pulled(name); !found.empty()) return found.string();
      fail(Fault::user,
           "model '{}' is neither a folder with a config.json nor in a download cache of this machine", name);
    }
    fail(Fault::user,
         "'{}' is not a model: there is no config.json in it; name a checkpoint's folder with -m", name);
  }
  if (const fs::path found = find_pulled(kRealModel); !found.empty()) return found.string();
  const fs::path bundled = find_bundled();
  if (bundled.empty())
    fail(Fault::user,
         "no model is named, none has been downloaded and the demo model is missing; use -m FOLDER");
  fmt::print(stderr,
             "lily: no model named: using the demo model lily-tiny, which knows a few toy tasks only. For "
             "the real one, "
             "download {} and name its folder with -m or LILY_MODEL.\n",
             kRealModel);
  return bundled.string();
}

}  // namespace lily::cli
