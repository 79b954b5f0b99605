// One kernel an op (unfused_ablation.h). Grids: a thread a value for elementwise ops, a warp a head, a block
// a run of weight tiles for the experts, 32 state columns a block for the delta rule, whose rows are walked
// in order. Sums in fp32, experts' products as in q4_gemv.h. Bound by launches: each op waits for the one
// before.
#include "backend/cuda/kernels/unfused_ablation.h"

#include "backend/cuda/kernels/kv_address.h"
#include "backend/cuda/kernels/launch.h"
#include "backend/cuda/kernels/q4_gemv.h"
#include "backend/cuda/kernels/rope.h"

namespace lily::cuda {
namespace {

constexpr unsigned kThreads = 256;
constexpr int kChosen = 8;     // experts a row
constexpr int kHead = 128;     // values of a delta head
constexpr int kWarpHeads = 8;  // heads of a block, a warp each

dim3 grid_of(int64_t values, int rows = 1) {
  return dim3(static_cast<unsigned>((values + kThreads - 1) / kThreads), static_cast<unsigned>(rows));
}
__device__ __forceinline__ int column() { return static_cast<int>(blockIdx.x * kThreads + threadIdx.x); }

__device__ __forceinline__ void load_four(const uint16_t* from, float (&x)[4]) {
  const auto* words = reinterpret_cast<const uint32_t*>(from);
  const uint32_t low = load_l2(words), high = load_l2(words + 1);
  x[0] = bf16_low(low), x[1] = bf16_high(low), x[2] = bf16_low(high), x[3] = bf16_high(high);
}

__global__ void __launch_bounds__(kThreads) swiglu_rows(SwiGluRows p) {
  pdl_wait();
  pdl_trigger();
  const int64_t row = blockIdx.y;
  const int i = column();
  if (i >= p.width) return;
  const float gate = bf16_value(p.gate[row * p.gate_stride + i]),
              up = bf16_value(p.up[row * p.up_stride + i]);
  p.y[row * p.width + i] = static_cast<uint16_t>(bf16_bits(silu(gate) * up));
}

// ---- experts
constexpr int kWarps = 16;
constexpr unsigned kExpertThreads = kWarps * 32;
constexpr int kBlocksWanted = 128;

struct ExpertsLayout {
  unsigned x, scales, partial, barrier, total;
};
__host__ __device__ ExpertsLayout experts_layout(const ExpertsLinearRows& p) {
  const auto n_groups = static_cast<unsigned>(p.in / kGroupCols),
             tiles = static_cast<unsigned>(p.tiles_per_block);
  ExpertsLayout l{};
  l.x = tiles * n_groups * kRecordBytes;
  l.scales = l.x + staged_row_bytes(p.in) + kStagedSlack;
  l.partial = l.scales + (n_groups * 8 + 15) / 16 * 16;
  l.barrier = l.partial + tiles * static_cast<unsigned>(p.units_per_tile) * kTileRows * 4;
  l.total = l.barrier + 16;
  return l;
}

__global__ void __launch_bounds__(kExpertThreads) experts_linear_rows(ExpertsLinearRows p) {
  unsigned char* shared = shared_memory();
  const ExpertsLayout l = experts_layout(p);
  auto* barrier = reinterpret_cast<MBarrier*>(shared + l.barrier);
  const int n_groups = p.in / kGroupCols, row = static_cast<int>(blockIdx.y);
  const unsigned tile_bytes = static_cast<unsigned>(n_groups) * kRecordBytes;
  const int expert_tiles = p.out / kTileRows, first = static_cast<int>(blockIdx.x) * p.tiles_per_block;
  const int choice = first / expert_tiles,
            first_tile = first % expert_tiles;  // a block has tiles of one expert
  if (threadIdx.x == 0) {
    mbarrier_init(barrier, 1);
    mbarrier_init_fence();
  }
  warp_sync();  // the compiler initialises by an instruction of the whole warp
  pdl_wait();
  pdl_trigger();
  if (threadIdx.x == 0) {
    const size_t expert = static_cast<size_t>(p.ids[row * kChosen + choice]);
    const unsigned bytes = static_cast<unsigned>(p.tiles_per_block) * tile_bytes;
    mbarrier_expect(barrier, bytes);
    bulk_copy(shared,
              p.records +
                  (expert * static_cast<size_t>(expert_tiles) + static_cast<size_t>(first_tile)) * tile_bytes,
              bytes, barrier);
  }
  auto* scales = reinterpret_cast<GroupScale*>(shared + l.scales);
  const size_t x_row = static_cast<size_t>(p.by_choice ? row * kChosen + choice : row);
  stage_bf16_row(p.x + x_row * static_cast<size_t>(p.in), p.in, shared + l.x, scales, 1);
  block_sync();
  mbarrier_wait(barrier, 0);
  auto* partial = reinterpret_cast<float*>(shared + l.partial);
  for (int unit = static_cast<int>(threadIdx.x / 32); unit < p.tiles_per_block * p.units_per_tile;
       unit += kWarps) {
    const int tile = unit / p.units_per_tile, begin = unit % p.units_per_tile * p.groups_per_unit;
    const int n = n_groups - begin < p.groups_per_unit ? n_groups - begin : p.groups_per_unit;
    store_unit<1>(sum_groups<1>(shared + static_cast<unsigned>(tile) * tile_bytes +
                                    static_cast<unsigned>(begin) * kRecordBytes,
                                n, shared + l.x + begin * 2 * kGroupCols, 0, scales + begin),
                  partial + unit * kTileRows);
  }
  block_sync();
  for (int i = static_cast<int>(threadIdx.x); i < p.tiles_per_block * kTileRows;
       i += static_cast<int>(kExpertThreads)) {
    const int tile = i / kTileRows, r = i % kTileRows;
    const float y = sum_units(partial + tile * p.units_per_tile * kTileRows + r, p.units_per_tile, kTileRows);
    p.y[static_cast<size_t>(row * kChosen + choice) * static_cast<size_t>(p.out) +
        static_cast<size_t>((first_tile + tile) * kTileRows + r)] = static_cast<uint16_t>(bf16_bits(y));
  }
}

__global__ void __launch_bounds__(kThreads) experts_combine_rows(ExpertsCombineRows p) {
  pdl_wait();
  pdl_trigger();
  const int64_t row = blockIdx.y;
  const int i = column();
  if (i >= p.hidden) return;
  float mix = 0;
#pragma unroll
  for (int j = 0; j < kChosen; ++j)
    mix = fmaf(p.weights[row * kChosen + j], bf16_value(p.experts[(row * kChosen + j) * p.hidden + i]), mix);
  mix = fmaf(sigmoid(p.shared_logit[row * p.shared_logit_stride]), bf16_value(p.shared[row * p.hidden + i]),
             mix);
  p.residual_out[row * p.hidden + i] = p.residual_in[row * p.hidden + i] + mix;
}

// ---- delta net
__global__ void __launch_bounds__(kThreads) short_conv_rows(ShortConvRows p) {
  pdl_wait();
  pdl_trigger();
  const int segment = static_cast<int>(blockIdx.y), pair = column();  // two neighbouring channels
  if (2 * pair >= p.channels) return;
  const int first = p.step.segment_row[segment], end = p.step.segment_row[segment + 1];
  const int src = p.step.state_src[first], dst = p.step.state_dst[first];
  const auto* weights = reinterpret_cast<const uint2*>(p.conv) + 2 * pair;
  float w[2][4];
#pragma unroll
  for (int c = 0; c < 2; ++c)
    w[c][0] = bf16_low(weights[c].x), w[c][1] = bf16_high(weights[c].x), w[c][2] = bf16_low(weights[c].y),
    w[c][3] = bf16_high(weights[c].y);
  const auto state = [&](int slot, int i) {
    return reinterpret_cast<uint32_t*>(p.conv_state + slot * p.slot_stride + int64_t{i} * p.channels) + pair;
  };
  uint32_t old[3];
#pragma unroll
  for (int i = 0; i < 3; ++i) old[i] = src < 0 ? 0 : load_l2(state(src, i));
  for (int row = first; row < end; ++row) {
    const uint32_t now = load_l2(reinterpret_cast<const uint32_t*>(p.x + row * p.stride) + pair);
    const float low =
        fmaf(w[0][3], bf16_low(now),
             fmaf(w[0][2], bf16_low(old[2]), fmaf(w[0][1], bf16_low(old[1]), w[0][0] * bf16_low(old[0]))));
    const float high =
        fmaf(w[1][3], bf16_high(now),
             fmaf(w[1][2], bf16_high(old[2]), fmaf(w[1][1], bf16_high(old[1]), w[1][0] * bf16_high(old[0]))));
    reinterpret_cast<uint32_t*>(p.y + int64_t{row} * p.channels)[pair] = bf16_pair(silu(low), silu(high));
    old[0] = old[1], old[1] = old[2], old[2] = now;
  }
#pragma unroll
  for (int i = 0; i < 3; ++i) *state(dst, i) = old[i];
}

__global__ void __launch_bounds__(kWarpHeads * 32) delta_prepare_rows(DeltaPrepareRows p) {
  pdl_wait();
  pdl_trigger();
  const int64_t row = blockIdx.y;
  const int head = static_cast<int>(blockIdx.x) * kWarpHeads + static_cast<int>(threadIdx.x) / 32;
  const int lane = static_cast<int>(lane_id());
  if (head < 2 * p.n_key_heads) {  // q heads, then k heads
    float x[4];
    load_four(p.mixed + row * p.mixed_stride + head * kHead + 4 * lane, x);
    float scale = reciprocal_sqrt(warp_sum(x[0] * x[0] + x[1] * x[1] + x[2] * x[2] + x[3] * x[3]) + 1e-6f);
    const bool is_q = head < p.n_key_heads;
    if (is_q) scale *= 0.08838834764831845f;  // 128^-1/2
    float* to =
        (is_q ? p.q : p.k) + row * p.n_key_heads * kHead + (is_q ? head : head - p.n_key_heads) * kHead;
    reinterpret_cast<float4*>(to)[lane] = make_float4(x[0] * scale, x[1] * scale, x[2] * scale, x[3] * scale);
  }
  if (blockIdx.x != 0) return;
  for (int h = static_cast<int>(threadIdx.x); h < 2 * p.n_key_heads; h += kWarpHeads * 32) {  // value heads
    const float a = bf16_value(p.a[row * p.gate_stride + h]) + p.dt_bias[h];
    p.g[row * 2 * p.n_key_heads + h] = -expf(p.a_log[h]) * (fmaxf(a, 0.0f) + log1pf(expf(-fabsf(a))));
    p.beta[row * 2 * p.n_key_heads + h] = sigmoid(bf16_value(p.b[row * p.gate_stride + h]));
  }
}

// 8 threads a state column, 16 of its 128 values each.
constexpr int kColumns = static_cast<int>(kThreads) / 8;
constexpr int kParts = kHead / kColumns;

__device__ __forceinline__ float sum_of_eight(float x) {
#pragma unroll
  for (unsigned m = 1; m < 8; m <<= 1) x += shuffle_xor(x, m);
  return x;
}

__global__ void __launch_bounds__(kThreads) delta_rule_rows(DeltaRuleRows p) {
  pdl_wait();
  pdl_trigger();
  const int head = static_cast<int>(blockIdx.x) / kParts, part = static_cast<int>(blockIdx.x) % kParts;
  const int segment = static_cast<int>(blockIdx.y), n_value_heads = 2 * p.n_key_heads;
  const int of_head = part * kColumns + static_cast<int>(threadIdx.x) / 8,
            lane = static_cast<int>(threadIdx.x) % 8;
  const int first = p.step.segment_row[segment], end = p.step.segment_row[segment + 1];
  const int src = p.step.state_src[first], dst = p.step.state_dst[first];
  const int64_t in_slot = (int64_t{head} * kHead + of_head) * kHead;
  const auto at = [&](int slot) {
    return reinterpret_cast<float4*>(p.state + slot * p.slot_stride + in_slot) + lane;
  };
  float4 s[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) s[i] = src < 0 ? make_float4(0, 0, 0, 0) : load_l2(at(src) + 8 * i);
  for (int64_t row = first; row < end; ++row) {
    const int64_t key_at = (row * p.n_key_heads + head / 2) * kHead;
    const auto* k = reinterpret_cast<const float4*>(p.k + key_at) + lane;
    const auto* q = reinterpret_cast<const float4*>(p.q + key_at) + lane;
    const float decay = expf(p.g[row * n_value_heads + head]), beta = p.beta[row * n_value_heads + head];
    float4 key[4];
    float read = 0, o = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      key[i] = load_l2(k + 8 * i);
      s[i].x *= decay, s[i].y *= decay, s[i].z *= decay, s[i].w *= decay;
      read = fmaf(key[i].x, s[i].x,
                  fmaf(key[i].y, s[i].y, fmaf(key[i].z, s[i].z, fmaf(key[i].w, s[i].w, read))));
    }
    const float v = bf16_value(p.v[row * p.v_stride + head * kHead + of_head]);
    const float delta = beta * (v - sum_of_eight(read));
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float4 x = load_l2(q + 8 * i);
      s[i].x = fmaf(key[i].x, delta, s[i].x), s[i].y = fmaf(key[i].y, delta, s[i].y);
      s[i].z = fmaf(key[i].z, delta, s[i].z), s[i].w = fmaf(key[i].w, delta, s[i].w);
      o = fmaf(x.x, s[i].x, fmaf(x.y, s[i].y, fmaf(x.z, s[i].z, fmaf(x.w, s[i].w, o))));
    }
    o = sum_of_eight(o);
    if (lane == 0) p.o[(row * n_value_heads + head) * kHead + of_head] = o;
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) at(dst)[8 * i] = s[i];
}

