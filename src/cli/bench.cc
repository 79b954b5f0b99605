// lily bench: throughput of both phases through the engine, as a request meets it.
//
// A prompt of random tokens is read (prefill), then tokens are written greedily after it (decode at that
// context). Every round takes fresh tokens; nothing is cached. The clock is the engine's, between the events
// that a client sees.
#include <algorithm>
#include <cstdio>
#include <nlohmann/json.hpp>
#include <random>

#include "base/error.h"
#include "base/thread_pool.h"
#include "cli/bench.h"
#include "cli/bench_plot.h"
#include "engine/engine.h"
#include "engine/load.h"
#include "plan/cost.h"

namespace lily::cli {
namespace {

using Json = nlohmann::ordered_json;

using Options = BenchOptions;

// GB/s at which all threads together read memory that no cache holds; the best of three passes.
double measure_read_rate(int n_threads) {
  constexpr size_t kBytes = size_t{1} << 30;
  ThreadPool pool(n_threads);
  std::vector<uint64_t> words(kBytes / 8);
  const size_t share = words.size() / static_cast<size_t>(n_threads) / 8 * 8;
  std::vector<uint64_t> sums(static_cast<size_t>(n_threads));
  const auto pass = [&](bool write) {
    pool.run([&](int thread) {
      const auto part = std::span(words).subspan(static_cast<size_t>(thread) * share, share);
      uint64_t sum[8] = {};  // independent, so that memory is what is waited for
      if (write) std::fill(part.begin(), part.end(), static_cast<uint64_t>(thread) + 1);  // first touch
      else
        for (size_t i = 0; i + 8 <= part.size(); i += 8)
          for (size_t j = 0; j < 8; ++j) sum[j] += part[i + j];
      sums[static_cast<size_t>(thread)] =
          sum[0] + sum[1] + sum[2] + sum[3] + sum[4] + sum[5] + sum[6] + sum[7];
    });
  };
  pass(true);
  double best_s = 1e9;
  for (int i = 0; i < 3; ++i) {
    const double start_s = now_s();
    pass(false);
    best_s = std::min(best_s, now_s() - start_s);
    for (size_t t = 0; t < sums.size(); ++t) LILY_CHECK(sums[t] == (t + 1) * share, "sum {}", sums[t]);
  }
  return static_cast<double>(share) * n_threads * 8 / best_s / 1e9;
}

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
  const double read_gb_s =  // 0: not measured
      backend == "cpu" && o.session == 0 ? measure_read_rate(n_threads) : 0;

  engine::Engine engine(model.make_executor());
  std::mt19937 random(1);
  Json results = Json::array();
  if (!o.json) {
    fmt::print("{} on {} ({}), loaded in {:.1f} s\n", folder, backend, model.device().info().name, load_s);
    if (read_gb_s > 0) fmt::print("memory is read at {:.1f} GB/s\n", read_gb_s);
    if (o.session == 0)
      fmt::print("{:8} {:>7} {:>10} {:>21} {:>10} {:>8}\n", "phase", "length", "tok/s", "min .. max", "GB/s",
                 "share");
  }
  for (const int length : o.lengths) {
    if (o.session > 0) {
      results.push_back(measure_session(engine, length, o));
      continue;
    }
    const Figures figures = measure(engine, length, o, random);
    for (const std::string& phase : o.phases) {
      const bool is_decode = phase == "decode";
      const Spread tok_s = spread_of(is_decode ? figures.decode : figures.prefill);
      Json result = {{"phase", phase}, {"length", length}, {"tok_s", spread_json(tok_s)}};
      double gb_s = 0;
      if (is_decode) {
        const plan::Plan plan = plan::forward(
            dims, {.phase = plan::Phase::decode, .context = length + 1, .ending = plan::Ending::greedy},
            model.policy());
        const int64_t n_bytes =
            plan::cost(plan, {.position = length,
                              .storage = [&](model::WeightId id) { return checkpoint.weight(id).storage; }})
                .total_bytes();
        gb_s = static_cast<double>(n_bytes) * tok_s.median / 1e9;
        result["bytes_per_token"] = n_bytes;
        result["gb_s"] = gb_s;
      } else {
        result["bytes_per_token"] = nullptr;
        result["gb_s"] = nullptr;
      }
      result["roofline_share"] = is_decode && read_gb_s > 0 ? Json(gb_s / read_gb_s) : Json();
      result["disabled"] = o.model.disable;
      results.push_back(result);
      if (!o.json)
        fmt::print("{:8} {:>7} {:>10.0f} {:>21} {:>10} {:>8}\n", phase, length, tok_s.median,
                   fmt::format("{:.0f} .. {:.0f}", tok_s.min, tok_s.max),
                   is_decode ? fmt::format("{:.1f}", gb_s) : "",
                   is_decode && read_gb_s > 0 ? fmt::format("{:.0f} %", gb_s / read_gb_s * 100) : "");
    }
  }
  const Json device = {{"name", model.device().info().name},
                       {"kind", backend},
                       {"read_gb_s", read_gb_s > 0 ? Json(read_gb_s) : Json()}};
  return {{"device", device}, {"model", folder}, {"load_s", load_s}, {"results", results}};
}

int run_bench(const Options& o) {
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
