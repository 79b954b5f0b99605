// Y^T = W X^T on warpgroup matrix units, weights dequantised in registers (formulas in prefill_linear.h).
//
// Persistent blocks of a producer warpgroup and two consumer warpgroups. An item is 256 outputs x up to 128
// (or 32) rows, gate_up: 128 gate and the same 128 up outputs; it is walked in groups of 64 columns through a
// ring of stages:
//
//   X: [rows][64] bf16, 128-byte swizzle, gathered row by row with cp.async: operand B of wgmma
//   W: 16 records of mma_q4, 576 bytes each, by the bulk copy engine: operand A, through registers
//
// Warpgroup w holds two blocks of 64 outputs. A warp turns the 16 bytes of a lane into four A fragments:
// spread (x >> 4 i) & 0x000f000f onto 128 + code, subtract 128, one bf16 fma with scale and bias, which
// rounds the weight to bf16 as the model's reference does. Dequantising step s + 1 overlaps the products of
// step s; the next stage is met and its codes are loaded under the products of this one. A product has as
// many rows as the tile, rounded up to 16, so that uneven experts waste at most 15 rows.
//
// Bound by matrix rate from about 64 rows an expert, by turning codes into operands below. Accumulates in
// fp32 over all columns in one chain an (output, row): the order never depends on the tiling.
#include <algorithm>

#include "backend/cuda/kernels/launch.h"
#include "backend/cuda/kernels/nibbles.h"
#include "backend/cuda/kernels/prefill_ops.h"
#include "backend/cuda/prefill_linear.h"
#include "pack/mma_q4_layout.h"