__global__ void __launch_bounds__(kWarpHeads * 32) gated_norm_rows(GatedNormRows p) {
  pdl_wait();
  pdl_trigger();
  const int64_t row = blockIdx.y;
  const int head = static_cast<int>(blockIdx.x) * kWarpHeads + static_cast<int>(threadIdx.x) / 32;
  const int lane = static_cast<int>(lane_id());
  if (head >= p.n_value_heads) return;
  const float4 o =
      load_l2(reinterpret_cast<const float4*>(p.o + (row * p.n_value_heads + head) * kHead) + lane);
  const float r =
      reciprocal_sqrt(warp_sum(o.x * o.x + o.y * o.y + o.z * o.z + o.w * o.w) / kHead + p.epsilon);
  const float4 w = reinterpret_cast<const float4*>(p.norm)[lane];
  float z[4];
  load_four(p.z + row * p.z_stride + head * kHead + 4 * lane, z);
  auto* y = reinterpret_cast<uint32_t*>(p.y + (row * p.n_value_heads + head) * kHead + 4 * lane);
  y[0] = bf16_pair(o.x * r * w.x * silu(z[0]), o.y * r * w.y * silu(z[1]));
  y[1] = bf16_pair(o.z * r * w.z * silu(z[2]), o.w * r * w.w * silu(z[3]));
}

