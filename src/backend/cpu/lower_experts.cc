// Routing and experts. Without groups (few rows) a unit is one assignment and some tiles of its expert; with
// groups it is one expert, some of its tiles, and all rows that were sent there: a tile is read from memory
// once.
#include <algorithm>
#include <numeric>
#include <vector>

#include "backend/cpu/kernels/activation.h"
#include "backend/cpu/kernels/embed.h"
#include "backend/cpu/kernels/router.h"
#include "backend/cpu/lower_parts.h"
#include "base/error.h"
#include "base/half.h"
#include "pack/cpu_tiles.h"

namespace lily::backend::cpu {
namespace {

using model::kExpertsPerToken;
using model::Storage;
using model::Weight;
using plan::kNoValue;
using plan::Routing;
using plan::ValueId;

// An expert weight as the checkpoint has it, or P1's ablation: expanded to bf16 in memory, in tiles too.
struct Experts {
  PackedWeight weight;
  ValueId expanded = kNoValue;

  Experts(const LowerContext& c, model::WeightId id, ValueId expanded_weight)
      : weight(c.weights.linear(id)), expanded(expanded_weight) {}

  int n_planes(const LowerContext& c) const {
    return expanded == kNoValue ? planes_of(c, {weight.first}) : 0;
  }
  int64_t out() const { return weight.first.rows; }
  // The shape that tiles are counted in; its bytes matter only for the size of units.
  const TileMatrix& shape() const { return weight.first; }
  TileMatrix matrix(const Step& step, int64_t expert) const {
    if (expanded == kNoValue) return weight.matrix(expert);
    TileMatrix m = weight.first;
    m.storage = Storage::bf16;
    m.tile_bytes = pack::cpu_tile_bytes(Storage::bf16, m.cols);
    m.tiles = step.data<uint8_t>(expanded) + expert * m.n_tiles() * m.tile_bytes;
    return m;
  }
};

// One piece of the work of an expert projection.
struct Piece {
  int64_t expert = 0;
  int64_t first_row = 0, n_rows = 0;  // of the routed values
  int64_t first_tile = 0, last_tile = 0;
};

// Cuts the routed rows of a step, times the tiles of an expert's matrix, into units.
class Pieces {
 public:
  Pieces(const LowerContext& c, const Routing& routing, const TileMatrix& shape)
      : routing_(routing),
        n_experts_(c.dims().n_experts),
        n_tiles_(shape.n_tiles()),
        tiles_per_unit_(tiles_per_unit(c, shape)),
        n_ranges_((n_tiles_ + tiles_per_unit_ - 1) / tiles_per_unit_) {}

  int64_t count(const Step& step) const {
    return (routing_.grouped() ? n_experts_ : step.n_rows() * kExpertsPerToken) * n_ranges_;
  }

  Piece piece(const Step& step, int64_t unit) const {
    Piece p;
    const int64_t group = unit / n_ranges_;
    p.first_tile = unit % n_ranges_ * tiles_per_unit_;
    p.last_tile = std::min(p.first_tile + tiles_per_unit_, n_tiles_);
    if (routing_.grouped()) {
      const int32_t* offsets = step.data<int32_t>(routing_.offsets);
      p.expert = group;
      p.first_row = offsets[group];
      p.n_rows = offsets[group + 1] - offsets[group];
    } else {
      p.expert = step.data<int32_t>(routing_.ids)[group];
      p.first_row = group;
      p.n_rows = 1;
    }
    return p;
  }

  // The rows of x that a piece reads: the tokens' of its assignments, or the routed rows themselves.
  InputRows rows(const Step& step, const InputRows& x, const Piece& p, bool from_tokens) const {
    if (!from_tokens) return x.from(p.first_row);
    if (!routing_.grouped()) return x.from(p.first_row / kExpertsPerToken);
    InputRows rows = x;
    rows.ids = step.data<int32_t>(routing_.order) + p.first_row;
    rows.per_row = kExpertsPerToken;
    return rows;
  }

