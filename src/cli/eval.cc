// lily eval: how close a backend is to golden outputs, to another backend, or how well it predicts a text.
#include <algorithm>
#include <cstdio>
#include <filesystem>
#include <nlohmann/json.hpp>

#include "base/error.h"
#include "base/file.h"
#include "base/printable.h"
#include "cli/command.h"
#include "engine/evaluate.h"
#include "engine/layers.h"
#include "engine/load.h"
#include "text/tokenizer.h"

namespace lily::cli {
namespace {

using Json = nlohmann::ordered_json;

constexpr uint64_t kMaxTextBytes = uint64_t{64} << 20;

struct EvalOptions {
  ModelOptions model;
  std::string goldens, text, against;
  int positions = 192, limit = 0, chunk = 0;
  bool json = false;
};

// A model on one backend, read for evaluation.
struct Subject {
  Subject(const model::Checkpoint& checkpoint, int32_t n_tokens, const ModelOptions& options)
      : model(checkpoint, n_tokens, load_options(options)) {
    ProgressBar bar("loading");
    model.load([&](int64_t done, int64_t total) {
      bar.update(done, total);
      return !interrupted();
    });
  }
  engine::LoadedModel model;
};

engine::EvalProgress progress_of(const char* title, const char* unit) {
  auto bar = std::make_shared<ProgressBar>(title, unit);
  return [bar](int64_t done, int64_t total) {
    check_interrupted();
    bar->update(done, total);
  };
}

Json forced_json(const engine::ForcedReport& r) {
  return {{"predictions", r.predictions},
          {"positions", r.positions},
          {"perplexity", r.perplexity},
          {"reference_perplexity", r.reference_perplexity},
          {"perplexity_ratio", r.perplexity_ratio()},
          {"top1_agreement", r.top1_agreement},
          {"max_abs_logit_error", r.max_abs_logit_error}};
}

Json greedy_json(const engine::GreedyReport& r) {
  return {{"prompts", r.prompts},
          {"exact", r.exact},
          {"first_divergence_margin_max", r.first_divergence_margin_max},
          {"tokens_hash", fmt::format("{:016x}", r.tokens_hash)}};
}

// Every tensor compared, and the one that uses the largest share of its tolerance.
Json layers_json(const std::vector<engine::LayerCheck>& checks) {
  Json json = {{"tensors", checks.size()}, {"beyond_tolerance", 0}, {"worst", nullptr}};
  const engine::LayerCheck* worst = nullptr;
  for (const engine::LayerCheck& check : checks) {
    if (!check.good()) json["beyond_tolerance"] = json["beyond_tolerance"].get<int>() + 1;
    if (worst == nullptr || check.error * worst->tolerance > worst->error * check.tolerance) worst = &check;
  }
  if (worst != nullptr) json["worst"] = worst->line();
  return json;
}

void print(const Json& report) {
  for (const auto& [key, value] : report.items()) {
    if (value.is_object()) {
      fmt::print("{}:\n", key);
      for (const auto& [inner, number] : value.items()) fmt::print("  {:28} {}\n", inner, number.dump());
    } else {
      fmt::print("{:30} {}\n", key, value.is_string() ? value.get<std::string>() : value.dump());
    }
  }
}

// Evenly spread, the last one included.
std::vector<int32_t> spread_positions(size_t n_ids, int n_positions) {
  std::vector<int32_t> positions;
  const auto n = std::min<int64_t>(n_positions, static_cast<int64_t>(n_ids) - 1);
  for (int64_t i = 1; i <= n; ++i)
    positions.push_back(static_cast<int32_t>(i * (static_cast<int64_t>(n_ids) - 1) / n - 1));
  return positions;
}

Json against_goldens(const EvalOptions& o, const model::Checkpoint& checkpoint, int32_t n_tokens) {
  engine::Goldens goldens = engine::load_goldens(o.goldens, n_tokens);
  if (o.limit > 0 && goldens.prompts.size() > static_cast<size_t>(o.limit))
    goldens.prompts.resize(static_cast<size_t>(o.limit));
  Subject subject(checkpoint, n_tokens, o.model);
  Json report;
  if (goldens.forced) {
    const auto executor = subject.model.make_executor();
    const auto score = engine::score(*executor, goldens.forced->ids, goldens.forced->positions, o.chunk,
                                     progress_of("text", "tokens"));
    report = forced_json(engine::compare(score, *goldens.forced));
  }
  if (!goldens.prompts.empty() || goldens.long_prompt) {
    engine::Engine engine(subject.model.make_executor());
    const std::vector<int32_t>& stop_ids = checkpoint.config().stop_ids;
    if (!goldens.prompts.empty())
      report["greedy"] = greedy_json(
          engine::run_greedy(engine, goldens.prompts, stop_ids, progress_of("answers", "tokens")));
    if (goldens.long_prompt)
      report["long"] = greedy_json(engine::run_greedy(engine, std::span(&*goldens.long_prompt, 1), stop_ids,
                                                      progress_of("long prompt", "tokens")));
  }
  const auto layers = std::filesystem::path(o.goldens) / "layers.safetensors";
  if (subject.model.device().info().keeps_values && std::filesystem::exists(layers)) {
    // Without fusions, so that as many values as possible stay in memory; where a backend has its fused
    // kernels only, what those leave.
    plan::Policy plain = subject.model.policy();
    if (plain.unfuses_prefill) plain.prefill = plain.decode = {};
    report["layers"] =
        layers_json(engine::check_layers(subject.model.device(), subject.model.dims(), plain, layers));
  }
  report["backend"] = subject.model.device().info().backend;
  return report;
}

Json on_text(const EvalOptions& o, const model::Checkpoint& checkpoint, const text::Tokenizer& tokenizer) {
  const std::vector<int32_t> ids =
      tokenizer.encode(read_named_file("--text", o.text, kMaxTextBytes), text::AddedTokens::none);
  if (ids.size() < 2)
    fail(Fault::user, "{}: too short: {}, at least 2 are needed", o.text, counted(std::ssize(ids), "token"));
  const std::vector<int32_t> positions = spread_positions(ids.size(), o.positions);
  std::string backend;  // of the first one, once made
  const auto score_with = [&](const ModelOptions& options) {
    Subject subject(checkpoint, tokenizer.n_tokens(), options);
    if (backend.empty()) backend = subject.model.device().info().backend;
    const auto executor = subject.model.make_executor();
    if (static_cast<int64_t>(ids.size()) > executor->limits().max_context)
      fail(Fault::user, "{}: {} tokens do not fit the context of {}", o.text, ids.size(),
           executor->limits().max_context);
    return engine::score(*executor, ids, positions, o.chunk, progress_of("text", "tokens"));
  };
  const engine::ForcedScore score = score_with(o.model);
  Json report;
  if (o.against.empty()) {
    report = {{"predictions", score.nll.size()},
              {"positions", positions.size()},
              {"perplexity", score.perplexity()}};
  } else {
    ModelOptions against = o.model;
    against.backend = o.against;
    against.disable.clear();  // the reference is whole, and may not have what is off in the other one
    against.activations.clear();
    if (o.against == "reference") against.kv.clear();
    report = forced_json(engine::compare(score, score_with(against), tokenizer.n_tokens()));
    report["against"] = o.against;
  }
  report["backend"] = backend;
  return report;
}

int run_eval(const EvalOptions& o) {
  if (o.goldens.empty() == o.text.empty())
    fail(Fault::user, "eval needs either --goldens DIR or --text FILE");
  if (!o.against.empty() && o.text.empty())
    fail(Fault::user, "--against compares two backends on a text: name one with --text FILE");
  if (o.limit > 0 && o.goldens.empty())
    fail(Fault::user, "--limit counts the golden prompts of --goldens; a text is predicted as a whole");
  const std::string folder = find_model(o.model.model);
  const model::Checkpoint checkpoint = model::Checkpoint::open(folder);
  const text::Tokenizer tokenizer = text::Tokenizer::load(folder);
  const Json report = o.text.empty() ? against_goldens(o, checkpoint, tokenizer.n_tokens())
                                     : on_text(o, checkpoint, tokenizer);
  if (o.json) fmt::print("{}\n", report.dump(2));
  else print(report);
  return 0;
}

}  // namespace

void add_eval(CLI::App& app, Action& action) {
  auto options = std::make_shared<EvalOptions>();
  CLI::App* command =
      app.add_subcommand("eval", "Perplexity and agreement with golden outputs, a text or another backend");
  add_model_options(*command, options->model);
  command->add_option("--goldens", options->goldens,
                      "Folder of golden outputs; whichever files it has are used");
  command->add_option("--limit", options->limit, "Golden prompts to answer at most")
      ->check(CLI::Range(1, 1 << 20));
  command->add_option("--text", options->text, "A text file to predict");
  command->add_option("--positions", options->positions, "Positions at which whole rows are compared")
      ->check(CLI::Range(1, 1 << 20))
      ->capture_default_str();
  command->add_option("--against", options->against, "A second backend to compare with, on --text");
  command->add_option("--chunk", options->chunk, "Rows of a prompt chunk; 0: the backend's")
      ->check(CLI::Range(0, 1 << 20));
  command->add_flag("--json", options->json, "One JSON document on stdout");
  command->footer(
      "Examples:\n  lily eval -m models/lily-tiny --goldens tests/golden/lily-tiny\n"
      "  lily eval --text README.md --backend cpu --against reference");
  command->callback([options, &action] { action = [options] { return run_eval(*options); }; });
}

}  // namespace lily::cli
