// lily list and lily rm: the models on this machine.
#include <unistd.h>

#include <cstdio>
#include <filesystem>
#include <iostream>
#include <nlohmann/json.hpp>

#include "base/error.h"
#include "base/printable.h"
#include "cli/command.h"
#include "cli/hub_settings.h"
#include "hub/cache.h"
#include "hub/repository.h"

namespace lily::cli {
namespace {

std::vector<hub::CachedModel> all_models() {
  std::vector<hub::CachedModel> models;
  for (const auto& cache : model_caches())
    for (hub::CachedModel& model : hub::list_cache(cache)) models.push_back(std::move(model));
  return models;
}

const char* state_of(const hub::CachedModel& model) {
  if (model.model) return model.is_supported ? "ready" : "other";
  return "incomplete";
}

int64_t bytes_in(const std::filesystem::path& folder) {
  std::error_code error;
  int64_t sum = 0;
  for (std::filesystem::directory_iterator it(folder, error), end; !error && it != end; it.increment(error))
    if (std::error_code ignored; it->is_regular_file(ignored))
      sum += static_cast<int64_t>(it->file_size(ignored));
  return sum;
}

int list(bool json, bool all) {
  const std::vector<hub::CachedModel> models = all_models();
  nlohmann::ordered_json out = nlohmann::json::array();
  const auto show = [&](const std::string& name, const char* state, int64_t n_bytes,
                        const std::optional<std::filesystem::path>& folder) {
    if (json)
      out.push_back({{"name", name},
                     {"state", state},
                     {"bytes", n_bytes},
                     {"folder", folder ? nlohmann::json(folder->string()) : nlohmann::json()}});
    else
      fmt::print("{:48} {:>9}  {:10}  {}\n", name, human_bytes(n_bytes), state,
                 folder ? folder->string() : "lily pull " + name + " goes on");
  };
  size_t n_hidden = 0;
  for (const auto& model : models) {
    // Without a whole snapshot, what it would be is known only for lily's own downloads.
    const bool is_ours = model.is_supported || model.n_part_bytes > 0;
    if (!all && !is_ours) {
      ++n_hidden;
      continue;
    }
    show(model.name, state_of(model), static_cast<int64_t>(model.n_bytes), model.model);
  }
  if (const std::filesystem::path bundled = find_bundled(); !bundled.empty())
    show(kDemoModel, "bundled", bytes_in(bundled), bundled);
  if (json) {
    fmt::print("{}\n", out.dump(2, ' ', false, nlohmann::json::error_handler_t::replace));
    return 0;
  }
  if (models.size() == n_hidden)
    fmt::print(stderr, "lily: no model has been pulled; lily pull fetches {}\n", hub::kRealModel);
  if (n_hidden > 0)
    fmt::print(stderr,
               "lily: {} more in the cache that lily cannot run or that are not whole; --all shows them\n",
               n_hidden);
  return 0;
}

bool agreed(const hub::CachedModel& model) {
  fmt::print(stderr, "Remove {} with all its revisions, {} in {}? Other tools share these files. [y/N] ",
             model.name, human_bytes(static_cast<int64_t>(model.n_bytes)), model.cache.string());
  std::string answer;
  std::getline(std::cin, answer);
  check_interrupted();
  return answer == "y" || answer == "Y" || answer == "yes";
}

int remove(const std::string& name, bool yes) {
  if (!hub::is_repository_name(name))
    fail(Fault::user, "'{}' is not the name of a pulled model; lily list shows them", printable(name));
  bool is_found = false;
  for (const auto& model : all_models()) {
    if (model.name != name) continue;
    is_found = true;
    if (!yes && isatty(STDIN_FILENO) == 0)
      fail(Fault::user, "nobody is there to be asked: use lily rm --yes {} to remove {}", name,
           human_bytes(static_cast<int64_t>(model.n_bytes)));
    if (!yes && !agreed(model)) return kExitFailed;
    const hub::RepositoryLock lock(model.cache, name);
    hub::CachedRepository(model.cache, name).remove();
    fmt::print(stderr, "lily: removed {}: {}\n", name, human_bytes(static_cast<int64_t>(model.n_bytes)));
  }
  if (!is_found) fail(Fault::user, "{} is not in a download cache; lily list shows what is there", name);
  return 0;
}

}  // namespace

void add_list(CLI::App& app, Action& action) {
  struct Options {
    bool json = false, all = false;
  };
  auto options = std::make_shared<Options>();
  CLI::App* command =
      app.add_subcommand("list", "The models that have been pulled, and the one that comes with lily");
  command->add_flag("--json", options->json, "One JSON document on stdout");
  command->add_flag("--all", options->all, "Also what other tools have put into the cache");
  command->footer("Examples:\n  lily list\n  lily list --all --json");
  command->callback([options, &action] { action = [options] { return list(options->json, options->all); }; });
}

void add_rm(CLI::App& app, Action& action) {
  struct Options {
    std::string name;
    bool yes = false;
  };
  auto options = std::make_shared<Options>();
  CLI::App* command = app.add_subcommand("rm", "Remove a pulled model, or a download that was not finished");
  command->add_option("REPO", options->name, "OWNER/NAME, as lily list shows it")->required();
  command->add_flag("--yes", options->yes, "Without asking");
  command->footer("Examples:\n  lily rm mlx-community/Qwen3.6-35B-A3B-4bit");
  command->callback(
      [options, &action] { action = [options] { return remove(options->name, options->yes); }; });
}

}  // namespace lily::cli