 private:
  Routing routing_;
  int64_t n_experts_, n_tiles_, tiles_per_unit_, n_ranges_;
};

OutputRows routed_output(const Step& step, ValueId y, const Piece& p) {
  return OutputRows{step.data(y), step.stride(y), 0, nullptr}.from(p.first_row);
}

// The routed row of assignment j of a token.
int64_t routed_row(const Step& step, const Routing& routing, int64_t token, int64_t j) {
  const int64_t assignment = token * kExpertsPerToken + j;
  return routing.grouped() ? step.data<int32_t>(routing.position)[assignment] : assignment;
}

// (26) columns [first, first + n) of a token, n a multiple of 16.
void combine(const Step& step, const Routing& routing, ValueId weights, const float* experts,
             int64_t experts_stride, const float* shared, float shared_weight, const float* residual,
             float* out, int64_t token, int64_t first, int64_t n, float* sum) {
  std::fill_n(sum, n, 0.0f);
  for (int64_t j = 0; j < kExpertsPerToken; ++j)
    multiply_add(experts + routed_row(step, routing, token, j) * experts_stride + first,
                 step.data(weights)[token * kExpertsPerToken + j], sum, n);
  multiply_add(shared + first, shared_weight, sum, n);
  add_rows(sum, residual + first, out + first, n);
}

void add_router_phase(Lowered& op, const LowerContext& c, plan::View logits, ValueId ids, ValueId weights) {
  const int n_experts = c.dims().n_experts;
  const int64_t at = reserve_worker(op, (n_experts + 15) / 16 * 16 * 4);
  add_row_phase(op, logits.value, [=](const Step& step, Worker& worker, int64_t row) {
    router_top(step.data(logits) + row * step.stride(logits), n_experts,
               reinterpret_cast<float*>(worker.scratch + at),
               step.data<int32_t>(ids) + row * kExpertsPerToken, step.data(weights) + row * kExpertsPerToken);
  });
}

}  // namespace

Lowered lower_op(const plan::RouterTop& o, const LowerContext& c) {
  Lowered op;
  add_router_phase(op, c, o.logits, o.ids, o.weights);
  return op;
}

Lowered lower_op(const plan::NormRouter& o, const LowerContext& c) {
  Lowered op;
  const auto weights = matrices(c, {{Weight::router, o.layer}, {Weight::shared_gate, o.layer}});
  const PreparedRows rows(c, op, whole(c, o.x), plan::WeightId{Weight::post_norm, o.layer},
                          planes_of(c, weights), o.normed);
  add_linear_phase(op, c, weights, rows, o.x, o.logits);
  add_router_phase(op, c, {o.logits, 0, c.dims().n_experts}, o.ids, o.weights);
  return op;
}

Lowered lower_op(const plan::ExpertGroups& o, const LowerContext& c) {
  Lowered op;
  const int64_t n_experts = c.dims().n_experts;
  const int64_t heavy_at = reserve_worker(op, n_experts * 4);
  op.phases.push_back({[](const Step&) { return int64_t{1}; },
                       [=](const Step& step, Worker& worker, int64_t) {
                         const int64_t n = step.n_rows() * kExpertsPerToken;
                         const int32_t* ids = step.data<int32_t>(o.ids);
                         int32_t* offsets = step.data<int32_t>(o.offsets);
                         int32_t* order = step.data<int32_t>(o.order);
                         int32_t* position = step.data<int32_t>(o.position);
                         std::fill_n(offsets, n_experts + 1, 0);
                         for (int64_t a = 0; a < n; ++a) ++offsets[ids[a] + 1];
                         std::partial_sum(offsets, offsets + n_experts + 1, offsets);
                         // Places assignments, moving each offset to its expert's end; then moves all back.
                         for (int64_t a = 0; a < n; ++a) {
                           position[a] = offsets[ids[a]]++;
                           order[position[a]] = static_cast<int32_t>(a);
                         }
                         std::copy_backward(offsets, offsets + n_experts, offsets + n_experts + 1);
                         offsets[0] = 0;
                         const auto load = [&](int32_t e) { return offsets[e + 1] - offsets[e]; };
                         auto* heavy = reinterpret_cast<int32_t*>(worker.scratch + heavy_at);
                         std::iota(heavy, heavy + n_experts, 0);
                         std::sort(heavy, heavy + n_experts, [&](int32_t a, int32_t b) {
                           return load(a) != load(b) ? load(a) > load(b) : a < b;
                         });
                         int32_t* block = step.data<int32_t>(o.blocks);
                         int32_t n_blocks = 0;
                         for (const int32_t* e = heavy; e != heavy + n_experts; ++e) {
                           const int32_t tile = load(*e) >= o.tile.large_from ? o.tile.large : o.tile.small;
                           for (int32_t first = 0; first < load(*e); first += tile, block += 4, ++n_blocks) {
                             block[0] = *e;
                             block[1] = offsets[*e] + first;
                             block[2] = std::min(tile, load(*e) - first);
                             block[3] = 0;
                           }
                         }
                         const int32_t arguments[4] = {n_blocks, 1, 1, 0};
                         std::copy_n(arguments, 4, step.data<int32_t>(o.n_blocks));
                       },
                       {}});
  return op;
}

Lowered lower_op(const plan::ExpandWeight& o, const LowerContext& c) {
  Lowered op;
  const PackedWeight weight = c.weights.linear(o.weight);
  const TileMatrix& w = weight.first;
  LILY_CHECK(w.rows % pack::kCpuTileRows == 0, "{} rows of an expert", w.rows);
  const int64_t row_at = reserve_worker(op, w.cols * 4);
  op.phases.push_back({[=](const Step&) { return weight.n_matrices * w.n_tiles(); },
                       [=](const Step& step, Worker& worker, int64_t unit) {
                         auto* row = reinterpret_cast<float*>(worker.scratch + row_at);
                         const int64_t tile_elements = pack::kCpuTileRows * w.cols;
                         Bf16* tile = step.data<Bf16>(o.y) + unit * tile_elements;
                         for (int64_t lane = 0; lane < pack::kCpuTileRows; ++lane) {
                           embed_row(weight.matrix(unit / w.n_tiles()),
                                     unit % w.n_tiles() * pack::kCpuTileRows + lane, row);
                           for (int64_t col = 0; col < w.cols; ++col)
                             tile[col / 2 * 2 * pack::kCpuTileRows + 2 * lane + col % 2] = to_bf16(row[col]);
                         }
                       },
                       {}});
  return op;
}

Lowered lower_op(const plan::ExpertsLinear& o, const LowerContext& c) {
  Lowered op;
  const Experts experts(c, o.weight, o.expanded);
  const bool from_tokens = o.weight.weight != Weight::expert_down;
  const PreparedRows x(c, op, whole(c, o.x), std::nullopt, experts.n_planes(c));
  const Pieces pieces(c, o.routing, experts.shape());
  x.add_phase(op);
  op.phases.push_back({[=](const Step& step) { return pieces.count(step); },
                       [=](const Step& step, Worker& worker, int64_t unit) {
                         const Piece p = pieces.piece(step, unit);
                         if (p.n_rows == 0) return;
                         linear_tiles(experts.matrix(step, p.expert), p.first_tile, p.last_tile,
                                      pieces.rows(step, x.rows(step, worker), p, from_tokens), p.n_rows,
                                      routed_output(step, o.y, p));
                       },
                       x.prepare()});
  return op;
}

Lowered lower_op(const plan::ExpertsGateUp& o, const LowerContext& c) {
  Lowered op;
  const Experts gate(c, {Weight::expert_gate, o.layer}, o.expanded_gate);
  const Experts up(c, {Weight::expert_up, o.layer}, o.expanded_up);
  std::vector<TileMatrix> shared;  // gate, up
  std::vector<TileRange> shared_ranges;
  if (o.shared != kNoValue) {
    shared = matrices(c, {{Weight::shared_gate_proj, o.layer}, {Weight::shared_up_proj, o.layer}});
    shared_ranges = tile_ranges(c, {shared[0]});
  }
  const PreparedRows x(c, op, whole(c, o.x), std::nullopt,
                       std::max({gate.n_planes(c), up.n_planes(c), planes_of(c, shared)}));
  const Pieces pieces(c, o.routing, gate.shape());
  x.add_phase(op);
  op.phases.push_back({[=](const Step& step) { return pieces.count(step) + std::ssize(shared_ranges); },
                       [=](const Step& step, Worker& worker, int64_t unit) {
                         const InputRows rows = x.rows(step, worker);
                         // The shared expert has the most rows: its units go first, and small ones are left
                         // for the end.
                         if (unit < std::ssize(shared_ranges)) {
                           const TileRange& range = shared_ranges[static_cast<size_t>(unit)];
                           gate_up_tiles(shared[0], shared[1], range.begin, range.end, rows, step.n_rows(),
                                         {step.data(o.shared), step.stride(o.shared), 0, nullptr});
                           return;
                         }
                         const Piece p = pieces.piece(step, unit - std::ssize(shared_ranges));
                         if (p.n_rows == 0) return;
                         gate_up_tiles(gate.matrix(step, p.expert), up.matrix(step, p.expert), p.first_tile,
                                       p.last_tile, pieces.rows(step, rows, p, true), p.n_rows,
                                       routed_output(step, o.y, p));
                       },
                       x.prepare()});
  return op;
}

Lowered lower_op(const plan::ExpertsCombine& o, const LowerContext& c) {
  Lowered op;
  const int64_t hidden = c.dims().hidden;
  const int64_t sum_at = reserve_worker(op, hidden * 4);
  add_row_phase(op, o.residual_in, [=](const Step& step, Worker& worker, int64_t row) {
    const float shared_weight = sigmoid(step.data(o.shared_gate)[row * step.stride(o.shared_gate)]);
    combine(step, o.routing, o.weights, step.data(o.experts), hidden, step.data(o.shared) + row * hidden,
            shared_weight, step.data(o.residual_in) + row * hidden, step.data(o.residual_out) + row * hidden,
            row, 0, hidden, reinterpret_cast<float*>(worker.scratch + sum_at));
  });
  return op;
}

namespace {

// Few rows: a unit is a token and some tiles of all its experts; nothing is stored between.
void add_combined_down(Lowered& op, const LowerContext& c, const plan::ExpertsDownCombine& o) {
  const Experts down(c, {Weight::expert_down, o.layer}, o.expanded);
  const TileMatrix shared_w = c.weights.linear({Weight::shared_down_proj, o.layer}).first;
  const PreparedRows x(c, op, whole(c, o.x), std::nullopt, down.n_planes(c));
  const PreparedRows shared(c, op, whole(c, o.shared), std::nullopt,
                            o.shared_down ? planes_of(c, {shared_w}) : 0);
  const std::vector<TileRange> ranges = tile_ranges(c, {down.shape()});
  const auto n_ranges = std::ssize(ranges);
  const auto prepare_x = x.prepare(), prepare_shared = shared.prepare();
  op.phases.push_back(
      {[=](const Step& step) { return step.n_rows() * n_ranges; },
       [=](const Step& step, Worker& worker, int64_t unit) {
         const int64_t row = unit / n_ranges, hidden = step.stride(o.residual_out);
         const TileRange& range = ranges[static_cast<size_t>(unit % n_ranges)];
         const InputRows x_rows = x.rows(step, worker), shared_rows = shared.rows(step, worker);
         const float shared_weight = sigmoid(step.data(o.shared_gate)[row * step.stride(o.shared_gate)]);
         const auto matrix_of = [&](int64_t j) {
           return down.matrix(step, step.data<int32_t>(o.routing.ids)[row * kExpertsPerToken + j]);
         };
         for (int64_t tile = range.begin; tile < range.end; ++tile) {
           alignas(64) float sum[pack::kCpuTileRows] = {};
           const uint8_t* const next_tile = matrix_of(0).tile(tile + 1);
           const uint8_t* const behind_experts = o.shared_down ? shared_w.tile(tile) : next_tile;
           for (int64_t j = 0; j < kExpertsPerToken; ++j)
             accumulate_tile(matrix_of(j), tile,
                             j + 1 < kExpertsPerToken ? matrix_of(j + 1).tile(tile) : behind_experts,
                             x_rows.row(routed_row(step, o.routing, row, j)),
                             step.data(o.weights)[row * kExpertsPerToken + j], sum);
           const int64_t col = tile * pack::kCpuTileRows;
           if (o.shared_down)
             accumulate_tile(shared_w, tile, next_tile, shared_rows.row(row), shared_weight, sum);
           else
             multiply_add(step.data(o.shared) + row * hidden + col, shared_weight, sum, pack::kCpuTileRows);
           add_rows(sum, step.data(o.residual_in) + row * hidden + col,
                    step.data(o.residual_out) + row * hidden + col, pack::kCpuTileRows);
         }
       },
       [=](const Step& step, Worker& worker) {
         if (prepare_x) prepare_x(step, worker);
         if (prepare_shared) prepare_shared(step, worker);
       }});
}

// Many rows: products of all experts in grouped order, then the sum of each token's.
void add_grouped_down(Lowered& op, const LowerContext& c, const plan::ExpertsDownCombine& o) {
  const Experts down(c, {Weight::expert_down, o.layer}, o.expanded);
  const TileMatrix shared_w = c.weights.linear({Weight::shared_down_proj, o.layer}).first;
  const PreparedRows x(c, op, whole(c, o.x), std::nullopt, down.n_planes(c));
  const PreparedRows shared(c, op, whole(c, o.shared), std::nullopt,
                            o.shared_down ? planes_of(c, {shared_w}) : 0);
  const Pieces pieces(c, o.routing, down.shape());
  const std::vector<TileRange> shared_ranges =
      o.shared_down ? tile_ranges(c, {shared_w}) : std::vector<TileRange>();
  const int64_t hidden = c.dims().hidden, rows = c.plan.shape.rows;
  const int64_t products_at = reserve_extra(c, op, rows * kExpertsPerToken * hidden * 4);
  const int64_t shared_at = reserve_extra(c, op, rows * hidden * 4);
  const int64_t sum_at = reserve_worker(op, hidden * 4);
  x.add_phase(op);
  shared.add_phase(op);
  op.phases.push_back(
      {[=](const Step& step) { return std::ssize(shared_ranges) + pieces.count(step); },
       [=](const Step& step, Worker& worker, int64_t unit) {
         if (unit < std::ssize(shared_ranges)) {
           const TileRange& range = shared_ranges[static_cast<size_t>(unit)];
           linear_tiles(range.w, range.begin, range.end, shared.rows(step, worker), step.n_rows(),
                        {reinterpret_cast<float*>(step.extra(shared_at)), hidden, 0, nullptr});
           return;
         }
         const Piece p = pieces.piece(step, unit - std::ssize(shared_ranges));
         if (p.n_rows == 0) return;
         const OutputRows out{reinterpret_cast<float*>(step.extra(products_at)), hidden, 0, nullptr};
         linear_tiles(down.matrix(step, p.expert), p.first_tile, p.last_tile,
                      pieces.rows(step, x.rows(step, worker), p, false), p.n_rows, out.from(p.first_row));
       },
       {}});
  add_row_phase(op, o.residual_in, [=](const Step& step, Worker& worker, int64_t row) {
    const float* shared_out =
        o.shared_down ? reinterpret_cast<const float*>(step.extra(shared_at)) : step.data(o.shared);
    combine(step, o.routing, o.weights, reinterpret_cast<const float*>(step.extra(products_at)), hidden,
            shared_out + row * hidden, sigmoid(step.data(o.shared_gate)[row * step.stride(o.shared_gate)]),
            step.data(o.residual_in) + row * hidden, step.data(o.residual_out) + row * hidden, row, 0, hidden,
            reinterpret_cast<float*>(worker.scratch + sum_at));
  });
}

}  // namespace

Lowered lower_op(const plan::ExpertsDownCombine& o, const LowerContext& c) {
  Lowered op;
  if (c.is_small()) add_combined_down(op, c, o);
  else add_grouped_down(op, c, o);
  return op;
}

}  // namespace lily::backend::cpu
