// Brings a repository of the hub into the cache: whole and verified, or not at all.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "hub/hub_client.h"
#include "hub/repository.h"

namespace lily::hub {

struct PullOptions {
  std::string repository = kRealModel, revision = "main";
  HubAddress address;
  std::filesystem::path cache;
  int n_connections = 4;
  uint64_t piece_bytes = uint64_t{64} << 20;  // what one request asks for
  // Bytes free for us where this path is; a test sets its own.
  std::function<uint64_t(const std::filesystem::path&)> free_bytes;
};

struct PullProgress {
  uint64_t n_bytes = 0;          // of all files
  uint64_t n_present_bytes = 0;  // here, those of before included
  uint64_t n_fetched_bytes = 0;  // in this run
  bool is_verifying = false;     // everything is here, checksums are computed
};

struct Pulled {
  std::filesystem::path folder;  // of the snapshot
  std::string commit;
  Choice files;
  uint64_t n_bytes = 0, n_fetched_bytes = 0;
};

// What the caller hears on the way; called from the caller's thread only.
struct PullListener {
  std::function<void(const std::string& line)> on_notice;
  std::function<void(const PullProgress&)> on_progress;  // ten times a second
  std::function<bool()> stop;                            // true: end soon; asked from any thread
};

// Nothing if it was stopped; what has arrived is kept. Throws lily::Error.
std::optional<Pulled> pull(const PullOptions& options, const PullListener& listener);

}  // namespace lily::hub
