// lily ablate: each mechanism on and off, the otherwise identical engine against itself.
//
// The weights are loaded once. A round measures both policies, in an order that changes with every round;
// between them the device's memory is reserved and the programs are compiled anew. Prompts start from
// nothing; tokens are written behind a context of made-up keys and values. On the CPU one row more compares
// activations of one int8 plane with those of two.
#include <algorithm>
#include <cstdio>
#include <map>
#include <nlohmann/json.hpp>
#include <random>

#include "base/error.h"
#include "base/printable.h"
#include "cli/ablate.h"
#include "cli/ablate_plot.h"
#include "cli/bench.h"
#include "engine/load.h"
#include "engine/phase_runs.h"

namespace lily::cli {
namespace {

using Json = nlohmann::ordered_json;

constexpr int kTurnWarmUpTokens = 4;
// The programs of a round are new, the caches and clocks are not: a warm-up that takes longer than this is
// not repeated after the first round.
constexpr double kShortWarmUp_s = 1;

struct AblateOptions {
  ModelOptions model;
  std::string only;  // "P1,D3"
  std::vector<int> prompts = {512, 2048}, contexts = {4096};
  int rounds = 5, tokens = 32;
  std::string plot;
  bool json = false;
};

// Something that can be switched off, the policy with it and the policy without it.
struct Ablation {
  std::string id, what;
  bool is_decode = false;
  plan::Policy on;
  std::optional<plan::Policy> off;
  std::string why;  // it cannot be switched off here
};

bool acts_in_decode(plan::Mechanism m) { return m >= plan::Mechanism::d1; }

// Why a backend does not have a mechanism.
std::string why_absent(plan::Mechanism m, const std::string& backend) {
  struct Reason {
    plan::Mechanism mechanism;
    const char* text;
  };
  using plan::Mechanism;
  constexpr Reason kOnCpu[] = {
      {Mechanism::p2, "the processor is the device: routing never leaves it"},
      {Mechanism::p3, "an expert's rows are one unit of work, however many they are"},
      {Mechanism::p6,
       "this processor has no matrix unit that lily uses (AMX), or the system does not grant it"},
      {Mechanism::d1, "one row runs in the loop of several, which is row-parallel by the weights' layout"},
      {Mechanism::d2, "the processor is the device: a token is never handed over"},
      {Mechanism::d5, "a thread reads whole keys and values: there is nothing to coalesce"}};
  if (backend == "reference") return "the reference runs one plain op after another";
  if (backend.starts_with("cpu"))
    for (const Reason& reason : kOnCpu)
      if (reason.mechanism == m) return reason.text;
  return fmt::format("the {} backend has no variant without it", backend);
}

constexpr std::string_view kOnePlane = "int8";  // beside the mechanisms' ids

// Takes an item out of a list, "P1,int8"; whether it was there.
bool take_item(std::string& list, std::string_view item) {
  std::string rest;
  bool found = false;
  for (size_t at = 0; at < list.size();) {
    const size_t end = std::min(list.find(',', at), list.size());
    const std::string_view one = std::string_view(list).substr(at, end - at);
    if (one == item) found = true;
    else rest.append(rest.empty() ? "" : ",").append(one);
    at = end + 1;
  }
  if (found) list = rest;
  return found;
}

std::vector<Ablation> ablations(const plan::Policy& on, const AblateOptions& o, const std::string& backend) {
  std::string only = o.only;
  const bool with_one_plane = take_item(only, kOnePlane) || only.empty();
  std::vector<plan::Mechanism> wanted = plan::parse_mechanisms(only);
  if (o.only.empty())
    for (int i = 0; i < plan::kMechanisms; ++i) wanted.push_back(static_cast<plan::Mechanism>(i));
  std::vector<Ablation> list;
  for (const plan::Mechanism m : wanted) {
    Ablation a{.id = std::string(plan::name(m)),
               .what = std::string(plan::description(m)),
               .is_decode = acts_in_decode(m),
               .on = on,
               .off = plan::without(on, m)};
    if (!a.off) a.why = why_absent(m, backend);
    list.push_back(std::move(a));
  }
  if (with_one_plane) {
    Ablation a{.id = std::string(kOnePlane), .what = "activations of one int8 plane, not two", .on = on};
    if (backend.starts_with("cpu")) {
      a.on.activation_planes = 1;
      a.off = on;
      a.off->activation_planes = 2;
    } else {
      a.why = fmt::format("the {} backend does not take activations as int8", backend);
    }
    list.push_back(std::move(a));
  }
  return list;
}

// Why a mechanism changes nothing at a length, or an empty string.
std::string idle_at(const plan::Policy& on, const std::string& id, int length) {
  if (id == "P5" && length <= on.max_chunk_rows)
    return fmt::format("acts on prompts of more than {} tokens", on.max_chunk_rows);
  if (id == "D7" && length < on.fixed_blocks_from_context)
    return fmt::format("acts from a context of {} tokens on", on.fixed_blocks_from_context);
  return {};
}

class Comparison {
 public:
  Comparison(engine::LoadedModel& model, int64_t weight_bytes, const AblateOptions& options)
      : model_(model), weight_bytes_(weight_bytes), o_(options) {}

