// lily diff: one plan on two backends, op by op.
#include <cstdio>
#include <nlohmann/json.hpp>

#include "base/error.h"
#include "base/file.h"
#include "base/printable.h"
#include "cli/command.h"
#include "engine/diff.h"
#include "text/tokenizer.h"

namespace lily::cli {
namespace {

using Json = nlohmann::ordered_json;

constexpr uint64_t kMaxDiffTextBytes = uint64_t{1} << 20;
constexpr const char* kSampleText =
    "And the evening and the morning were the first day. def add(a, b):\n    return a + b\n";

struct DiffOptions {
  ModelOptions model;
  std::string against = "reference", phase = "prefill", until, text;
  int rows = 24;
  bool json = false;
};

Json difference_json(const std::optional<engine::Difference>& d) {
  if (!d) return nullptr;
  return {{"op", d->op},       {"value", d->value},         {"row", d->row},
          {"col", d->col},     {"candidate", d->candidate}, {"reference", d->reference},
          {"error", d->error}, {"tolerance", d->tolerance}};
}

int run_diff(const DiffOptions& o) {
  const std::string folder = find_model(o.model.model);
  const model::Checkpoint checkpoint = model::Checkpoint::open(folder);
  const text::Tokenizer tokenizer = text::Tokenizer::load(folder);
  std::vector<int32_t> tokens =
      tokenizer.encode(o.text.empty() ? kSampleText : read_named_file("--text", o.text, kMaxDiffTextBytes),
                       text::AddedTokens::none);
  if (tokens.size() > static_cast<size_t>(o.rows)) tokens.resize(static_cast<size_t>(o.rows));
  if (tokens.size() < 2) fail(Fault::user, "diff needs at least 2 tokens of text");

  const auto load = [&](const std::string& backend) {
    auto device =
        backend::make_device(backend, {.threads = o.model.threads, .tensor_ops = o.model.tensor_ops});
    ProgressBar bar("loading");
    device->load(checkpoint, [&](int64_t done, int64_t total) {
      bar.update(done, total);
      return !interrupted();
    });
    return device;
  };
  const auto candidate = load(o.model.backend);
  const auto reference = load(o.against);
  const engine::DiffReport report =
      engine::diff(*candidate, *reference, checkpoint.dims(),
                   chosen_policy(*candidate, checkpoint.dims(), o.model), tokens,
                   {.phase = o.phase == "decode" ? plan::Phase::decode : plan::Phase::prefill,
                    .until = o.until,
                    .between_ops = check_interrupted});
  if (o.json) {
    const Json json = {{"backend", candidate->info().backend},
                       {"against", o.against},
                       {"phase", o.phase},
                       {"ops", report.n_ops},
                       {"values", report.n_values},
                       {"first", difference_json(report.first)},
                       {"worst", difference_json(report.worst)}};
    fmt::print("{}\n", json.dump(2));
  } else {
    fmt::print("{} against {}: {}, {} compared\n", candidate->info().backend, o.against,
               counted(report.n_ops, "op"), counted(report.n_values, "value"));
    if (report.worst) fmt::print("largest share of a tolerance: {}\n", report.worst->line());
    fmt::print("{}\n",
               report.first ? "first difference: " + report.first->line() : "no difference beyond tolerance");
  }
  if (!report.first) return 0;
  fmt::print(stderr, "lily: the backends differ: {}\n", report.first->line());
  return kExitFailed;
}

}  // namespace

void add_diff(CLI::App& app, Action& action) {
  auto options = std::make_shared<DiffOptions>();
  CLI::App* command =
      app.add_subcommand("diff", "Run one plan on two backends and name the first op and value that differ");
  add_model_options(*command, options->model);
  command->add_option("--against", options->against, "The other backend")->capture_default_str();
  command->add_option("--phase", options->phase)
      ->check(CLI::IsMember({"prefill", "decode"}))
      ->capture_default_str();
  command->add_option("--until", options->until, "The last value to compare, as in layers.3.router_logits");
  command->add_option("--text", options->text,
                      "A text file to read tokens from (default: a built-in sentence)");
  command->add_option("--rows", options->rows, "Tokens to read at most")
      ->check(CLI::Range(2, 8192))
      ->capture_default_str();
  command->add_flag("--json", options->json, "One JSON document on stdout");
  command->footer(
      "Examples:\n  lily diff --backend cpu --against reference\n"
      "  lily diff --backend cpu --phase decode --until layers.3.router_logits");
  command->callback([options, &action] { action = [options] { return run_diff(*options); }; });
}

}  // namespace lily::cli
