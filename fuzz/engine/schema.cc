// Any JSON is refused with an error of the user or becomes a grammar that can always be completed, whose
// finished texts are JSON, and which is the same after it has forgotten its states. The input is a schema, a
// zero byte, and bytes that choose a way through the grammar.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <vector>

#include "base/error.h"
#include "engine/grammar/call_grammar.h"
#include "engine/grammar/matcher.h"
#include "engine/grammar/schema_compiler.h"
#include "text/json_text.h"

namespace {

using namespace lily;
using namespace lily::engine::grammar;

constexpr SchemaLimits kLimits = {.max_depth = 60,
                                  .max_places = 1000,
                                  .max_nodes = 5000,
                                  .max_dfa_states = 5000,
                                  .max_work = 60'000,
                                  .max_pattern_steps = 500'000};

// Bytes of a text that are looked at, each with all 255 others.
constexpr size_t kMaxSteps = 100;

void walk(const Grammar& grammar, std::string_view choices, bool is_json) {
  Matcher matcher(grammar);
  Matcher::State state = matcher.start();
  std::string text;
  for (const char choice : choices.substr(0, kMaxSteps)) {
    std::vector<uint8_t> possible;
    for (int byte = 0; byte < 256; ++byte)
      if (matcher.next(state, static_cast<uint8_t>(byte)) != Matcher::kDead)
        possible.push_back(static_cast<uint8_t>(byte));
    LILY_CHECK(!possible.empty() || matcher.complete(state), "stuck after {}", text);
    LILY_CHECK(possible.empty() == matcher.finished(state) || !possible.empty(),
               "finished, but more may come");
    if (is_json && matcher.complete(state))
      LILY_CHECK(nlohmann::ordered_json::accept(text), "no JSON: {}", text);
    if (possible.empty()) return;
    const uint8_t byte = possible[static_cast<uint8_t>(choice) % possible.size()];
    text += static_cast<char>(byte);
    state = matcher.next(state, byte);
    if (static_cast<uint8_t>(choice) % 16 == 7) {
      Matcher::State* const kept[] = {&state};
      matcher.forget(kept);
    }
  }
  Matcher fresh(grammar);
  const Matcher::State again = fresh.next(fresh.start(), text);
  LILY_CHECK(again != Matcher::kDead && fresh.complete(again) == matcher.complete(state),
             "forgetting changed {}", text);
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size > 4096) return 0;
  const std::string_view input(reinterpret_cast<const char*>(data), size);
  const size_t end = std::min(input.find('\0'), size);
  const auto schema = text::parse_json(input.substr(0, end));
  if (!schema) return 0;
  const std::string_view choices = input.substr(std::min(end + 1, size));
  try {
    walk(schema_grammar(*schema, "schema", kLimits), choices, true);
  } catch (const Error& error) {
    LILY_CHECK(error.fault() == Fault::user, "{}", error.what());
    LILY_CHECK(std::string_view(error.what()).find_first_of("\n\r") == std::string_view::npos, "{}",
               error.what());
  }
  try {
    nlohmann::ordered_json tool = {{"name", "f"}, {"strict", true}};
    tool["parameters"] = *schema;
    nlohmann::ordered_json tools = nlohmann::ordered_json::array();
    tools.push_back({{"type", "function"}, {"function", std::move(tool)}});
    walk(call_grammar(tools, "", {}, kLimits), choices, false);
  } catch (const Error& error) {
    LILY_CHECK(error.fault() == Fault::user, "{}", error.what());
  }
  return 0;
}