namespace lily::cuda {
namespace {

namespace q4 = pack::mma_q4;

constexpr int kStages = 6;
constexpr int kConsumers = 256;
constexpr int kProducers = 128;  // each of the 4 warps gathers a quarter of the rows
constexpr int kThreads = kConsumers + kProducers;
constexpr int kSlots = 16;  // records a stage
constexpr uint32_t kRowBytes = q4::kGroup * 2;
constexpr int kItemOutputs = 256;
constexpr uint32_t kOutPitch =
    kItemOutputs * 2 + 16;  // bytes; 16 more keep the transposing stores free of conflicts
constexpr uint32_t kBarrierBytes = 2 * kStages * 8;

// What depends on the most rows a tile may have. With few, two blocks share an SM: one turns codes into
// operands while the other waits, which is what counts when each expert has a handful of rows.
template <int kTile>
struct Layout {
  static constexpr uint32_t kXBytes = kTile * kRowBytes;
  static constexpr uint32_t kStageBytes = kXBytes + kSlots * q4::kRecordBytes;
  static constexpr uint32_t kOutBytes = kTile * kOutPitch;
  static constexpr uint32_t kSharedBytes = kStages * kStageBytes + kOutBytes + kBarrierBytes + 1024;
  static constexpr int kBlocksPerSm = kTile == kMaxTileTokens ? 1 : 2;
  // Of 168 or 80 a thread at entry.
  static constexpr int kConsumerRegisters = kBlocksPerSm == 1 ? 232 : 104;
  static constexpr int kProducerRegisters = kBlocksPerSm == 1 ? 40 : 32;
  static_assert(kStageBytes % 1024 == 0 && kBlocksPerSm * kSharedBytes <= 227 * 1024);
};

enum class Epilogue { bf16, residual, floats, swiglu };

struct Params {
  const uint16_t* x;
  int n_cols;
  int n_tokens;  // dense
  int tile_tokens;
  int n_token_tiles;
  int n_segments;  // 0: expert groups
  int segment_items[kMaxSegments];
  LinearSegment segments[kMaxSegments];
  const float* residual;
  const ExpertTile* tiles;
  const int32_t* n_tiles;
  int n_experts;
  const int32_t* token_of_row;
  const float* row_weight;
  const std::byte* weights;
  const std::byte* weights_up;
  const std::byte* shared;
  const std::byte* shared_up;
};

// What a block works on at a time.
struct Item {
  const std::byte* weights;
  const std::byte* weights_up;
  int first_tile;  // of 16 outputs
  int n_outputs;   // of the whole matrix
  int first_row, n_rows;
  void* out;
  int64_t out_stride;
};

template <Epilogue kEpilogue>
constexpr int item_tiles() {
  return kEpilogue == Epilogue::swiglu ? 8 : 16;
}

__device__ __forceinline__ int count_items(const Params& p, int blocks_per_expert) {
  if (p.n_segments == 0) return *p.n_tiles * blocks_per_expert;
  int n = 0;
  for (int s = 0; s < p.n_segments; ++s) n += p.segment_items[s];
  return n;
}

template <Epilogue kEpilogue>
__device__ __forceinline__ Item find_item(const Params& p, int index, int blocks_per_expert) {
  Item item;
  if (p.n_segments == 0) {
    const ExpertTile tile = p.tiles[index / blocks_per_expert];
    const LinearSegment& s = p.segments[0];
    const size_t bytes = static_cast<size_t>((s.n_rows + 15) / 16) *
                         static_cast<size_t>(p.n_cols / q4::kGroup) * q4::kRecordBytes;
    const bool is_shared = tile.expert == p.n_experts;
    item.weights = is_shared ? p.shared : p.weights + static_cast<size_t>(tile.expert) * bytes;
    item.weights_up = is_shared ? p.shared_up : p.weights_up + static_cast<size_t>(tile.expert) * bytes;
    item.first_tile = index % blocks_per_expert * item_tiles<kEpilogue>();
    item.n_outputs = s.n_rows;
    item.first_row = tile.first_row;
    item.n_rows = tile.n_rows;
    item.out = s.out;
    item.out_stride = s.out_stride;
    return item;
  }
  int segment = 0;
  while (index >= p.segment_items[segment]) index -= p.segment_items[segment++];
  const LinearSegment& s = p.segments[segment];
  item.weights = item.weights_up = s.weights;
  item.first_tile = index / p.n_token_tiles * item_tiles<kEpilogue>();
  item.n_outputs = s.n_rows;
  item.first_row = index % p.n_token_tiles * p.tile_tokens;
  item.n_rows = min(p.tile_tokens, p.n_tokens - item.first_row);
  item.out = s.out;
  item.out_stride = s.out_stride;
  return item;
}

template <int kTile>
struct Ring {
  static constexpr uint32_t kStageBytes = Layout<kTile>::kStageBytes;
  uint32_t base;  // shared address of stage 0
  uint32_t full, empty;
  int stage = 0;
  uint32_t parity = 0;

