// attention_decode. Grid: per row and KV head 60 splits of the cache in clusters of 4 blocks, one block an
// SM; how many splits are in use follows from the position on the device, so the launch never changes. Bound
// by KV bytes, each read once for all 8 query heads of its KV head: a warp has a ring of slots of 16 keys or
// their values, which the copy engine fills from before the wait on. The order of the 256 columns inside a
// product is free, so a lane's 16 bytes of a key serve as B fragments of S = Q K^T (A: 8 heads, 8 rows
// unused), and its 16 bytes of four values, halves regrouped, as A fragments of O^T = V^T P^T. P enters as
// two bf16 parts, so that softmax and accumulation are fp32 in effect. Partial results meet warp -> block ->
// cluster (by messages) -> last cluster to arrive, each in a fixed order.
#include "backend/cuda/kernels/attention_decode.h"

#include "backend/cuda/kernels/attention_products.h"
#include "backend/cuda/kernels/kv_address.h"
#include "backend/cuda/kernels/launch.h"
#include "backend/cuda/kernels/rope.h"

namespace lily::cuda {
namespace {

constexpr int kWarps = 4, kGroup = 8;  // query heads of a KV head
constexpr int kCluster = 4, kClusters = 15, kSplits = kCluster * kClusters;
constexpr int kOwnHeads = kGroup / kCluster;  // that a block finishes for its cluster
constexpr unsigned kThreads = kWarps * 32;
constexpr int kChunk = 16;  // keys of a slot
template <KvForm kForm>
constexpr int kSlots = kForm == KvForm::int8 ? 5 : 3;  // of a warp
template <KvForm kForm>
constexpr unsigned kSlotBytes = kChunk * kv_head_bytes(kForm) / kKvBlock;  // int8: codes, then scales
constexpr unsigned kSlotCodes = kChunk * kv_row_bytes(KvForm::int8);
// Up to so many chunks a warp, one cluster does all: meeting in memory costs as much as two chunks.
constexpr int kChunksOfOneCluster = 3 * kWarps * kCluster;
constexpr int kMinChunks = 2 * kWarps;  // of a split, of several clusters
constexpr int kRow = kHeadCols + 4;     // floats of a partial row: 256 values, maximum, sum, padding

template <KvForm kForm>
struct alignas(128) Shared {
  union {
    unsigned char ring[kWarps][kSlots<kForm>][kSlotBytes<kForm>];
    float partial[kWarps][kSlots<kForm> * kSlotBytes<kForm> /
                          4];  // when a warp is done: [8][kRow], values in fragment order
  };
  uint16_t q[kGroup][kHeadCols];                // scaled by 1/16
  uint16_t new_k[kHeadCols], new_v[kHeadCols];  // int8: 256 codes and 4 scales
  float received[kOwnHeads][kCluster][kRow];    // from the blocks of the cluster
  float share[kGroup][kWarps];                  // what a warp's partial sum counts in the block's
  MBarrier filled[kWarps][kSlots<kForm>], arrived;
  unsigned n_before;
};

// The column at place i of a partial row.
__device__ __forceinline__ int fragment_column(int i) {
  return i / 64 * 64 + i % 8 * 8 + i / 16 % 4 * 2 + i / 8 % 2;
}

// What a partial sum with maximum m counts in a total with maximum top; parts without a key have none.
__device__ __forceinline__ float share_of(float m, float top) {
  return m == -INFINITY ? 0.0f : exp_fast(m - top);
}

// Four values of a row, its maximum and its sum, of n parts, as one. row(i): part i.
template <int kParts, typename Row>
__device__ __forceinline__ void merge_parts(int n, int place, const Row& row, float (&value)[4], float& top,
                                            float& all) {
  float m[kParts], sum[kParts];
  float4 v[kParts];
#pragma unroll
  for (int i = 0; i < kParts; ++i) {
    const bool used = i < n;
    v[i] = used ? row(i, place) : make_float4(0, 0, 0, 0);
    const float4 end = used ? row(i, kHeadCols) : make_float4(-INFINITY, 0, 0, 0);
    m[i] = end.x;
    sum[i] = end.y;
  }
  top = -INFINITY;
#pragma unroll
  for (const float x : m) top = fmaxf(top, x);
  value[0] = value[1] = value[2] = value[3] = all = 0;
#pragma unroll
  for (int i = 0; i < kParts; ++i) {
    const float share = share_of(m[i], top);
    value[0] = fmaf(share, v[i].x, value[0]);
    value[1] = fmaf(share, v[i].y, value[1]);
    value[2] = fmaf(share, v[i].z, value[2]);
    value[3] = fmaf(share, v[i].w, value[3]);
    all = fmaf(share, sum[i], all);
  }
}

// Chunks of each but the last of one cluster's splits. The split with the last position has a key to prepare
// and a chunk to patch, so it gets a turn of its warps less than the others where they can take its chunks in
// the turns that they make anyway.
__device__ __forceinline__ int chunks_of_one_cluster(int n_chunks) {
  const int even = (n_chunks + kCluster - 1) / kCluster, turns = (even + kWarps - 1) / kWarps;
  const int of_last = (turns - 1) * kWarps;
  if (turns == 1 || n_chunks - (kCluster - 1) * even <= of_last) return even;
  const int uneven = (n_chunks - of_last + kCluster - 2) / (kCluster - 1);
  return uneven <= turns * kWarps ? uneven : even;
}

template <KvForm kForm>
__global__ void __launch_bounds__(kThreads) attention_decode(AttentionDecode p) {
  constexpr int kSlots = cuda::kSlots<kForm>;
  constexpr unsigned kSlotBytes = cuda::kSlotBytes<kForm>;
  constexpr bool kInt8 = kForm == KvForm::int8;
  auto* s = reinterpret_cast<Shared<kForm>*>(shared_memory());
  const int row = static_cast<int>(blockIdx.y), thread = static_cast<int>(threadIdx.x), warp = thread / 32;
  const int lane = static_cast<int>(lane_id()), g = lane / 4, t = lane % 4;
  const int kv_head = static_cast<int>(blockIdx.x) / kSplits, split = static_cast<int>(blockIdx.x) % kSplits;
  const int rank = static_cast<int>(cluster_rank());
  const int position = p.step.positions[row], n_keys = position + 1;
  const int32_t* table = p.step.block_table + p.step.table_first[row];
  const int n_chunks = (n_keys + kChunk - 1) / kChunk;
  int per_split;
  if (n_chunks <= kChunksOfOneCluster) {
    per_split = chunks_of_one_cluster(n_chunks);
  } else {
    per_split = (n_chunks + kSplits - 1) / kSplits;
    if (per_split < kMinChunks) per_split = kMinChunks;
  }
  const int n_splits = (n_chunks + per_split - 1) / per_split,
            n_clusters = (n_splits + kCluster - 1) / kCluster;
  if (split / kCluster >= n_clusters) {  // the whole cluster leaves
    pdl_wait();
    pdl_trigger();
    return;
  }

  // Slot 2 i has the keys of this warp's i-th chunk, slot 2 i + 1 its values.
  const int first = split * per_split + warp;
  const int last = split * per_split + per_split < n_chunks ? split * per_split + per_split : n_chunks;
  const int n_slots = first < last ? (last - first + kWarps - 1) / kWarps * 2 : 0;
  const auto block_of = [&](int slot) {  // the KV block of a slot's chunk; asked for early, it is a load
    const int chunk = first + slot / 2 * kWarps;
    return slot < n_slots ? table[chunk / (kKvBlock / kChunk)] : 0;
  };
  const auto request = [&](int slot, int32_t block) {  // by one lane
    const int chunk = first + slot / 2 * kWarps;
    const unsigned char* const rows =
        (slot % 2 == 0 ? p.cache.k : p.cache.v) + kv_head_offset<kForm>(p.cache, block, kv_head);
    MBarrier* filled = &s->filled[warp][slot % kSlots];
    unsigned char* const to = s->ring[warp][slot % kSlots];
    mbarrier_expect(filled, kSlotBytes);
    bulk_copy(to, rows + kv_row_offset<kForm>(chunk * kChunk), kChunk * kv_row_bytes(kForm), filled);
    if constexpr (kInt8)
      bulk_copy(to + kSlotCodes, rows + kv_scale_offset(chunk * kChunk), kChunk * kKvScaleBytes, filled);
  };
  if (thread == 0) {
    mbarrier_init(&s->arrived, 1);
    for (int w = 0; w < kWarps; ++w)
      for (int i = 0; i < kSlots; ++i) mbarrier_init(&s->filled[w][i], 1);
    mbarrier_init_fence();
    mbarrier_expect(&s->arrived, kOwnHeads * kCluster * (kHeadCols + 2) * 4);
  }
  block_sync();
  cluster_arrive();
  if (!p.prepare) pdl_wait();  // the kernel in front writes the cache
  for (int slot = 0; slot < kSlots; ++slot) {
    const int32_t block = block_of(slot);
    if (lane == 0 && slot < n_slots) request(slot, block);
  }
  int32_t upcoming = block_of(kSlots);
  HeadWeight q_norm{}, k_norm{};
  if (p.prepare) {
    q_norm = load_head_weight(p.q_norm);
    k_norm = load_head_weight(p.k_norm);
  }
  cluster_wait();  // every block's barrier can take messages
  pdl_wait();
  pdl_trigger();
  const size_t at = static_cast<size_t>(row) * static_cast<size_t>(p.stride);

  // All loads first. Queries: two heads a warp. The new key and value: by warp 0 of the split that has the
  // last position. Gates: of the values that this thread finishes, wanted at the end.
  constexpr int kHeadsOfWarp = kGroup / kWarps;
  const bool has_new = p.prepare && split == n_splits - 1 && warp == 0;
  uint4 raw_q[kHeadsOfWarp], raw_k = make_uint4(0, 0, 0, 0), raw_v = make_uint4(0, 0, 0, 0);
#pragma unroll
  for (int i = 0; i < kHeadsOfWarp; ++i) {
    const int q_head = kv_head * kGroup + warp + i * kWarps;
    const uint16_t* from = p.prepare ? p.q_gate + at + static_cast<size_t>(q_head) * 2 * kHeadCols
                                     : p.q + (static_cast<size_t>(row) * static_cast<size_t>(p.n_q_heads) +
                                              static_cast<size_t>(q_head)) *
                                                 kHeadCols;
    raw_q[i] = load_l2(reinterpret_cast<const uint4*>(from) + lane);
  }
  HeadAngles angles{};
  if (p.prepare) angles = load_head_angles(p.step.rope + row * 32);
  if (has_new) {
    const size_t from = at + static_cast<size_t>(kv_head) * kHeadCols;
    raw_k = load_l2(reinterpret_cast<const uint4*>(p.k + from) + lane);
    raw_v = load_l2(reinterpret_cast<const uint4*>(p.v + from) + lane);
  }
  const int own = thread / (static_cast<int>(kThreads) / kOwnHeads);
  const int place = thread % (static_cast<int>(kThreads) / kOwnHeads) * 4;
  const int head = kv_head * kGroup + rank * kOwnHeads + own;
  uint16_t gate[4] = {};
  if (p.gate)
#pragma unroll
    for (int i = 0; i < 4; ++i)
      gate[i] =
          p.q_gate[at + static_cast<size_t>(head * 2 * kHeadCols + kHeadCols + fragment_column(place + i))];

#pragma unroll
  for (int i = 0; i < kHeadsOfWarp; ++i) {
    const uint4 q = p.prepare ? norm_and_rotate(raw_q[i], q_norm, p.epsilon, angles) : raw_q[i];
    const auto scaled = [](uint32_t w) { return bf16_pair(bf16_low(w) * 0.0625f, bf16_high(w) * 0.0625f); };
    reinterpret_cast<uint4*>(s->q[warp + i * kWarps])[lane] =
        make_uint4(scaled(q.x), scaled(q.y), scaled(q.z), scaled(q.w));
  }
  if (has_new) {
    const size_t rows = kv_head_offset<kForm>(p.cache, table[position / kKvBlock], kv_head);
    const auto append = [&](unsigned char* part, uint16_t* new_row, const uint4& bits) {
      unsigned char* const to = part + rows + kv_row_offset<kForm>(position);
      if constexpr (kInt8) {
        const Int8Piece piece = quantised_row(bits);
        put_int8_row(piece, to, part + rows + kv_scale_offset(position));
        put_int8_row(piece, reinterpret_cast<unsigned char*>(new_row),
                     reinterpret_cast<unsigned char*>(new_row) + kHeadCols);
      } else {
        reinterpret_cast<uint4*>(to)[lane] = reinterpret_cast<uint4*>(new_row)[lane] = bits;
      }
    };
    append(p.cache.k, s->new_k, norm_and_rotate(raw_k, k_norm, p.epsilon, angles));
    append(p.cache.v, s->new_v, raw_v);
  }
  block_sync();

  uint4 q[8];
#pragma unroll
  for (int c = 0; c < 8; ++c)
    q[c] = reinterpret_cast<const uint4*>(s->q[g])[kInt8 ? int8_query_piece(c, t) : 4 * c + t];
  float o[16][4];
#pragma unroll
  for (auto& tile : o)
#pragma unroll
    for (float& x : tile) x = 0;
  float maximum = -INFINITY, sum = 0;  // of head g; sum over this lane's keys only

  // Waits for a slot. In the last chunk the copy has what was in the cache before this token: the new row is
  // put in its place, and values beyond the end become zeros (their weights are zero, but zero times NaN is
  // not); of codes, which are numbers whatever they are, the scales do.
  const auto wait_for = [&](int slot, int base, const uint16_t* new_row) {
    unsigned char* rows = s->ring[warp][slot % kSlots];
    mbarrier_wait(&s->filled[warp][slot % kSlots], static_cast<unsigned>(slot / kSlots) & 1);
    if (base + kChunk > position) {
      for (int r = position - base; r < kChunk; ++r) {
        if constexpr (kInt8) {
          auto* scales = reinterpret_cast<uint2*>(rows + kSlotCodes) + r;
          if (base + r > position) {
            if (lane == 0) *scales = make_uint2(0, 0);
          } else if (p.prepare) {
            reinterpret_cast<uint2*>(rows + r * kHeadCols)[lane] =
                reinterpret_cast<const uint2*>(new_row)[lane];
            if (lane == 0) *scales = reinterpret_cast<const uint2*>(new_row)[kHeadCols / 8];
          }
        } else {
          uint4* to = reinterpret_cast<uint4*>(rows + r * kHeadCols * 2) + lane;
          if (base + r > position) *to = make_uint4(0, 0, 0, 0);
          else if (p.prepare) *to = reinterpret_cast<const uint4*>(new_row)[lane];
        }
      }
      warp_sync();
    }
    return rows;
  };
  const auto free_slot = [&](int slot) {  // after its last read: asks for the slot that takes its place
    warp_sync();
    if (lane == 0 && slot + kSlots < n_slots) request(slot + kSlots, upcoming);
    upcoming = block_of(slot + kSlots + 1);
  };

  for (int slot = 0; slot < n_slots; slot += 2) {
    const int base = (first + slot / 2 * kWarps) * kChunk;
    float score[2][4];
    {
      const unsigned char* keys = wait_for(slot, base, s->new_k);
      if constexpr (kInt8) int8_scores(score, q, keys);
      else bf16_scores(score, q, keys);
      free_slot(slot);
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
    float weight[2][2];
    uint32_t high[2], low[2];  // bf16 only
    sum *= shrink;
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      weight[n][0] = exp_fast(score[n][0] - maximum), weight[n][1] = exp_fast(score[n][1] - maximum);
      sum += weight[n][0] + weight[n][1];
      if constexpr (!kInt8) bf16_parts(weight[n][0], weight[n][1], high[n], low[n]);
    }
    // Accumulators hold heads 2 t and 2 t + 1; the shrink factors live with head g.
    const float shrink0 = shuffle_from(shrink, static_cast<unsigned>(8 * t)),
                shrink1 = shuffle_from(shrink, static_cast<unsigned>(8 * t + 4));
    const unsigned char* values = wait_for(slot + 1, base, s->new_v);
    if constexpr (kInt8) add_int8_outputs(o, weight, values, shrink0, shrink1);
    else add_bf16_outputs(o, high, low, values, shrink0, shrink1);
    free_slot(slot + 1);
  }
  sum += shuffle_xor(sum, 1);
  sum += shuffle_xor(sum, 2);

  // Warp -> block. The warp's ring is free: all that was asked for has come and was read.
  warp_sync();
  float* const partial = s->partial[warp];
#pragma unroll
  for (int i = 0; i < 16; ++i)
#pragma unroll
    for (int j = 0; j < 4; ++j) partial[(2 * t + j % 2) * kRow + i * 16 + j / 2 * 8 + g] = o[i][j];
  if (t == 0) {
    partial[g * kRow + kHeadCols] = maximum;
    partial[g * kRow + kHeadCols + 1] = sum;
  }
  block_sync();
  if (thread < kGroup) {
    float top = -INFINITY, all = 0;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) top = fmaxf(top, s->partial[w][thread * kRow + kHeadCols]);
#pragma unroll
    for (int w = 0; w < kWarps; ++w) {
      const float share = share_of(s->partial[w][thread * kRow + kHeadCols], top);
      s->share[thread][w] = share;
      all = fmaf(share, s->partial[w][thread * kRow + kHeadCols + 1], all);
    }
    float* to = &s->received[thread % kOwnHeads][rank][kHeadCols];
    cluster_send(to, &s->arrived, static_cast<unsigned>(thread / kOwnHeads), top);
    cluster_send(to + 1, &s->arrived, static_cast<unsigned>(thread / kOwnHeads), all);
  }
  block_sync();

