// Parts that the lowering of several ops is made of.
#pragma once

#include <optional>
#include <vector>

#include "backend/cpu/lower.h"

namespace lily::backend::cpu {

inline plan::View whole(const LowerContext& c, plan::ValueId id) { return {id, 0, c.plan.value(id).cols}; }

// Activation rows of linear layers: normalised if asked for, and quantised if one of the weights is. Few rows
// are prepared by every thread for itself, which costs less than a barrier; many by all threads together, in
// a phase of their own that add_phase() appends.
class PreparedRows {
 public:
  // Rows of x, `cols` of them from first_col on. With `norm`, x is normalised first; all_rows_kept is where
  // to, else nowhere that others see. n_planes is what the weights need (planes_of).
  PreparedRows(const LowerContext& context, Lowered& op, plan::View x, std::optional<plan::WeightId> norm,
               int n_planes, plan::ValueId normed_copy = plan::kNoValue);

  // Appends the phase, if there is one.
  void add_phase(Lowered& op) const;
  // For the phase that reads the rows: does nothing where add_phase() did the work.
  std::function<void(const Step&, Worker&)> prepare() const;
  InputRows rows(const Step& step, const Worker& worker) const;
  // Writes normed_copy where add_phase() did not, from the phase that reads the rows; once for all rows.
  void keep_normed_rows(const Step& step, const Worker& worker) const;

 private:
  std::byte* base(const Step& step, const Worker& worker) const;
  void fill(const Step& step, const Worker& worker, int64_t row) const;
  void keep_normed(const Step& step, const Worker& worker, int64_t row) const;

  plan::View x_;
  const float* norm_ = nullptr;  // [cols]
  int n_planes_ = 0;             // 0: not quantised
  bool keep_rest_ = false;       // full precision: KV in fp32 was asked for (kernels/quantise.h)
  bool in_worker_ = false;
  plan::ValueId normed_copy_ = plan::kNoValue;
  int64_t rows_bound_ = 0;
  int64_t offset_ = 0;            // of the normalised rows, in the op's extra or the worker's scratch memory
  int64_t quantised_offset_ = 0;  // likewise
  int64_t rest_offset_ = 0;       // likewise
  int64_t matrix_offset_ = -1;    // of the matrix unit's memory in the worker's; -1: it is not used
};

// Some tiles of a weight.
struct TileRange {
  TileMatrix w;
  int64_t first_col = 0;  // of the weight's output in the result
  int64_t begin = 0, end = 0;
};

// All tiles of weights whose outputs follow one another, in pieces of a size that threads can share out.
std::vector<TileRange> tile_ranges(const LowerContext& context, const std::vector<TileMatrix>& weights);
int64_t tiles_per_unit(const LowerContext& context, const TileMatrix& w);

std::vector<TileMatrix> matrices(const LowerContext& context, const std::vector<plan::WeightId>& ids);
// The planes of activations for products with these weights: 0 without a quantised one, else the policy's. A
// weight of 8 bits, as the router's is, takes two always: what is chosen by it is not rounded further.
int planes_of(const LowerContext& context, const std::vector<TileMatrix>& weights);

// y = rows * W^T (+ residual) as a phase.
void add_linear_phase(Lowered& op, const LowerContext& context, const std::vector<TileMatrix>& weights,
                      const PreparedRows& rows, plan::ValueId row_space, plan::ValueId y,
                      plan::ValueId residual = plan::kNoValue);

// A phase with one unit for each row of a value.
void add_row_phase(Lowered& op, plan::ValueId row_space,
                   std::function<void(const Step&, Worker&, int64_t row)> run);

// Reserves bytes, 64-byte aligned; returns their offset.
int64_t reserve_extra(const LowerContext& context, Lowered& op, int64_t bytes);  // for Step::extra
int64_t reserve_worker(Lowered& op, int64_t bytes);                              // in Worker::scratch

// Families of ops, one file each.
Lowered lower_op(const plan::Linear& o, const LowerContext& c);
Lowered lower_op(const plan::NormLinear& o, const LowerContext& c);
Lowered lower_op(const plan::LinearAdd& o, const LowerContext& c);

Lowered lower_op(const plan::Embed& o, const LowerContext& c);
Lowered lower_op(const plan::RmsNorm& o, const LowerContext& c);
Lowered lower_op(const plan::Add& o, const LowerContext& c);
Lowered lower_op(const plan::SwiGlu& o, const LowerContext& c);
Lowered lower_op(const plan::GatherRows& o, const LowerContext& c);
Lowered lower_op(const plan::GreedyToken& o, const LowerContext& c);
Lowered lower_op(const plan::SampleToken& o, const LowerContext& c);
Lowered lower_op(const plan::TopCandidates& o, const LowerContext& c);

Lowered lower_op(const plan::ShortConv& o, const LowerContext& c);
Lowered lower_op(const plan::DeltaPrepare& o, const LowerContext& c);
Lowered lower_op(const plan::DeltaRule& o, const LowerContext& c);
Lowered lower_op(const plan::GatedNorm& o, const LowerContext& c);
Lowered lower_op(const plan::DeltaRuleNorm& o, const LowerContext& c);
Lowered lower_op(const plan::DeltaMixer& o, const LowerContext& c);

Lowered lower_op(const plan::HeadNormRope& o, const LowerContext& c);
Lowered lower_op(const plan::KvAppend& o, const LowerContext& c);
Lowered lower_op(const plan::Attention& o, const LowerContext& c);
Lowered lower_op(const plan::AttentionGate& o, const LowerContext& c);
Lowered lower_op(const plan::QkPrepare& o, const LowerContext& c);
Lowered lower_op(const plan::GatedAttention& o, const LowerContext& c);

Lowered lower_op(const plan::RouterTop& o, const LowerContext& c);
Lowered lower_op(const plan::NormRouter& o, const LowerContext& c);
Lowered lower_op(const plan::ExpertGroups& o, const LowerContext& c);
Lowered lower_op(const plan::ExpandWeight& o, const LowerContext& c);
Lowered lower_op(const plan::ExpertsLinear& o, const LowerContext& c);
Lowered lower_op(const plan::ExpertsCombine& o, const LowerContext& c);
Lowered lower_op(const plan::ExpertsGateUp& o, const LowerContext& c);
Lowered lower_op(const plan::ExpertsDownCombine& o, const LowerContext& c);

}  // namespace lily::backend::cpu
