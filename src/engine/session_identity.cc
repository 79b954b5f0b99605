#include "engine/session_identity.h"

#include <filesystem>

#include <fmt/format.h>

#include "base/file.h"
#include "base/sha256.h"

namespace lily::engine {
namespace {

constexpr uint64_t kMaxFileBytes = uint64_t{1} << 30;

std::string digest_of(const std::filesystem::path& path) {
  std::error_code ignored;
  return std::filesystem::exists(path, ignored) ? sha256_hex(read_text_file(path, kMaxFileBytes)) : "none";
}

// What of a device decides bits, beside the policy: the number of threads in its name does not.
std::string arithmetic_of(const backend::DeviceInfo& device) {
  if (device.backend == "reference") return "scalar";
  if (!device.backend.starts_with("cpu")) return device.name;
  return device.name.substr(device.name.rfind(", ") + 1);  // "processor, threads, instruction set"
}

// Every value of a policy as text. The bindings do not compile when a field is added: it belongs here too.
std::string fingerprint(const plan::Policy& policy) {
  const auto fusions = [](const plan::Fusions& f) {
    const auto& [norm_linear, linear_add, norm_router, router_in_experts, gate_up, shared, down_combine,
                 qk_prepare, delta_norm, delta_mixer, attention_gate, qk_in_attention] = f;
    return fmt::format("{:d}{:d}{:d}{:d}{:d}{:d}{:d}{:d}{:d}{:d}{:d}{:d}", norm_linear, linear_add,
                       norm_router, router_in_experts, gate_up, shared, down_combine, qk_prepare, delta_norm,
                       delta_mixer, attention_gate, qk_in_attention);
  };
  const auto& [activation, residual, kv, activation_planes, prefill, decode, unfuses_prefill,
               dequantise_in_gemm, route_on_device, tile, delta_blocks_from_rows, max_chunk_rows, matrix_unit,
               group_experts_from_rows, row_parallel_gemv, tokens_stay_on_device, concurrent, coalesced_kv,
               pack_query_heads, fixed_blocks_from_context, max_decode_rows, mechanisms, kv_types] = policy;
  return fmt::format("{} {} {} {} {} {} {:d}{:d}{:d} {}/{}/{} {} {} {} {} {:d}{:d}{:d}{:d}{:d} {} {} {} {}",
                     static_cast<int>(activation), static_cast<int>(residual), static_cast<int>(kv),
                     activation_planes, fusions(prefill), fusions(decode), unfuses_prefill,
                     dequantise_in_gemm, route_on_device, tile.small, tile.large, tile.large_from,
                     delta_blocks_from_rows, max_chunk_rows, static_cast<int>(matrix_unit),
                     group_experts_from_rows, row_parallel_gemv, tokens_stay_on_device, concurrent,
                     coalesced_kv, pack_query_heads, fixed_blocks_from_context, max_decode_rows,
                     mechanisms.to_string(), kv_types.to_string());
}

}  // namespace

std::string session_identity(const model::Checkpoint& checkpoint, const backend::DeviceInfo& device,
                             const plan::Policy& policy, const std::string& build) {
  std::string text = "build " + build + "\ncheckpoint " + checkpoint.id();
  for (const char* const file : {"tokenizer.json", "tokenizer_config.json", "chat_template.jinja"})
    text += fmt::format("\n{} {}", file, digest_of(checkpoint.folder() / file));
  text += fmt::format("\nbackend {} {}", device.backend, arithmetic_of(device));
  text += "\npolicy " + fingerprint(policy);
  return sha256_hex(text);
}

}  // namespace lily::engine
