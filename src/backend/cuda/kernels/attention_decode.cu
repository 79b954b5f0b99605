// attention_decode. Grid: per row and KV head 120 splits of the cache in clusters of 8 blocks (an H200
// holds 30 such clusters at once); how many splits are in use
// follows from the position on the device, so the launch never changes. Bound by KV bytes, each read once for
// all 8 query heads of its KV head. A warp takes 16 keys at a time straight from memory into mma.m16n8k16
// fragments: the order of the 256 columns inside a product is free, so a lane's 16 bytes of a key serve as B
// fragments of S = Q K^T (A: 8 heads, 8 rows unused), and its 16 bytes of four values, halves regrouped, as A
// fragments of O^T = V^T P^T. P enters as two bf16 parts, so that softmax and accumulation are fp32 in
// effect. Partial results meet warp -> block -> cluster -> last cluster to arrive, each in a fixed order.
#include "backend/cuda/kernels/attention_decode.h"

#include "backend/cuda/kernels/kv_address.h"
#include "backend/cuda/kernels/launch.h"
#include "backend/cuda/kernels/rope.h"

namespace lily::cuda {
namespace {

constexpr int kWarps = 4, kGroup = 8;  // query heads of a KV head
constexpr unsigned kCluster = 8, kThreads = kWarps * 32;
constexpr int kSplits = 120, kClusters = kSplits / static_cast<int>(kCluster);
constexpr int kChunk = 16;           // keys of a warp's step
constexpr int kMinChunks = kWarps;   // of a split
constexpr int kRow = kHeadCols + 4;  // floats of a partial row: 256 values, maximum, sum, padding

struct Shared {
  uint16_t q[kGroup][kHeadCols];        // scaled by 1/16
  float partial[kWarps][kGroup][kRow];  // values in fragment order (fragment_column)
  float block[kGroup][kRow];            // read by the other blocks of the cluster
  float share[kGroup][kWarps];          // what a warp's partial sum counts in the block's
  unsigned arrived;
};

// The column at place i of a partial row.
__device__ __forceinline__ int fragment_column(int i) {
  return i / 64 * 64 + i % 8 * 8 + i / 16 % 4 * 2 + i / 8 % 2;
}

// What a partial sum with maximum m counts in a total with maximum top; parts without a key have none.
__device__ __forceinline__ float share_of(float m, float top) {
  return m == -INFINITY ? 0.0f : exp_fast(m - top);
}

__global__ void __launch_bounds__(kThreads, 2) attention_decode(AttentionDecode p) {
  auto* s = reinterpret_cast<Shared*>(shared_memory());
  const int row = static_cast<int>(blockIdx.y), thread = static_cast<int>(threadIdx.x), warp = thread / 32;
  const int lane = static_cast<int>(lane_id()), g = lane / 4, t = lane % 4;
  const int kv_head = static_cast<int>(blockIdx.x) / kSplits, split = static_cast<int>(blockIdx.x) % kSplits;
  const int position = p.step.positions[row], n_keys = position + 1;
  const int32_t* table = p.step.block_table + p.step.table_first[row];
  const int n_chunks = (n_keys + kChunk - 1) / kChunk;
  int per_split = (n_chunks + kSplits - 1) / kSplits;
  if (per_split < kMinChunks) per_split = kMinChunks;
  const int n_splits = (n_chunks + per_split - 1) / per_split;
  const int n_clusters = (n_splits + static_cast<int>(kCluster) - 1) / static_cast<int>(kCluster);
  HeadWeight q_norm{}, k_norm{};
  if (p.prepare) {
    q_norm = load_head_weight(p.q_norm);
    k_norm = load_head_weight(p.k_norm);
  }
  // Into the L2 ahead of the loads: 16 keys and their values, 4 lines each, 2 of both a lane.
  const int first = split * per_split;
  const int last = first + per_split < n_chunks ? first + per_split : n_chunks;
  const auto prefetch = [&](int chunk) {
    const int key = chunk * kChunk + lane / 2;
    if (chunk >= last || key >= position) return;  // the last key is not written yet
    const size_t offset =
        kv_offset(table, p.cache.n_kv_heads, kv_head, key) + static_cast<size_t>(lane % 2) * (kHeadCols / 2);
#pragma unroll
    for (int line = 0; line < 2; ++line) {
      prefetch_l2(p.cache.k + offset + line * (kHeadCols / 4));
      prefetch_l2(p.cache.v + offset + line * (kHeadCols / 4));
    }
  };
  prefetch(first + warp);
  pdl_wait();
  pdl_trigger();
  if (split / static_cast<int>(kCluster) >= n_clusters) return;  // the whole cluster leaves
  const size_t at = static_cast<size_t>(row) * static_cast<size_t>(p.stride);

  // Queries: two heads a warp. The new key and value: by warp 0 of the split that has the last position.
  for (int h = warp; h < kGroup; h += kWarps) {
    const int head = kv_head * kGroup + h;
    uint4 q;
    if (p.prepare)
      q = norm_and_rotate(p.q_gate + at + static_cast<size_t>(head) * 2 * kHeadCols, q_norm, p.epsilon,
                          p.step.rope + row * 32);
    else
      q = load_l2(
          reinterpret_cast<const uint4*>(p.q + (static_cast<size_t>(row) * static_cast<size_t>(p.n_q_heads) +
                                                static_cast<size_t>(head)) *
                                                   kHeadCols) +
          lane);
    const auto scaled = [](uint32_t w) { return bf16_pair(bf16_low(w) * 0.0625f, bf16_high(w) * 0.0625f); };
    reinterpret_cast<uint4*>(s->q[h])[lane] = make_uint4(scaled(q.x), scaled(q.y), scaled(q.z), scaled(q.w));
  }
  if (p.prepare && warp == 0 && split == n_splits - 1) {
    const size_t to = kv_offset(table, p.cache.n_kv_heads, kv_head, position);
    const size_t from = at + static_cast<size_t>(kv_head) * kHeadCols;
    reinterpret_cast<uint4*>(p.cache.k + to)[lane] =
        norm_and_rotate(p.k + from, k_norm, p.epsilon, p.step.rope + row * 32);
    reinterpret_cast<uint4*>(p.cache.v + to)[lane] =
        load_l2(reinterpret_cast<const uint4*>(p.v + from) + lane);
  }
  block_sync();

  uint4 q[8];
#pragma unroll
  for (int c = 0; c < 8; ++c) q[c] = reinterpret_cast<const uint4*>(s->q[g])[4 * c + t];
  float o[16][4];
#pragma unroll
  for (auto& tile : o)
#pragma unroll
    for (float& x : tile) x = 0;
  float maximum = -INFINITY, sum = 0;  // of head g; sum over this lane's keys only

  for (int chunk = first + warp; chunk < last; chunk += kWarps) {
    prefetch(chunk + kWarps);
    const int base = chunk * kChunk;
    const auto key_at = [&](int key) {  // beyond the end: the last key again, with weight 0
      return kv_offset(table, p.cache.n_kv_heads, kv_head, key < n_keys ? key : n_keys - 1);
    };
    float score[2][4];
    {
      uint4 k[2][8];
#pragma unroll
      for (int n = 0; n < 2; ++n) {
        const auto* key = reinterpret_cast<const uint4*>(p.cache.k + key_at(base + 8 * n + g));
#pragma unroll
        for (int c = 0; c < 8; ++c) k[n][c] = load_l2(key + 4 * c + t);
      }
#pragma unroll
      for (int n = 0; n < 2; ++n) {
#pragma unroll
        for (float& x : score[n]) x = 0;
#pragma unroll
        for (int c = 0; c < 8; ++c) {
          mma_16816(score[n], q[c].x, 0, q[c].y, 0, k[n][c].x, k[n][c].y);
          mma_16816(score[n], q[c].z, 0, q[c].w, 0, k[n][c].z, k[n][c].w);
        }
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
      high[n] = bf16_pair(p0, p1);
      low[n] = bf16_pair(p0 - bf16_low(high[n]), p1 - bf16_high(high[n]));
    }
    // Accumulators hold heads 2 t and 2 t + 1; the shrink factors live with head g.
    const float shrink0 = shuffle_from(shrink, static_cast<unsigned>(8 * t)),
                shrink1 = shuffle_from(shrink, static_cast<unsigned>(8 * t + 4));
    const uint4* value[4];
#pragma unroll
    for (int n = 0; n < 2; ++n)
#pragma unroll
      for (int j = 0; j < 2; ++j)
        value[2 * n + j] = reinterpret_cast<const uint4*>(p.cache.v + key_at(base + 8 * n + 2 * t + j)) + g;
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      uint32_t v[4][4];
#pragma unroll
      for (int n = 0; n < 4; ++n) {
        const uint4 x = load_l2(value[n] + 8 * c);
        v[n][0] = x.x;
        v[n][1] = x.y;
        v[n][2] = x.z;
        v[n][3] = x.w;
      }
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        float(&acc)[4] = o[4 * c + i];
        acc[0] *= shrink0;
        acc[1] *= shrink1;
        acc[2] *= shrink0;
        acc[3] *= shrink1;
        const uint32_t a0 = pick_halves(v[0][i], v[1][i], false), a1 = pick_halves(v[0][i], v[1][i], true);
        const uint32_t a2 = pick_halves(v[2][i], v[3][i], false), a3 = pick_halves(v[2][i], v[3][i], true);
        mma_16816(acc, a0, a1, a2, a3, high[0], high[1]);
        mma_16816(acc, a0, a1, a2, a3, low[0], low[1]);
      }
    }
  }
  sum += shuffle_xor(sum, 1);
  sum += shuffle_xor(sum, 2);

