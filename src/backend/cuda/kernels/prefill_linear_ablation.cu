// P6 off: Y^T = W X^T in vector arithmetic, on the same numbers as prefill_linear.cu (weights rounded to
// bf16, fp32 sums in one chain an (output, row)).
//
// Persistent blocks of 256 threads; 256 outputs x 64 rows at a time, 8 x 8 values a thread. Each group of 64
// columns is dequantised into shared memory as fp32: W [64][256], X [64][64]. Bound by fp32 rate.
#include "backend/cuda/kernels/launch.h"
#include "backend/cuda/kernels/nibbles.h"
#include "backend/cuda/kernels/prefill_items.h"

namespace lily::cuda {
namespace {

constexpr unsigned kThreads = 256;
constexpr int kRows = 64;  // at a time
constexpr int kGroup = q4::kGroup;
constexpr unsigned kSharedBytes = (kGroup * kItemOutputs + kGroup * kRows) * 4;

template <Epilogue kEpilogue>
__device__ __forceinline__ void fill_weights(const Item& item, int n_groups, int group, float* w) {
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(lane_id()), g = lane / 4,
            t = lane % 4;
  for (int slot = warp; slot < kItemOutputs / 16; slot += static_cast<int>(kThreads) / 32) {
    const bool is_up = kEpilogue == Epilogue::swiglu && slot >= 8;
    const int tile = item.first_tile + (is_up ? slot - 8 : slot);
    uint4 codes = make_uint4(0, 0, 0, 0);
    uint2 scales = make_uint2(0, 0);
    if (tile * q4::kTileRows < item.n_outputs) {
      const auto* record =
          reinterpret_cast<const unsigned char*>(is_up ? item.weights_up : item.weights) +
          (static_cast<size_t>(tile) * static_cast<size_t>(n_groups) + static_cast<size_t>(group)) *
              q4::kRecordBytes;
      codes = reinterpret_cast<const uint4*>(record)[lane];
      scales = reinterpret_cast<const uint2*>(record + q4::kCodeBytes)[g];
    }
    uint32_t scale[2], bias[2];
    spread_scales(scales, scale, bias);
#pragma unroll
    for (int step = 0; step < 4; ++step) {
      uint32_t a[4];
      dequantise(a, word_of(codes, step), scale, bias);
#pragma unroll
      for (int i = 0; i < 4; ++i) {  // register i: row half i % 2, column half i / 2
        float* to = w + (16 * step + i / 2 * 8 + 2 * t) * kItemOutputs + 16 * slot + i % 2 * 8 + g;
        to[0] = bf16_low(a[i]);
        to[kItemOutputs] = bf16_high(a[i]);
      }
    }
  }
}

template <Epilogue kEpilogue>
__global__ void __launch_bounds__(kThreads) linear_q4_fma_kernel(const __grid_constant__ ProductParams p) {
  pdl_wait();
  pdl_trigger();
  auto* w = reinterpret_cast<float*>(shared_memory());
  float* x = w + kGroup * kItemOutputs;
  const int thread = static_cast<int>(threadIdx.x), tx = thread % 32, ty = thread / 32;
  const int per_expert = blocks_per_expert<kEpilogue>(p), n_items = count_items(p, per_expert);
  const int n_groups = p.n_cols / kGroup;
  for (int index = static_cast<int>(blockIdx.x); index < n_items; index += static_cast<int>(gridDim.x)) {
    const Item item = find_item<kEpilogue>(p, index, per_expert);
    for (int first = 0; first < item.n_rows; first += kRows) {
      const int n_rows = min(kRows, item.n_rows - first);
      // Four threads a row; rows past the end repeat the last one, and are not stored.
      int source = item.first_row + first + min(thread / 4, n_rows - 1);
      if (p.token_of_row) source = p.token_of_row[source];
      const uint16_t* from =
          p.x + static_cast<size_t>(source) * static_cast<size_t>(p.n_cols) + thread % 4 * 16;
      float acc[8][8] = {};  // [output][row]
      for (int group = 0; group < n_groups; ++group) {
        block_sync();
        fill_weights<kEpilogue>(item, n_groups, group, w);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          float value[8];
          unpack8(reinterpret_cast<const uint4*>(from + group * kGroup)[half], value);
#pragma unroll
          for (int i = 0; i < 8; ++i) x[(thread % 4 * 16 + 8 * half + i) * kRows + thread / 4] = value[i];
        }
        block_sync();
#pragma unroll 4
        for (int k = 0; k < kGroup; ++k) {
          const auto* wk = reinterpret_cast<const float4*>(w + k * kItemOutputs);
          const auto* xk = reinterpret_cast<const float4*>(x + k * kRows);
          const float4 w0 = wk[tx], w1 = wk[32 + tx], x0 = xk[2 * ty], x1 = xk[2 * ty + 1];
          const float ws[8] = {w0.x, w0.y, w0.z, w0.w, w1.x, w1.y, w1.z, w1.w};
          const float xs[8] = {x0.x, x0.y, x0.z, x0.w, x1.x, x1.y, x1.z, x1.w};
#pragma unroll
          for (int o = 0; o < 8; ++o)
#pragma unroll
            for (int r = 0; r < 8; ++r) acc[o][r] = fmaf(ws[o], xs[r], acc[o][r]);
        }
      }
#pragma unroll
      for (int r = 0; r < 8; ++r) {
        const int row = 8 * ty + r;
        if (row >= n_rows) continue;
#pragma unroll
        for (int o = 0; o < 4; ++o) {
          const int output = item.first_tile * q4::kTileRows + 4 * tx + o;
          if constexpr (kEpilogue == Epilogue::swiglu) {
            if (output < item.n_outputs)
              store_one<kEpilogue>(
                  p, item, first + row, output,
                  gated(acc[o][r], acc[4 + o][r], p.row_weight[item.first_row + first + row]));
          } else {
            if (output < item.n_outputs) store_one<kEpilogue>(p, item, first + row, output, acc[o][r]);
            if (output + 128 < item.n_outputs)
              store_one<kEpilogue>(p, item, first + row, output + 128, acc[4 + o][r]);
          }
        }
      }
    }
  }
}

}  // namespace

void launch_products_fma(const ProductParams& p, Epilogue epilogue, int n_blocks, cudaStream_t stream) {
  const LaunchShape shape{dim3(static_cast<unsigned>(n_blocks)), kThreads, kSharedBytes};
  switch (epilogue) {
    case Epilogue::bf16:
      return launch(linear_q4_fma_kernel<Epilogue::bf16>, p, shape, stream);
    case Epilogue::residual:
      return launch(linear_q4_fma_kernel<Epilogue::residual>, p, shape, stream);
    case Epilogue::floats:
      return launch(linear_q4_fma_kernel<Epilogue::floats>, p, shape, stream);
    case Epilogue::swiglu:
      return launch(linear_q4_fma_kernel<Epilogue::swiglu>, p, shape, stream);
  }
}

}  // namespace lily::cuda
