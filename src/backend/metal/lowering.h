// The state of lowering one plan: the dispatch under construction, and one function an op.
#pragma once

#include <string>
#include <vector>

#include "backend/metal/kernels/params.h"
#include "backend/metal/lower.h"

namespace lily::metal {

class Lowering {
 public:
  Lowering(const plan::Plan& plan, const Lowered& lowered, StorageOf storage)
      : plan_(plan), lowered_(lowered), storage_(std::move(storage)) {}

  void begin_stage() { work_used_ = 0; }
  LoweredOp op(const plan::Op& op);
  int64_t work_bytes() const { return work_bytes_; }

 private:
  using Count = Extent::Count;
  using Kind = Access::Kind;

  // ---- The dispatch under construction
  Dispatch& begin(std::string kernel, std::array<Extent, 3> grid, Size3 threads);
  void arg(int index, Place place, Kind access = Kind::read);
  void read(int index, plan::ValueId id) { arg(index, place_of(plan_, lowered_, id)); }
  void write(int index, plan::ValueId id) { arg(index, place_of(plan_, lowered_, id), Kind::write); }
  void weight(int index, model::WeightId id) { arg(index, {.kind = Place::Kind::weight, .weight = id}); }
  void weight(int index, model::Weight kind, int layer) { weight(index, model::WeightId{kind, layer}); }
  void state(int index, Place::Kind kind, int layer, Kind access) {
    arg(index, {.kind = kind, .layer = layer}, access);
  }
  void step(int index, Place::Part part) { arg(index, {.kind = Place::Kind::step, .part = part}); }
  void header() { step(kHeaderIndex, Place::Part::header); }
  void rows() { step(kRowsIndex, Place::Part::rows); }
  void segments() { step(kSegmentsIndex, Place::Part::segments); }
  void rows_of_sequences();  // segments, rows and header
  void rows_and_blocks();    // and the block table
  template <typename T>
  void params(const T& value) {
    static_assert(std::is_trivially_copyable_v<T>);
    std::vector<std::byte>& to = op_.dispatches.back().params;
    to.resize(sizeof(T));
    std::memcpy(to.data(), &value, sizeof(T));
  }
  void next_phase() {
    ++phase_;
    op_.n_phases = phase_ + 1;
  }
  Place work(int64_t bytes);

  // ---- Facts
  const model::Dims& dims() const { return plan_.dims; }
  WeightLayout layout(model::WeightId id) const { return weight_layout(plan_.dims, id, storage_(id)); }
  int bits(model::WeightId id) const { return code_bits(layout(id).storage); }
  uint32_t cols(plan::ValueId id) const { return static_cast<uint32_t>(plan_.value(id).cols); }
  bool of_outputs(plan::ValueId id) const { return plan_.value(id).rows == plan::RowSpace::outputs; }
  Count count_of(plan::ValueId id) const;
  bool is_few(plan::ValueId rows_of) const;  // at most kFewRows rows: the decode kernels
  kernels::DeltaParams delta_params() const;
  kernels::HeadParams head_params() const;
  std::string of_cache(std::string kernel) const;  // the kernel for the policy's type of KV cache
  kernels::ExpertsParams experts_params(model::WeightId weight) const;

  // ---- Ops. lower_linear.cc
  struct Product {  // one or several weights on rows of x
    std::vector<model::WeightId> weights;
    plan::View x;
    plan::ValueId y, residual = plan::kNoValue;
    model::WeightId norm{};
    bool has_norm = false;
  };
  void product(const Product& product);
  void gemv(const Product& product);
  void gemm(const Product& product, const Place& x, kernels::LinearParams params);
  void rms_norm(model::WeightId weight, plan::ValueId x, const Place& y);
  void each_element(const std::string& kernel, plan::ValueId like, const kernels::RowsParams& params);
  void lower(const plan::Embed&);
  void lower(const plan::RmsNorm&);
  void lower(const plan::Linear&);
  void lower(const plan::Add&);
  void lower(const plan::SwiGlu&);
  void lower(const plan::GatherRows&);
  void lower(const plan::NormLinear&);
  void lower(const plan::LinearAdd&);
  // lower_mixers.cc
  template <typename Rule>
  kernels::DeltaParams delta_rule(const Rule& rule, plan::ValueId y);
  void lower(const plan::ShortConv&);
  void lower(const plan::DeltaPrepare&);
  void lower(const plan::DeltaRule&);
  void lower(const plan::GatedNorm&);
  void lower(const plan::DeltaRuleNorm&);
  void lower(const plan::DeltaMixer&);
  void lower(const plan::HeadNormRope&);
  void lower(const plan::KvAppend&);
  void lower(const plan::QkPrepare&);
  void attention(int layer, plan::AttentionPath path, plan::ValueId q, const plan::GatedAttention* gated,
                 plan::ValueId y);
  void lower(const plan::Attention&);
  void lower(const plan::AttentionGate&);
  void lower(const plan::GatedAttention&);
  // lower_experts.cc
  void router_top(const plan::View& logits, plan::ValueId ids, plan::ValueId weights);
  void lower(const plan::RouterTop&);
  void lower(const plan::NormRouter&);
  void lower(const plan::ExpertGroups&);
  void lower(const plan::ExpandWeight&);
  void lower(const plan::ExpertsLinear&);
  void lower(const plan::ExpertsCombine&);
  void lower(const plan::ExpertsGateUp&);
  void lower(const plan::ExpertsDownCombine&);
  std::string grouped_kernel(const std::string& name, int bits) const;
  // lower_head.cc
  Place ranked(plan::ValueId logits, uint32_t n_kept, Place& sums, uint32_t& n_chunks);
  void endings(kernels::VocabularyParams params);
  void lower(const plan::GreedyToken&);
  void lower(const plan::SampleToken&);
  void lower(const plan::TopCandidates&);

  const plan::Plan& plan_;
  const Lowered& lowered_;  // its results are known
  StorageOf storage_;
  LoweredOp op_;
  int phase_ = 0;
  int64_t work_used_ = 0, work_bytes_ = 0;
};

inline constexpr int kFewRows = 8;

// As kernels take their numbers.
inline uint32_t u(int64_t n) { return static_cast<uint32_t>(n); }

// "q4", "q8" or "bf16", as kernels' names end.
const char* storage_name(int bits);
// What stands in the names of matrix kernels for the unit that they run on.
const char* unit_name(plan::MatrixUnit unit);

}  // namespace lily::metal