  // tok/s of one policy in a turn of its own.
  double measure(const plan::Policy& policy, bool is_decode, int length, bool is_first) {
    check_interrupted();
    const engine::MemoryOptions memory{.context = length + o_.tokens + kTurnWarmUpTokens,
                                       .n_cached_states = 0};
    const engine::MemoryPlan planned =
        engine::plan_memory(model_.device(), model_.dims(), policy, weight_bytes_, memory);
    engine::DeviceExecutor executor(model_.device(), model_.dims(), policy, planned, model_.n_tokens());
    if (is_decode) {
      engine::fill_cache(model_.device(), model_.dims(), executor.limits().n_kv_blocks);
      engine::time_tokens(executor, length, kTurnWarmUpTokens);
      return o_.tokens / engine::time_tokens(executor, length, o_.tokens);
    }
    std::uniform_int_distribution<int32_t> token(0, model_.n_tokens() - 1);
    std::vector<int32_t> prompt(static_cast<size_t>(length));
    for (int32_t& id : prompt) id = token(random_);
    double& warm_up_s = warm_up_s_[length];
    if (is_first || warm_up_s < kShortWarmUp_s) warm_up_s = engine::time_prompt(executor, prompt);
    check_interrupted();
    return length / engine::time_prompt(executor, prompt);
  }

  Json compare(const Ablation& a, int length) {
    std::vector<double> with, without, gains;
    for (int round = 0; round < o_.rounds; ++round) {
      double figures[2];  // on, off
      for (const int turn : {0, 1}) {
        const bool is_off = (turn + round) % 2 == 1;
        if (stderr_is_terminal())
          fmt::print(stderr, "\r{} at {}: round {} of {}, {}\x1b[K", a.id, length, round + 1, o_.rounds,
                     is_off ? "off" : "on");
        figures[is_off] = measure(is_off ? *a.off : a.on, a.is_decode, length, round == 0);
      }
      with.push_back(figures[0]);
      without.push_back(figures[1]);
      gains.push_back(figures[0] / figures[1] - 1);
    }
    if (stderr_is_terminal()) fmt::print(stderr, "\r\x1b[K");
    const Spread on_s = spread_of(with), off_s = spread_of(without), gain = spread_of(gains);
    Json row = row_of(a, length);
    row.update({{"on_tok_s", on_s.median},
                {"off_tok_s", off_s.median},
                {"gain", gain.median},
                {"applicable", true},
                {"why", ""},
                {"on", spread_json(on_s)},
                {"off", spread_json(off_s)},
                {"gain_min", gain.min},
                {"gain_max", gain.max}});
    return row;
  }

  static Json row_of(const Ablation& a, int length) {
    return {
        {"id", a.id}, {"what", a.what}, {"phase", a.is_decode ? "decode" : "prefill"}, {"length", length}};
  }
  static Json not_measured(const Ablation& a, std::optional<int> length, const std::string& why) {
    Json row = row_of(a, length.value_or(0));
    if (!length) row["length"] = nullptr;
    row.update({{"on_tok_s", nullptr},
                {"off_tok_s", nullptr},
                {"gain", nullptr},
                {"applicable", a.off.has_value()},
                {"why", why}});
    return row;
  }