  // Warp -> block.
#pragma unroll
  for (int i = 0; i < 16; ++i)
#pragma unroll
    for (int j = 0; j < 4; ++j) s->partial[warp][2 * t + j % 2][i * 16 + j / 2 * 8 + g] = o[i][j];
  if (t == 0) {
    s->partial[warp][g][kHeadCols] = maximum;
    s->partial[warp][g][kHeadCols + 1] = sum;
  }
  block_sync();
  if (thread < kGroup) {
    float top = -INFINITY, all = 0;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) top = fmaxf(top, s->partial[w][thread][kHeadCols]);
#pragma unroll
    for (int w = 0; w < kWarps; ++w) {
      const float share = share_of(s->partial[w][thread][kHeadCols], top);
      s->share[thread][w] = share;
      all = fmaf(share, s->partial[w][thread][kHeadCols + 1], all);
    }
    s->block[thread][kHeadCols] = top;
    s->block[thread][kHeadCols + 1] = all;
  }
  block_sync();
#pragma unroll
  for (int h = 0; h < kGroup; ++h) {
    float2 value = make_float2(0, 0);
#pragma unroll
    for (int w = 0; w < kWarps; ++w) {
      const float2 v = reinterpret_cast<const float2*>(s->partial[w][h])[thread];
      value.x = fmaf(s->share[h][w], v.x, value.x);
      value.y = fmaf(s->share[h][w], v.y, value.y);
    }
    reinterpret_cast<float2*>(s->block[h])[thread] = value;
  }
  cluster_sync();

