// Causal attention with a prefix on warpgroup matrix units (prefill_attention.h has the formula).
//
// A block takes 16 tokens x the 8 query heads of one KV head: 128 rows, row = 8 token + head, so that every
// KV tile loaded serves all of them. Two consumer warpgroups have 64 rows each: scores [64 x 64 keys] and
// outputs [64 x 256] in registers (fp32), probabilities become the A operand as they stand. A producer
// warpgroup gathers KV blocks of 64 positions through the block table into a ring of four tiles, K and V in
// turn:
//
//   tile: [4 quarters of 256 columns][64 positions][64] bf16, 128-byte swizzle:
//         operand B of Q K^T (K along columns) and of P V (K along positions)
//
// Scores of block j are issued together with the output product of block j - 1, so that the softmax of one
// warpgroup runs under its own products; named barriers make the warpgroups take turns at the matrix units.
// Softmax in base 2 with the running maximum, fp32. Positions past the sequence's end are loaded as zeros:
// whatever the cache holds there stays out.
//
// Blocks with most keys start first. Bound by matrix rate; keys and values come from L2 at 32 bytes a cycle
// and SM.
#include "backend/cuda/kernels/kv_address.h"
#include "backend/cuda/kernels/launch.h"
#include "backend/cuda/kernels/prefill_attention_rows.h"
#include "backend/cuda/kernels/prefill_kv_int8.h"
#include "backend/cuda/prefill_attention.h"

