// lily inspect: what is in a checkpoint, and what is wrong with it.
#include <cstdio>
#include <filesystem>
#include <nlohmann/json.hpp>

#include "base/error.h"
#include "base/printable.h"
#include "cli/command.h"
#include "text/tokenizer.h"

namespace lily::cli {
namespace {

using Json = nlohmann::ordered_json;

Json dims_json(const model::Dims& d) {
  return {{"hidden", d.hidden},
          {"layers", d.n_layers},
          {"attention_layers", d.n_attention_layers()},
          {"delta_layers", d.n_delta_layers()},
          {"vocab", d.vocab},
          {"query_heads", d.n_q_heads},
          {"kv_heads", d.n_kv_heads},
          {"head_dim", model::kHeadDim},
          {"delta_key_heads", d.n_key_heads},
          {"delta_value_heads", d.n_value_heads},
          {"delta_head_dim", model::kDeltaHeadDim},
          {"experts", d.n_experts},
          {"experts_per_token", model::kExpertsPerToken},
          {"expert_width", d.expert_width},
          {"shared_width", d.shared_width},
          {"rope_theta", d.rope_theta},
          {"max_positions", d.max_positions}};
}

// Adds what is wrong with the tokenizer. A checkpoint without one can be measured, but not asked.
void check_tokenizer(const std::string& folder, model::CheckpointReport& report) {
  std::error_code error;
  if (!std::filesystem::exists(std::filesystem::path(folder) / "tokenizer.json", error)) {
    report.notices.emplace_back("there is no tokenizer.json: lily bench can use this, lily run cannot");
    return;
  }
  try {
    const text::Tokenizer tokenizer = text::Tokenizer::load(folder);
    if (report.config && tokenizer.n_tokens() > report.config->dims.vocab)
      report.problems.push_back(fmt::format(
          "tokenizer.json: has ids up to {}, and the model's vocabulary ends at {}; are both files "
          "of one checkpoint?",
          tokenizer.n_tokens() - 1, report.config->dims.vocab));
  } catch (const Error& e) {
    report.problems.emplace_back(e.what());
  }
}

Json report_json(const model::CheckpointReport& report) {
  Json json;
  json["dims"] = report.config ? dims_json(report.config->dims) : Json();
  json["tensors"] = Json::array();
  for (const auto& tensor : report.tensors)
    json["tensors"].push_back({{"name", tensor.name},
                               {"file", tensor.file},
                               {"shape", tensor.shape},
                               {"dtype", tensor.dtype},
                               {"bits", tensor.bits},
                               {"group_size", tensor.group_size},
                               {"bytes", tensor.n_bytes}});
  for (int c = 0; c < model::kTensorClasses; ++c)
    json["bytes_by_class"][std::string(to_string(static_cast<model::TensorClass>(c)))] =
        report.bytes_by_class[static_cast<size_t>(c)];
  json["text_tensors"] = report.n_text_tensors;
  json["text_bytes"] = report.text_bytes;
  json["notices"] = report.notices;
  json["problems"] = report.problems;
  return json;
}

void print(const std::string& folder, const model::CheckpointReport& report, bool list_tensors) {
  fmt::print("{}\n", folder);
  if (report.config) {
    const model::Dims& d = report.config->dims;
    fmt::print("  {} layers ({} Gated DeltaNet, {} attention), hidden {}, vocabulary {}, context {}\n",
               d.n_layers, d.n_delta_layers(), d.n_attention_layers(), d.hidden, d.vocab, d.max_positions);
    fmt::print(
        "  attention: {} query heads on {} KV heads of {}; DeltaNet: {} value heads on {} key heads of {}\n",
        d.n_q_heads, d.n_kv_heads, model::kHeadDim, d.n_value_heads, d.n_key_heads, model::kDeltaHeadDim);
    fmt::print("  experts: {} of width {}, {} a token, and a shared one of width {}\n", d.n_experts,
               d.expert_width, model::kExpertsPerToken, d.shared_width);
  }
  fmt::print("  {} tensors of the text model, {}\n", report.n_text_tensors, human_bytes(report.text_bytes));
  for (int c = 0; c < model::kTensorClasses; ++c)
    if (const int64_t n_bytes = report.bytes_by_class[static_cast<size_t>(c)]; n_bytes > 0)
      fmt::print("    {:14} {:>16} bytes\n", to_string(static_cast<model::TensorClass>(c)), n_bytes);
  if (list_tensors)
    for (const auto& tensor : report.tensors)
      fmt::print(
          "  {:72} {:24} {:5} {:>12} bytes{}\n", tensor.name,
          fmt::format("[{}]", fmt::join(tensor.shape, ", ")), tensor.dtype, tensor.n_bytes,
          tensor.bits > 0 ? fmt::format("  {}-bit, groups of {}", tensor.bits, tensor.group_size) : "");
  for (const std::string& notice : report.notices) fmt::print("  note: {}\n", notice);
  for (const std::string& problem : report.problems) fmt::print("  problem: {}\n", problem);
  if (report.problems.empty()) fmt::print("  no problems in headers and configuration\n");
}

}  // namespace

void add_inspect(CLI::App& app, Action& action) {
  struct Options {
    std::string model, named;
    bool json = false, tensors = false;
  };
  auto options = std::make_shared<Options>();
  CLI::App* command =
      app.add_subcommand("inspect", "What is in a checkpoint, and what is missing or unsupported");
  CLI::Option* const model = command->add_option(
      "MODEL", options->model, "Folder of a checkpoint, or the name of one that has been pulled");
  command->add_option("-m,--model", options->named, "The same, as other commands have it")->excludes(model);
  command->add_flag("--tensors", options->tensors, "List every tensor");
  command->add_flag("--json", options->json, "One JSON document on stdout");
  command->footer("Examples:\n  lily inspect models/lily-tiny\n  lily inspect --json models/lily-tiny");
  command->callback([options, &action] {
    action = [options] {
      const std::string folder = find_model(options->named.empty() ? options->model : options->named);
      model::CheckpointReport report = model::inspect_checkpoint(folder);
      check_tokenizer(folder, report);
      if (options->json)
        fmt::print("{}\n", report_json(report).dump(2, ' ', false, Json::error_handler_t::replace));
      else print(folder, report, options->tensors);
      if (report.problems.empty()) return 0;
      fmt::print(stderr, "lily: {}: {}; the first: {}\n", folder,
                 counted(std::ssize(report.problems), "problem"), report.problems[0]);
      return kExitFailed;
    };
  });
}

}  // namespace lily::cli
