// Full attention between its projections.
#include <algorithm>
#include <cstring>

#include "backend/cpu/kernels/activation.h"
#include "backend/cpu/kernels/attention.h"
#include "backend/cpu/kernels/rope.h"
#include "backend/cpu/lower_parts.h"
#include "base/error.h"

namespace lily::backend::cpu {
namespace {

using backend::Segment;
using model::kHeadDim;
using model::Weight;

// Where a row's key and value belong.
struct CachePlace {
  int64_t block;
  int key;
};

CachePlace place_of(const Step& step, int64_t row) {
  const int64_t position = step.position(row);
  const auto blocks = step.blocks_of(step.segment_of(row));
  return {blocks[static_cast<size_t>(position / kKvKeys)], static_cast<int>(position % kKvKeys)};
}

// What attention ends in: o, or with D-fused gating o * sigmoid(gate).
struct Output {
  plan::ValueId y;
  std::optional<plan::View> gate;  // q_proj's columns: head h's gate at h * 512 + 256

  void write(const Step& step, int64_t row, int64_t head, const Partial& sum) const {
    float* o = step.data(y) + row * step.stride(y) + head * kHeadDim;
    finish_partial(sum, o);
    if (gate) apply_gate(step, *gate, row, head, o, o);
  }
  static void apply_gate(const Step& step, const plan::View& gate, int64_t row, int64_t head, const float* o,
                         float* y) {
    sigmoid_gate(o, step.data(gate) + row * step.stride(gate) + head * 2 * kHeadDim + kHeadDim, y, kHeadDim);
  }
};

struct Heads {
  int64_t q, kv;
  int64_t group() const { return q / kv; }
};

// Queries that share the reading of a key. D6's ablation reads it again for each; results are the same to the
// bit.
void run_split(const Step& step, int layer, int64_t kv_head, const Segment& segment, int64_t split,
               std::span<const Query> queries, Partial* const* partials) {
  const KvLayer kv = step.memory().kv(layer);
  const size_t together = step.plan().policy.pack_query_heads ? queries.size() : 1;
  for (size_t i = 0; i < queries.size(); i += together)
    attention_split(kv, static_cast<int>(kv_head), step.blocks_of(segment), split,
                    queries.subspan(i, together), partials + i);
}

Query query_of(const Step& step, plan::ValueId q, int64_t row, int64_t head) {
  return {step.data(q) + row * step.stride(q) + head * kHeadDim, step.position(row) + 1};
}

// One unit a tile of rows and KV head, from the first key to the last.
void add_general(Lowered& op, int layer, Heads heads, plan::ValueId q, const Output& out) {
  const int64_t sums_at = reserve_worker(op, 2 * kMaxQueries * static_cast<int64_t>(sizeof(Partial)));
  op.phases.push_back({[=](const Step& step) { return std::ssize(step.tiles()) * heads.kv; },
                       [=](const Step& step, Worker& worker, int64_t unit) {
                         // Later rows see more keys: heavy units first.
                         const int64_t tile_index = std::ssize(step.tiles()) - 1 - unit / heads.kv;
                         const RowTile& tile = step.tiles()[static_cast<size_t>(tile_index)];
                         const int64_t kv_head = unit % heads.kv;
                         auto* sums = reinterpret_cast<Partial*>(worker.scratch + sums_at);
                         Query queries[kMaxQueries];
                         Partial* first[kMaxQueries];
                         Partial* next[kMaxQueries];
                         const int64_t n = tile.n_rows * heads.group();
                         for (int64_t i = 0; i < n; ++i) {
                           const int64_t head = kv_head * heads.group() + i % heads.group();
                           queries[i] = query_of(step, q, tile.first_row + i / heads.group(), head);
                           first[i] = sums + i;
                           next[i] = sums + kMaxQueries + i;
                         }
                         const std::span<const Query> all(queries, static_cast<size_t>(n));
                         const Segment& segment = step.segment(tile.segment);
                         for (int64_t split = 0; split < n_splits(queries[n - 1].n_keys); ++split) {
                           run_split(step, layer, kv_head, segment, split, all, split == 0 ? first : next);
                           for (int64_t i = 0; i < n && split > 0; ++i)
                             if (queries[i].n_keys > split * kSplitKeys) merge_partial(*first[i], *next[i]);
                         }
                         for (int64_t i = 0; i < n; ++i)
                           out.write(step, tile.first_row + i / heads.group(),
                                     kv_head * heads.group() + i % heads.group(), *first[i]);
                       },
                       {}});
}

// D7: the splits of a long cache go to different threads and meet in a second phase, in rising order.
void add_fixed_blocks(Lowered& op, const LowerContext& c, int layer, Heads heads, plan::ValueId q,
                      const Output& out) {
  const int64_t most_splits = n_splits(c.plan.shape.context);
  const int64_t partials_at =
      reserve_extra(c, op, c.plan.shape.rows * heads.q * most_splits * static_cast<int64_t>(sizeof(Partial)));
  // [row][query head][split]
  const auto partial = [=](const Step& step, int64_t row, int64_t head, int64_t split) {
    return reinterpret_cast<Partial*>(step.extra(partials_at)) + (row * heads.q + head) * most_splits + split;
  };
  op.phases.push_back({[=](const Step& step) { return step.n_rows() * heads.kv * n_splits(step.longest()); },
                       [=](const Step& step, Worker&, int64_t unit) {
                         const int64_t splits = n_splits(step.longest());
                         const int64_t split = unit % splits, kv_head = unit / splits % heads.kv;
                         const int64_t row = unit / splits / heads.kv;
                         if (step.position(row) < split * kSplitKeys) return;
                         Query queries[kMaxQueries];
                         Partial* partials[kMaxQueries];
                         for (int64_t i = 0; i < heads.group(); ++i) {
                           const int64_t head = kv_head * heads.group() + i;
                           queries[i] = query_of(step, q, row, head);
                           partials[i] = partial(step, row, head, split);
                         }
                         run_split(step, layer, kv_head, step.segment_of(row), split,
                                   {queries, static_cast<size_t>(heads.group())}, partials);
                       },
                       {}});
  op.phases.push_back({[=](const Step& step) { return step.n_rows() * heads.q; },
                       [=](const Step& step, Worker&, int64_t unit) {
                         const int64_t row = unit / heads.q, head = unit % heads.q;
                         Partial* sum = partial(step, row, head, 0);
                         for (int64_t split = 1; split < n_splits(step.position(row) + 1); ++split)
                           merge_partial(*sum, sum[split]);
                         out.write(step, row, head, *sum);
                       },
                       {}});
}

Lowered lower_attention(const LowerContext& c, int layer, plan::AttentionPath path, plan::ValueId q,
                        const Output& out) {
  const Heads heads{c.dims().n_q_heads, c.dims().n_kv_heads};
  LILY_CHECK(heads.group() <= kMaxQueries, "{} query heads a KV head", heads.group());
  Lowered op;
  // Many rows fill the threads by themselves.
  if (path == plan::AttentionPath::fixed_blocks && c.is_small())
    add_fixed_blocks(op, c, layer, heads, q, out);
  else add_general(op, layer, heads, q, out);
  return op;
}

}  // namespace

Lowered lower_op(const plan::HeadNormRope& o, const LowerContext& c) {
  Lowered op;
  const float* w = c.weights.vector(o.weight).data();
  const int64_t heads = c.plan.value(o.y).cols / kHeadDim;
  add_row_phase(op, o.y, [=](const Step& step, Worker&, int64_t row) {
    for (int64_t head = 0; head < heads; ++head)
      head_norm_rope(step.data(o.x) + row * step.stride(o.x) + head * o.head_stride, w, step.rope(row),
                     step.data(o.y) + row * step.stride(o.y) + head * kHeadDim);
  });
  return op;
}

Lowered lower_op(const plan::KvAppend& o, const LowerContext& c) {
  Lowered op;
  const int n_kv_heads = c.dims().n_kv_heads;
  add_row_phase(op, o.k, [=](const Step& step, Worker&, int64_t row) {
    const KvLayer kv = step.memory().kv(o.layer);
    const CachePlace place = place_of(step, row);
    for (int head = 0; head < n_kv_heads; ++head) {
      store_key(kv, place.block, head, place.key, step.data(o.k) + row * step.stride(o.k) + head * kHeadDim);
      store_value(kv, place.block, head, place.key,
                  step.data(o.v) + row * step.stride(o.v) + head * kHeadDim);
    }
  });
  return op;
}

Lowered lower_op(const plan::QkPrepare& o, const LowerContext& c) {
  Lowered op;
  const float* q_norm = c.weights.vector({Weight::q_norm, o.layer}).data();
  const float* k_norm = c.weights.vector({Weight::k_norm, o.layer}).data();
  const int64_t q_heads = c.dims().n_q_heads, kv_heads = c.dims().n_kv_heads;
  op.phases.push_back(
      {[=](const Step& step) { return step.n_rows() * (q_heads + kv_heads); },
       [=](const Step& step, Worker&, int64_t unit) {
         const int64_t row = unit / (q_heads + kv_heads), head = unit % (q_heads + kv_heads);
         if (head < q_heads) {
           head_norm_rope(step.data(o.q_gate) + row * step.stride(o.q_gate) + head * 2 * kHeadDim, q_norm,
                          step.rope(row), step.data(o.q) + row * step.stride(o.q) + head * kHeadDim);
           return;
         }
         const auto kv_head = static_cast<int>(head - q_heads);
         const KvLayer kv = step.memory().kv(o.layer);
         const CachePlace place = place_of(step, row);
         float k[kHeadDim];
         head_norm_rope(step.data(o.k) + row * step.stride(o.k) + kv_head * kHeadDim, k_norm, step.rope(row),
                        k);
         store_key(kv, place.block, kv_head, place.key, k);
         store_value(kv, place.block, kv_head, place.key,
                     step.data(o.v) + row * step.stride(o.v) + kv_head * kHeadDim);
       },
       {}});
  return op;
}

Lowered lower_op(const plan::Attention& o, const LowerContext& c) {
  return lower_attention(c, o.layer, o.path, o.q, {o.o, std::nullopt});
}

Lowered lower_op(const plan::GatedAttention& o, const LowerContext& c) {
  return lower_attention(c, o.layer, o.path, o.q, {o.y, o.gate});
}

Lowered lower_op(const plan::AttentionGate& o, const LowerContext& c) {
  Lowered op;
  const int64_t heads = c.dims().n_q_heads;
  add_row_phase(op, o.o, [=](const Step& step, Worker&, int64_t row) {
    for (int64_t head = 0; head < heads; ++head)
      Output::apply_gate(step, o.gate, row, head, step.data(o.o) + row * step.stride(o.o) + head * kHeadDim,
                         step.data(o.y) + row * step.stride(o.y) + head * kHeadDim);
  });
  return op;
}

}  // namespace lily::backend::cpu
