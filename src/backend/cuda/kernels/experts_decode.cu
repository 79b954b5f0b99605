// router_q8_decode, experts_gate_up_q4_decode, experts_down_q4_decode. Bound by weight bytes: 0.56, 10.6
// and 5.3 MB a row at full size. Sums as in q4_gemv.h; the router's in fp32, the mix of experts in fp32 in
// the order j = 0 .. 7, shared. Every block of the two expert kernels chooses the 8 experts itself: cheaper
// than a kernel for it. Rows of a step choose different experts, so each row has its own blocks (grid y).
#include "backend/cuda/kernels/experts_decode.h"

#include "backend/cuda/kernels/launch.h"
#include "backend/cuda/kernels/q4_gemv.h"
#include "backend/cuda/kernels/top8.h"

namespace lily::cuda {
namespace {

// ---- router: two of the n_experts + 1 rows a block, half of its threads for each
constexpr unsigned kRouterThreads = 512;
constexpr int kCodesPerStep = 8;  // of a thread
constexpr int kRouterSteps = 2;   // hidden <= 256 threads * 8 codes * 2

__device__ __forceinline__ float byte_value(uint32_t word, int i) {
  return static_cast<float>(word >> (8 * i) & 0xffu);
}

__global__ void __launch_bounds__(kRouterThreads, 2) router_q8_decode(RouterDecode p) {
  unsigned char* shared = shared_memory();
  auto* x = reinterpret_cast<float4*>(shared);  // the normalised row, bf16 values
  auto* scratch = reinterpret_cast<float*>(shared + static_cast<unsigned>(p.hidden) * 4);
  constexpr int kHalf = kRouterThreads / 2;
  const int half = static_cast<int>(threadIdx.x) / kHalf, i = static_cast<int>(threadIdx.x) % kHalf;
  const int out = static_cast<int>(blockIdx.x) * 2 + half;
  const bool active = out <= p.n_experts, gate = out == p.n_experts;
  const size_t weight_row = gate || !active ? 0 : static_cast<size_t>(out),
               hidden = static_cast<size_t>(p.hidden);
  const uint8_t* codes = (gate ? p.shared_codes : p.router_codes) + weight_row * hidden;
  const uint16_t* scales = (gate ? p.shared_scales : p.router_scales) + weight_row * (hidden / kGroupCols);
  const uint16_t* biases = (gate ? p.shared_biases : p.router_biases) + weight_row * (hidden / kGroupCols);
  uint2 c[kRouterSteps];
  float scale[kRouterSteps], bias[kRouterSteps];
#pragma unroll
  for (int k = 0; k < kRouterSteps; ++k) {
    const int at = i + k * kHalf;
    const bool inside = at * kCodesPerStep < p.hidden;
    c[k] = inside ? reinterpret_cast<const uint2*>(codes)[at] : make_uint2(0, 0);
    scale[k] = inside ? bf16_value(scales[at / 8]) : 0.0f;
    bias[k] = inside ? bf16_value(biases[at / 8]) : 0.0f;
  }
  const NormPart norm = load_norm_weight(p.norm, p.hidden);
  pdl_wait();
  pdl_trigger();
  for (int row = 0; row < p.rows; ++row) {
    const NormPart u =
        norm_row(p.x + static_cast<size_t>(row) * hidden, true, norm, p.hidden, p.epsilon, scratch);
#pragma unroll
    for (int k = 0; k < kNormSteps; ++k) {
      const int at = norm_index(k);
      if (at >= p.hidden / 4) break;
      const uint32_t low = bf16_pair(u.step[k].x, u.step[k].y), high = bf16_pair(u.step[k].z, u.step[k].w);
      x[at] = make_float4(bf16_low(low), bf16_high(low), bf16_low(high), bf16_high(high));
      if (blockIdx.x == 0)
        reinterpret_cast<uint2*>(p.normed + static_cast<size_t>(row) * hidden)[at] = make_uint2(low, high);
    }
    block_sync();
    float sum = 0;
#pragma unroll
    for (int k = 0; k < kRouterSteps; ++k) {
      const int at = i + k * kHalf;
      if (at * kCodesPerStep >= p.hidden) break;
      float product = 0, plain = 0;
#pragma unroll
      for (int w = 0; w < 2; ++w) {
        const float4 v = x[2 * at + w];
        const uint32_t word = w == 0 ? c[k].x : c[k].y;
        product = fmaf(byte_value(word, 0), v.x,
                       fmaf(byte_value(word, 1), v.y,
                            fmaf(byte_value(word, 2), v.z, fmaf(byte_value(word, 3), v.w, product))));
        plain += (v.x + v.y) + (v.z + v.w);
      }
      sum = fmaf(scale[k], product, fmaf(bias[k], plain, sum));
    }
    sum = warp_sum(sum);
    if (lane_id() == 0) scratch[threadIdx.x / 32] = sum;
    block_sync();
    if (i == 0 && active) {
      float y = 0;
      for (int w = 0; w < kHalf / 32; ++w) y += scratch[half * (kHalf / 32) + w];
      p.logits[static_cast<size_t>(row) * static_cast<size_t>(p.n_experts + 1) + static_cast<size_t>(out)] =
          y;
    }
    block_sync();
  }
}

// ---- gate and up: a pair is one 16-row tile of the gate and the same tile of the up projection
constexpr int kWarps = 16;
constexpr unsigned kThreads = kWarps * 32;
constexpr int kMaxTiles = 16;  // of a block
constexpr unsigned kBlocksWanted = 128;

struct GateUpLayout {
  unsigned records, x, sums, partial, top, scratch, logits, barriers, total;
};
__host__ __device__ GateUpLayout gate_up_layout(const ExpertsGateUpDecode& p) {
  const unsigned n_groups = static_cast<unsigned>(p.hidden / kGroupCols);
  const unsigned tiles = 2 * static_cast<unsigned>(p.pairs_per_block + p.shared_pairs_per_block);
  GateUpLayout l{};
  l.x = tiles * n_groups * kRecordBytes;
  l.sums = l.x + staged_row_bytes(p.hidden) + kStagedSlack;
  l.partial = l.sums + (n_groups * 8 + 15) / 16 * 16;
  l.top = l.partial + tiles * static_cast<unsigned>(p.units_per_tile) * kTileRows * 4;
  l.scratch = l.top + static_cast<unsigned>(sizeof(Top8));
  l.barriers = l.scratch + static_cast<unsigned>(sizeof(Top8Scratch));
  l.total = l.barriers + kMaxTiles * 8;
  return l;
}

__global__ void __launch_bounds__(kThreads, 2) experts_gate_up_q4_decode(ExpertsGateUpDecode p) {
  unsigned char* shared = shared_memory();
  const GateUpLayout l = gate_up_layout(p);
  auto* barriers = reinterpret_cast<MBarrier*>(shared + l.barriers);
  auto* top = reinterpret_cast<Top8*>(shared + l.top);
  const int n_groups = p.hidden / kGroupCols, row = static_cast<int>(blockIdx.y);
  const unsigned tile_bytes = static_cast<unsigned>(n_groups) * kRecordBytes;
  const int expert_tiles = p.width / kTileRows;
  const int n_pairs = kTop * expert_tiles, n_shared = p.shared_width / kTileRows;
  // Tiles of the block: its shared pairs first (static, asked for before the wait), then its routed pairs;
  // each as gate tile, up tile. Blocks beyond the routed ones have shared pairs only: no SM stays empty, so
  // that none takes two blocks of the kernel behind.
  const int extra = static_cast<int>(blockIdx.x) - p.routed_blocks,
            room = p.pairs_per_block + p.shared_pairs_per_block;
  const int shared_first = extra >= 0 ? extra * room
                                      : (static_cast<int>(gridDim.x) - p.routed_blocks) * room +
                                            static_cast<int>(blockIdx.x) * p.shared_pairs_per_block;
  const int shared_most = extra >= 0 ? room : p.shared_pairs_per_block;
  int my_shared = n_shared - shared_first < shared_most ? n_shared - shared_first : shared_most;
  if (my_shared < 0) my_shared = 0;
  const int first = static_cast<int>(blockIdx.x) * p.pairs_per_block;
  int my_pairs = n_pairs - first < p.pairs_per_block ? n_pairs - first : p.pairs_per_block;
  if (my_pairs < 0) my_pairs = 0;
  const int n_tiles = 2 * (my_shared + my_pairs);
  const auto request = [&](int tile, const unsigned char* weight, size_t weight_tile) {
    mbarrier_expect(&barriers[tile], tile_bytes);
    bulk_copy(shared + static_cast<unsigned>(tile) * tile_bytes, weight + weight_tile * tile_bytes,
              tile_bytes, &barriers[tile]);
  };
  if (threadIdx.x == 0) {
    for (int i = 0; i < n_tiles; ++i) mbarrier_init(&barriers[i], 1);
    mbarrier_init_fence();
    for (int i = 0; i < my_shared; ++i) {
      request(2 * i, p.shared_gate, static_cast<size_t>(shared_first + i));
      request(2 * i + 1, p.shared_up, static_cast<size_t>(shared_first + i));
    }
  }
  // Divisions take time: before the wait. Which routed tile this thread asks for, and which value it
  // finishes.
  const int thread = static_cast<int>(threadIdx.x);
  const bool asks = thread < 2 * my_pairs;
  const int asked_slot = (first + thread / 2) / expert_tiles;
  const auto asked_tile = static_cast<size_t>((first + thread / 2) % expert_tiles);
  uint16_t* y = nullptr;
  if (const int pair = thread / kTileRows, r = thread % kTileRows; pair < my_shared) {
    y = p.shared_act + static_cast<size_t>(row) * static_cast<size_t>(p.shared_width) +
        static_cast<size_t>((shared_first + pair) * kTileRows + r);
  } else if (pair < n_tiles / 2) {
    const int routed = first + pair - my_shared, slot = routed / expert_tiles;
    y = p.act + static_cast<size_t>(row * kTop + slot) * static_cast<size_t>(p.width) +
        static_cast<size_t>(routed % expert_tiles * kTileRows + r);
  }
  pdl_wait();
  pdl_trigger();
  const Bf16Part normed =
      load_bf16_row(p.normed + static_cast<size_t>(row) * static_cast<size_t>(p.hidden), p.hidden);
  if (p.logits != nullptr) {
    select_top8(p.logits + static_cast<size_t>(row) * static_cast<size_t>(p.logits_stride), p.n_experts, top,
                reinterpret_cast<Top8Scratch*>(shared + l.scratch));
  } else {
    if (threadIdx.x < kTop) top->ids[threadIdx.x] = p.ids[row * kTop + static_cast<int>(threadIdx.x)];
    block_sync();
  }
  // One thread a tile asks for it; the barriers were initialised before the block met.
  if (asks) {
    const size_t tile =
        static_cast<size_t>(top->ids[asked_slot]) * static_cast<size_t>(expert_tiles) + asked_tile;
    request(2 * my_shared + thread, thread % 2 == 0 ? p.gate : p.up, tile);
  }
  if (p.logits != nullptr && blockIdx.x == 0 && threadIdx.x < kTop) {
    p.ids[row * kTop + static_cast<int>(threadIdx.x)] = top->ids[threadIdx.x];
    p.weights[row * kTop + static_cast<int>(threadIdx.x)] = top8_weight(*top, static_cast<int>(threadIdx.x));
  }
  auto* scales = reinterpret_cast<GroupScale*>(shared + l.sums);
  stage_bf16_part(normed, p.hidden, shared + l.x, scales, 1);
  block_sync();

  auto* partial = reinterpret_cast<float*>(shared + l.partial);
  int tile = 0, in_tile = static_cast<int>(threadIdx.x / 32);
  for (int unit = in_tile; unit < n_tiles * p.units_per_tile; unit += kWarps, in_tile += kWarps) {
    for (; in_tile >= p.units_per_tile; in_tile -= p.units_per_tile) ++tile;
    const int begin = in_tile * p.groups_per_unit;
    const int n = n_groups - begin < p.groups_per_unit ? n_groups - begin : p.groups_per_unit;
    mbarrier_wait(&barriers[tile], 0);
    store_unit<1>(sum_groups<1>(shared + static_cast<unsigned>(tile) * tile_bytes +
                                    static_cast<unsigned>(begin) * kRecordBytes,
                                n, shared + l.x + begin * 2 * kGroupCols, 0, scales + begin),
                  partial + unit * kTileRows);
  }
  block_sync();
  if (y != nullptr) {
    const int pair = thread / kTileRows, r = thread % kTileRows;
    const float gate =
        sum_units(partial + 2 * pair * p.units_per_tile * kTileRows + r, p.units_per_tile, kTileRows);
    const float up =
        sum_units(partial + (2 * pair + 1) * p.units_per_tile * kTileRows + r, p.units_per_tile, kTileRows);
    *y = static_cast<uint16_t>(bf16_bits(silu_bf16(gate) * up));
  }
}

// ---- down: a block has one 16-row tile of the output and that tile of all 8 experts and the shared one
constexpr int kDownWarps = 18;
// Clock cycles between the choice and the request for the weights: those of the gate and up projections,
// which are asked for at the same time and wanted 5 us earlier, come first.
constexpr unsigned kDownDelay = 3000;
constexpr unsigned kDownThreads = kDownWarps * 32;

struct DownLayout {
  unsigned x, sums, partial, top, scratch, barriers, total, groups_per_unit, units_per_expert, units_shared,
      row_bytes;
};
__host__ __device__ DownLayout down_layout(const ExpertsDownDecode& p) {
  DownLayout l{};
  const unsigned groups = static_cast<unsigned>(p.width / kGroupCols),
                 shared_groups = static_cast<unsigned>(p.shared_width / kGroupCols);
  l.groups_per_unit = 4;
  l.units_per_expert = (groups + l.groups_per_unit - 1) / l.groups_per_unit;
  l.units_shared = (shared_groups + l.groups_per_unit - 1) / l.groups_per_unit;
  l.x = (kTop * groups + shared_groups) * kRecordBytes;
  l.row_bytes = staged_row_bytes(p.width);
  l.sums = l.x + kTop * l.row_bytes + staged_row_bytes(p.shared_width) + kStagedSlack;
  l.partial = l.sums + ((kTop * groups + shared_groups) * 8 + 15) / 16 * 16;
  l.top = l.partial + (kTop * l.units_per_expert + l.units_shared) * kTileRows * 4;
  l.scratch = l.top + static_cast<unsigned>(sizeof(Top8));
  l.barriers = l.scratch + static_cast<unsigned>(sizeof(Top8Scratch));
  l.total = l.barriers + (kTop + 1) * 8;
  return l;
}

__global__ void __launch_bounds__(kDownThreads) experts_down_q4_decode(ExpertsDownDecode p) {
  unsigned char* shared = shared_memory();
  const DownLayout l = down_layout(p);
  auto* barriers = reinterpret_cast<MBarrier*>(shared + l.barriers);
  auto* top = reinterpret_cast<Top8*>(shared + l.top);
  const int row = static_cast<int>(blockIdx.y), groups = p.width / kGroupCols,
            shared_groups = p.shared_width / kGroupCols;
  const size_t tile = blockIdx.x, expert_tiles = static_cast<size_t>(p.hidden / kTileRows);
  const unsigned tile_bytes = static_cast<unsigned>(groups) * kRecordBytes,
                 shared_bytes = static_cast<unsigned>(shared_groups) * kRecordBytes;
  const auto choose_and_request = [&] {  // contains barriers
    if (p.logits != nullptr) {
      select_top8(p.logits + static_cast<size_t>(row) * static_cast<size_t>(p.logits_stride), p.n_experts,
                  top, reinterpret_cast<Top8Scratch*>(shared + l.scratch));
    } else {
      if (threadIdx.x < kTop) {
        top->ids[threadIdx.x] = p.ids[row * kTop + static_cast<int>(threadIdx.x)];
        top->weights[threadIdx.x] = p.weights[row * kTop + static_cast<int>(threadIdx.x)];
      }
      block_sync();
    }
    if (threadIdx.x < kTop) {
      const unsigned j = threadIdx.x;
      if (p.logits != nullptr) spin(kDownDelay);
      mbarrier_expect(&barriers[j], tile_bytes);
      bulk_copy(shared + j * tile_bytes,
                p.down + (static_cast<size_t>(top->ids[j]) * expert_tiles + tile) * tile_bytes, tile_bytes,
                &barriers[j]);
      if (p.logits != nullptr) top->weights[j] = top8_weight(*top, static_cast<int>(j));
    }
  };
  if (threadIdx.x == 0) {
    for (int i = 0; i <= kTop; ++i) mbarrier_init(&barriers[i], 1);
    mbarrier_init_fence();
    if (shared_groups > 0) {
      mbarrier_expect(&barriers[kTop], shared_bytes);
      bulk_copy(shared + kTop * tile_bytes, p.shared_down + tile * shared_bytes, shared_bytes,
                &barriers[kTop]);
    }
  }
  // Units of work: of the 8 experts, then of the shared one. Divisions take time: the first unit's before the
  // wait.
  auto* partial = reinterpret_cast<float*>(shared + l.partial);
  const int per_unit = static_cast<int>(l.groups_per_unit), units = static_cast<int>(l.units_per_expert);
  const int n_units = kTop * units + static_cast<int>(l.units_shared);
  int expert, begin, n;
  const auto place = [&](int unit) {
    expert = unit < kTop * units ? unit / units : kTop;
    begin = (unit - expert * units) * per_unit;
    const int all = expert == kTop ? shared_groups : groups;
    n = all - begin < per_unit ? all - begin : per_unit;
  };
  place(static_cast<int>(threadIdx.x / 32));
  // The logits come from the kernel before the one in front, which has finished: they may be read before the
  // wait.
  //
  // The kernel behind may start as soon as blocks of the one in front leave room: it asks for a third of a
  // layer's bytes, all of weights, and would else ask when this kernel ends, whose end then waits in the same
  // queues.
  pdl_trigger();
  if (p.logits != nullptr) choose_and_request();
  pdl_wait();
  if (p.logits == nullptr) choose_and_request();

  // Wanted at the end only, asked for now.
  const size_t out_at = static_cast<size_t>(row) * static_cast<size_t>(p.hidden) + tile * kTileRows +
                        threadIdx.x / 16 % kTileRows;
  const float residual = load_l2(p.residual_in + out_at);
  const float shared_logit =
      shared_groups > 0
          ? load_l2(p.shared_logit + static_cast<size_t>(row) * static_cast<size_t>(p.shared_logit_stride))
          : 0.0f;
  auto* scales = reinterpret_cast<GroupScale*>(shared + l.sums);
  const int eighths = p.width / 8, n_routed = kTop * eighths, n_eighths = n_routed + p.shared_width / 8;
  for (int i = static_cast<int>(threadIdx.x); (i & ~31) < n_eighths; i += static_cast<int>(kDownThreads)) {
    const bool inside = i < n_eighths;
    const int j = i < n_routed ? i / eighths : kTop, at = i - j * eighths;
    uint4 v = make_uint4(0, 0, 0, 0);
    if (i < n_routed)
      v = load_l2(reinterpret_cast<const uint4*>(p.act + static_cast<size_t>(row * kTop) *
                                                             static_cast<size_t>(p.width)) +
                  i);
    else if (inside)
      v = load_l2(reinterpret_cast<const uint4*>(p.shared_act + static_cast<size_t>(row) *
                                                                    static_cast<size_t>(p.shared_width)) +
                  at);
    stage_eight(v, inside, 8 * at, shared + l.x + static_cast<unsigned>(j) * l.row_bytes, scales + j * groups,
                1);
  }
  block_sync();

  for (int unit = static_cast<int>(threadIdx.x / 32); unit < n_units; unit += kDownWarps) {
    if (unit >= kDownWarps) place(unit);
    mbarrier_wait(&barriers[expert], 0);
    store_unit<1>(
        sum_groups<1>(
            shared + static_cast<unsigned>(expert) * tile_bytes + static_cast<unsigned>(begin) * kRecordBytes,
            n, shared + l.x + static_cast<unsigned>(expert) * l.row_bytes + begin * 2 * kGroupCols, 0,
            scales + expert * groups + begin),
        partial + unit * kTileRows);
  }
  block_sync();
  // 16 lanes a row of the output: lane j < 9 sums the units of its expert.
  const int r = static_cast<int>(threadIdx.x) / 16, j = static_cast<int>(threadIdx.x) % 16;
  if (r < kTileRows) {  // whole warps
    float y = 0;
    if (j < kTop) y = top->weights[j] * sum_units(partial + j * units * kTileRows + r, units, kTileRows);
    else if (j == kTop && shared_groups > 0)
      y = sigmoid(shared_logit) *
          sum_units(partial + kTop * units * kTileRows + r, static_cast<int>(l.units_shared), kTileRows);
#pragma unroll
    for (unsigned m = 1; m < 16; m <<= 1) y += shuffle_xor(y, m);
    if (j == 0) p.residual_out[out_at] = residual + y;
  }
}

}  // namespace

void launch_router_decode(const RouterDecode& p, cudaStream_t stream) {
  LaunchShape shape;
  shape.threads = kRouterThreads;
  shape.grid = dim3(static_cast<unsigned>((p.n_experts + 2) / 2));
  shape.shared_bytes = static_cast<unsigned>(p.hidden) * 4 + 128;
  launch(router_q8_decode, p, shape, stream);
}

void launch_experts_gate_up_decode(ExpertsGateUpDecode p, int n_sms, cudaStream_t stream) {
  const int n_pairs = kTop * (p.width / kTileRows), n_shared = p.shared_width / kTileRows;
  p.pairs_per_block = (n_pairs + static_cast<int>(kBlocksWanted) - 1) / static_cast<int>(kBlocksWanted);
  const int blocks = (n_pairs + p.pairs_per_block - 1) / p.pairs_per_block;
  p.routed_blocks = blocks;
  const int extra = n_sms > blocks ? n_sms - blocks : 0;
  // The fewest that suffice beside what the extra blocks take.
  while (p.shared_pairs_per_block * blocks + (p.pairs_per_block + p.shared_pairs_per_block) * extra <
         n_shared)
    ++p.shared_pairs_per_block;
  p.groups_per_unit = 4;
  p.units_per_tile = (p.hidden / kGroupCols + p.groups_per_unit - 1) / p.groups_per_unit;
  LaunchShape shape;
  shape.threads = kThreads;
  shape.grid = dim3(static_cast<unsigned>(blocks + extra), static_cast<unsigned>(p.rows));
  shape.shared_bytes = gate_up_layout(p).total;
  launch(experts_gate_up_q4_decode, p, shape, stream);
}

void launch_experts_down_decode(const ExpertsDownDecode& p, cudaStream_t stream) {
  LaunchShape shape;
  shape.threads = kDownThreads;
  shape.grid = dim3(static_cast<unsigned>(p.hidden / kTileRows), static_cast<unsigned>(p.rows));
  shape.shared_bytes = down_layout(p).total;
  launch(experts_down_q4_decode, p, shape, stream);
}

}  // namespace lily::cuda
