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
#pragma once

#include "backend/cuda/kernels/launch.h"
#include "backend/cuda/kernels/nibbles.h"
#include "backend/cuda/kernels/prefill_items.h"

namespace lily::cuda {

constexpr int kConsumers = 256;
constexpr int kProducers = 128;  // each of the 4 warps gathers a quarter of the rows
constexpr int kThreads = kConsumers + kProducers;
constexpr int kSlots = 16;  // records a stage
constexpr uint32_t kRowBytes = q4::kGroup * 2;
constexpr uint32_t kOutPitch =
    kItemOutputs * 2 + 16;  // bytes; 16 more keep the transposing stores free of conflicts
// An expanded record: the A fragments of its four steps, 16 bytes a lane (P1's ablation).
constexpr int kExpandedBytes = 4 * 512;

// What depends on the most rows a tile may have. With few, two blocks share an SM: one turns codes into
// operands while the other waits, which is what counts when each expert has a handful of rows.
template <int kTile, bool kExpanded>
struct Layout {
  static constexpr int kStages = kExpanded ? 3 : 6;
  static constexpr int kRecordBytes = kExpanded ? kExpandedBytes : q4::kRecordBytes;
  static constexpr uint32_t kBarrierBytes = 2 * kStages * 8;
  static constexpr uint32_t kXBytes = kTile * kRowBytes;
  static constexpr uint32_t kStageBytes = kXBytes + kSlots * kRecordBytes;
  static constexpr uint32_t kOutBytes = kTile * kOutPitch;
  static constexpr uint32_t kSharedBytes = kStages * kStageBytes + kOutBytes + kBarrierBytes + 1024;
  static constexpr int kBlocksPerSm = kTile == kMaxTileTokens ? 1 : 2;
  // Of 168 or 80 a thread at entry.
  static constexpr int kConsumerRegisters = kBlocksPerSm == 1 ? 232 : 104;
  static constexpr int kProducerRegisters = kBlocksPerSm == 1 ? 40 : 32;
  static_assert(kStageBytes % 1024 == 0 && kBlocksPerSm * kSharedBytes <= 227 * 1024);
};

template <int kTile, bool kExpanded>
struct Ring {
  using Place = Layout<kTile, kExpanded>;
  static constexpr uint32_t kStageBytes = Place::kStageBytes;
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
    if (++stage == Place::kStages) stage = 0, parity ^= 1u;
  }
};