  // Block -> cluster: block r finishes heads r * kOwnHeads ...
#pragma unroll
  for (int r = 0; r < kCluster; ++r) {
    const int h = r * kOwnHeads + own;
    float4 value = make_float4(0, 0, 0, 0);
#pragma unroll
    for (int w = 0; w < kWarps; ++w) {
      const float4 v = *reinterpret_cast<const float4*>(&s->partial[w][h * kRow + place]);
      const float share = s->share[h][w];
      value.x = fmaf(share, v.x, value.x);
      value.y = fmaf(share, v.y, value.y);
      value.z = fmaf(share, v.z, value.z);
      value.w = fmaf(share, v.w, value.w);
    }
    cluster_send(&s->received[own][rank][place], &s->arrived, static_cast<unsigned>(r), value);
  }
  mbarrier_wait(&s->arrived, 0);
  float value[4], top, all;
  merge_parts<kCluster>(
      kCluster, place,
      [&](int r, int i) { return *reinterpret_cast<const float4*>(&s->received[own][r][i]); }, value, top,
      all);

  // Cluster -> row: the last to arrive for these heads.
  if (n_clusters > 1) {
    float* rows = p.partial + static_cast<size_t>(row * p.n_q_heads + head) * kClusters * kRow;
    float* mine = rows + split / kCluster * kRow;
    *reinterpret_cast<float4*>(mine + place) = make_float4(value[0], value[1], value[2], value[3]);
    if (place == 0) *reinterpret_cast<float4*>(mine + kHeadCols) = make_float4(top, all, 0, 0);
    block_sync();
    unsigned* counter = &p.counters[row * p.n_q_heads + kv_head * kGroup + rank * kOwnHeads];
    if (thread == 0) s->n_before = fetch_add_acq_rel(counter, 1);
    block_sync();
    if (s->n_before != static_cast<unsigned>(n_clusters) - 1) return;
    if (thread == 0) *counter = 0;
    merge_parts<kClusters>(
        n_clusters, place,
        [&](int c, int i) { return load_l2(reinterpret_cast<const float4*>(rows + c * kRow + i)); }, value,
        top, all);
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    float y = value[i] / all;
    if (p.gate) y *= sigmoid(bf16_value(gate[i]));
    p.y[(static_cast<size_t>(row) * static_cast<size_t>(p.n_q_heads) + static_cast<size_t>(head)) *
            kHeadCols +
        static_cast<size_t>(fragment_column(place + i))] = static_cast<uint16_t>(bf16_bits(y));
  }
}

}  // namespace

void launch_attention_decode(const AttentionDecode& p, cudaStream_t stream) {
  LaunchShape shape;
  shape.threads = kThreads;
  shape.cluster = kCluster;
  shape.grid = dim3(static_cast<unsigned>(p.n_q_heads / kGroup * kSplits), static_cast<unsigned>(p.rows));
  const auto start = [&](auto kernel, size_t shared_bytes) {
    shape.shared_bytes = static_cast<unsigned>(shared_bytes);
    launch(kernel, p, shape, stream);
  };
  if (p.cache.form == KvForm::int8) start(attention_decode<KvForm::int8>, sizeof(Shared<KvForm::int8>));
  else start(attention_decode<KvForm::bf16>, sizeof(Shared<KvForm::bf16>));
}

}  // namespace lily::cuda
