// What a backend can do and chooses to do: a value that it publishes and forward() reads. Plan never calls a
// backend, and a test may write any policy.
//
// The mechanisms P1-P6 and D1-D7 (docs/architecture.md, "Mechanisms") are fields here. An ablation is the
// same policy with one mechanism off (`without`).
#pragma once

#include <bitset>
#include <cstdint>
#include <limits>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "model/int8_group.h"

namespace lily::plan {

enum class Mechanism : uint8_t { p1, p2, p3, p4, p5, p6, d1, d2, d3, d4, d5, d6, d7 };
inline constexpr int kMechanisms = 13;

// How the delta rule runs over the rows of a chunk. Equal in meaning, not in rounding.
enum class DeltaScan : uint8_t {
  in_registers,  // token by token, state columns held on chip (P4)
  in_blocks,     // WY form in blocks of tokens, matrix products between them
};

enum class AttentionPath : uint8_t {
  general,       // one pass over the cache
  fixed_blocks,  // the cache split in fixed blocks whose partial results are combined in order (D7)
};

enum class MatrixUnit : uint8_t {
  vector,     // no matrix unit (P6's ablation)
  simdgroup,  // 8x8 simdgroup matrices (Metal), mma.sync (CUDA)
  tensor,     // Metal 4 tensor operations, wgmma (CUDA), AMX or BF16 dot products (CPU)
};

// Rows of a tile in the grouped expert GEMM (P3): `large` for experts with at least `large_from` rows, else
// `small`.
struct TileRows {
  int small = 16;
  int large = 32;
  int large_from = 17;
  bool operator==(const TileRows&) const = default;
};

// Which fused ops a phase uses (plan/op.h).
struct Fusions {
  bool norm_linear = false;  // NormLinear before the mixers' and the head's projections
  bool linear_add = false;   // LinearAdd for o_proj and delta_out
  bool norm_router = false;  // NormRouter
  bool router_in_experts =
      false;             // RouterTop inside ExpertsGateUp; with norm_router and gate_up, without groups
  bool gate_up = false;  // D4a: ExpertsGateUp
  bool shared_in_experts = false;  // the shared expert inside ExpertsGateUp and ExpertsDownCombine
  bool down_combine = false;       // D4b: ExpertsDownCombine
  bool qk_prepare = false;         // D4c: QkPrepare
  bool delta_norm = false;         // D4d: DeltaRuleNorm
  bool delta_mixer = false;        // DeltaMixer; implies delta_norm
  bool attention_gate = false;     // GatedAttention
  bool qk_in_attention =
      false;  // QkPrepare inside GatedAttention; decode, with qk_prepare and attention_gate
  bool operator==(const Fusions&) const = default;
};

enum class FloatType : uint8_t { f32, bf16 };

// How keys and values are kept (docs/numerics.md).
enum class KvType : uint8_t {
  f32,
  bf16,
  int8,  // 64 values in 66 bytes: model/int8_group.h
};
inline constexpr int kKvTypes = 3;

inline constexpr int64_t kNever = std::numeric_limits<int64_t>::max();

struct Policy {
  // Numbers between ops. Where docs/numerics.md says fp32, values are fp32 on every backend.
  FloatType activation = FloatType::f32;
  FloatType residual = FloatType::f32;
  KvType kv = KvType::bf16;
  // int8 planes of the activations in products with 4-bit weights: 1 or 2 (CPU; docs/numerics.md, section 2).
  int activation_planes = 2;

  Fusions prefill, decode;
  bool unfuses_prefill =
      true;  // D4's ablation reaches prefill; off where its kernels are not made of simple ops

  // Prefill.
  bool dequantise_in_gemm = true;               // P1; off: ExpandWeight before each expert projection
  bool route_on_device = true;                  // P2; off: ExpertGroups::on_host
  TileRows tile;                                // P3; off: 16 rows always
  int64_t delta_blocks_from_rows = kNever;      // P4: DeltaScan::in_blocks from this many rows on
  int max_chunk_rows = 2048;                    // P5; off: one chunk for the whole prompt
  MatrixUnit matrix_unit = MatrixUnit::vector;  // P6
  int group_experts_from_rows = 9;  // ExpertGroups from this many rows on; below, assignment by assignment

  // Decode.
  bool row_parallel_gemv = true;              // D1; off: the GEMM kernel with one row
  bool tokens_stay_on_device = false;         // D2; off: the id goes to the host and back
  bool concurrent = true;                     // D3; off: a barrier after every op
  bool coalesced_kv = true;                   // D5
  bool pack_query_heads = true;               // D6
  int64_t fixed_blocks_from_context = 32768;  // D7; kNever: always general
  int max_decode_rows = 8;                    // rows (one a sequence) a decode step can take

  // Mechanisms that exist on this backend; the others are 'not applicable'.
  std::bitset<kMechanisms> mechanisms;
  std::bitset<kKvTypes> kv_types{1u << static_cast<unsigned>(KvType::bf16)};  // that this backend has

  bool has(Mechanism m) const { return mechanisms.test(static_cast<size_t>(m)); }
  bool has(KvType type) const { return kv_types.test(static_cast<size_t>(type)); }
  const Fusions& fusions(bool is_decode) const { return is_decode ? decode : prefill; }
};

// The otherwise identical policy without a mechanism, or nothing where the backend does not have it.
std::optional<Policy> without(const Policy& policy, Mechanism mechanism);

// Bytes of n values of K or of V; n is a multiple of 64.
constexpr int64_t kv_bytes(KvType type, int64_t n_values) {
  switch (type) {
    case KvType::f32:
      return 4 * n_values;
    case KvType::bf16:
      return 2 * n_values;
    case KvType::int8:
      break;
  }
  return n_values / model::kInt8Group * model::kInt8GroupBytes;
}
std::string_view name(KvType type);  // "int8"
std::optional<KvType> parse_kv_type(std::string_view name);
std::string kv_type_names(const Policy& policy);  // "f32, bf16, int8": those that it has

std::string_view name(Mechanism mechanism);         // "P1"
std::string_view description(Mechanism mechanism);  // "dequantise inside the grouped GEMM"
// "P1,D3" in any case; throws Error(Fault::user) naming what is not a mechanism.
std::vector<Mechanism> parse_mechanisms(std::string_view list);

}  // namespace lily::plan
