// lily bench --vs: this program and a peer in turns.
#include <algorithm>
#include <charconv>
#include <cmath>
#include <cstdio>
#include <filesystem>
#include <map>

#include "base/error.h"
#include "cli/bench.h"
#include "cli/child_process.h"

namespace lily::cli {
namespace {

using Json = nlohmann::ordered_json;

constexpr int kRepetitions = 2;  // of the peer in one process, and of this program after its warm-up

struct Case {
  std::string phase;
  int length;
  auto operator<=>(const Case&) const = default;
};

struct Series {
  std::vector<double> own, peer, ratio;  // one value a round: the median of its repetitions
  Json sample;                           // this program's last result
};

std::vector<std::string> own_command(const BenchOptions& o, const std::vector<int>& lengths) {
  const ModelOptions& m = o.model;
  std::vector<std::string> command = {
      executable_path(),        "bench",     "--json", "--rounds", std::to_string(kRepetitions), "--tokens",
      std::to_string(o.tokens), "--backend", m.backend};
  const auto add = [&](const char* name, const std::string& value) {
    if (!value.empty()) command.insert(command.end(), {name, value});
  };
  add("--model", m.model);
  add("--kv", m.kv);
  add("--activations", m.activations);
  add("--disable", m.disable);
  if (o.made_up_context) command.emplace_back("--made-up-context");
  if (m.threads > 0) add("--threads", std::to_string(m.threads));
  if (m.ctx > 0) add("--ctx", std::to_string(m.ctx));
  add("--phase", fmt::format("{}", fmt::join(o.phases, ",")));
  add("--lengths", fmt::format("{}", fmt::join(lengths, ",")));
  return command;
}

std::vector<double> numbers_of(const std::string& text, const std::string& command) {
  std::vector<double> numbers;
  size_t at = 0;
  while (at < text.size()) {
    const size_t end = std::min(text.find('\n', at), text.size());
    const std::string line = text.substr(at, end - at);
    at = end + 1;
    if (line.find_first_not_of(" \t\r") == std::string::npos) continue;
    char* stop = nullptr;
    const double number = std::strtod(line.c_str(), &stop);
    if (stop == line.c_str() || !std::isfinite(number) || number <= 0)
      fail(Fault::user, "{}: expected one tok/s a line, found '{}'", command, line.substr(0, 80));
    numbers.push_back(number);
  }
  if (numbers.empty()) fail(Fault::user, "{}: printed no figure", command);
  return numbers;
}

class Turns {
 public:
  explicit Turns(const BenchOptions& options) : o_(options) {}

  Json run() {
    for (int round = 0; round < o_.rounds; ++round) {
      if (round % 2 == 0) measure_own(round), measure_peer(round);
      else measure_peer(round), measure_own(round);
    }
    for (auto& [key, series] : series_)
      for (size_t i = 0; i < series.own.size(); ++i) series.ratio.push_back(series.own[i] / series.peer[i]);
    return document();
  }

 private:
  void say(int round, const std::string& what) const {
    if (stderr_is_terminal()) fmt::print(stderr, "\rround {} of {}: {}\x1b[K", round + 1, o_.rounds, what);
  }

  void measure_own(int round) {
    say(round, "lily");
    const std::string text = run_child(own_command(o_, o_.lengths));
    document_ = Json::parse(text, nullptr, false);
    if (!document_.is_object() || !document_.contains("results"))
      fail(Fault::device, "lily bench printed no document in round {}", round + 1);
    for (const Json& result : document_["results"]) {
      Series& series = series_[{result["phase"], result["length"]}];
      series.own.push_back(result["tok_s"]["median"]);
      series.sample = result;
    }
    const Json &read = document_["device"]["read_gb_s"], &matrix = document_["device"]["matrix_tflops"];
    if (read.is_number()) read_gb_s_.push_back(read);
    if (matrix.is_number()) matrix_tflops_.push_back(matrix);
  }

  void measure_peer(int round) {
    for (const std::string& phase : o_.phases)
      for (const int length : o_.lengths) {
        say(round, fmt::format("{} {} {}", o_.vs, phase, length));
        const std::string text =
            run_child({o_.vs, phase, std::to_string(length), std::to_string(kRepetitions)});
        series_[{phase, length}].peer.push_back(spread_of(numbers_of(text, o_.vs)).median);
      }
  }

  Json document() {
    if (stderr_is_terminal()) fmt::print(stderr, "\r\x1b[K");
    const std::string name = std::filesystem::path(o_.vs).filename().string();
    Json results = Json::array();
    const Spread rate = read_gb_s_.empty() ? Spread{} : spread_of(read_gb_s_),
                 matrix = matrix_tflops_.empty() ? Spread{} : spread_of(matrix_tflops_);
    if (!o_.json) {
      fmt::print("{} on {}\n", document_["model"].get<std::string>(),
                 document_["device"]["name"].get<std::string>());
      if (rate.median > 0)
        fmt::print(
            "memory is read at {:.1f} GB/s ({:.1f} .. {:.1f}), matrices are multiplied at {:.2f} TFLOP/s "
            "({:.2f} .. {:.2f})\n",
            rate.median, rate.min, rate.max, matrix.median, matrix.min, matrix.max);
      fmt::print("{:8} {:>7} {:>28} {:>28} {:>22} {:>6}\n", "phase", "length", "lily tok/s", name + " tok/s",
                 "ratio", "share");
    }
    for (const std::string& phase : o_.phases)
      for (const int length : o_.lengths) {
        const Series& series = series_.at({phase, length});
        const Spread own = spread_of(series.own), peer = spread_of(series.peer),
                     ratio = spread_of(series.ratio);
        Json result = series.sample;
        result["tok_s"] = spread_json(own);
        if (result["bytes_per_token"].is_number()) {
          const double gb_s = result["bytes_per_token"].get<double>() * own.median / 1e9;
          result["gb_s"] = gb_s;
          result["roofline_share"] = rate.median > 0 ? Json(gb_s / rate.median) : Json();
        }
        const double tflops = result["flops_per_token"].get<double>() * own.median / 1e12;
        result["tflops"] = tflops;
        if (phase == "prefill")
          result["roofline_share"] = matrix.median > 0 ? Json(tflops / matrix.median) : Json();
        result["peer"] = {{"name", name}, {"tok_s", spread_json(peer)}};
        result["ratio"] = spread_json(ratio);
        results.push_back(result);
        if (o_.json) continue;
        const auto shown = [](const Spread& s) {
          return fmt::format("{:.2f} ({:.2f} .. {:.2f})", s.median, s.min, s.max);
        };
        fmt::print("{:8} {:>7} {:>28} {:>28} {:>22} {:>6}\n", phase, length, shown(own), shown(peer),
                   shown(ratio),
                   result["roofline_share"].is_number()
                       ? fmt::format("{:.0f} %", result["roofline_share"].get<double>() * 100)
                       : "");
      }
    if (rate.median > 0) document_["device"]["read_gb_s"] = rate.median;
    if (matrix.median > 0) document_["device"]["matrix_tflops"] = matrix.median;
    document_["results"] = results;
    return document_;
  }

  const BenchOptions& o_;
  std::map<Case, Series> series_;
  std::vector<double> read_gb_s_, matrix_tflops_;
  Json document_;
};

}  // namespace

Json measure_in_turns(const BenchOptions& options) { return Turns(options).run(); }

}  // namespace lily::cli