  // Block -> cluster: block r of the cluster has head r; a thread has places `thread` and thread + 128 of its
  // row.
  const int h = static_cast<int>(cluster_rank()), head = kv_head * kGroup + h;
  float value[2] = {0, 0}, top = -INFINITY, all = 0;
  {
    float m[kCluster], v[kCluster][3];
#pragma unroll
    for (unsigned r = 0; r < kCluster; ++r) {
      m[r] = cluster_read(&s->block[h][kHeadCols], r);
      v[r][0] = cluster_read(&s->block[h][thread], r);
      v[r][1] = cluster_read(&s->block[h][thread + static_cast<int>(kThreads)], r);
      v[r][2] = cluster_read(&s->block[h][kHeadCols + 1], r);
    }
#pragma unroll
    for (const float x : m) top = fmaxf(top, x);
#pragma unroll
    for (unsigned r = 0; r < kCluster; ++r) {
      const float share = share_of(m[r], top);
      value[0] = fmaf(share, v[r][0], value[0]);
      value[1] = fmaf(share, v[r][1], value[1]);
      all = fmaf(share, v[r][2], all);
    }
  }
  cluster_sync();  // nobody leaves while its shared memory may be read

  // Cluster -> row: the last to arrive for this head.
  if (n_clusters > 1) {
    float* rows = p.partial + static_cast<size_t>(row * p.n_q_heads + head) * kClusters * kRow;
    float* mine = rows + split / static_cast<int>(kCluster) * kRow;
    mine[thread] = value[0];
    mine[thread + static_cast<int>(kThreads)] = value[1];
    if (thread == 0) {
      mine[kHeadCols] = top;
      mine[kHeadCols + 1] = all;
    }
    block_sync();
    unsigned* counter = &p.counters[row * p.n_q_heads + head];
    if (thread == 0) s->arrived = fetch_add_acq_rel(counter, 1);
    block_sync();
    if (s->arrived != static_cast<unsigned>(n_clusters) - 1) return;
    if (thread == 0) *counter = 0;
    float m[kClusters], v[kClusters][3];
#pragma unroll
    for (int c = 0; c < kClusters; ++c) {
      const bool used = c < n_clusters;
      m[c] = used ? load_l2(rows + c * kRow + kHeadCols) : -INFINITY;
      v[c][0] = used ? load_l2(rows + c * kRow + thread) : 0.0f;
      v[c][1] = used ? load_l2(rows + c * kRow + thread + static_cast<int>(kThreads)) : 0.0f;
      v[c][2] = used ? load_l2(rows + c * kRow + kHeadCols + 1) : 0.0f;
    }
    top = -INFINITY;
#pragma unroll
    for (const float x : m) top = fmaxf(top, x);
    value[0] = value[1] = all = 0;
#pragma unroll
    for (int c = 0; c < kClusters; ++c) {
      const float share = share_of(m[c], top);
      value[0] = fmaf(share, v[c][0], value[0]);
      value[1] = fmaf(share, v[c][1], value[1]);
      all = fmaf(share, v[c][2], all);
    }
  }
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int column = fragment_column(thread + i * static_cast<int>(kThreads));
    float y = value[i] / all;
    if (p.gate)
      y *= sigmoid(bf16_value(p.q_gate[at + static_cast<size_t>(head * 2 * kHeadCols + kHeadCols + column)]));
    p.y[(static_cast<size_t>(row) * static_cast<size_t>(p.n_q_heads) + static_cast<size_t>(head)) *
            kHeadCols +
        static_cast<size_t>(column)] = static_cast<uint16_t>(bf16_bits(y));
  }
}

}  // namespace

void launch_attention_decode(const AttentionDecode& p, cudaStream_t stream) {
  LaunchShape shape;
  shape.threads = kThreads;
  shape.cluster = kCluster;
  shape.grid = dim3(static_cast<unsigned>(p.n_q_heads / kGroup * kSplits), static_cast<unsigned>(p.rows));
  shape.shared_bytes = sizeof(Shared);
  launch(attention_decode, p, shape, stream);
}

}  // namespace lily::cuda