// ---- attention
__global__ void __launch_bounds__(32) head_norm_rope_rows(HeadNormRopeRows p) {
  pdl_wait();
  pdl_trigger();
  const int64_t row = blockIdx.y, head = blockIdx.x;
  reinterpret_cast<uint4*>(p.y + (row * p.n_heads + head) * kHeadCols)[lane_id()] = norm_and_rotate(
      p.x + row * p.stride + head * p.head_stride, p.weight, p.epsilon, p.step.rope + row * 32);
}

template <KvForm kForm>
__global__ void __launch_bounds__(32) kv_append_rows(KvAppendRows p) {
  pdl_wait();
  pdl_trigger();
  const int row = static_cast<int>(blockIdx.y), head = static_cast<int>(blockIdx.x);
  const int32_t* const table = p.step.block_table + p.step.table_first[row];
  const int position = p.step.positions[row];
  const uint16_t* k = p.k + (int64_t{row} * p.cache.n_kv_heads + head) * kHeadCols;
  const uint16_t* v = p.v + row * p.v_stride + head * kHeadCols;
  store_kv_row<kForm>(p.cache, p.cache.k, table, head, position,
                      load_l2(reinterpret_cast<const uint4*>(k) + lane_id()));
  store_kv_row<kForm>(p.cache, p.cache.v, table, head, position,
                      load_l2(reinterpret_cast<const uint4*>(v) + lane_id()));
}

