// Attention of decode rows by the products of attention_decode.cu (16 keys a warp and step, mma.m16n8k16,
// probabilities in two bf16 parts), with each mechanism a switch:
//   coalesced: the lanes of a quad read 64 consecutive bytes of a key. Without: 16 bytes each, 128 apart
//              (keys), or 64 apart (values). The order of columns inside a product is free.
//   packed:    a block has the 8 query heads of a KV head. Without: one head, so that keys and values are
//              read 8 times.
//   split:     the cache is cut so that some 128 blocks share it. Without: one block walks all of it.
// Grid: [KV heads x heads apart x splits, rows], 8 warps. Partial results meet in the last block to arrive,
// in the order of the splits. Bound by KV bytes.
#include "backend/cuda/kernels/attention_ablation.h"

#include <type_traits>

#include "backend/cuda/kernels/kv_address.h"
#include "backend/cuda/kernels/launch.h"
#include "backend/cuda/kernels/rope.h"

namespace lily::cuda {
namespace {

constexpr int kWarps = 8, kGroup = 8;  // query heads of a KV head
constexpr unsigned kThreads = kWarps * 32;
constexpr int kChunk = 16;           // keys of a warp's step
constexpr int kRow = kHeadCols + 4;  // floats of a partial row: 256 values, maximum, sum, padding
constexpr int kBlocksWanted = 128;

struct Shared {
  uint16_t q[kGroup][kHeadCols];  // scaled by 1/16
  float partial[kWarps][kGroup][kRow];
  unsigned arrived;
};

struct CachedRow {
  const unsigned char *values, *scales;  // scales: int8 only
};

struct Params {
  AttentionDecode a;
  int n_splits;  // most
};

__device__ __forceinline__ int lesser(int a, int b) { return a < b ? a : b; }

// What a partial sum with maximum m counts in a total with maximum top; parts without a key have none.
__device__ __forceinline__ float share_of(float m, float top) {
  return m == -INFINITY ? 0.0f : exp_fast(m - top);
}

// 8 columns of a cached row, as bf16. at: of the row; piece: which 8 of the 256.
template <KvForm kForm>
__device__ __forceinline__ uint4 load_piece(const CachedRow& row, int piece) {
  if constexpr (kForm == KvForm::bf16) return load_l2(reinterpret_cast<const uint4*>(row.values) + piece);
  else
    return dequantised(load_l2(reinterpret_cast<const uint2*>(row.values) + piece),
                       f16_value(load_l2(reinterpret_cast<const uint16_t*>(row.scales) + piece / 8)));
}

template <bool kCoalesced, bool kPacked, KvForm kForm>
__global__ void __launch_bounds__(kThreads, 1) attention_ablation(Params params) {
  auto* s = reinterpret_cast<Shared*>(shared_memory());
  const AttentionDecode& p = params.a;
  constexpr int kHeads = kPacked ? kGroup : 1, kApart = kGroup / kHeads;
  const int row = static_cast<int>(blockIdx.y), thread = static_cast<int>(threadIdx.x), warp = thread / 32;
  const int lane = static_cast<int>(lane_id()), g = lane / 4, t = lane % 4;
  const int split = static_cast<int>(blockIdx.x) % params.n_splits,
            unit = static_cast<int>(blockIdx.x) / params.n_splits;
  const int kv_head = unit / kApart, first_head = kv_head * kGroup + unit % kApart * kHeads;
  const int position = p.step.positions[row], n_keys = position + 1;
  const int32_t* table = p.step.block_table + p.step.table_first[row];
  const int n_chunks = (n_keys + kChunk - 1) / kChunk;
  int per_split = (n_chunks + params.n_splits - 1) / params.n_splits;
  if (per_split < kWarps / 2) per_split = kWarps / 2;
  const int n_splits = (n_chunks + per_split - 1) / per_split;
  pdl_wait();
  pdl_trigger();
  if (split >= n_splits) return;
  const size_t at = static_cast<size_t>(row) * static_cast<size_t>(p.stride);

  // Queries: a head a warp. The new key and value: by every block that reads them, the same bytes.
  if (warp < kHeads) {
    const int head = first_head + warp;
    uint4 q;
    if (p.prepare)
      q = norm_and_rotate(p.q_gate + at + static_cast<size_t>(head) * 2 * kHeadCols, p.q_norm, p.epsilon,
                          p.step.rope + row * 32);
    else
      q = load_l2(
          reinterpret_cast<const uint4*>(p.q + (static_cast<size_t>(row) * static_cast<size_t>(p.n_q_heads) +
                                                static_cast<size_t>(head)) *
                                                   kHeadCols) +
          lane);
    const auto scaled = [](uint32_t w) { return bf16_pair(bf16_low(w) * 0.0625f, bf16_high(w) * 0.0625f); };
    reinterpret_cast<uint4*>(s->q[warp])[lane] =
        make_uint4(scaled(q.x), scaled(q.y), scaled(q.z), scaled(q.w));
  }
  if (p.prepare && warp == kWarps - 1 && split == n_splits - 1) {
    const size_t from = at + static_cast<size_t>(kv_head) * kHeadCols;
    store_kv_row<kForm>(p.cache, p.cache.k, table, kv_head, position,
                        norm_and_rotate(p.k + from, p.k_norm, p.epsilon, p.step.rope + row * 32));
    store_kv_row<kForm>(p.cache, p.cache.v, table, kv_head, position,
                        load_l2(reinterpret_cast<const uint4*>(p.v + from) + lane));
  }
  block_sync();

  // Piece of a key that step c multiplies in this lane, and of a value.
  const auto key_piece = [&](int c) { return kCoalesced ? 4 * c + t : 8 * t + c; };
  const auto value_piece = [&](int c) { return kCoalesced ? 8 * c + g : 4 * g + c; };
  uint4 q[8];
#pragma unroll
  for (int c = 0; c < 8; ++c)
    q[c] = g < kHeads ? reinterpret_cast<const uint4*>(s->q[g])[key_piece(c)] : make_uint4(0, 0, 0, 0);
  float o[16][4] = {};
  float maximum = -INFINITY, sum = 0;  // of head g; sum over this lane's keys only
  const int first = split * per_split, last = lesser(first + per_split, n_chunks);
  for (int chunk = first + warp; chunk < last; chunk += kWarps) {
    const int base = chunk * kChunk;
    const auto row_at = [&](const unsigned char* part, int key) {
      const int there = lesser(key, n_keys - 1);  // beyond the end: the last key again, with weight 0
      const unsigned char* rows = part + kv_head_offset<kForm>(p.cache, table[there / kKvBlock], kv_head);
      return CachedRow{rows + kv_row_offset<kForm>(there), rows + kv_scale_offset(there)};
    };
    float score[2][4] = {};
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      const CachedRow key = row_at(p.cache.k, base + 8 * n + g);
      uint4 k[8];
#pragma unroll
      for (int c = 0; c < 8; ++c) k[c] = load_piece<kForm>(key, key_piece(c));
#pragma unroll
      for (int c = 0; c < 8; ++c) {
        mma_16816(score[n], q[c].x, 0, q[c].y, 0, k[c].x, k[c].y);
        mma_16816(score[n], q[c].z, 0, q[c].w, 0, k[c].z, k[c].w);
      }
    }
    float largest = maximum;
#pragma unroll
    for (int n = 0; n < 2; ++n)
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        if (base + 8 * n + 2 * t + j >= n_keys) score[n][j] = -INFINITY;
        largest = fmaxf(largest, score[n][j]);
      }
    largest = fmaxf(largest, shuffle_xor(largest, 1));
    largest = fmaxf(largest, shuffle_xor(largest, 2));
    const float shrink = exp_fast(maximum - largest);  // 0 at the first chunk
    maximum = largest;
    uint32_t high[2], low[2];
    sum *= shrink;
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      const float p0 = exp_fast(score[n][0] - maximum), p1 = exp_fast(score[n][1] - maximum);
      sum += p0 + p1;
      bf16_parts(p0, p1, high[n], low[n]);
    }
    // Accumulators hold heads 2 t and 2 t + 1; the shrink factors live with head g.
    const float shrink0 = shuffle_from(shrink, static_cast<unsigned>(8 * t)),
                shrink1 = shuffle_from(shrink, static_cast<unsigned>(8 * t + 4));
    CachedRow value[4];
#pragma unroll
    for (int n = 0; n < 4; ++n) value[n] = row_at(p.cache.v, base + 8 * (n / 2) + 2 * t + n % 2);
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      uint32_t v[4][4];
#pragma unroll
      for (int n = 0; n < 4; ++n) {
        const uint4 x = load_piece<kForm>(value[n], value_piece(c));
        v[n][0] = x.x, v[n][1] = x.y, v[n][2] = x.z, v[n][3] = x.w;
      }
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        float(&acc)[4] = o[4 * c + i];
        acc[0] *= shrink0, acc[1] *= shrink1, acc[2] *= shrink0, acc[3] *= shrink1;
        const uint32_t a0 = pick_halves(v[0][i], v[1][i], false), a1 = pick_halves(v[0][i], v[1][i], true);
        const uint32_t a2 = pick_halves(v[2][i], v[3][i], false), a3 = pick_halves(v[2][i], v[3][i], true);
        mma_16816(acc, a0, a1, a2, a3, high[0], high[1]);
        mma_16816(acc, a0, a1, a2, a3, low[0], low[1]);
      }
    }
  }
  sum += shuffle_xor(sum, 1);
  sum += shuffle_xor(sum, 2);

  // Warp -> block, in columns of the head.
