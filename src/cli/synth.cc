// lily synth: a synthetic checkpoint with a shape's true dimensions.
#include <cstdio>
#include <filesystem>

#include "base/error.h"
#include "base/thread_pool.h"
#include "cli/command.h"
#include "model/synth.h"

namespace lily::cli {
namespace {

struct SynthOptions {
  std::string folder, shape = "qwen3.6-35b-a3b";
  int layers = 0, threads = 0;
  uint64_t seed = 1;
};

int run_synth(const SynthOptions& o) {
  model::Dims dims = o.shape == "lily-tiny" ? model::lily_tiny() : model::qwen36_35b_a3b();
  if (o.layers > dims.n_layers)
    fail(Fault::user, "--layers {}: the shape has {} layers", o.layers, dims.n_layers);
  if (o.layers > 0) dims.n_layers = o.layers;
  ThreadPool pool(o.threads > 0 ? o.threads : physical_cores());
  const double start_s = now_s();
  {
    ProgressBar bar("writing");
    model::write_synthetic(dims, o.folder, {.seed = o.seed}, pool, [&](int64_t done, int64_t total) {
      bar.update(done, total);
      return !interrupted();
    });
  }
  const double seconds = now_s() - start_s;
  const int64_t n_bytes = model::synthetic_bytes(dims);
  fmt::print(stderr, "lily: wrote {} to {} in {:.1f} s ({}/s)\n", human_bytes(n_bytes), o.folder, seconds,
             human_bytes(static_cast<int64_t>(static_cast<double>(n_bytes) / seconds)));
  return 0;
}

}  // namespace

void add_synth(CLI::App& app, Action& action) {
  auto options = std::make_shared<SynthOptions>();
  CLI::App* command =
      app.add_subcommand("synth", "Write a synthetic checkpoint with true dimensions and random values");
  command->add_option("DIR", options->folder, "Folder to write")->required();
  command->add_option("--shape", options->shape)
      ->check(CLI::IsMember({"qwen3.6-35b-a3b", "lily-tiny"}))
      ->capture_default_str();
  command->add_option("--layers", options->layers, "Fewer layers than the shape has")
      ->check(CLI::Range(1, 1024));
  command->add_option("--seed", options->seed)->capture_default_str();
  command->add_option("--threads", options->threads, "0: physical cores")->check(CLI::Range(0, 1024));
  command->footer("Examples:\n  lily synth /tmp/synthetic\n  lily synth --layers 4 /tmp/four-layers");
  command->callback([options, &action] { action = [options] { return run_synth(*options); }; });
}

}  // namespace lily::cli