 private:
  engine::LoadedModel& model_;
  const int64_t weight_bytes_;
  const AblateOptions& o_;
  std::mt19937 random_{1};
  std::map<int, double> warm_up_s_;
};

void print_row(const Json& row) {
  const std::string phase = row["phase"];
  const std::string length = row["length"].is_number() ? row["length"].dump() : "";
  if (!row["gain"].is_number()) {
    fmt::print("{:7} {:8} {:>7}  {}: {}\n", row["id"].get<std::string>(), phase, length,
               row["applicable"].get<bool>() ? "not measured" : "not applicable on this backend",
               row["why"].get<std::string>());
    return;
  }
  const auto shown = [&](const char* key) {
    return fmt::format("{:.1f} ({:.1f} .. {:.1f})", row[key]["median"].get<double>(),
                       row[key]["min"].get<double>(), row[key]["max"].get<double>());
  };
  fmt::print("{:7} {:8} {:>7} {:>26} {:>26} {:>26}  {}\n", row["id"].get<std::string>(), phase, length,
             shown("on"), shown("off"),
             fmt::format("{:+.1f} % ({:+.1f} .. {:+.1f})", row["gain"].get<double>() * 100,
                         row["gain_min"].get<double>() * 100, row["gain_max"].get<double>() * 100),
             row["what"].get<std::string>());
  std::fflush(stdout);
}

int run_ablate(const AblateOptions& o) {
  const std::string folder = find_model(o.model.model);
  const model::Checkpoint checkpoint = model::Checkpoint::open(folder);
  engine::LoadOptions load = load_options(o.model);
  load.memory.context = std::max(*std::max_element(o.prompts.begin(), o.prompts.end()),
                                 *std::max_element(o.contexts.begin(), o.contexts.end())) +
                        o.tokens + kTurnWarmUpTokens;
  load.memory.n_cached_states = 0;
  // Synthetic checkpoints have no tokenizer; every row of the head counts as a token.
  engine::LoadedModel model(checkpoint, checkpoint.dims().vocab, load);
  const std::string backend = model.device().info().backend, device = model.device().info().name;
  const std::vector<Ablation> list = ablations(model.policy(), o, backend);
  {
    ProgressBar bar("loading");
    model.load([&](int64_t done, int64_t total) {
      bar.update(done, total);
      return !interrupted();
    });
  }
  if (!o.json) {
    fmt::print("{} on {} ({}), {}\n", folder, backend, device, counted(o.rounds, "round"));
    fmt::print("{:7} {:8} {:>7} {:>26} {:>26} {:>26}\n", "", "phase", "length", "on tok/s", "off tok/s",
               "gain");
  }
  Comparison comparison(model, checkpoint.report().text_bytes, o);
  Json rows = Json::array();
  const auto add = [&](Json row) {
    if (!o.json) print_row(row);
    rows.push_back(std::move(row));
  };
  for (const Ablation& a : list) {
    if (!a.off) {
      add(Comparison::not_measured(a, std::nullopt, a.why));
      continue;
    }
    for (const int length : a.is_decode ? o.contexts : o.prompts) {
      if (const std::string why = idle_at(a.on, a.id, length); !why.empty()) {
        add(Comparison::not_measured(a, length, why));
        continue;
      }
      try {
        add(comparison.compare(a, length));
      } catch (const Error& e) {
        // Without a mechanism more memory may be needed than there is.
        if (e.fault() != Fault::user) throw;
        add(Comparison::not_measured(a, length, fmt::format("off: {}", e.what())));
      }
    }
  }
  if (!o.plot.empty()) write_gains(rows, device, o.plot);
  if (o.json) fmt::print("{}\n", rows.dump(2));
  return 0;
}

}  // namespace

void add_ablate(CLI::App& app, Action& action) {
  auto options = std::make_shared<AblateOptions>();
  CLI::App* command =
      app.add_subcommand("ablate", "What each mechanism gains: on and off in turns, in one process");
  add_model_options(*command, options->model);
  command->add_option("--only", options->only, "Mechanisms to compare, as in P1,D3, and int8 (default: all)");
  command->add_option("--prompts", options->prompts, "Prompt lengths for P1..P6")
      ->delimiter(',')
      ->check(CLI::Range(1, 1 << 20))
      ->capture_default_str();
  command->add_option("--contexts", options->contexts, "Contexts of decode for D1..D7")
      ->delimiter(',')
      ->check(CLI::Range(0, 1 << 20))
      ->capture_default_str();
  command->add_option("--rounds", options->rounds, "Measured rounds, each with both")
      ->check(CLI::Range(1, 1000))
      ->capture_default_str();
  command->add_option("--tokens", options->tokens, "Tokens written in each turn")
      ->check(CLI::Range(1, 100000))
      ->capture_default_str();
  command->add_option("--plot", options->plot, "Draw the gains into an SVG file");
  command->add_flag("--json", options->json, "One JSON document on stdout");
  command->footer(
      "Examples:\n  lily ablate -m models/lily-tiny --only P4,D6\n"
      "  lily ablate -m /tmp/synthetic --backend cuda --contexts 4096,32768 --plot gains.svg\n"
      "A gain of +0.5 in JSON, +50 % in the table: with the mechanism 1.5 times the tokens a second.");
  command->callback([options, &action] { action = [options] { return run_ablate(*options); }; });
}

}  // namespace lily::cli