#pragma unroll
  for (int i = 0; i < 16; ++i)
#pragma unroll
    for (int j = 0; j < 4; ++j)
      if (2 * t + j % 2 < kHeads)
        s->partial[warp][2 * t + j % 2][8 * value_piece(i / 4) + 2 * (i % 4) + j / 2] = o[i][j];
  if (t == 0 && g < kHeads) {
    s->partial[warp][g][kHeadCols] = maximum;
    s->partial[warp][g][kHeadCols + 1] = sum;
  }
  block_sync();
  // Block -> row: a thread has its column of every head.
  float* const rows = p.partial + (static_cast<size_t>(row) * static_cast<size_t>(p.n_q_heads) +
                                   static_cast<size_t>(first_head)) *
                                      kAblationSplits * kRow;
  for (int h = 0; h < kHeads; ++h) {
    float top = -INFINITY, all = 0, x = 0;
    for (int w = 0; w < kWarps; ++w) top = fmaxf(top, s->partial[w][h][kHeadCols]);
    for (int w = 0; w < kWarps; ++w) {
      const float share = share_of(s->partial[w][h][kHeadCols], top);
      all = fmaf(share, s->partial[w][h][kHeadCols + 1], all);
      x = fmaf(share, s->partial[w][h][thread], x);
    }
    float* mine = rows + (h * kAblationSplits + split) * kRow;
    mine[thread] = x;
    if (thread == 0) mine[kHeadCols] = top, mine[kHeadCols + 1] = all;
  }
  block_sync();
  unsigned* counter = &p.counters[row * p.n_q_heads + first_head];
  if (thread == 0) s->arrived = fetch_add_acq_rel(counter, 1);
  block_sync();
  if (s->arrived != static_cast<unsigned>(n_splits) - 1) return;
  if (thread == 0) *counter = 0;
  for (int h = 0; h < kHeads; ++h) {
    const float* parts = rows + h * kAblationSplits * kRow;
    float top = -INFINITY, all = 0, x = 0;
    for (int i = 0; i < n_splits; ++i) top = fmaxf(top, load_l2(parts + i * kRow + kHeadCols));
    for (int i = 0; i < n_splits; ++i) {
      const float share = share_of(load_l2(parts + i * kRow + kHeadCols), top);
      all = fmaf(share, load_l2(parts + i * kRow + kHeadCols + 1), all);
      x = fmaf(share, load_l2(parts + i * kRow + thread), x);
    }
    const int head = first_head + h;
    float y = x / all;
    if (p.gate)
      y *= sigmoid(bf16_value(p.q_gate[at + static_cast<size_t>(head * 2 * kHeadCols + kHeadCols + thread)]));
    p.y[(static_cast<size_t>(row) * static_cast<size_t>(p.n_q_heads) + static_cast<size_t>(head)) *
            kHeadCols +
        static_cast<size_t>(thread)] = static_cast<uint16_t>(bf16_bits(y));
  }
}

}  // namespace

void launch_attention_ablation(const AttentionAblation& p, cudaStream_t stream) {
  const int units = p.attention.n_q_heads / (p.packed ? kGroup : 1);
  int n_splits = p.split ? kBlocksWanted / units : 1;
  n_splits = n_splits < 1 ? 1 : n_splits > kAblationSplits ? kAblationSplits : n_splits;
  const LaunchShape shape{
      dim3(static_cast<unsigned>(units * n_splits), static_cast<unsigned>(p.attention.rows)), kThreads,
      static_cast<unsigned>(sizeof(Shared))};
  const Params params{p.attention, n_splits};
  const auto start = [&](auto int8) {
    constexpr KvForm kForm = int8 ? KvForm::int8 : KvForm::bf16;
    if (p.coalesced)
      launch(p.packed ? attention_ablation<true, true, kForm> : attention_ablation<true, false, kForm>,
             params, shape, stream);
    else
      launch(p.packed ? attention_ablation<false, true, kForm> : attention_ablation<false, false, kForm>,
             params, shape, stream);
  };
  if (p.attention.cache.form == KvForm::int8) start(std::true_type{});
  else start(std::false_type{});
}

}  // namespace lily::cuda
