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
#include "base/log.h"
#include "base/printable.h"
#include "cli/command.h"
#include "cli/hub_settings.h"
#include "hub/cache.h"
#include "hub/repository.h"
#include "model/foreign.h"

namespace lily::cli {
namespace {

namespace fs = std::filesystem;

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

// A hub name in the caches of this machine.
fs::path find_pulled(const std::string& name) {
  if (!hub::is_repository_name(name)) return {};
  for (const fs::path& cache : model_caches())
    if (const auto found = hub::CachedRepository(cache, name).find_model()) return *found;
  return {};
}

bool is_begun(const std::string& name) {
  std::error_code ignored;
  for (const fs::path& cache : model_caches())
    if (hub::is_repository_name(name) && fs::exists(hub::CachedRepository(cache, name).folder(), ignored))
      return true;
  return false;
}

bool looks_like_hub_name(const std::string& name) {
  return std::count(name.begin(), name.end(), '/') == 1 && name.front() != '/' && name.front() != '.' &&
         name.back() != '/';
}

// A file or folder in a format of other engines, or a file where a folder is wanted: says so and what to do.
void refuse_foreign(const std::string& name, const fs::path& path) {
  std::error_code ignored;
  const std::string shown = printable(name, 400);
  if (const std::string what = model::foreign_format(path); !what.empty())
    fail(Fault::user,
         "'{}' is {}, a format that lily does not read; a model is a folder with MLX safetensors: lily pull "
         "fetches {}",
         shown, what, hub::kRealModel);
  if (!fs::exists(path, ignored) || fs::is_directory(path, ignored)) return;
  const fs::path folder = path.has_parent_path() ? path.parent_path() : fs::path(".");
  if (is_model(folder))
    fail(Fault::user, "'{}' is one file of a checkpoint; name its folder: {}", shown,
         printable(folder.string(), 400));
  fail(Fault::user,
       "'{}' is a file; a model is a checkpoint's folder (config.json, tokenizer.json, *.safetensors) or the "
       "name of a pulled one",
       shown);
}

// Other tools bring other formats into the same cache; lily pull would not make them ready.
void refuse_foreign_pulled(const std::string& name) {
  if (!hub::is_repository_name(name)) return;
  std::error_code error;
  for (const fs::path& cache : model_caches())
    for (fs::directory_iterator it(hub::CachedRepository(cache, name).folder() / "snapshots", error), end;
         !error && it != end; it.increment(error))
      refuse_foreign(name, it->path());
}

}  // namespace

// Beside the program in the build tree, or where `make install` puts it.
fs::path find_bundled() {
  const fs::path program = program_path().parent_path();
  for (const char* place : {"../share/lily/models", "../../models", "models"})
    if (const fs::path folder = program / place / kDemoModel; is_model(folder))
      return fs::weakly_canonical(folder);
  return {};
}

std::string find_model(const std::string& asked) {
  std::string name = asked.empty() ? environment("LILY_MODEL") : asked;
  if (!name.empty()) {
    if (is_model(name)) return name;
    if (name == kDemoModel)
      if (const fs::path bundled = find_bundled(); !bundled.empty()) return bundled.string();
    const std::string shown = printable(name, 400);
    refuse_foreign(name, name);
    if (looks_like_hub_name(name)) {
      if (const fs::path found = find_pulled(name); !found.empty()) return found.string();
      refuse_foreign_pulled(name);
      if (is_begun(name))
        fail(Fault::user, "model '{}' has been downloaded in part only; lily pull {} goes on", shown, shown);
      fail(Fault::user,
           "model '{}' is neither a folder with a config.json nor in a download cache of this machine; lily "
           "pull {} "
           "downloads it",
           shown, shown);
    }
    std::error_code ignored;
    if (!fs::exists(name, ignored))
      fail(Fault::user, "'{}' does not exist; name a checkpoint's folder, or {} for the demo model", shown,
           kDemoModel);
    fail(Fault::user,
         "'{}' is not a model: there is no config.json in it; name a checkpoint's folder, or {} for the demo "
         "model",
         shown, kDemoModel);
  }
  if (const fs::path found = find_pulled(hub::kRealModel); !found.empty()) return found.string();
  const fs::path bundled = find_bundled();
  if (bundled.empty())
    fail(Fault::user,
         "no model is named, none has been downloaded and the demo model is missing; run lily pull, or name "
         "a checkpoint's folder");
  log(LogLevel::notice,
      "no model named: using the demo model {}, which knows a few toy tasks only. lily pull downloads the "
      "real one, {}.",
      kDemoModel, hub::kRealModel);
  return bundled.string();
}

}  // namespace lily::cli
