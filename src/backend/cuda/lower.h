// From ops to kernel launches: one exhaustive switch (lower.cc) over what a step's rows call for. Decode
// rows, one a sequence and at most 8, take the kernels of kernels/*_decode.h; chunks of a prompt those of
// prefill_*.h. Where values must be what the plan says (diff and tests), chunks take the decode kernels too,
// 8 rows at a time, and the mixer's simple ops: slower, and every value is written. What a mechanism's
// ablation takes instead is in lower_ablation.cc.
#pragma once

#include <cstdint>

#include "backend/cuda/buffer.h"
#include "backend/cuda/memory.h"
#include "backend/cuda/step_inputs.h"
#include "backend/cuda/weights.h"
#include "plan/plan.h"

namespace lily::cuda {

struct GroupArgs;

// Scratch beyond the plan's values, sized for the plan's bounds.
struct Extra {
  explicit Extra(const plan::Plan& plan);

  static constexpr int kAttentionRows = 64;            // rows of one attention launch
  DeviceMemory attention_partial, attention_counters;  // counters are zero between launches
  DeviceMemory chunk_max, chunk_id, chunk_sum, sample_weights;
  DeviceMemory normed;                // [rows, hidden] bf16
  DeviceMemory expert_act, expert_y;  // [9 rows, width], [9 rows, hidden] bf16
  DeviceMemory expert_rows, token_of_row, row_weight, row_of_choice, tiles, n_tiles, shared_weight;
  DeviceMemory delta;  // blocks of the delta rule
  // Ablations and kept values only.
  DeviceMemory mixed, delta_q, delta_k, delta_g, delta_beta, delta_o;  // between the simple ops of a mixer
  DeviceMemory expanded;                                               // P1
  PinnedMemory host_groups;                                            // P2
  int n_tiles_bound = 0;
};

struct Run {
  const plan::Plan& plan;
  const Weights& weights;
  const Memory& memory;
  const StepBuffer& step;
  const Extra& extra;
  std::byte* arena;
  cudaStream_t stream;
  int n_sms;
  bool has_wgmma;        // the chip is a Hopper
  bool alone;            // ops run one by one (run_ops): none may leave work to its neighbour
  TokenReport* reports;  // [outputs], where the host waits for chosen tokens; null: it does not

  bool exact_values() const { return alone || plan.options.keep_values; }
  bool decode_rows() const { return step.n_rows() <= 8 && step.one_row_each(); }
  bool chunk() const { return !decode_rows() && !exact_values(); }
  // Products take the GEMM kernels: chunks, and with D1 off single rows as well.
  bool gemm() const { return chunk() || (!plan.policy.row_parallel_gemv && !exact_values()); }
  int rows_of(plan::ValueId value) const {
    return plan.value(value).rows == plan::RowSpace::outputs ? step.n_outputs() : step.n_rows();
  }
  template <typename T>
  T* data(plan::ValueId value) const {
    return reinterpret_cast<T*>(arena + plan.placement[static_cast<size_t>(value)].offset);
  }
  uint16_t* bf16(const plan::View& view) const { return data<uint16_t>(view.value) + view.first_col; }
  int64_t stride(plan::ValueId value) const { return plan.value(value).cols; }
  bool is_f32(plan::ValueId value) const { return plan.value(value).type == plan::Type::f32; }
};

// Launches ops [first, last) in order.
void launch_ops(const Run& run, int first, int last);

// ---- by op, for lower.cc (lower_decode.cc, lower_prefill.cc)
struct LinearSource {
  const void* x;
  int64_t stride;
  bool f32;
  const float* norm;  // null: none
};
void linear_rows(const Run& run, const LinearSource& x, const std::vector<model::WeightId>& weights,
                 plan::ValueId y, int rows);
void linear_add_rows(const Run& run, const plan::LinearAdd& op);
void delta_rows(const Run& run, const plan::DeltaMixer& op);
void qk_prepare_rows(const Run& run, const plan::QkPrepare& op);
// With `prepare`, the fused op in front is done here as well.
void attention_rows(const Run& run, const plan::GatedAttention& op, const plan::QkPrepare* prepare);
void router_rows(const Run& run, const plan::NormRouter& op, bool choose);
// `logits`: the router's, if the kernels are to choose the experts from them.
void gate_up_rows(const Run& run, const plan::ExpertsGateUp& op, const plan::NormRouter* router);
void down_rows(const Run& run, const plan::ExpertsDownCombine& op, const plan::NormRouter* router);
void choose_token(const Run& run, plan::ValueId logits, plan::ValueId token, bool sampled);
void choose_candidates(const Run& run, const plan::TopCandidates& op);

void norm_linear_chunk(const Run& run, const plan::NormLinear& op);
void linear_add_chunk(const Run& run, const plan::LinearAdd& op);
void delta_chunk(const Run& run, const plan::DeltaMixer& op);
void qk_prepare_chunk(const Run& run, const plan::QkPrepare& op);
void attention_chunk(const Run& run, const plan::GatedAttention& op);
void router_chunk(const Run& run, const plan::NormRouter& op);
void gate_up_chunk(const Run& run, const plan::ExpertsGateUp& op);
void down_chunk(const Run& run, const plan::ExpertsDownCombine& op);

// Rows that an expert's tile may have in this step (P3).
int tile_rows(const plan::Policy& policy, const model::Dims& dims, int n_rows);

// ---- lower_ablation.cc
// D1: the head's logits by the GEMM.
void head_chunk(const Run& run, const plan::NormLinear& op);
// P2: group_by_expert_prefill on the host, which waits for the choice.
void group_on_host(const Run& run, const GroupArgs& args);
size_t host_group_bytes(int n_rows, int n_tiles_bound);
// D5, D6, D7; `prepare` as for attention_rows.
bool attention_is_ablated(const Run& run, const plan::GatedAttention& op);
void attention_ablation_rows(const Run& run, const plan::GatedAttention& op, const plan::QkPrepare* prepare);
// D4: one kernel an op. DeltaMixer as the four ops that it stands for.
void unfused_delta_mixer(const Run& run, const plan::DeltaMixer& op);
void unfused(const Run& run, const plan::Linear& op);
void unfused(const Run& run, const plan::SwiGlu& op);
void unfused(const Run& run, const plan::ExpertsLinear& op);
void unfused(const Run& run, const plan::ExpertsCombine& op);
void unfused(const Run& run, const plan::ShortConv& op);
void unfused(const Run& run, const plan::DeltaPrepare& op);
void unfused(const Run& run, const plan::DeltaRule& op);
void unfused(const Run& run, const plan::GatedNorm& op);
void unfused(const Run& run, const plan::HeadNormRope& op);
void unfused(const Run& run, const plan::KvAppend& op);

}  // namespace lily::cuda
