// The input is config.json; with a zero byte in it, generation_config.json follows. What is accepted keeps
// the promises that the rest of the program builds on.
#include <cstddef>
#include <cstdint>
#include <string_view>

#include "base/error.h"
#include "model/config.h"
#include "model/weight.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace lily;
  using namespace lily::model;
  const std::string_view input(reinterpret_cast<const char*>(data), size);
  const size_t split = input.find('\0');
  try {
    const Config config =
        parse_config(input.substr(0, split),
                     split == std::string_view::npos ? std::string_view() : input.substr(split + 1));
    const Dims& dims = config.dims;
    LILY_CHECK(dims.n_layers >= 1 && dims.n_layers <= 1024 && dims.n_experts >= kExpertsPerToken);
    LILY_CHECK(dims.n_q_heads % dims.n_kv_heads == 0 &&
               dims.n_value_heads == kValueHeadsPerKey * dims.n_key_heads);
    for (const WeightSpec& spec : catalogue(dims)) {
      LILY_CHECK(spec.n_elements() > 0 && storage_bytes(spec.n_elements(), Storage::f32) > 0, "{}",
                 spec.name);
      LILY_CHECK(!spec.quantisable || spec.shape.back() % kQuantGroup == 0, "{}", spec.name);
    }
    for (const int32_t id : config.stop_ids) LILY_CHECK(id >= 0 && id < dims.vocab);
    LILY_CHECK(config.sampling.temperature >= 0 && config.sampling.top_k >= 0 && config.sampling.top_p <= 1);
    for (const auto& [path, rule] : config.quantisation.overrides)
      LILY_CHECK(rule.bits >= 1 && rule.bits <= 32 && rule.group_size >= 1, "{}", path);
  } catch (const Error& error) {
    LILY_CHECK(std::string_view(error.what()).find('\n') == std::string_view::npos);
  }
  return 0;
}
