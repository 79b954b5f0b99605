// prepare_heads, router_top. One warp a head, one block a row: written to be plainly right.
#include "backend/cuda/kernels/simple.h"

#include "backend/cuda/kernels/kv_address.h"
#include "backend/cuda/kernels/launch.h"
#include "backend/cuda/kernels/rope.h"
#include "backend/cuda/kernels/top8.h"

namespace lily::cuda {
namespace {

template <KvForm kForm>
__global__ void __launch_bounds__(32) prepare_heads(PrepareHeads p) {
  const int head = static_cast<int>(blockIdx.x), row = static_cast<int>(blockIdx.y);
  pdl_wait();
  pdl_trigger();
  const size_t at = static_cast<size_t>(row) * static_cast<size_t>(p.stride);
  const float2* rope = p.step.rope + row * 32;
  if (head < p.n_q_heads) {
    auto* q = reinterpret_cast<uint4*>(
        p.q + (static_cast<size_t>(row) * static_cast<size_t>(p.n_q_heads) + static_cast<size_t>(head)) *
                  kHeadCols);
    q[lane_id()] =
        norm_and_rotate(p.q_gate + at + static_cast<size_t>(head) * 2 * kHeadCols, p.q_norm, p.epsilon, rope);
    return;
  }
  const int kv_head = head - p.n_q_heads;
  const int32_t* const table = p.step.block_table + p.step.table_first[row];
  const int position = p.step.positions[row];
  const size_t from = at + static_cast<size_t>(kv_head) * kHeadCols;
  store_kv_row<kForm>(p.cache, p.cache.k, table, kv_head, position,
                      norm_and_rotate(p.k + from, p.k_norm, p.epsilon, rope));
  store_kv_row<kForm>(p.cache, p.cache.v, table, kv_head, position,
                      load_l2(reinterpret_cast<const uint4*>(p.v + from) + lane_id()));
}

struct TopShared {
  Top8 top;
  Top8Scratch scratch;
};

__global__ void __launch_bounds__(kMaxExperts) router_top(RouterTopRows p) {
  auto* s = reinterpret_cast<TopShared*>(shared_memory());
  pdl_wait();
  pdl_trigger();
  const int row = static_cast<int>(blockIdx.x);
  select_top8(p.logits + static_cast<size_t>(row) * static_cast<size_t>(p.stride), p.n_experts, &s->top,
              &s->scratch);
  if (threadIdx.x < kTop) {
    p.ids[row * kTop + static_cast<int>(threadIdx.x)] = s->top.ids[threadIdx.x];
    p.weights[row * kTop + static_cast<int>(threadIdx.x)] =
        top8_weight(s->top, static_cast<int>(threadIdx.x));
  }
}

}  // namespace

void launch_prepare_heads(const PrepareHeads& p, cudaStream_t stream) {
  LaunchShape shape;
  shape.threads = 32;
  shape.grid = dim3(static_cast<unsigned>(p.n_q_heads + p.cache.n_kv_heads), static_cast<unsigned>(p.rows));
  launch(p.cache.form == KvForm::int8 ? prepare_heads<KvForm::int8> : prepare_heads<KvForm::bf16>, p, shape,
         stream);
}

void launch_router_top(const RouterTopRows& p, cudaStream_t stream) {
  LaunchShape shape;
  shape.threads = kMaxExperts;
  shape.grid = dim3(static_cast<unsigned>(p.rows));
  shape.shared_bytes = sizeof(TopShared);
  launch(router_top, p, shape, stream);
}

}  // namespace lily::cuda
