// Linear layers: units are some tiles of a weight times some rows.
#include <algorithm>

#include "backend/cpu/lower_parts.h"
#include "base/error.h"

namespace lily::backend::cpu {
namespace {

// Rows of a unit: enough that a tile is read from L2 many times, few enough that small weights still give
// units to all threads.
constexpr int64_t kUnitRows = 128;

int64_t row_blocks(int64_t rows) { return (rows + kUnitRows - 1) / kUnitRows; }

// What leaves a mixer has passed a gate: a few large values of a group among many small ones, which one plane
// would lose. These projections keep two.
int planes_of_input(const LowerContext& c, const std::vector<plan::WeightId>& ids,
                    const std::vector<TileMatrix>& weights) {
  const bool is_gated = std::ranges::any_of(ids, [](const plan::WeightId& id) {
    return id.weight == model::Weight::o_proj || id.weight == model::Weight::delta_out;
  });
  const int n_planes = planes_of(c, weights);
  return is_gated && n_planes == 1 ? 2 : n_planes;
}

}  // namespace

void add_linear_phase(Lowered& op, const LowerContext& context, const std::vector<TileMatrix>& weights,
                      const PreparedRows& rows, plan::ValueId row_space, plan::ValueId y,
                      plan::ValueId residual) {
  int64_t n_out = 0;
  for (const TileMatrix& w : weights) n_out += w.rows;
  LILY_CHECK(n_out == context.plan.value(y).cols, "{} outputs for {} columns of {}", n_out,
             context.plan.value(y).cols, context.plan.value(y).name);
  rows.add_phase(op);
  const auto ranges = tile_ranges(context, weights);
  const auto n_ranges = std::ssize(ranges);
  op.phases.push_back({[=](const Step& step) { return n_ranges * row_blocks(step.rows(row_space)); },
                       [=](const Step& step, Worker& worker, int64_t unit) {
                         // The row blocks of a range follow one another, so that its tiles stay in the cache.
                         const int64_t blocks = row_blocks(step.rows(row_space));
                         const TileRange& range = ranges[static_cast<size_t>(unit / blocks)];
                         const int64_t first = unit % blocks * kUnitRows;
                         const int64_t n = std::min(kUnitRows, step.rows(row_space) - first);
                         const OutputRows out{step.data(y), step.stride(y), range.first_col,
                                              residual == plan::kNoValue ? nullptr : step.data(residual)};
                         if (unit == 0) rows.keep_normed_rows(step, worker);
                         linear_tiles(range.w, range.begin, range.end, rows.rows(step, worker).from(first), n,
                                      out.from(first));
                       },
                       rows.prepare()});
}

Lowered lower_op(const plan::Linear& o, const LowerContext& c) {
  Lowered op;
  const auto weights = matrices(c, o.weights);
  const PreparedRows rows(c, op, o.x, std::nullopt, planes_of_input(c, o.weights, weights));
  add_linear_phase(op, c, weights, rows, o.x.value, o.y);
  return op;
}

Lowered lower_op(const plan::NormLinear& o, const LowerContext& c) {
  Lowered op;
  const auto weights = matrices(c, o.weights);
  const PreparedRows rows(c, op, whole(c, o.x), o.norm, planes_of(c, weights));
  add_linear_phase(op, c, weights, rows, o.x, o.y);
  return op;
}

Lowered lower_op(const plan::LinearAdd& o, const LowerContext& c) {
  Lowered op;
  const auto weights = matrices(c, {o.weight});
  const PreparedRows rows(c, op, whole(c, o.x), std::nullopt, planes_of_input(c, {o.weight}, weights));
  add_linear_phase(op, c, weights, rows, o.x, o.residual_out, o.residual_in);
  return op;
}

}  // namespace lily::backend::cpu
