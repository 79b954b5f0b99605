#include "engine/goldens.h"

#include <nlohmann/json.hpp>
#include <sstream>

#include "base/error.h"
#include "base/file.h"
#include "engine/npz.h"

namespace lily::engine {
namespace {

constexpr uint64_t kMaxGoldenTextBytes = uint64_t{256} << 20;

void check_id(int64_t id, size_t i, int32_t n_tokens, const std::string& what, const char* name) {
  if (id < 0 || id >= n_tokens)
    fail(Fault::model, "{}: {}[{}] is {}; ids go from 0 to {}; are these goldens of this model?", what, name,
         i, id, n_tokens - 1);
}

std::vector<int32_t> parse_ids(const nlohmann::json& json, const char* name, int32_t n_tokens,
                               const std::string& what) {
  std::vector<int32_t> ids;
  for (const int64_t id : json.at(name).get<std::vector<int64_t>>()) {
    check_id(id, ids.size(), n_tokens, what, name);
    ids.push_back(static_cast<int32_t>(id));
  }
  return ids;
}

GoldenPrompt parse_prompt(const nlohmann::json& json, int32_t n_tokens, const std::string& what) {
  GoldenPrompt p{.task = json.value("task", ""),
                 .prompt = parse_ids(json, "prompt_ids", n_tokens, what),
                 .output = parse_ids(json, "output_ids", n_tokens, what),
                 .margins = json.at("margins").get<std::vector<float>>()};
  if (p.prompt.empty() || p.output.empty() || p.output.size() != p.margins.size())
    fail(Fault::model, "{}: {} prompt ids, {} output ids and {} margins", what, p.prompt.size(),
         p.output.size(), p.margins.size());
  return p;
}

// JSON errors become ours, which name the file.
template <typename F>
auto reading(const std::string& what, F&& read) {
  try {
    return read();
  } catch (const nlohmann::json::exception& e) {
    fail(Fault::model, "{}: {}", what, e.what());
  }
}

GoldenForced read_forced(const std::filesystem::path& path, int32_t n_tokens) {
  const auto arrays = read_npz(path);
  const auto get = [&](const char* name) -> const NpyArray& {
    const auto found = arrays.find(name);
    if (found == arrays.end()) fail(Fault::model, "{}: no array '{}'", path.string(), name);
    return found->second;
  };
  GoldenForced g{.ids = get("ids").ints(),
                 .positions = get("positions").ints(),
                 .top_ids = get("top_ids").ints(),
                 .top_logits = get("top_logits").floats(),
                 .nll = get("nll").floats()};
  if (get("perplexity").data.size() != 1)
    fail(Fault::model, "{}: 'perplexity' is not one number", path.string());
  g.perplexity = get("perplexity").data[0];
  const size_t n = g.ids.size(), m = g.positions.size();
  if (n < 2 || m == 0 || g.nll.size() != n - 1 || g.top_ids.size() != g.top_logits.size() ||
      g.top_ids.empty() || g.top_ids.size() % m != 0)
    fail(Fault::model, "{}: {} ids, {} likelihoods, {} positions, {} and {} top values do not fit together",
         path.string(), n, g.nll.size(), m, g.top_ids.size(), g.top_logits.size());
  for (size_t i = 0; i < m; ++i)
    if (g.positions[i] < (i == 0 ? 0 : g.positions[i - 1] + 1) ||
        g.positions[i] >= static_cast<int32_t>(n) - 1)
      fail(Fault::model, "{}: position {} is {}; they must rise and stay below {}", path.string(), i,
           g.positions[i], n - 1);
  for (size_t i = 0; i < n; ++i) check_id(g.ids[i], i, n_tokens, path.string(), "ids");
  for (size_t i = 0; i < g.top_ids.size(); ++i) check_id(g.top_ids[i], i, n_tokens, path.string(), "top_ids");
  g.n_top = static_cast<int>(g.top_ids.size() / m);
  return g;
}

}  // namespace

Goldens load_goldens(const std::filesystem::path& folder, int32_t n_tokens) {
  Goldens goldens;
  bool any = false;
  const auto has = [&](const char* name) {
    const bool found = std::filesystem::is_regular_file(folder / name);
    any = any || found;
    return found;
  };
  if (has("prompts.jsonl")) {
    std::istringstream lines(read_text_file(folder / "prompts.jsonl", kMaxGoldenTextBytes));
    std::string line;
    for (int n = 1; std::getline(lines, line); ++n) {
      const std::string what = fmt::format("{}:{}", (folder / "prompts.jsonl").string(), n);
      goldens.prompts.push_back(
          reading(what, [&] { return parse_prompt(nlohmann::json::parse(line), n_tokens, what); }));
    }
  }
  if (has("teacher_forced.npz")) goldens.forced = read_forced(folder / "teacher_forced.npz", n_tokens);
  if (has("long.json")) {
    const std::string what = (folder / "long.json").string();
    reading(what, [&] {
      const auto json = nlohmann::json::parse(read_text_file(folder / "long.json", kMaxGoldenTextBytes));
      goldens.long_prompt = parse_prompt(json, n_tokens, what);
      goldens.long_last_nll = json.value("last64_nll", std::vector<float>());
      return 0;
    });
  }
  if (!any)
    fail(Fault::user, "{}: none of prompts.jsonl, teacher_forced.npz and long.json is there",
         folder.string());
  return goldens;
}

}  // namespace lily::engine
