// lily version: the program, its backends and the devices they find.
#include <cstdio>
#include <nlohmann/json.hpp>

#include "base/error.h"
#include "cli/command.h"
#include "cli/version_info.h"

namespace lily::cli {

void add_version(CLI::App& app, Action& action) {
  auto json = std::make_shared<bool>(false);
  CLI::App* command = app.add_subcommand("version", "Version, commit, compiled backends and devices found");
  command->add_flag("--json", *json, "One JSON document on stdout");
  command->callback([json, &action] {
    action = [json] {
      nlohmann::ordered_json out = {{"version", kVersion},
                                    {"commit", kCommit},
                                    {"backends", nlohmann::json::array()},
                                    {"devices", nlohmann::json::array()}};
      for (const std::string& name : backend::compiled_backends()) {
        out["backends"].push_back(name);
        try {
          const auto device = backend::make_device(name);
          out["devices"].push_back({{"name", device->info().name},
                                    {"kind", device->info().backend},
                                    {"memory_bytes", device->info().memory_bytes},
                                    {"read_gb_s", nullptr}});  // measured by a benchmark, not here
        } catch (const Error&) {
          // Compiled in, but its device is not present: listed among the backends only.
        }
      }
      if (*json) {
        fmt::print("{}\n", out.dump(2));
        return 0;
      }
      fmt::print("lily {} ({})\n", kVersion, kCommit);
      fmt::print("backends: {}\n", fmt::join(out["backends"].get<std::vector<std::string>>(), ", "));
      for (const auto& device : out["devices"])
        fmt::print("  {:16} {}\n", device["kind"].get<std::string>(), device["name"].get<std::string>());
      return 0;
    };
  });
}

}  // namespace lily::cli