__global__ void __launch_bounds__(kThreads) mask_tokens(MaskTokens p) {
  pdl_wait();
  pdl_trigger();
  const int i = p.n_tokens + column();
  if (i < p.vocab) p.logits[int64_t{blockIdx.y} * p.vocab + i] = -INFINITY;
}

template <typename Params>
void start(void (*kernel)(Params), const Params& p, dim3 grid, unsigned threads, cudaStream_t stream,
           unsigned shared_bytes = 0) {
  launch(kernel, p, LaunchShape{grid, threads, shared_bytes}, stream);
}

}  // namespace

void launch_swiglu_rows(const SwiGluRows& p, cudaStream_t stream) {
  start(swiglu_rows, p, grid_of(p.width, p.rows), kThreads, stream);
}

void launch_experts_linear_rows(ExpertsLinearRows p, cudaStream_t stream) {
  const int expert_tiles = p.out / kTileRows, n_tiles = kChosen * expert_tiles;
  p.tiles_per_block = (n_tiles + kBlocksWanted - 1) / kBlocksWanted;
  while (expert_tiles % p.tiles_per_block != 0) --p.tiles_per_block;
  const UnitSplit split = split_units(p.tiles_per_block, p.in / kGroupCols, kWarps);
  p.units_per_tile = split.units_per_tile;
  p.groups_per_unit = split.groups_per_unit;
  start(experts_linear_rows, p,
        dim3(static_cast<unsigned>(n_tiles / p.tiles_per_block), static_cast<unsigned>(p.rows)),
        kExpertThreads, stream, experts_layout(p).total);
}

