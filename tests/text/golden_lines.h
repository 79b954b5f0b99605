// Reads golden files of JSON lines.
#pragma once

#include <fstream>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

namespace lily::text {

// The objects of a JSON-lines file, in order; lines that are not one are counted and left out. One line of
// lily-tiny/tokenizer.jsonl is such: it held U+2028, which a tool took for a line end (the test has that text
// itself).
struct GoldenLines {
  std::vector<nlohmann::ordered_json> rows;
  int n_damaged = 0;
};

inline GoldenLines read_golden(const std::string& path) {
  GoldenLines out;
  std::ifstream in(path);
  for (std::string line; std::getline(in, line);) {
    auto row = nlohmann::ordered_json::parse(line, nullptr, false);
    if (row.is_object()) out.rows.push_back(std::move(row));
    else ++out.n_damaged;
  }
  return out;
}

}  // namespace lily::text
