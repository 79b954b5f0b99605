// lily synth: a synthetic checkpoint with a shape's true dimensions.
#include <cstdio>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <random>

#include "base/error.h"
#include "base/printable.h"
#include "base/thread_pool.h"
#include "cli/command.h"
#include "engine/routing.h"
#include "model/synth.h"

namespace lily::cli {
namespace {

using Json = nlohmann::ordered_json;

// What a trained model's routing looks like at a prompt of 2K tokens, per layer.
constexpr double kLeastHeaviest = 2.5, kMostHeaviest = 6, kLeastUsed = 0.95;

struct SynthOptions {
  std::string folder, shape = "qwen3.6-35b-a3b";
  int layers = 0, threads = 0, routing = 2048;
  uint64_t seed = 1;
  bool json = false;
};

// The same tokens on every machine.
std::vector<int32_t> random_prompt(uint64_t seed, int n_tokens, int vocab) {
  std::mt19937_64 random(seed);
  std::vector<int32_t> prompt(static_cast<size_t>(n_tokens));
  for (int32_t& token : prompt) token = static_cast<int32_t>(random() % static_cast<uint64_t>(vocab));
  return prompt;
}

std::vector<engine::LayerRouting> count_routing(const SynthOptions& o, const model::Dims& dims,
                                                int64_t n_bytes) {
  ProgressBar bar("counting routes");
  return engine::count_routing(o.folder, random_prompt(o.seed, o.routing, dims.vocab), {.threads = o.threads},
                               [&](int64_t done, int64_t total) {
                                 bar.update(n_bytes / total * done, n_bytes);
                                 return !interrupted();
                               });
}

bool is_plausible(const engine::LayerRouting& layer) {
  return layer.heaviest() >= kLeastHeaviest && layer.heaviest() <= kMostHeaviest &&
         layer.share_used() >= kLeastUsed;
}

void print_table(const std::vector<engine::LayerRouting>& layers, int n_tokens) {
  fmt::print("Routing of {}: experts by their load, in multiples of the layer's mean load\n",
             counted(n_tokens, "random token"));
  fmt::print("{:>5} {:>9} {:>7}  {:>5}", "layer", "heaviest", "used", "none");
  for (size_t i = 1; i < engine::kLoadBounds.size(); ++i)
    fmt::print(" {:>6}", fmt::format("<={}", engine::kLoadBounds[i]));
  fmt::print(" {:>5}\n", fmt::format(">{}", engine::kLoadBounds.back()));
  for (const engine::LayerRouting& layer : layers) {
    const auto classes = layer.histogram();
    fmt::print("{:>5} {:>8.2f}x {:>5.1f} %  {:>5}", layer.layer, layer.heaviest(), 100 * layer.share_used(),
               classes[0]);
    for (size_t i = 1; i + 1 < classes.size(); ++i) fmt::print(" {:>6}", classes[i]);
    fmt::print(" {:>5}{}\n", classes.back(), is_plausible(layer) ? "" : "  unlike a trained model's");
  }
}

Json routing_json(const std::vector<engine::LayerRouting>& layers) {
  Json json = Json::array();
  for (const engine::LayerRouting& layer : layers)
    json.push_back({{"layer", layer.layer},
                    {"heaviest", layer.heaviest()},
                    {"used", layer.share_used()},
                    {"plausible", is_plausible(layer)},
                    {"loads", layer.loads}});
  return json;
}

int run_synth(const SynthOptions& o) {
  model::Dims dims = o.shape == "lily-tiny" ? model::lily_tiny() : model::qwen36_35b_a3b();
  if (o.layers > dims.n_layers)
    fail(Fault::user, "--layers {}: the shape has {}", o.layers, counted(dims.n_layers, "layer"));
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
  std::vector<engine::LayerRouting> routing;
  const double routing_start_s = now_s();
  if (o.routing > 0) routing = count_routing(o, dims, n_bytes);
  const double routing_s = now_s() - routing_start_s;
  if (o.json) {
    fmt::print("{}\n", Json{{"bytes", n_bytes},
                            {"seconds", seconds},
                            {"routing_tokens", o.routing},
                            {"routing_seconds", routing_s},
                            {"routing", routing_json(routing)}}
                           .dump(2));
  } else if (o.routing > 0) {
    print_table(routing, o.routing);
    fmt::print(stderr, "lily: read {} through {} in {:.1f} s\n", counted(o.routing, "token"),
               counted(dims.n_layers, "layer"), routing_s);
  }
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
  command
      ->add_option(
          "--routing", options->routing,
          "Tokens of the random prompt that is read to show how each layer spreads them over its experts "
          "(0: none)")
      ->check(CLI::Range(0, 16384))
      ->capture_default_str();
  command->add_flag("--json", options->json, "One JSON document on stdout");
  command->footer(
      "Examples:\n  lily synth /tmp/synthetic\n  lily synth --layers 4 --routing 0 /tmp/four-layers\n"
      "The files stay whatever the routing shows. Reading takes the memory of one attention interval of "
      "layers.");
  command->callback([options, &action] { action = [options] { return run_synth(*options); }; });
}

}  // namespace lily::cli
