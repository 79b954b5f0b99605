// The vocabulary of a plan: typed ops over values, weights and state. An op says what is computed; grids,
// tiles and instruction streams are the backend's business (its lower.cc).
//
// Equations (n) are those of docs/numerics.md. Every operand a kernel may touch is a field of its op and
// reported by uses() (plan/uses.h): nothing reaches a kernel by another way. Fused ops are defined by
// expand() (plan/expand.h) as the simple ops they stand for.
//
// Nothing here depends on the step: positions, token ids, sequences, slots and block tables are read on the
// device from StepInputs (backend/backend.h). Row counts in a plan are bounds; the actual ones come with the
// step.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <variant>
#include <vector>

#include "model/dims.h"
#include "model/weight.h"
#include "plan/policy.h"

namespace lily::plan {

using model::Weight;
using model::WeightId;

// ---- Values: scratch tensors that live for one step
// ---------------------------------------------------------------

enum class ValueId : int32_t {};
inline constexpr ValueId kNoValue{-1};

// What a value has one row of; the count is known per step (see rows_bound in plan/plan.h).
enum class RowSpace : uint8_t {
  tokens,   // rows of the step
  routed,   // kExpertsPerToken assignments a row
  outputs,  // rows whose logits are wanted
  experts,  // n_experts + 1
  blocks,   // entries of the block map
  matrix,   // rows of an expanded weight (n_matrices * out): P1's ablation only
  one,
};

enum class Type : uint8_t { f32, bf16, i32 };
int type_bytes(Type type);

struct Value {
  std::string name;  // "layers.3.router_logits"; unique in a plan, the name `lily diff` prints
  RowSpace rows = RowSpace::tokens;
  int64_t n_matrix_rows = 0;  // for RowSpace::matrix
  int64_t cols = 0;
  Type type = Type::f32;
};

// Columns [first_col, first_col + n_cols) of a value, all rows; the row stride is the value's cols.
struct View {
  ValueId value = kNoValue;
  int64_t first_col = 0;
  int64_t n_cols = 0;
};

// ---- Simple ops
// --------------------------------------------------------------------------------------------------- T =
// rows of the step, A = T * 8 assignments, O = output rows, H = hidden. Shapes are [rows, columns].

// (1) y[t] = row token[t] of the embedding, dequantised. A token of kTokenFromSlot is read from the segment's
// token slot.
struct Embed {
  ValueId y;  // [T, H]
};

// (2) y = x / sqrt(mean(x^2) + eps) * w.
struct RmsNorm {
  WeightId weight;
  ValueId x, y;  // [T or O, H]
};

// y = x * W^T for one weight or several whose output rows follow one another in y.
struct Linear {
  std::vector<WeightId> weights;
  View x;     // [T or O, in]
  ValueId y;  // [T or O, sum of out]
};

// residual_out = residual_in + x. The two may be the same value.
struct Add {
  ValueId x, residual_in, residual_out;  // [T, H]
};

// (14) causal convolution over kConvTaps tokens of each sequence, then SiLU. Reads conv state `src` (the last
// 3 rows of x before this step, zeros where src is kNoSlot) and writes conv state `dst`.
struct ShortConv {
  int layer;
  View x;     // [T, conv_channels], before convolution
  ValueId y;  // [T, conv_channels]: q heads, k heads, v heads
};

// (16) (18) q = l2norm(q) / sqrt(128), k = l2norm(k); log decay g = -exp(A_log) softplus(a + dt_bias), beta =
// sigmoid(b).
struct DeltaPrepare {
  int layer;
  View q_in, k_in;  // [T, key_width], columns of ShortConv's y
  View b, a;        // [T, n_value_heads]
  ValueId q, k;     // [T, key_width] f32
  ValueId g, beta;  // [T, n_value_heads] f32
};

// (19) the recurrence, token by token in meaning, whatever the scan. Reads delta state `src`, writes `dst`.
struct DeltaRule {
  int layer;
  DeltaScan scan;
  ValueId q, k;     // [T, key_width] f32
  View v;           // [T, value_width], columns of ShortConv's y
  ValueId g, beta;  // [T, n_value_heads] f32
  ValueId o;        // [T, value_width] f32
};

// (20) y = RMSNorm over each value head's 128 values * w * silu(z).
struct GatedNorm {
  int layer;
  ValueId o;  // [T, value_width] f32
  View z;     // [T, value_width]
  ValueId y;  // [T, value_width]
};

// (7) (8) RMSNorm of each head, then rotation of its first 64 values by the row's position.
struct HeadNormRope {
  WeightId weight;      // q_norm or k_norm
  View x;               // [T, n_heads * head_stride]: head h stands at h * head_stride
  int64_t head_stride;  // 512 where q is followed by its gate, else 256
  ValueId y;            // [T, n_heads * 256]
};

// (10) writes k and v of each row at its position into the sequence's KV blocks.
struct KvAppend {
  int layer;
  ValueId k;  // [T, kv_width], after norm and rotation
  View v;     // [T, kv_width]
};

// (11) causal attention of each row over its own sequence's KV, positions 0 .. its own.
struct Attention {
  int layer;
  AttentionPath path;
  ValueId q;  // [T, q_width]
  ValueId o;  // [T, q_width]
};

// (12) y = o * sigmoid(gate), without the projection.
struct AttentionGate {
  ValueId o;  // [T, q_width]
  View gate;  // q_proj's output [T, q_gate_width]: head h's gate at h * 512 + 256
  ValueId y;  // [T, q_width]
};

// (22) (23) softmax over all experts, the 8 largest (larger p, then lower index), renormalised; falling
// weight order.
struct RouterTop {
  View logits;      // [T, n_experts] f32
  ValueId ids;      // [T, 8] i32
  ValueId weights;  // [T, 8] f32
};

// Groups assignments by expert (P2): histogram, scan, scatter, block map. Assignment a = t * 8 + j.
struct ExpertGroups {
  TileRows tile;
  bool on_host;     // P2's ablation: the CPU waits, groups, and submits the rest
  ValueId ids;      // [T, 8] i32
  ValueId offsets;  // [E + 1, 1] i32: first grouped position of each expert, then A
  ValueId
      order;  // [A, 1] i32: the assignment at each grouped position; within an expert by rising assignment
  ValueId position;  // [A, 1] i32: the grouped position of each assignment
  ValueId
      blocks;  // [blocks, 4] i32: expert, first grouped position, rows in the block, 0; heavy experts first
  ValueId n_blocks;  // [1, 4] i32: blocks in use, 1, 1, 0 (arguments of an indirect dispatch)
};

// What the expert ops share. Without groups, row a of an expert value is assignment a of the token order;
// with groups, rows stand in grouped order.
struct Routing {
  ValueId ids = kNoValue;      // [T, 8] i32
  ValueId offsets = kNoValue;  // the fields of ExpertGroups, all kNoValue without groups
  ValueId order = kNoValue;
  ValueId position = kNoValue;
  ValueId blocks = kNoValue;
  ValueId n_blocks = kNoValue;
  bool grouped() const { return offsets != kNoValue; }
};

// P1's ablation: the expert weight as bf16 in memory.
struct ExpandWeight {
  WeightId weight;
  ValueId y;  // [n_experts * out, in] bf16
};

// (24) one projection of the routed experts: y[row] = x[source row] * W_e^T. For expert_gate and expert_up
// the source is the token's row of x; for expert_down it is the same routed row.
struct ExpertsLinear {
  WeightId weight;
  Routing routing;
  ValueId x;                    // [T, H], or [A, expert_width] for expert_down
  ValueId y;                    // [A, expert_width], or [A, H]
  ValueId expanded = kNoValue;  // ExpandWeight's y, where P1 is off
};

// y = silu(gate) * up.
struct SwiGlu {
  View gate, up;  // [rows, width]
  ValueId y;      // [rows, width]
};

// (26) residual_out = residual_in + sum over j of weight_j * expert row + sigmoid(shared gate logit) *
// shared. The sum runs over j = 0 .. 7, then the shared expert, in fp32.
struct ExpertsCombine {
  Routing routing;
  ValueId weights;                    // [T, 8] f32
  ValueId experts;                    // [A, H]
  ValueId shared;                     // [T, H]
  View shared_gate;                   // [T, 1] logit
  ValueId residual_in, residual_out;  // [T, H]
};

// y[o] = x[output_rows[o]].
struct GatherRows {
  ValueId x;  // [T, H]
  ValueId y;  // [O, H]
};

// What a step ends in. Padding rows of the vocabulary (ids >= StepInputs::n_tokens) are masked before any
// choice.
struct GreedyToken {
  ValueId logits;  // [O, vocab] f32
  ValueId token;   // [O, 1] i32, also written to the segment's token slot; lowest id on ties
};
struct SampleToken {  // model: temperature, top-k, top-p, min-p, one draw (docs/numerics.md, "Sampling")
  ValueId logits;
  ValueId token;  // as GreedyToken
};
struct TopCandidates {
  int n_candidates;
  ValueId logits;     // [O, vocab] f32
  ValueId ids;        // [O, n_candidates] i32, by falling logit, then rising id
  ValueId values;     // [O, n_candidates] f32 logits
  ValueId logsumexp;  // [O, 1] f32 over all real tokens
};

// ---- Fused ops
// ----------------------------------------------------------------------------------------------------

// RmsNorm, then Linear; the normalised row is not kept.
struct NormLinear {
  WeightId norm;
  std::vector<WeightId> weights;
  ValueId x;  // [T or O, H]
  ValueId y;
};

// Linear, then Add.
struct LinearAdd {
  WeightId weight;
  ValueId x;                          // [T, in]
  ValueId residual_in, residual_out;  // [T, H]
};

// D4d: DeltaRule, then GatedNorm; o is not kept.
struct DeltaRuleNorm {
  int layer;
  DeltaScan scan;
  ValueId q, k;
  View v;
  ValueId g, beta;
  View z;
  ValueId y;  // [T, value_width]
};

// The whole mixer between its projections: ShortConv, DeltaPrepare, DeltaRule, GatedNorm.
struct DeltaMixer {
  int layer;
  DeltaScan scan;
  View qkv;   // [T, conv_channels], before convolution
  View z;     // [T, value_width]
  View b, a;  // [T, n_value_heads]
  ValueId y;  // [T, value_width]
};

// D4c: HeadNormRope of q, HeadNormRope of k, KvAppend.
struct QkPrepare {
  int layer;
  View q_gate;  // [T, q_gate_width]
  View k, v;    // [T, kv_width]
  ValueId q;    // [T, q_width]
};

// Attention, then AttentionGate.
// With k and v: QkPrepare of gate, k and v, then the same; q is not kept. For steps of one row a sequence.
struct GatedAttention {
  int layer;
  AttentionPath path;
  ValueId q;  // kNoValue with k and v
  View gate;
  ValueId y;  // [T, q_width]
  View k{kNoValue, 0, 0}, v{kNoValue, 0, 0};
  bool prepares() const { return k.value != kNoValue; }
};

// The router from the residual: RmsNorm (its result is kept, experts read it), Linear of router and shared
// gate, RouterTop unless ids is kNoValue (then ExpertsGateUp does that).
struct NormRouter {
  int layer;
  ValueId x;       // [T, H]
  ValueId normed;  // [T, H]
  ValueId logits;  // [T, n_experts + 1] f32: router, then the shared gate
  ValueId ids, weights;
};

// D4a: ExpertsLinear of gate and up, then SwiGlu; with `shared`, also the shared expert's gate, up and
// SwiGlu; with `router`, RouterTop of these logits comes first and writes routing.ids and weights.
struct ExpertsGateUp {
  int layer;
  Routing routing;
  ValueId x;                  // [T, H]
  ValueId y;                  // [A, expert_width]
  ValueId shared = kNoValue;  // [T, shared_width]
  ValueId expanded_gate = kNoValue, expanded_up = kNoValue;
  View router{kNoValue, 0, 0};
  ValueId weights = kNoValue;  // [T, 8] f32, with router
  bool routes() const { return router.value != kNoValue; }
};

// D4b: ExpertsLinear of down, then ExpertsCombine. `shared` is the shared expert's [T, shared_width] before
// its down projection if `shared_down`, else its [T, H] result.
struct ExpertsDownCombine {
  int layer;
  Routing routing;
  ValueId x;        // [A, expert_width]
  ValueId weights;  // [T, 8] f32
  ValueId shared;
  bool shared_down;
  View shared_gate;
  ValueId residual_in, residual_out;
  ValueId expanded = kNoValue;
};

using Op = std::variant<
    // simple
    Embed, RmsNorm, Linear, Add, ShortConv, DeltaPrepare, DeltaRule, GatedNorm, HeadNormRope, KvAppend,
    Attention, AttentionGate, RouterTop, ExpertGroups, ExpandWeight, ExpertsLinear, SwiGlu, ExpertsCombine,
    GatherRows, GreedyToken, SampleToken, TopCandidates,
    // fused
    NormLinear, LinearAdd, DeltaRuleNorm, DeltaMixer, QkPrepare, GatedAttention, NormRouter, ExpertsGateUp,
    ExpertsDownCombine>;

const char* kind_name(const Op& op);  // "experts_gate_up"

// std::visit with one lambda a kind; a kind without a lambda does not compile.
template <typename... F>
struct overloaded : F... {
  using F::operator()...;
};
template <typename... F>
overloaded(F...) -> overloaded<F...>;

}  // namespace lily::plan