  __device__ __forceinline__ uint32_t stage_address() const {
    return base + static_cast<uint32_t>(stage) * kStageBytes;
  }
  __device__ __forceinline__ uint32_t full_barrier(int s) const {
    return full + 8u * static_cast<uint32_t>(s);
  }
  __device__ __forceinline__ uint32_t empty_barrier(int s) const {
    return empty + 8u * static_cast<uint32_t>(s);
  }
  __device__ __forceinline__ void advance() {
    if (++stage == kStages) stage = 0, parity ^= 1u;
  }
};

template <Epilogue kEpilogue, int kTile>
__device__ __forceinline__ void produce(const Params& p, Ring<kTile> ring, int n_items,
                                        int blocks_per_expert) {
  const int lane = static_cast<int>(lane_id());
  const int warp = static_cast<int>(threadIdx.x - kConsumers) / 32;
  constexpr int kRounds = kTile / 4 / 4;
  const int n_groups = p.n_cols / q4::kGroup;
  const uint32_t x_row_bytes = static_cast<uint32_t>(p.n_cols) * 2u;
  const auto* x = reinterpret_cast<const unsigned char*>(p.x);
  for (int index = static_cast<int>(blockIdx.x); index < n_items; index += static_cast<int>(gridDim.x)) {
    const Item item = find_item<kEpilogue>(p, index, blocks_per_expert);
    // Slot l of a stage is the record of warp l % 4, block l / 4 % 2, warpgroup l / 8. Bulk copies leave a
    // warp one by one, so each of the 4 warps sends 4: lane l the record of slot 4 warp + l.
    const auto tile_of = [&](int slot) {
      return kEpilogue == Epilogue::swiglu ? item.first_tile + slot / 8 * 4 + slot % 4
                                           : item.first_tile + slot;
    };
    const auto exists = [&](int slot) { return tile_of(slot) * q4::kTileRows < item.n_outputs; };
    const uint32_t w_bytes =
        static_cast<uint32_t>(count_bits(warp_ballot(lane < kSlots && exists(lane)))) * q4::kRecordBytes;
    const int slot = kSlots / 4 * warp + lane % 4;
    const bool copies_record = lane < kSlots / 4 && exists(slot);
    const std::byte* record =
        (kEpilogue == Epilogue::swiglu && slot / 4 % 2 ? item.weights_up : item.weights) +
        static_cast<size_t>(tile_of(slot)) * static_cast<size_t>(n_groups) * q4::kRecordBytes;
    // Rows kTile / 4 warp + lane / 8 + 4 i; those past the end repeat the last one, and are not stored.
    const int first = kTile / 4 * warp + lane / 8;
    const int n_rounds = (item.n_rows + 15) / 16 * 4 - kRounds * warp;
    uint32_t offset[kRounds];
#pragma unroll
    for (int i = 0; i < kRounds; ++i) {
      offset[i] = 0;
      if (i < n_rounds) {
        int row = item.first_row + min(first + 4 * i, item.n_rows - 1);
        if (p.token_of_row) row = p.token_of_row[row];
        offset[i] = static_cast<uint32_t>(row) * x_row_bytes + static_cast<uint32_t>(lane % 8) * 16u;
      }
    }
    for (int g = 0; g < n_groups; ++g) {
      barrier_wait(ring.empty_barrier(ring.stage), ring.parity ^ 1u);
      const uint32_t to = ring.stage_address();
      const uint32_t full = ring.full_barrier(ring.stage);
      if (warp == 0 && lane == 0) barrier_arrive_expect(full, w_bytes);
      warp_sync();
      if (copies_record) {
        copy_bulk(to + Layout<kTile>::kXBytes + static_cast<uint32_t>(slot) * q4::kRecordBytes, record,
                  q4::kRecordBytes, full);
        record += q4::kRecordBytes;
      }
      const unsigned char* from = x + static_cast<size_t>(g) * kRowBytes;
#pragma unroll
      for (int i = 0; i < kRounds; ++i)
        if (i < n_rounds) copy_16(swizzled(to, first + 4 * i, lane % 8), from + offset[i]);
      barrier_arrive_after_copies(full);
      ring.advance();
    }
  }
}

// The lane's A fragment of 16 columns: registers 0, 2 are row g, 1, 3 row g + 8.
__device__ __forceinline__ void dequantise(uint32_t (&a)[4], uint32_t codes, const uint32_t (&scale)[2],
                                           const uint32_t (&bias)[2]) {
  a[0] = bf16x2_fma(bf16x2_subtract_128(nibbles_plus_128<0>(codes)), scale[0], bias[0]);
  a[1] = bf16x2_fma(bf16x2_subtract_128(nibbles_plus_128<1>(codes)), scale[1], bias[1]);
  a[2] = bf16x2_fma(bf16x2_subtract_128(nibbles_plus_128<2>(codes)), scale[0], bias[0]);
  a[3] = bf16x2_fma(bf16x2_subtract_128(nibbles_plus_128<3>(codes)), scale[1], bias[1]);
}

__device__ __forceinline__ uint32_t word_of(const uint4& v, int i) {
  return i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w;
}

// A lane's codes, scales and biases of one stage, for both blocks of its warpgroup.
struct StageWeights {
  uint4 codes[2];
  uint2 scales[2];
};
template <int kTile>
__device__ __forceinline__ StageWeights load_weights(const unsigned char* shared_base, int stage) {
  const unsigned warp = threadIdx.x / 32, lane = lane_id();
  const unsigned char* records = shared_base + static_cast<uint32_t>(stage) * Layout<kTile>::kStageBytes +
                                 Layout<kTile>::kXBytes + (warp / 4 * 8 + warp % 4) * q4::kRecordBytes;
  StageWeights w;
#pragma unroll
  for (int block = 0; block < 2; ++block) {
    const unsigned char* record = records + block * 4 * q4::kRecordBytes;
    w.codes[block] = *reinterpret_cast<const uint4*>(record + lane * 16);
    w.scales[block] = *reinterpret_cast<const uint2*>(record + q4::kCodeBytes + lane / 4 * 8);
  }
  return w;
}

template <int kN, int kTile>
__device__ __forceinline__ void multiply(float (&acc)[2][kTile / 2], Ring<kTile>& ring,
                                         const unsigned char* shared_base, int n_groups) {
  const unsigned lane = lane_id();
  uint32_t a[2][2][4];
  barrier_wait(ring.full_barrier(ring.stage), ring.parity);
  async_proxy_fence();  // the rows came by cp.async
  StageWeights next = load_weights<kTile>(shared_base, ring.stage);
  int previous = 0;
  for (int g = 0; g < n_groups; ++g) {
    const StageWeights w = next;
    uint32_t scale[2][2], bias[2][2];
#pragma unroll
    for (int block = 0; block < 2; ++block) {
      const uint2 pair = w.scales[block];
      scale[block][0] = pick_halves(pair.x, pair.x, false),
      bias[block][0] = pick_halves(pair.x, pair.x, true);
      scale[block][1] = pick_halves(pair.y, pair.y, false),
      bias[block][1] = pick_halves(pair.y, pair.y, true);
    }
    const int stage = ring.stage;
    const uint64_t x = k_major_descriptor(ring.stage_address());
    ring.advance();
#pragma unroll
    for (int step = 0; step < 4; ++step) {
      uint32_t(&now)[2][4] = a[step % 2];
#pragma unroll
      for (int block = 0; block < 2; ++block)
        dequantise(now[block], word_of(w.codes[block], step), scale[block], bias[block]);
      wgmma_fence();
      Wgmma<kN>::rs(acc[0], now[0], x + 2u * static_cast<unsigned>(step), g | step);
      Wgmma<kN>::rs(acc[1], now[1], x + 2u * static_cast<unsigned>(step), g | step);
      wgmma_commit();
      if (step == 2 && g + 1 < n_groups) {  // under the products in flight
        barrier_wait(ring.full_barrier(ring.stage), ring.parity);
        async_proxy_fence();
        next = load_weights<kTile>(shared_base, ring.stage);
      }
      wgmma_wait<1>();  // the other half of `a` is free, and the stage before this one is read
      if (step == 0 && g > 0 && lane == 0) barrier_arrive(ring.empty_barrier(previous));
    }
    previous = stage;
  }
  wgmma_wait<0>();
#pragma unroll
  for (int block = 0; block < 2; ++block)
#pragma unroll
    for (int i = 0; i < kN / 2; ++i) pin(acc[block][i]);
  if (lane == 0) barrier_arrive(ring.empty_barrier(previous));
}

constexpr int kConsumerBarrier = 1;

// Accumulators to memory. bf16 outputs are transposed through shared memory: a lane holds neighbouring rows
// of one output, memory wants neighbouring outputs of one row.
template <Epilogue kEpilogue, int kN, int kTile>
__device__ __forceinline__ void store(const Params& p, const Item& item, float (&acc)[2][kTile / 2],
                                      unsigned char* staging) {
  const unsigned warp = threadIdx.x / 32, lane = lane_id(), g = lane / 4, t = lane % 4;
  const unsigned group = warp / 4, member = warp % 4;
  if constexpr (kEpilogue == Epilogue::floats) {
#pragma unroll
    for (int block = 0; block < 2; ++block)
#pragma unroll
      for (int i = 0; i < kN / 2; ++i) {
        const int row = i / 4 * 8 + static_cast<int>(2 * t) + i % 2;
        const int output =
            item.first_tile * 16 +
            static_cast<int>(group * 128 + static_cast<unsigned>(block) * 64 + member * 16 + g) +
            (i / 2 % 2) * 8;
        if (row < item.n_rows && output < item.n_outputs)
          static_cast<float*>(item.out)[(item.first_row + row) * item.out_stride + output] = acc[block][i];
      }
    return;
  }
  constexpr bool kSwiglu = kEpilogue == Epilogue::swiglu;
  constexpr int kOutputs = kSwiglu ? 128 : 256;
  constexpr uint32_t kPitch = kOutputs * 2 + 16;
  named_barrier(kConsumerBarrier, kConsumers);  // the last item's rows have left the staging area
  const uint32_t at = shared_address(staging) + (lane / 16 * 8 + lane % 8) * kPitch + lane / 8 % 2 * 16;
#pragma unroll
  for (int block = 0; block < (kSwiglu ? 1 : 2); ++block) {
    const unsigned output =
        kSwiglu ? group * 64 + member * 16 : group * 128 + static_cast<unsigned>(block) * 64 + member * 16;
#pragma unroll
    for (int j = 0; j < kN / 8; j += 2) {
      uint32_t r[4];
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int i = 4 * (j + h);
        if constexpr (kSwiglu) {
          const int row = 8 * (j + h) + static_cast<int>(2 * t);
          const float w0 = row < item.n_rows ? p.row_weight[item.first_row + row] : 0.0f;
          const float w1 = row + 1 < item.n_rows ? p.row_weight[item.first_row + row + 1] : 0.0f;
          const auto gated = [&](int e, float w) {
            const float gate = acc[0][i + e];
            return w * acc[1][i + e] * gate / (1.0f + exp_fast(-gate));
          };
          r[2 * h] = bf16_pair(gated(0, w0), gated(1, w1));
          r[2 * h + 1] = bf16_pair(gated(2, w0), gated(3, w1));
        } else {
          r[2 * h] = bf16_pair(acc[block][i], acc[block][i + 1]);
          r[2 * h + 1] = bf16_pair(acc[block][i + 2], acc[block][i + 3]);
        }
      }
      store_matrices_transposed(at + static_cast<uint32_t>(8 * j) * kPitch + output * 2, r[0], r[1], r[2],
                                r[3]);
    }
  }
  named_barrier(kConsumerBarrier, kConsumers);
  constexpr int kLanes = kOutputs / 8;  // a row's 16-byte pieces
  const int piece = static_cast<int>(threadIdx.x) % kLanes;
  const int output = item.first_tile * 16 + piece * 8;
  if (output >= item.n_outputs) return;
  for (int row = static_cast<int>(threadIdx.x) / kLanes; row < item.n_rows; row += kConsumers / kLanes) {
    uint4 value = *reinterpret_cast<const uint4*>(staging + static_cast<uint32_t>(row) * kPitch +
                                                  static_cast<uint32_t>(piece) * 16u);
    const int64_t to = (item.first_row + row) * item.out_stride + output;
    if constexpr (kEpilogue == Epilogue::residual) {
      float y[8];
      unpack8(value, y);
      const auto* old = reinterpret_cast<const float4*>(p.residual + to);
      const float4 low = old[0], high = old[1];
      auto* out = reinterpret_cast<float4*>(static_cast<float*>(item.out) + to);
      out[0] = make_float4(low.x + y[0], low.y + y[1], low.z + y[2], low.w + y[3]);
      out[1] = make_float4(high.x + y[4], high.y + y[5], high.z + y[6], high.w + y[7]);
      continue;
    }
    *reinterpret_cast<uint4*>(static_cast<uint16_t*>(item.out) + to) = value;
  }
}

template <Epilogue kEpilogue, int kN, int kTile>
__device__ __forceinline__ void consume_item(const Params& p, const Item& item, Ring<kTile>& ring,
                                             unsigned char* base, unsigned char* staging) {
  float acc[2][kTile / 2];
  multiply<kN, kTile>(acc, ring, base, p.n_cols / q4::kGroup);
  store<kEpilogue, kN, kTile>(p, item, acc, staging);
}

template <Epilogue kEpilogue, int kTile>
__global__ void __launch_bounds__(kThreads, Layout<kTile>::kBlocksPerSm)
    linear_q4_kernel(const __grid_constant__ Params p) {
  unsigned char* base = aligned_shared_memory();
  unsigned char* staging = base + kStages * Layout<kTile>::kStageBytes;
  Ring<kTile> ring;
  ring.base = shared_address(base);
  ring.full = shared_address(staging + Layout<kTile>::kOutBytes);
  ring.empty = ring.full + 8 * kStages;
  if (threadIdx.x == 0) {
    for (int s = 0; s < kStages; ++s) {
      barrier_init(ring.full_barrier(s), 1 + kProducers);
      barrier_init(ring.empty_barrier(s), kConsumers / 32);
    }
    barrier_init_fence();
  }
  block_sync();
  pdl_wait();
  pdl_trigger();
  const int blocks_per_expert =
      (p.segments[0].n_rows + item_tiles<kEpilogue>() * 16 - 1) / (item_tiles<kEpilogue>() * 16);
  const int n_items = count_items(p, blocks_per_expert);
  if (threadIdx.x >= kConsumers) {
    registers_release<Layout<kTile>::kProducerRegisters>();
    produce<kEpilogue, kTile>(p, ring, n_items, blocks_per_expert);
  } else {
    registers_claim<Layout<kTile>::kConsumerRegisters>();
    for (int index = static_cast<int>(blockIdx.x); index < n_items; index += static_cast<int>(gridDim.x)) {
      const Item item = find_item<kEpilogue>(p, index, blocks_per_expert);
      const int sixteens = (item.n_rows + 15) / 16;
      if constexpr (kTile == kFewTileTokens) {
        if (sixteens == 1) consume_item<kEpilogue, 16, kTile>(p, item, ring, base, staging);
        else consume_item<kEpilogue, 32, kTile>(p, item, ring, base, staging);
      } else {
        switch (sixteens) {  // 7 takes 128: one variant more and ptxas serialises them all
          case 1:
            consume_item<kEpilogue, 16, kTile>(p, item, ring, base, staging);
            break;
          case 2:
            consume_item<kEpilogue, 32, kTile>(p, item, ring, base, staging);
            break;
          case 3:
            consume_item<kEpilogue, 48, kTile>(p, item, ring, base, staging);
            break;
          case 4:
            consume_item<kEpilogue, 64, kTile>(p, item, ring, base, staging);
            break;
          case 5:
            consume_item<kEpilogue, 80, kTile>(p, item, ring, base, staging);
            break;
          case 6:
            consume_item<kEpilogue, 96, kTile>(p, item, ring, base, staging);
            break;
          default:
            consume_item<kEpilogue, 128, kTile>(p, item, ring, base, staging);
            break;
        }
      }
    }
  }
}

template <Epilogue kEpilogue, int kTile = kMaxTileTokens>
void start(const Params& p, int n_blocks, cudaStream_t stream) {
  launch(linear_q4_kernel<kEpilogue, kTile>, p,
         LaunchShape{dim3(static_cast<unsigned>(n_blocks)), kThreads, Layout<kTile>::kSharedBytes}, stream);
}

template <Epilogue kEpilogue>
void start_experts(const Params& p, int tile_rows, int n_multiprocessors, cudaStream_t stream) {
  require(tile_rows == kMaxTileTokens || tile_rows == kFewTileTokens, "experts: tiles of 32 or 128 rows");
  if (tile_rows == kFewTileTokens) start<kEpilogue, kFewTileTokens>(p, 2 * n_multiprocessors, stream);
  else start<kEpilogue>(p, n_multiprocessors, stream);
}

// Rows a tile so that the last wave of blocks is as full as may be: waves * (time of a tile), where a tile
// costs its rows plus a fixed part for dequantising and storing.
int choose_tile_tokens(int n_tokens, int n_output_blocks, int n_multiprocessors) {
  constexpr int kFixedRows = 40;
  int best = kMaxTileTokens;
  int64_t best_cost = INT64_MAX;
  for (int tile = kMaxTileTokens; tile >= 16; tile -= 16) {
    const int64_t items = int64_t{n_output_blocks} * ((n_tokens + tile - 1) / tile);
    const int64_t waves = (items + n_multiprocessors - 1) / n_multiprocessors;
    const int64_t cost = waves * (tile + kFixedRows);
    if (cost < best_cost) best = tile, best_cost = cost;
  }
  return best;
}

Params expert_params(const ExpertArgs& args) {
  Params p{};
  p.x = args.x;
  p.n_cols = args.n_cols;
  p.tiles = args.tiles;
  p.n_tiles = args.n_tiles;
  p.n_experts = args.n_experts;
  p.token_of_row = args.token_of_row;
  p.row_weight = args.row_weight;
  p.weights = args.weights;
  p.weights_up = args.weights_up;
  p.shared = args.shared;
  p.shared_up = args.shared_up;
  p.segments[0] = {nullptr, args.n_rows, args.out, args.n_rows};
  return p;
}

}  // namespace

