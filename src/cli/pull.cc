// lily pull: a checkpoint from the hub into the download cache.
#include <cstdio>
#include <numeric>

#include "base/error.h"
#include "base/printable.h"
#include "cli/command.h"
#include "cli/hub_settings.h"
#include "cli/transfer_bar.h"
#include "hub/pull.h"

namespace lily::cli {
namespace {

constexpr size_t kNamesShown = 4;

void say_skipped(const std::vector<hub::RemoteFile>& files, const char* why, TransferBar& bar) {
  if (files.empty()) return;
  std::vector<std::string> names;
  for (const auto& file : files)
    if (names.size() < kNamesShown) names.push_back(printable(file.name, 60));
  const uint64_t n_bytes = std::accumulate(files.begin(), files.end(), uint64_t{0},
                                           [](uint64_t sum, const auto& file) { return sum + file.n_bytes; });
  bar.note(fmt::format("skipped {} {} ({}{}; {})", counted(std::ssize(files), "file"), why,
                       fmt::join(names, ", "), files.size() > names.size() ? ", ..." : "",
                       human_bytes(static_cast<int64_t>(n_bytes))));
}

int run_pull(hub::PullOptions options) {
  if (const std::string offline = environment("HF_HUB_OFFLINE"); !offline.empty() && offline != "0")
    fail(Fault::user, "HF_HUB_OFFLINE is set: nothing is downloaded; unset it to pull");
  options.address = [&] {
    hub::HubAddress address = hub_address();
    address.n_retries = options.address.n_retries;
    return address;
  }();
  options.cache = hub_cache();
  const double start_s = now_s();
  TransferBar bar;
  bar.note(fmt::format("pulling {} into {}", printable(options.repository), options.cache.string()));
  const auto pulled = hub::pull(options, {.on_notice = [&](const std::string& line) { bar.note(line); },
                                          .on_progress = [&](const hub::PullProgress& p) { bar.update(p); },
                                          .stop = [] { return interrupted().load(); }});
  if (!pulled) {
    bar.note("stopped; what has arrived is kept, and lily pull goes on from there");
    return kExitInterrupted;
  }
  say_skipped(pulled->files.vision, "with vision or draft weights only", bar);
  say_skipped(pulled->files.unneeded, "that lily does not need", bar);
  const double seconds = now_s() - start_s;
  bar.note(fmt::format("{} is here and verified: {}, of which {} were fetched in {}{}", options.repository,
                       human_bytes(static_cast<int64_t>(pulled->n_bytes)),
                       human_bytes(static_cast<int64_t>(pulled->n_fetched_bytes)), human_time(seconds),
                       options.repository == hub::kRealModel ? "; lily run uses it from now on" : ""));
  fmt::print("{}\n", pulled->folder.string());
  return 0;
}

}  // namespace

void add_pull(CLI::App& app, Action& action) {
  auto options = std::make_shared<hub::PullOptions>();
  CLI::App* command =
      app.add_subcommand("pull", "Download a checkpoint from the hub, with resume and checksums");
  command->add_option("REPO", options->repository, "OWNER/NAME on the hub")->capture_default_str();
  command->add_option("--revision", options->revision, "A branch, a tag or a commit")->capture_default_str();
  command->add_option("--connections", options->n_connections, "Requests at a time")
      ->check(CLI::Range(1, 32))
      ->capture_default_str();
  command
      ->add_option("--piece-bytes", options->piece_bytes,
                   "What one request asks for; a download that goes on keeps its own")
      ->check(CLI::Range(uint64_t{1} << 16, uint64_t{1} << 40))
      ->capture_default_str();
  command
      ->add_option("--retries", options->address.n_retries,
                   "Attempts in a row that bring nothing, before giving up")
      ->check(CLI::Range(0, 1000))
      ->capture_default_str();
  command->footer(
      "Ends whole and verified, or resumes where it stopped when it is run again. Prints the folder on "
      "stdout.\n"
      "Known variables: HF_ENDPOINT, HF_TOKEN, HF_TOKEN_PATH, HF_HOME, HF_HUB_CACHE, HF_HUB_OFFLINE, "
      "SSL_CERT_FILE, https_proxy, no_proxy.\n\n"
      "Examples:\n  lily pull\n  lily pull mlx-community/Qwen3.6-35B-A3B-8bit\n"
      "  HF_HUB_CACHE=/mnt/big lily pull");
  command->callback([options, &action] { action = [options] { return run_pull(*options); }; });
}

}  // namespace lily::cli
