// What lily bench measures, alone or in turns with a peer.
#pragma once

#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "cli/command.h"
#include "engine/engine.h"

namespace lily::cli {

struct BenchOptions {
  ModelOptions model;
  std::vector<std::string> phases = {"prefill", "decode"};
  std::vector<int> lengths = {256, 512, 1024, 2048};
  int rounds = 5, tokens = 64;
  int session = 0;               // turns of a session to measure instead of the phases; 0: none
  int new_tokens = 200;          // that each of its turns adds
  bool made_up_context = false;  // no prompt is read before its tokens
  std::string vs, plot;          // a peer's command; an SVG file
  bool json = false;
};

struct Spread {
  double median = 0, min = 0, max = 0;
};
Spread spread_of(std::vector<double> values);
nlohmann::ordered_json spread_json(const Spread& spread);

// A session whose last prompt has `length` tokens, beside a cold read of that prompt. Prints, unless JSON is
// asked for, and returns the entry of `results`.
nlohmann::ordered_json measure_session(engine::Engine& engine, int length, const BenchOptions& options);

// Measures this program and the peer in turns, each in a process of its own, so that both need not fit into
// memory together; who goes first changes with every round. Loading is not timed. Prints the table, unless
// JSON is asked for, and returns the document.
nlohmann::ordered_json measure_in_turns(const BenchOptions& options);

}  // namespace lily::cli
