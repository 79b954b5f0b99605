// P1 off: the weights of the experts as bf16 in memory. A pass of its own writes every record as its A
// fragments (2,048 bytes instead of 576), and the kernel of prefill_linear_kernel.h reads those back. Bound
// by bytes: 1.6 GB a layer written, and read by each tile of rows.
#include "backend/cuda/kernels/prefill_expand.h"
#include "backend/cuda/kernels/prefill_linear_kernel.h"

namespace lily::cuda {
namespace {

constexpr unsigned kExpandThreads = 256;

// A warp a record.
__global__ void __launch_bounds__(kExpandThreads) expand_q4_kernel(const __grid_constant__ ExpandQ4 p) {
  pdl_wait();
  pdl_trigger();
  const int64_t index = int64_t{blockIdx.x} * (kExpandThreads / 32) + threadIdx.x / 32;
  if (index >= p.n_records) return;
  const unsigned lane = lane_id();
  const auto* record = reinterpret_cast<const unsigned char*>(p.records) + index * q4::kRecordBytes;
  const uint4 codes = reinterpret_cast<const uint4*>(record)[lane];
  uint32_t scale[2], bias[2];
  spread_scales(reinterpret_cast<const uint2*>(record + q4::kCodeBytes)[lane / 4], scale, bias);
  auto* to =
      reinterpret_cast<uint4*>(reinterpret_cast<unsigned char*>(p.expanded) + index * kExpandedBytes) + lane;
#pragma unroll
  for (int step = 0; step < 4; ++step) {
    uint32_t a[4];
    dequantise(a, word_of(codes, step), scale, bias);
    to[32 * step] = make_uint4(a[0], a[1], a[2], a[3]);
  }
}

template <Epilogue kEpilogue>
void start(const ProductParams& p, int n_blocks, cudaStream_t stream) {
  using Place = Layout<kMaxTileTokens, true>;
  launch(linear_q4_kernel<kEpilogue, kMaxTileTokens, true>, p,
         LaunchShape{dim3(static_cast<unsigned>(n_blocks)), kThreads, Place::kSharedBytes}, stream);
}

}  // namespace

void expand_q4_prefill(const ExpandQ4& p, cudaStream_t stream) {
  constexpr int64_t kPerBlock = kExpandThreads / 32;
  launch(
      expand_q4_kernel, p,
      LaunchShape{dim3(static_cast<unsigned>((p.n_records + kPerBlock - 1) / kPerBlock)), kExpandThreads, 0},
      stream);
}

void launch_products_expanded(const ProductParams& p, Epilogue epilogue, int n_blocks, cudaStream_t stream) {
  require(epilogue == Epilogue::swiglu || epilogue == Epilogue::bf16, "only experts' weights are expanded");
  if (epilogue == Epilogue::swiglu) start<Epilogue::swiglu>(p, n_blocks, stream);
  else start<Epilogue::bf16>(p, n_blocks, stream);
}

}  // namespace lily::cuda
