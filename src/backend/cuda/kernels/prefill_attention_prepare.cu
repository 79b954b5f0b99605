// Angles, head norms, rotation and the append to the cache (prefill_attention.h). A warp takes one head of
// one token, 16 bytes a lane. Bound by bytes.
#include "backend/cuda/kernels/kv_address.h"
#include "backend/cuda/kernels/launch.h"
#include "backend/cuda/kernels/prefill_ops.h"
#include "backend/cuda/kernels/rope.h"
#include "backend/cuda/prefill_attention.h"

namespace lily::cuda {
namespace {

constexpr int kWarps = 8;
constexpr float kEpsilon = 1e-6f;

template <KvForm kForm>
__global__ void __launch_bounds__(kWarps * 32) qk_prepare_kernel(const __grid_constant__ AttentionArgs p) {
  pdl_wait();
  pdl_trigger();
  const int n_kv = p.cache.n_kv_heads, n_heads = p.n_q_heads + 2 * n_kv;
  const int64_t index = int64_t{blockIdx.x} * kWarps + threadIdx.x / 32;
  const int64_t token = index / n_heads;
  const int head = static_cast<int>(index % n_heads), lane = static_cast<int>(lane_id());
  if (token >= p.n_tokens) return;
  if (head < p.n_q_heads) {
    const uint4 q = norm_and_rotate(p.q_gate + token * p.q_gate_stride + head * 2 * kHeadCols, p.q_norm,
                                    kEpsilon, p.rope + token * 32);
    reinterpret_cast<uint4*>(p.q + (token * p.n_q_heads + head) * kHeadCols)[lane] = q;
    return;
  }
  const int kv_head = (head - p.n_q_heads) % n_kv;
  const int position = p.position + static_cast<int>(token);
  if (head < p.n_q_heads + n_kv) {
    const uint4 k = norm_and_rotate(p.k + token * p.kv_stride + kv_head * kHeadCols, p.k_norm, kEpsilon,
                                    p.rope + token * 32);
    store_kv_row<kForm>(p.cache, p.cache.k, p.block_table, kv_head, position, k);
  } else {
    store_kv_row<kForm>(
        p.cache, p.cache.v, p.block_table, kv_head, position,
        reinterpret_cast<const uint4*>(p.v + token * p.kv_stride + kv_head * kHeadCols)[lane]);
  }
}

struct RopeParams {
  float2* rope;
  int n_tokens, position;
  double theta;
};
__global__ void __launch_bounds__(256) rope_table_kernel(const __grid_constant__ RopeParams p) {
  pdl_wait();
  pdl_trigger();
  const int index = static_cast<int>(blockIdx.x * 256 + threadIdx.x);
  if (index >= p.n_tokens * 32) return;
  const double angle = static_cast<double>(p.position + index / 32) *
                       exp(-log(p.theta) * static_cast<double>(index % 32) / 32.0);
  p.rope[index] = make_float2(static_cast<float>(cos(angle)), static_cast<float>(sin(angle)));
}

}  // namespace

void qk_prepare_prefill(const AttentionArgs& args, cudaStream_t stream) {
  require(args.n_tokens > 0 && args.n_q_heads == kQueryGroup * args.cache.n_kv_heads,
          "attention: 8 query heads a KV head");
  const int64_t warps = int64_t{args.n_tokens} * (args.n_q_heads + 2 * args.cache.n_kv_heads);
  launch(args.cache.form == KvForm::int8 ? qk_prepare_kernel<KvForm::int8> : qk_prepare_kernel<KvForm::bf16>,
         args, LaunchShape{dim3(static_cast<unsigned>((warps + kWarps - 1) / kWarps)), kWarps * 32, 0},
         stream);
}

void rope_table_prefill(float2* rope, int n_tokens, int position, double theta, cudaStream_t stream) {
  require(n_tokens > 0, "rope: tokens");
  launch(rope_table_kernel, RopeParams{rope, n_tokens, position, theta},
         LaunchShape{dim3(static_cast<unsigned>((n_tokens * 32 + 255) / 256)), 256, 0}, stream);
}

}  // namespace lily::cuda