namespace lily::cuda {
namespace {

constexpr int kTileTokens = 16;
constexpr int kRows = kTileTokens * kQueryGroup;
constexpr int kConsumers = 256, kProducers = 128;
constexpr int kThreads = kConsumers + kProducers;
constexpr int kConsumerRegisters = 232, kProducerRegisters = 40;  // of 168 a thread at entry
constexpr int kBuffers = 4;
constexpr uint32_t kRowBytes = kv_row_bytes(KvForm::bf16);
constexpr uint32_t kQuarterBytes = kKvBlock * 128;
constexpr uint32_t kTileBytes = 4 * kQuarterBytes;
constexpr uint32_t kQQuarterBytes = kRows * 128;
constexpr uint32_t kQBytes = 4 * kQQuarterBytes;
constexpr uint32_t kSharedBytes = kQBytes + kBuffers * kTileBytes + 128 + 1024;  // int8: and two stages
constexpr int kTurnBarrier = 2;  // and 3: warpgroup 0's and 1's turn

struct Ring {
  uint32_t base, full, empty;
  int buffer = 0;
  uint32_t parity = 0;
  __device__ __forceinline__ uint32_t tile() const {
    return base + static_cast<uint32_t>(buffer) * kTileBytes;
  }
  __device__ __forceinline__ uint32_t full_barrier(int b) const {
    return full + 8u * static_cast<uint32_t>(b);
  }
  __device__ __forceinline__ uint32_t empty_barrier(int b) const {
    return empty + 8u * static_cast<uint32_t>(b);
  }
  __device__ __forceinline__ void wait_full() const {
    barrier_wait(full_barrier(buffer), parity);
    async_proxy_fence();  // the tile came by cp.async or stores
  }
  __device__ __forceinline__ void advance() {
    if (++buffer == kBuffers) buffer = 0, parity ^= 1u;
  }
};

struct Tile {
  int kv_head, first_token, n_tokens, n_blocks;
};
__device__ __forceinline__ Tile find_tile(const AttentionArgs& p) {
  const int n_kv = p.cache.n_kv_heads, n_tiles = (p.n_tokens + kTileTokens - 1) / kTileTokens;
  Tile tile;
  tile.kv_head = static_cast<int>(blockIdx.x) % n_kv;
  tile.first_token = (n_tiles - 1 - static_cast<int>(blockIdx.x) / n_kv) * kTileTokens;
  tile.n_tokens = min(kTileTokens, p.n_tokens - tile.first_token);
  tile.n_blocks = (p.position + tile.first_token + tile.n_tokens + kKvBlock - 1) / kKvBlock;
  return tile;
}

__device__ __forceinline__ void load_queries(const AttentionArgs& p, const Tile& tile, uint32_t q,
                                             uint32_t q_full) {
  const int thread = static_cast<int>(threadIdx.x) - kConsumers, row = thread / 32, piece = thread % 32;
  // Rows row + 4 i; tokens past the end repeat the last one, and are not stored.
  for (int i = 0; i < kRows / 4; ++i) {
    const int r = row + 4 * i;
    const int64_t token = tile.first_token + min(r / kQueryGroup, tile.n_tokens - 1);
    const uint16_t* from =
        p.q + (token * p.n_q_heads + tile.kv_head * kQueryGroup + r % kQueryGroup) * kHeadCols + piece * 8;
    copy_16(swizzled(q + static_cast<uint32_t>(piece / 8) * kQQuarterBytes, r, piece % 8), from);
  }
  barrier_arrive_after_copies(q_full);
}

__device__ __forceinline__ void produce(const AttentionArgs& p, const Tile& tile, Ring ring) {
  const int thread = static_cast<int>(threadIdx.x) - kConsumers, row = thread / 32, piece = thread % 32;
  const int n_keys = p.position + p.n_tokens;  // in the cache by now
  for (int block = 0; block < tile.n_blocks; ++block) {
    const size_t block_at = kv_head_offset<KvForm::bf16>(p.cache, p.block_table[block], tile.kv_head);
#pragma unroll
    for (int is_v = 0; is_v < 2; ++is_v) {
      const unsigned char* from =
          (is_v ? p.cache.v : p.cache.k) + block_at + static_cast<size_t>(row) * kRowBytes + piece * 16;
      barrier_wait(ring.empty_barrier(ring.buffer), ring.parity ^ 1u);
      const uint32_t quarter = ring.tile() + static_cast<uint32_t>(piece / 8) * kQuarterBytes;
      const uint32_t even = swizzled(quarter, row, piece % 8), odd = swizzled(quarter, row + 4, piece % 8);
      if ((block + 1) * kKvBlock <= n_keys) {
#pragma unroll 4
        for (uint32_t i = 0; i < kKvBlock / 8; ++i) {
          copy_16(even + i * 1024, from + i * 8 * kRowBytes);
          copy_16(odd + i * 1024, from + (i * 8 + 4) * kRowBytes);
        }
      } else {
        for (int i = 0; i < kKvBlock / 4; ++i) {
          const uint32_t at_row = (i % 2 ? odd : even) + static_cast<uint32_t>(i / 2) * 1024;
          copy_16_or_zero(at_row, from + static_cast<size_t>(i) * 4 * kRowBytes,
                          block * kKvBlock + row + 4 * i < n_keys);
        }
      }
      barrier_arrive_after_copies(ring.full_barrier(ring.buffer));
      ring.advance();
    }
  }
}

// The same from codes, by way of two stages, K's and V's, each filled while the other's tile is made.
__device__ __forceinline__ void produce_int8(const AttentionArgs& p, const Tile& tile, Ring ring,
                                             uint32_t stages) {
  const int thread = static_cast<int>(threadIdx.x) - kConsumers;
  const int n_keys = p.position + p.n_tokens;  // in the cache by now
  int32_t upcoming = p.block_table[0];
  size_t block_at = 0;
  const auto request = [&](int i) {  // tile i: K or V of block i / 2
    if (i < 2 * tile.n_blocks) {
      if (i % 2 == 0) {
        block_at = kv_head_offset<KvForm::int8>(p.cache, upcoming, tile.kv_head);
        if (i / 2 + 1 < tile.n_blocks) upcoming = p.block_table[i / 2 + 1];
      }
      stage_int8_block(stages + static_cast<uint32_t>(i % 2) * kInt8StageBytes,
                       (i % 2 == 0 ? p.cache.k : p.cache.v) + block_at, thread);
    }
    copies_commit();
  };
  request(0);
  for (int i = 0; i < 2 * tile.n_blocks; ++i) {
    request(i + 1);
    copies_wait<1>();
    barrier_wait(ring.empty_barrier(ring.buffer), ring.parity ^ 1u);
    expand_int8_block(ring.tile(), kQuarterBytes, stages + static_cast<uint32_t>(i % 2) * kInt8StageBytes,
                      thread, n_keys - i / 2 * kKvBlock);
    barrier_arrive(ring.full_barrier(ring.buffer));
    ring.advance();
  }
}

// Scores of the warpgroup's 64 rows with the 64 keys of a tile.
__device__ __forceinline__ void issue_scores(float (&s)[32], uint32_t q, uint32_t k) {
  wgmma_fence();
#pragma unroll
  for (int step = 0; step < kHeadCols / 16; ++step) {
    const uint32_t quarter = static_cast<uint32_t>(step / 4), inside = static_cast<uint32_t>(step % 4) * 32u;
    wgmma64_ss(s, k_major_descriptor(q + quarter * kQQuarterBytes + inside),
               k_major_descriptor(k + quarter * kQuarterBytes + inside), step);
  }
  wgmma_commit();
}

__device__ __forceinline__ void issue_outputs(float (&o)[128], const uint32_t (&probabilities)[4][4],
                                              uint32_t v, int accumulate) {
  wgmma_fence();
#pragma unroll
  for (int step = 0; step < kKvBlock / 16; ++step)
    Wgmma<256>::rs<1>(o, probabilities[step],
                      n_major_descriptor(v + static_cast<uint32_t>(step) * 2048u, kQuarterBytes),
                      accumulate | step);
  wgmma_commit();
}

__device__ __forceinline__ void consume(const AttentionArgs& p, const Tile& tile, Ring ring, uint32_t q,
                                        uint32_t q_full) {
  const int lane = static_cast<int>(lane_id());
  const int group = static_cast<int>(threadIdx.x) / 128, warp = static_cast<int>(threadIdx.x) % 128 / 32;
  const uint32_t own_q = q + static_cast<uint32_t>(group) * kKvBlock * 128u;
  // Rows g and g + 8 of a warp are the same head of neighbouring tokens.
  const int token = 8 * group + 2 * warp;
  const int last_key[2] = {p.position + tile.first_token + token, p.position + tile.first_token + token + 1};
  const int first_last_key = p.position + tile.first_token + 8 * group;
  const auto release = [&](int buffer) {
    if (lane == 0) barrier_arrive(ring.empty_barrier(buffer));
  };
  // Group 0 goes first in every round, so that group 1 passes the turn on only if there is another.
  const auto pass_turn = [&](bool more) {
    if (group == 0 || more) named_barrier_arrive(kTurnBarrier + 1 - group, kConsumers);
  };
  float s[32], o[128], factor[2];
  uint32_t probabilities[4][4];
  RowState state{{-INFINITY, -INFINITY}, {0, 0}};
  if (group == 1) named_barrier_arrive(kTurnBarrier, kConsumers);

  barrier_wait(q_full, 0);
  ring.wait_full();
  named_barrier(kTurnBarrier + group, kConsumers);
  issue_scores(s, own_q, ring.tile());
  pass_turn(1 < tile.n_blocks);
  wgmma_wait<0>();
#pragma unroll
  for (int i = 0; i < 32; ++i) pin(s[i]);
  release(ring.buffer);
  ring.advance();
  soften(s, state, factor, 0, last_key, kKvBlock - 1 > first_last_key);
  to_operand(probabilities, s);
  for (int block = 1; block < tile.n_blocks; ++block) {
    Ring k_ring = ring;
    k_ring.advance();
    k_ring.wait_full();
    named_barrier(kTurnBarrier + group, kConsumers);
    issue_scores(s, own_q, k_ring.tile());
    ring.wait_full();
    issue_outputs(o, probabilities, ring.tile(), block - 1);
    pass_turn(block + 1 < tile.n_blocks);
    wgmma_wait<1>();
#pragma unroll
    for (int i = 0; i < 32; ++i) pin(s[i]);
    release(k_ring.buffer);
    soften(s, state, factor, block * kKvBlock, last_key, block * kKvBlock + kKvBlock - 1 > first_last_key);
    wgmma_wait<0>();
#pragma unroll
    for (int i = 0; i < 128; ++i) pin(o[i]);
    release(ring.buffer);
    ring = k_ring;
    ring.advance();
#pragma unroll
    for (int i = 0; i < 128; ++i) o[i] *= factor[i / 2 % 2];
    to_operand(probabilities, s);
  }
  ring.wait_full();
  issue_outputs(o, probabilities, ring.tile(), tile.n_blocks - 1);
  wgmma_wait<0>();
#pragma unroll
  for (int i = 0; i < 128; ++i) pin(o[i]);

  store_rows(p, tile.kv_head, tile.first_token, tile.n_tokens, q, kQQuarterBytes, 64 * group + 16 * warp, o,
             state);
}

template <KvForm kForm>
__global__ void __launch_bounds__(kThreads, 1) attention_kernel(const __grid_constant__ AttentionArgs p) {
  unsigned char* base = aligned_shared_memory();
  const uint32_t q = shared_address(base);
  Ring ring;
  ring.base = q + kQBytes;
  ring.full = ring.base + kBuffers * kTileBytes;
  ring.empty = ring.full + 8 * kBuffers;
  const uint32_t q_full = ring.empty + 8 * kBuffers;
  if (threadIdx.x == 0) {
    for (int b = 0; b < kBuffers; ++b) {
      barrier_init(ring.full_barrier(b), kProducers);
      barrier_init(ring.empty_barrier(b), kConsumers / 32);
    }
    barrier_init(q_full, kProducers);
    barrier_init_fence();
  }
  block_sync();
  pdl_wait();
  pdl_trigger();
  const Tile tile = find_tile(p);
  if (threadIdx.x >= kConsumers) {
    registers_release<kProducerRegisters>();
    load_queries(p, tile, q, q_full);
    if constexpr (kForm == KvForm::int8) produce_int8(p, tile, ring, ring.full + 128);
    else produce(p, tile, ring);
  } else {
    registers_claim<kConsumerRegisters>();
    consume(p, tile, ring, q, q_full);
  }
}

}  // namespace

void attention_prefill(const AttentionArgs& args, cudaStream_t stream) {
  require(args.n_tokens > 0 && args.n_q_heads == kQueryGroup * args.cache.n_kv_heads,
          "attention: 8 query heads a KV head");
  const int tiles = (args.n_tokens + kTileTokens - 1) / kTileTokens * args.cache.n_kv_heads;
  LaunchShape shape{dim3(static_cast<unsigned>(tiles)), kThreads, kSharedBytes};
  if (args.cache.form == KvForm::int8) {
    shape.shared_bytes += 2 * kInt8StageBytes;
    launch(attention_kernel<KvForm::int8>, args, shape, stream);
  } else {
    launch(attention_kernel<KvForm::bf16>, args, shape, stream);
  }
}

}  // namespace lily::cuda