void launch_experts_combine_rows(const ExpertsCombineRows& p, cudaStream_t stream) {
  start(experts_combine_rows, p, grid_of(p.hidden, p.rows), kThreads, stream);
}

void launch_short_conv_rows(const ShortConvRows& p, cudaStream_t stream) {
  start(short_conv_rows, p, grid_of(p.channels / 2, p.n_segments), kThreads, stream);
}

void launch_delta_prepare_rows(const DeltaPrepareRows& p, cudaStream_t stream) {
  const auto blocks = static_cast<unsigned>((2 * p.n_key_heads + kWarpHeads - 1) / kWarpHeads);
  start(delta_prepare_rows, p, dim3(blocks, static_cast<unsigned>(p.rows)), kWarpHeads * 32, stream);
}

void launch_delta_rule_rows(const DeltaRuleRows& p, cudaStream_t stream) {
  start(delta_rule_rows, p,
        dim3(static_cast<unsigned>(2 * p.n_key_heads * kParts), static_cast<unsigned>(p.n_segments)),
        kThreads, stream);
}

void launch_gated_norm_rows(const GatedNormRows& p, cudaStream_t stream) {
  const auto blocks = static_cast<unsigned>((p.n_value_heads + kWarpHeads - 1) / kWarpHeads);
  start(gated_norm_rows, p, dim3(blocks, static_cast<unsigned>(p.rows)), kWarpHeads * 32, stream);
}

void launch_head_norm_rope_rows(const HeadNormRopeRows& p, cudaStream_t stream) {
  start(head_norm_rope_rows, p, dim3(static_cast<unsigned>(p.n_heads), static_cast<unsigned>(p.rows)), 32,
        stream);
}

void launch_kv_append_rows(const KvAppendRows& p, cudaStream_t stream) {
  start(p.cache.form == KvForm::int8 ? kv_append_rows<KvForm::int8> : kv_append_rows<KvForm::bf16>, p,
        dim3(static_cast<unsigned>(p.cache.n_kv_heads), static_cast<unsigned>(p.rows)), 32, stream);
}

void launch_mask_tokens(const MaskTokens& p, cudaStream_t stream) {
  if (p.n_tokens < p.vocab) start(mask_tokens, p, grid_of(p.vocab - p.n_tokens, p.rows), kThreads, stream);
}

}  // namespace lily::cuda