template <Epilogue kEpilogue, int kTile, bool kExpanded>
__device__ __forceinline__ void produce(const ProductParams& p, Ring<kTile, kExpanded> ring, int n_items,
                                        int per_expert) {
  using Place = Layout<kTile, kExpanded>;
  constexpr int kBytes = Place::kRecordBytes;
  const int lane = static_cast<int>(lane_id());
  const int warp = static_cast<int>(threadIdx.x - kConsumers) / 32;
  constexpr int kRounds = kTile / 4 / 4;
  const int n_groups = p.n_cols / q4::kGroup;
  const uint32_t x_row_bytes = static_cast<uint32_t>(p.n_cols) * 2u;
  const auto* x = reinterpret_cast<const unsigned char*>(p.x);
  for (int index = static_cast<int>(blockIdx.x); index < n_items; index += static_cast<int>(gridDim.x)) {
    const Item item = find_item<kEpilogue, kBytes>(p, index, per_expert);
    // Slot l of a stage is the record of warp l % 4, block l / 4 % 2, warpgroup l / 8. Bulk copies leave a
    // warp one by one, so each of the 4 warps sends 4: lane l the record of slot 4 warp + l.
    const auto tile_of = [&](int slot) {
      return kEpilogue == Epilogue::swiglu ? item.first_tile + slot / 8 * 4 + slot % 4
                                           : item.first_tile + slot;
    };
    const auto exists = [&](int slot) { return tile_of(slot) * q4::kTileRows < item.n_outputs; };
    const uint32_t w_bytes =
        static_cast<uint32_t>(count_bits(warp_ballot(lane < kSlots && exists(lane)))) * kBytes;
    const int slot = kSlots / 4 * warp + lane % 4;
    const bool copies_record = lane < kSlots / 4 && exists(slot);
    const std::byte* record =
        (kEpilogue == Epilogue::swiglu && slot / 4 % 2 ? item.weights_up : item.weights) +
        static_cast<size_t>(tile_of(slot)) * static_cast<size_t>(n_groups) * kBytes;
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
        copy_bulk(to + Place::kXBytes + static_cast<uint32_t>(slot) * kBytes, record, kBytes, full);
        record += kBytes;
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

// A lane's codes, scales and biases of one stage, for both blocks of its warpgroup.
struct StageWeights {
  uint4 codes[2];
  uint2 scales[2];
};
template <int kTile>
__device__ __forceinline__ StageWeights load_weights(const unsigned char* shared_base, int stage) {
  const unsigned warp = threadIdx.x / 32, lane = lane_id();
  const unsigned char* records = shared_base +
                                 static_cast<uint32_t>(stage) * Layout<kTile, false>::kStageBytes +
                                 Layout<kTile, false>::kXBytes + (warp / 4 * 8 + warp % 4) * q4::kRecordBytes;
  StageWeights w;
#pragma unroll
  for (int block = 0; block < 2; ++block) {
    const unsigned char* record = records + block * 4 * q4::kRecordBytes;
    w.codes[block] = *reinterpret_cast<const uint4*>(record + lane * 16);
    w.scales[block] = *reinterpret_cast<const uint2*>(record + q4::kCodeBytes + lane / 4 * 8);
  }
  return w;
}

// Both blocks' A fragments of a step, as they lie in an expanded stage.
template <int kTile>
__device__ __forceinline__ void load_fragments(uint32_t (&a)[2][4], const unsigned char* shared_base,
                                               int stage, int step) {
  using Place = Layout<kTile, true>;
  const unsigned warp = threadIdx.x / 32;
#pragma unroll
  for (unsigned block = 0; block < 2; ++block) {
    const unsigned slot = warp / 4 * 8 + block * 4 + warp % 4;
    const uint4 f = *reinterpret_cast<const uint4*>(
        shared_base + static_cast<uint32_t>(stage) * Place::kStageBytes + Place::kXBytes +
        slot * kExpandedBytes + static_cast<unsigned>(step) * 512 + lane_id() * 16);
    a[block][0] = f.x, a[block][1] = f.y, a[block][2] = f.z, a[block][3] = f.w;
  }
}

template <int kN, int kTile, bool kExpanded>
__device__ __forceinline__ void multiply(float (&acc)[2][kTile / 2], Ring<kTile, kExpanded>& ring,
                                         const unsigned char* shared_base, int n_groups) {
  // Each thread gives back for itself: an arrival stands for the reads of its own thread.
  const auto release = [&](int stage) { barrier_arrive(ring.empty_barrier(stage)); };
  uint32_t a[2][2][4];
  barrier_wait(ring.full_barrier(ring.stage), ring.parity);
  async_proxy_fence();  // the rows came by cp.async
  StageWeights next{};
  if constexpr (!kExpanded) next = load_weights<kTile>(shared_base, ring.stage);
  int previous = 0;
  for (int g = 0; g < n_groups; ++g) {
    const StageWeights w = next;
    uint32_t scale[2][2], bias[2][2];
    if constexpr (!kExpanded) {
#pragma unroll
      for (int block = 0; block < 2; ++block) spread_scales(w.scales[block], scale[block], bias[block]);
    }
    const int stage = ring.stage;
    const uint64_t x = k_major_descriptor(ring.stage_address());
    ring.advance();
#pragma unroll
    for (int step = 0; step < 4; ++step) {
      uint32_t(&now)[2][4] = a[step % 2];
      if constexpr (kExpanded) {
        load_fragments<kTile>(now, shared_base, stage, step);
      } else {
#pragma unroll
        for (int block = 0; block < 2; ++block)
          dequantise(now[block], word_of(w.codes[block], step), scale[block], bias[block]);
      }
      wgmma_fence();
      Wgmma<kN>::rs(acc[0], now[0], x + 2u * static_cast<unsigned>(step), g | step);
      Wgmma<kN>::rs(acc[1], now[1], x + 2u * static_cast<unsigned>(step), g | step);
      wgmma_commit();
      if (step == 2 && g + 1 < n_groups) {  // under the products in flight
        barrier_wait(ring.full_barrier(ring.stage), ring.parity);
        async_proxy_fence();
        if constexpr (!kExpanded) next = load_weights<kTile>(shared_base, ring.stage);
      }
      wgmma_wait<1>();  // the other half of `a` is free, and the stage before this one is read
      if (step == 0 && g > 0) release(previous);
    }
    previous = stage;
  }
  wgmma_wait<0>();
#pragma unroll
  for (int block = 0; block < 2; ++block)
#pragma unroll
    for (int i = 0; i < kN / 2; ++i) pin(acc[block][i]);
  release(previous);
}

constexpr int kConsumerBarrier = 1;

// Accumulators to memory. bf16 outputs are transposed through shared memory: a lane holds neighbouring rows
// of one output, memory wants neighbouring outputs of one row.
template <Epilogue kEpilogue, int kN, int kTile>
__device__ __forceinline__ void store(const ProductParams& p, const Item& item, float (&acc)[2][kTile / 2],
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
          const auto value = [&](int e, float weight) { return gated(acc[0][i + e], acc[1][i + e], weight); };
          r[2 * h] = bf16_pair(value(0, w0), value(1, w1));
          r[2 * h + 1] = bf16_pair(value(2, w0), value(3, w1));
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

template <Epilogue kEpilogue, int kN, int kTile, bool kExpanded>
__device__ __forceinline__ void consume_item(const ProductParams& p, const Item& item,
                                             Ring<kTile, kExpanded>& ring, unsigned char* base,
                                             unsigned char* staging) {
  float acc[2][kTile / 2];
  multiply<kN, kTile, kExpanded>(acc, ring, base, p.n_cols / q4::kGroup);
  store<kEpilogue, kN, kTile>(p, item, acc, staging);
}

template <Epilogue kEpilogue, int kTile, bool kExpanded>
__global__ void __launch_bounds__(kThreads, Layout<kTile, kExpanded>::kBlocksPerSm)
    linear_q4_kernel(const __grid_constant__ ProductParams p) {
  using Place = Layout<kTile, kExpanded>;
  unsigned char* base = aligned_shared_memory();
  unsigned char* staging = base + Place::kStages * Place::kStageBytes;
  Ring<kTile, kExpanded> ring;
  ring.base = shared_address(base);
  ring.full = shared_address(staging + Place::kOutBytes);
  ring.empty = ring.full + 8 * Place::kStages;
  if (threadIdx.x == 0) {
    for (int s = 0; s < Place::kStages; ++s) {
      barrier_init(ring.full_barrier(s), 1 + kProducers);
      barrier_init(ring.empty_barrier(s), kConsumers);
    }
    barrier_init_fence();
  }
  block_sync();
  pdl_wait();
  pdl_trigger();
  const int per_expert = blocks_per_expert<kEpilogue>(p);
  const int n_items = count_items(p, per_expert);
  if (threadIdx.x >= kConsumers) {
    registers_release<Place::kProducerRegisters>();
    produce<kEpilogue, kTile, kExpanded>(p, ring, n_items, per_expert);
  } else {
    registers_claim<Place::kConsumerRegisters>();
    for (int index = static_cast<int>(blockIdx.x); index < n_items; index += static_cast<int>(gridDim.x)) {
      const Item item = find_item<kEpilogue, Place::kRecordBytes>(p, index, per_expert);
      const int sixteens = (item.n_rows + 15) / 16;
      if constexpr (kTile == kFewTileTokens) {
        if (sixteens == 1) consume_item<kEpilogue, 16, kTile, kExpanded>(p, item, ring, base, staging);
        else consume_item<kEpilogue, 32, kTile, kExpanded>(p, item, ring, base, staging);
      } else {
        switch (sixteens) {  // 7 takes 128: one variant more and ptxas serialises them all
          case 1:
            consume_item<kEpilogue, 16, kTile, kExpanded>(p, item, ring, base, staging);
            break;
          case 2:
            consume_item<kEpilogue, 32, kTile, kExpanded>(p, item, ring, base, staging);
            break;
          case 3:
            consume_item<kEpilogue, 48, kTile, kExpanded>(p, item, ring, base, staging);
            break;
          case 4:
            consume_item<kEpilogue, 64, kTile, kExpanded>(p, item, ring, base, staging);
            break;
          case 5:
            consume_item<kEpilogue, 80, kTile, kExpanded>(p, item, ring, base, staging);
            break;
          case 6:
            consume_item<kEpilogue, 96, kTile, kExpanded>(p, item, ring, base, staging);
            break;
          default:
            consume_item<kEpilogue, 128, kTile, kExpanded>(p, item, ring, base, staging);
            break;
        }
      }
    }
  }
}

}  // namespace lily::cuda
