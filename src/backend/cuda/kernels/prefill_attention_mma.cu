// Causal attention with a prefix by mma.sync (prefill_attention.h has the formula), for chips without
// warpgroup products; slower than prefill_attention.cu where both run.
//
// A block of 4 warps takes 8 tokens x the 8 query heads of one KV head: 64 rows, 16 a warp. Keys and values
// come in blocks of 64 positions into one place each; the next keys are fetched under the output product, the
// next values under the scores. Softmax in base 2 with the running maximum, fp32. Bound by the matrix rate of
// mma.sync and the copies' latency.
#include "backend/cuda/kernels/kv_address.h"
#include "backend/cuda/kernels/launch.h"
#include "backend/cuda/kernels/prefill_attention_rows.h"
#include "backend/cuda/kernels/prefill_kv_int8.h"

namespace lily::cuda {
namespace {

constexpr int kTileTokens = 8;
constexpr int kRows = kTileTokens * kQueryGroup;
constexpr unsigned kThreads = 128;
constexpr uint32_t kQuarterBytes = 64 * 128;  // 64 rows or positions x 64 columns
constexpr uint32_t kImageBytes = 4 * kQuarterBytes;
constexpr uint32_t kSharedBytes = 3 * kImageBytes;  // int8: and a stage each for keys and values
static_assert(kRows == 64 && kKvBlock == 64);

// One block of the cache into an image, or of codes into a stage; positions from n_keys on become zeros.
template <KvForm kForm>
__device__ __forceinline__ void fetch_block(const AttentionArgs& p, const unsigned char* part, int kv_head,
                                            int block, int n_keys, uint32_t image, uint32_t stage) {
  const unsigned char* from = part + kv_head_offset<kForm>(p.cache, p.block_table[block], kv_head);
  if constexpr (kForm == KvForm::int8) {
    stage_int8_block(stage, from, static_cast<int>(threadIdx.x));
  } else {
    const int piece = static_cast<int>(threadIdx.x) % 32;
    for (int row = static_cast<int>(threadIdx.x) / 32; row < kKvBlock; row += static_cast<int>(kThreads) / 32)
      copy_16_or_zero(swizzled(image + static_cast<uint32_t>(piece / 8) * kQuarterBytes, row, piece % 8),
                      from + static_cast<uint32_t>(row) * kv_row_bytes(kForm) + piece * 16,
                      block * kKvBlock + row < n_keys);
  }
  copies_commit();
}
// What fetch_block brought has landed; afterwards it is in the image.
template <KvForm kForm>
__device__ __forceinline__ void land_block(int block, int n_keys, uint32_t image, uint32_t stage) {
  if constexpr (kForm == KvForm::int8)
    expand_int8_block(image, kQuarterBytes, stage, static_cast<int>(threadIdx.x), n_keys - block * kKvBlock);
}

template <KvForm kForm>
__global__ void __launch_bounds__(kThreads) attention_mma_kernel(const __grid_constant__ AttentionArgs p) {
  pdl_wait();
  pdl_trigger();
  const uint32_t q = shared_address(shared_memory()), k = q + kImageBytes, v = k + kImageBytes;
  const uint32_t k_stage = v + kImageBytes, v_stage = k_stage + kInt8StageBytes;
  const int thread = static_cast<int>(threadIdx.x), warp = thread / 32, lane = static_cast<int>(lane_id());
  // Blocks with most keys start first.
  const int n_kv = p.cache.n_kv_heads, n_tiles = (p.n_tokens + kTileTokens - 1) / kTileTokens;
  const int kv_head = static_cast<int>(blockIdx.x) % n_kv;
  const int first_token = (n_tiles - 1 - static_cast<int>(blockIdx.x) / n_kv) * kTileTokens;
  const int n_tokens = min(kTileTokens, p.n_tokens - first_token), n_keys = p.position + p.n_tokens;
  const int n_blocks = (p.position + first_token + n_tokens + kKvBlock - 1) / kKvBlock;
  for (int row = thread / 32; row < kRows; row += static_cast<int>(kThreads) / 32) {
    const int64_t token = first_token + min(row / kQueryGroup, n_tokens - 1);  // past the end: not stored
    copy_16(swizzled(q + static_cast<uint32_t>(lane / 8) * kQuarterBytes, row, lane % 8),
            p.q + (token * p.n_q_heads + kv_head * kQueryGroup + row % kQueryGroup) * kHeadCols + lane * 8);
  }
  fetch_block<kForm>(p, p.cache.k, kv_head, 0, n_keys, k, k_stage);  // with Q
  const int last_key[2] = {p.position + first_token + 2 * warp, p.position + first_token + 2 * warp + 1};
  float o[128] = {};
  RowState state{{-INFINITY, -INFINITY}, {0, 0}};
  for (int block = 0; block < n_blocks; ++block) {
    fetch_block<kForm>(p, p.cache.v, kv_head, block, n_keys, v, v_stage);
    copies_wait<1>();
    land_block<kForm>(block, n_keys, k, k_stage);
    block_sync();  // the keys are there
    float s[32] = {};
#pragma unroll
    for (int step = 0; step < kHeadCols / 16; ++step) {
      const uint32_t quarter = static_cast<uint32_t>(step / 4) * kQuarterBytes;
      uint32_t a[4];
      load_matrices(a, swizzled(q + quarter, 16 * warp + lane % 16, 2 * (step % 4) + lane / 16));
#pragma unroll
      for (int pair = 0; pair < 4; ++pair) {
        uint32_t b[4];
        load_matrices(
            b, swizzled(k + quarter, 16 * pair + lane % 8 + lane / 16 * 8, 2 * (step % 4) + lane / 8 % 2));
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          float(&acc)[4] = *reinterpret_cast<float(*)[4]>(&s[8 * pair + 4 * half]);
          mma_16816(acc, a[0], a[1], a[2], a[3], b[2 * half], b[2 * half + 1]);
        }
      }
    }
    block_sync();  // the keys are read
    if (block + 1 < n_blocks) fetch_block<kForm>(p, p.cache.k, kv_head, block + 1, n_keys, k, k_stage);
    else copies_commit();
    float factor[2];
    soften(s, state, factor, block * kKvBlock, last_key, block * kKvBlock + kKvBlock - 1 > last_key[0]);
    uint32_t probabilities[4][4];
    to_operand(probabilities, s);
#pragma unroll
    for (int i = 0; i < 128; ++i) o[i] *= factor[i / 2 % 2];
    copies_wait<1>();
    land_block<kForm>(block, n_keys, v, v_stage);
    block_sync();  // the values are there
#pragma unroll
    for (int step = 0; step < 4; ++step)
#pragma unroll
      for (int pair = 0; pair < kHeadCols / 16; ++pair) {
        uint32_t b[4];
        load_matrices_transposed(b, swizzled(v + static_cast<uint32_t>(pair / 4) * kQuarterBytes,
                                             16 * step + lane % 16, 2 * (pair % 4) + lane / 16));
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          float(&acc)[4] = *reinterpret_cast<float(*)[4]>(&o[8 * pair + 4 * half]);
          const uint32_t(&a)[4] = probabilities[step];
          mma_16816(acc, a[0], a[1], a[2], a[3], b[2 * half], b[2 * half + 1]);
        }
      }
    block_sync();  // the values are read
  }
  store_rows(p, kv_head, first_token, n_tokens, q, kQuarterBytes, 16 * warp, o, state);
}

}  // namespace

void attention_mma_prefill(const AttentionArgs& args, cudaStream_t stream) {
  require(args.n_tokens > 0 && args.n_q_heads == kQueryGroup * args.cache.n_kv_heads,
          "attention: 8 query heads a KV head");
  const int tiles = (args.n_tokens + kTileTokens - 1) / kTileTokens * args.cache.n_kv_heads;
  LaunchShape shape{dim3(static_cast<unsigned>(tiles)), kThreads, kSharedBytes};
  if (args.cache.form == KvForm::int8) {
    shape.shared_bytes += 2 * kInt8StageBytes;
    launch(attention_mma_kernel<KvForm::int8>, args, shape, stream);
  } else {
    launch(attention_mma_kernel<KvForm::bf16>, args, shape, stream);
  }
}

}  // namespace lily::cuda
