#include "plan/schedule.h"

#include <algorithm>
#include <map>
#include <numeric>
#include <tuple>

#include "base/error.h"
#include "plan/uses.h"

namespace lily::plan {
namespace {

// Identity of what a use touches, coarse on purpose: a whole value, a layer's state, a layer's KV.
using Key = std::tuple<Resource, int, int>;

Key key_of(const Use& use) { return {use.resource, static_cast<int>(use.value), use.layer}; }

bool is_constant(const Use& use) {
  return use.resource == Resource::weight || use.resource == Resource::step;
}

struct History {
  int last_writer = -1;
  std::vector<int> readers;  // since the last write
};

// Places values so that two share bytes only if one is dead in every stage in which the other lives.
void place(Plan& plan) {
  const size_t n_values = plan.values.size();
  std::vector<int> first(n_values, -1), last(n_values, -1);
  for (size_t op = 0; op < plan.ops.size(); ++op) {
    for (const Use& use : uses(plan.ops[op])) {
      if (use.resource != Resource::value) continue;
      const auto v = static_cast<size_t>(use.value);
      if (first[v] < 0) first[v] = plan.stage[op];
      last[v] = plan.stage[op];
    }
  }
  constexpr int64_t kAlignment = 256;
  std::vector<size_t> order;
  plan.placement.assign(n_values, {});
  for (size_t v = 0; v < n_values; ++v) {
    const Value& value = plan.values[v];
    const int64_t bytes = rows_bound(plan, value) * value.cols * type_bytes(value.type);
    plan.placement[v].bytes = (bytes + kAlignment - 1) / kAlignment * kAlignment;
    if (first[v] >= 0) order.push_back(v);
  }
  // Large values first, each at the lowest offset that is free while it lives.
  std::stable_sort(order.begin(), order.end(),
                   [&](size_t a, size_t b) { return plan.placement[a].bytes > plan.placement[b].bytes; });
  std::vector<size_t> placed;
  plan.scratch_bytes = 0;
  for (const size_t v : order) {
    std::vector<std::pair<int64_t, int64_t>> taken;
    for (const size_t other : placed) {
      const bool lives_beside =
          plan.options.keep_values || (first[other] <= last[v] && first[v] <= last[other]);
      if (lives_beside)
        taken.emplace_back(plan.placement[other].offset,
                           plan.placement[other].offset + plan.placement[other].bytes);
    }
    std::sort(taken.begin(), taken.end());
    int64_t offset = 0;
    for (const auto& [begin, end] : taken) {
      if (begin - offset >= plan.placement[v].bytes) break;
      offset = std::max(offset, end);
    }
    plan.placement[v].offset = offset;
    plan.scratch_bytes = std::max(plan.scratch_bytes, offset + plan.placement[v].bytes);
    placed.push_back(v);
  }
}

}  // namespace

std::vector<Edge> edges(const std::vector<Op>& ops) {
  std::map<Key, History> histories;
  std::vector<std::map<int, Edge::Why>> before(ops.size());  // direct predecessors of each op
  for (size_t i = 0; i < ops.size(); ++i) {
    const int op = static_cast<int>(i);
    const std::vector<Use> touched = uses(ops[i]);
    for (const Use& use : touched) {
      if (is_constant(use)) continue;
      const History& h = histories[key_of(use)];
      if (h.last_writer >= 0)
        before[i].emplace(h.last_writer,
                          use.reads() ? Edge::Why::read_after_write : Edge::Why::write_after_write);
      if (use.writes())
        for (const int reader : h.readers)
          if (reader != op) before[i].emplace(reader, Edge::Why::write_after_read);
    }
    for (const Use& use : touched) {
      if (is_constant(use)) continue;
      History& h = histories[key_of(use)];
      if (use.writes()) {
        h.last_writer = op;
        h.readers.clear();
      } else {
        h.readers.push_back(op);
      }
    }
  }
  // Drop edges that another path implies. ancestors[i] holds every op that must finish before i starts.
  std::vector<std::vector<bool>> ancestors(ops.size());
  std::vector<Edge> result;
  for (size_t i = 0; i < ops.size(); ++i) {
    std::vector<bool>& reached = ancestors[i];
    reached.assign(ops.size(), false);
    for (auto it = before[i].rbegin(); it != before[i].rend(); ++it) {
      const auto from = static_cast<size_t>(it->first);
      if (reached[from]) continue;
      result.push_back({it->first, static_cast<int>(i), it->second});
      reached[from] = true;
      for (size_t k = 0; k < from; ++k)
        if (ancestors[from][k]) reached[k] = true;
    }
  }
  return result;
}

std::vector<int> stages(std::vector<Op>& ops, bool concurrent) {
  std::vector<int> stage(ops.size(), 0);
  if (!concurrent) {
    std::iota(stage.begin(), stage.end(), 0);
    return stage;
  }
  for (const Edge& edge : edges(ops)) {
    auto& to = stage[static_cast<size_t>(edge.to)];
    to = std::max(to, stage[static_cast<size_t>(edge.from)] + 1);
  }
  std::vector<size_t> order(ops.size());
  std::iota(order.begin(), order.end(), size_t{0});
  std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) { return stage[a] < stage[b]; });
  std::vector<Op> sorted;
  std::vector<int> sorted_stage;
  for (const size_t i : order) {
    sorted.push_back(std::move(ops[i]));
    sorted_stage.push_back(stage[i]);
  }
  ops = std::move(sorted);
  return sorted_stage;
}

void schedule(Plan& plan) {
  plan.stage = stages(plan.ops, plan.policy.concurrent);
  place(plan);
}

int64_t rows_in_step(const Plan& plan, RowSpace space, int n_rows, int n_outputs) {
  const int64_t assignments = int64_t{n_rows} * model::kExpertsPerToken;
  switch (space) {
    case RowSpace::tokens:
      return n_rows;
    case RowSpace::routed:
      return assignments;
    case RowSpace::outputs:
      return n_outputs;
    case RowSpace::experts:
      return plan.dims.n_experts + 1;
    case RowSpace::blocks:
      // Every expert may end in a block that is not full.
      return (assignments + plan.policy.tile.small - 1) / plan.policy.tile.small + plan.dims.n_experts;
    case RowSpace::one:
      return 1;
    case RowSpace::matrix:
      break;
  }
  LILY_CHECK(false, "row space {}", static_cast<int>(space));
  return 0;
}

int64_t rows_bound(const Plan& plan, const Value& value) {
  if (value.rows == RowSpace::matrix) return value.n_matrix_rows;
  return rows_in_step(plan, value.rows, plan.shape.rows, plan.shape.outputs);
}

}  // namespace lily::plan