void linear_q4_prefill(const LinearArgs& args, int n_multiprocessors, cudaStream_t stream) {
  require(args.n_tokens > 0 && args.n_cols > 0 && args.n_cols % q4::kGroup == 0,
          "linear: rows, or columns of groups of 64");
  require(args.n_segments >= 1 && args.n_segments <= kMaxSegments, "linear: 1 to 4 segments");
  Params p{};
  p.x = args.x;
  p.n_cols = args.n_cols;
  p.n_tokens = args.n_tokens;
  p.n_segments = args.n_segments;
  p.residual = args.residual;
  int n_blocks = 0;
  for (int s = 0; s < args.n_segments; ++s) {
    require(args.segments[s].n_rows % 8 == 0 || args.output == LinearOutput::floats,
            "linear: outputs in eights");
    p.segments[s] = args.segments[s];
    p.segment_items[s] = (args.segments[s].n_rows + kItemOutputs - 1) / kItemOutputs;
    n_blocks += p.segment_items[s];
  }
  p.tile_tokens = choose_tile_tokens(args.n_tokens, n_blocks, n_multiprocessors);
  p.n_token_tiles = (args.n_tokens + p.tile_tokens - 1) / p.tile_tokens;
  for (int s = 0; s < args.n_segments; ++s) p.segment_items[s] *= p.n_token_tiles;
  const int grid = std::min(n_blocks * p.n_token_tiles, n_multiprocessors);
  switch (args.output) {
    case LinearOutput::bf16:
      return start<Epilogue::bf16>(p, grid, stream);
    case LinearOutput::residual:
      return start<Epilogue::residual>(p, grid, stream);
    case LinearOutput::floats:
      return start<Epilogue::floats>(p, grid, stream);
  }
}

void experts_gate_up_q4_prefill(const ExpertArgs& args, int n_multiprocessors, cudaStream_t stream) {
  require(args.n_rows % 128 == 0 && args.n_cols % q4::kGroup == 0, "experts: width in 128s, hidden in 64s");
  start_experts<Epilogue::swiglu>(expert_params(args), args.tile_rows, n_multiprocessors, stream);
}

void experts_down_q4_prefill(const ExpertArgs& args, int n_multiprocessors, cudaStream_t stream) {
  require(args.n_rows % 8 == 0 && args.n_cols % q4::kGroup == 0, "experts: hidden in 8s, width in 64s");
  start_experts<Epilogue::bf16>(expert_params(args), args.tile_rows, n_multiprocessors, stream);
}

}  // namespace lily::cuda
