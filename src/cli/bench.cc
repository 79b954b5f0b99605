// lily bench: throughput of both phases through the engine, as a request meets it.
//
// A prompt of random tokens is read (prefill), then tokens are written greedily after it (decode at that
// context). Every round takes fresh tokens; nothing is cached. The clock is the engine's, between the events
// that a client sees. With --made-up-context no prompt is read: tokens are timed step by step behind keys and
// values that nobody computed, which takes as long as behind real ones.
#include <algorithm>
#include <cstdio>
#include <nlohmann/json.hpp>
#include <random>

#include "backend/processor_rates.h"
#include "base/error.h"
#include "base/thread_pool.h"
#include "cli/bench.h"
#include "cli/bench_plot.h"
#include "engine/engine.h"
#include "engine/load.h"
#include "engine/phase_runs.h"
#include "plan/cost.h"

namespace lily::cli {
namespace {

using Json = nlohmann::ordered_json;

using Options = BenchOptions;

struct Figures {
  std::vector<double> prefill, decode;  // tok/s, one a round
};

Figures measure(engine::Engine& engine, int length, const Options& o, std::mt19937& random) {
  std::uniform_int_distribution<int32_t> token(0, engine.limits().n_tokens - 1);
  Figures figures;
  for (int round = -1; round < o.rounds; ++round) {  // the first one warms up
    engine::GenerateRequest request{.max_tokens = o.tokens, .keep_states = false};
    request.sampling.temperature = 0;
    for (int i = 0; i < length; ++i) request.prompt.push_back(token(random));
    engine::Generation generation = engine.generate(std::move(request));
    while (!generation.done()) {
      if (interrupted()) generation.cancel();
      const auto event = generation.next_for(std::chrono::milliseconds(100));
      if (!event) continue;
      const auto* finished = std::get_if<engine::Finished>(&*event);
      if (finished == nullptr) continue;
      check_interrupted();
      if (finished->finish == engine::Finish::error) throw Error(finished->fault, finished->error);
      if (finished->finish == engine::Finish::cancelled)
        fail(Fault::device, "a round of length {} was cancelled by the engine", length);
      if (round < 0) break;
      figures.prefill.push_back(length / finished->timings.prefill_ms * 1e3);
      figures.decode.push_back((finished->usage.completion_tokens - 1) / finished->timings.decode_ms * 1e3);
    }
    if (stderr_is_terminal())
      fmt::print(stderr, "\rlength {}: round {} of {}\x1b[K", length, round + 1, o.rounds);
  }
  if (stderr_is_terminal()) fmt::print(stderr, "\r\x1b[K");
  return figures;
}

// Without the engine, behind a context that is made up.
Figures measure_tokens(engine::Executor& executor, int length, const Options& o) {
  constexpr int kWarmUpTokens = 4;
  Figures figures;
  engine::time_tokens(executor, length, std::min(kWarmUpTokens, o.tokens));
  for (int round = 0; round < o.rounds; ++round) {
    check_interrupted();
    figures.decode.push_back(o.tokens / engine::time_tokens(executor, length, o.tokens));
  }
  return figures;
}

// What a token of a phase costs, on average over the prompt or at that context.
struct TokenCost {
  double bytes = 0, flops = 0;
};

TokenCost cost_of(const model::Checkpoint& checkpoint, const plan::Policy& policy, bool is_decode,
                  int length) {
  const auto storage = [&](model::WeightId id) { return checkpoint.weight(id).storage; };
  const int chunk = is_decode ? 1 : policy.max_chunk_rows, end = is_decode ? length + 1 : length;
  plan::Cost total;
  for (int first = is_decode ? length : 0; first < end; first += chunk) {
    const int rows = std::min(chunk, end - first);
    const bool is_last = first + rows == end;
    const plan::Plan plan = plan::forward(checkpoint.dims(),
                                          {.phase = is_decode ? plan::Phase::decode : plan::Phase::prefill,
                                           .rows = rows,
                                           .outputs = is_last ? 1 : 0,
                                           .context = first + rows,
                                           .ending = is_last ? plan::Ending::greedy : plan::Ending::none},
                                          policy);
    total +=
        plan::cost(plan, {.rows = rows, .outputs = is_last ? 1 : 0, .position = first, .storage = storage});
  }
  const double n = is_decode ? 1 : length;
  return {static_cast<double>(total.total_bytes()) / n, static_cast<double>(total.flops) / n};
}

Json measure_here(const Options& o) {
  const std::string folder = find_model(o.model.model);
  const model::Checkpoint checkpoint = model::Checkpoint::open(folder);
  const model::Dims& dims = checkpoint.dims();
  engine::LoadOptions load = load_options(o.model);
  const int longest = *std::max_element(o.lengths.begin(), o.lengths.end());
  if (load.memory.context == 0) load.memory.context = longest + o.tokens + 1;
  if (o.session == 0) load.memory.n_cached_states = 0;
  // Synthetic checkpoints have no tokenizer; every row of the head counts as a token.
  engine::LoadedModel model(checkpoint, dims.vocab, load);
  const double load_start_s = now_s();
  {
    ProgressBar bar("loading");
    model.load([&](int64_t done, int64_t total) {
      bar.update(done, total);
      return !interrupted();
    });
  }
  const double load_s = now_s() - load_start_s;
  const std::string backend = model.device().info().backend;
  const int n_threads = o.model.threads > 0 ? o.model.threads : physical_cores();
  std::optional<backend::ProcessorRates> rates;
  if (backend.starts_with("cpu") && o.session == 0) rates = backend::measure_processor(backend, n_threads);
  // The rate was measured with two int8 planes; with one, a product of a weight is half the work.
  if (rates) rates->matrix_tflops *= 2.0 / model.policy().activation_planes;

  std::unique_ptr<engine::DeviceExecutor> executor = model.make_executor();
  engine::DeviceExecutor& steps = *executor;
  std::optional<engine::Engine> engine;
  if (o.made_up_context) engine::fill_cache(model.device(), dims, steps.limits().n_kv_blocks);
  else engine.emplace(std::move(executor));
  std::mt19937 random(1);
  Json results = Json::array();
  if (!o.json) {
    fmt::print("{} on {} ({}), loaded in {:.1f} s\n", folder, backend, model.device().info().name, load_s);
    if (rates)
      fmt::print("memory is read at {:.1f} GB/s, matrices are multiplied at {:.2f} TFLOP/s\n",
                 rates->read_gb_s, rates->matrix_tflops);
    if (o.session == 0)
      fmt::print("{:8} {:>7} {:>10} {:>21} {:>10} {:>8} {:>6}\n", "phase", "length", "tok/s", "min .. max",
                 "GB/s", "TFLOP/s", "share");
  }
  for (const int length : o.lengths) {
    if (o.session > 0) {
      results.push_back(measure_session(*engine, length, o));
      continue;
    }
    const Figures figures = engine ? measure(*engine, length, o, random) : measure_tokens(steps, length, o);
    for (const std::string& phase : o.phases) {
      const bool is_decode = phase == "decode";
      const Spread tok_s = spread_of(is_decode ? figures.decode : figures.prefill);
      Json result = {{"phase", phase}, {"length", length}, {"tok_s", spread_json(tok_s)}};
      const TokenCost cost = cost_of(checkpoint, model.policy(), is_decode, length);
      const double gb_s = cost.bytes * tok_s.median / 1e9, tflops = cost.flops * tok_s.median / 1e12;
      // Decode is bound by memory, reading a prompt by the matrix rate.
      std::optional<double> share;
      if (rates) share = is_decode ? gb_s / rates->read_gb_s : tflops / rates->matrix_tflops;
      result["bytes_per_token"] = is_decode ? Json(static_cast<int64_t>(cost.bytes)) : Json();
      result["gb_s"] = is_decode ? Json(gb_s) : Json();
      result["flops_per_token"] = cost.flops;
      result["tflops"] = tflops;
      result["roofline_share"] = share ? Json(*share) : Json();
      result["disabled"] = o.model.disable;
      result["activations"] = o.model.activations;
      results.push_back(result);
      if (!o.json)
        fmt::print("{:8} {:>7} {:>10.1f} {:>21} {:>10} {:>8.3f} {:>6}\n", phase, length, tok_s.median,
                   fmt::format("{:.1f} .. {:.1f}", tok_s.min, tok_s.max),
                   is_decode ? fmt::format("{:.1f}", gb_s) : "", tflops,
                   share ? fmt::format("{:.0f} %", *share * 100) : "");
    }
  }
  const Json device = {{"name", model.device().info().name},
                       {"kind", backend},
                       {"read_gb_s", rates ? Json(rates->read_gb_s) : Json()},
                       {"matrix_tflops", rates ? Json(rates->matrix_tflops) : Json()}};
  return {{"device", device}, {"model", folder}, {"load_s", load_s}, {"results", results}};
}

int run_bench(const Options& o) {
  if (o.made_up_context && o.phases != std::vector<std::string>{"decode"})
    fail(Fault::user, "--made-up-context has no prompt to read: use it with --phase decode");
  const Json document = o.vs.empty() ? measure_here(o) : measure_in_turns(o);
  if (!o.plot.empty()) write_plot(document, o.plot);
  if (o.json) fmt::print("{}\n", document.dump(2));
  return 0;
}

}  // namespace

Spread spread_of(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  const size_t n = values.size();
  return {n % 2 == 1 ? values[n / 2] : (values[n / 2 - 1] + values[n / 2]) / 2, values.front(),
          values.back()};
}

Json spread_json(const Spread& s) { return {{"median", s.median}, {"min", s.min}, {"max", s.max}}; }

void add_bench(CLI::App& app, Action& action) {
  auto options = std::make_shared<Options>();
  CLI::App* command =
      app.add_subcommand("bench", "Throughput of reading prompts and writing answers at given lengths");
  add_model_options(*command, options->model);
  add_profile_option(*command, options->model);
  command->add_option("--phase", options->phases, "prefill, decode or both")
      ->delimiter(',')
      ->check(CLI::IsMember({"prefill", "decode"}));
  command->add_option("--lengths", options->lengths, "Prompt lengths, which are also the contexts of decode")
      ->delimiter(',')
      ->check(CLI::Range(1, 1 << 20));
  command->add_option("--rounds", options->rounds, "Measured rounds; one more warms up")
      ->check(CLI::Range(1, 1000));
  command->add_option("--tokens", options->tokens, "Tokens written in each round")
      ->check(CLI::Range(2, 100000));
  CLI::Option* const vs = command->add_option(
      "--vs", options->vs,
      "A peer to measure in turns: an executable called as PEER PHASE LENGTH REPETITIONS that prints "
      "one tok/s a line (bench/peers/ has some)");
  CLI::Option* const session = command->add_option("--session", options->session,
                                                   "Turns of a session whose last prompt has the length: how "
                                                   "much sooner its answer starts than after a cold read");
  session->check(CLI::Range(2, 10000))->excludes(vs);
  command->add_option("--new", options->new_tokens, "Tokens that each turn of the session adds")
      ->check(CLI::Range(1, 1 << 20))
      ->needs(session);
  command
      ->add_flag("--made-up-context", options->made_up_context,
                 "Decode behind made-up keys and values, so that long contexts need not be read first")
      ->excludes(session);
  command->add_option("--plot", options->plot, "Draw the figures into an SVG file")->excludes(session);
  command->add_flag("--json", options->json, "One JSON document on stdout");
  command->footer(
      "Examples:\n  lily bench -m models/lily-tiny --lengths 256,1024\n"
      "  lily bench -m /tmp/synthetic --backend cuda --lengths 512,4096,32768 --rounds 5\n"
      "  LILY_PEER_MODEL=model.gguf lily bench --vs bench/peers/llama_cpp --lengths 256,4096 --plot "
      "speed.svg\n"
      "  lily bench -m /tmp/synthetic --session 10 --new 200 --lengths 16384 --rounds 1");
  command->callback([options, &action] { action = [options] { return run_bench(*options); }; });
}

}  // namespace lily::cli
