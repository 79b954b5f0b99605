// The delta rule in blocks of 64 tokens, WY form (prefill_delta.h). With gamma the sums of g within the block
// and D_ij = exp(gamma_i - gamma_j) for i >= j, else 0:
//
//   A = strict_lower(beta_i (K K^T)_ij D_ij)      T = (I + A)^-1
//   U = T diag(beta) V      W = T diag(beta e^gamma) K
//   X = U - W S             O = diag(e^gamma) Q S + lower((Q K^T) D) X
//   S <- e^gamma_63 S + (diag(e^(gamma_63 - gamma)) K)^T X
//
//   wy_kernel, by (block, key head): U and W of both value heads, all blocks at once
//   state_kernel, by (value head, 32 of 128 dv): the sequential part, X and the state before every block
//   output_kernel, by (block, value head): O and gated norm, all blocks at once
//
// Everything between kernels is in operand register order, so that no kernel transposes: the state pass works
// on S^T and X^T, whose accumulators are the next product's A operand as they stand; a warp owns 16 state
// columns from start to end and never waits for another warp's results. Products are mma.m16n8k16. T is
// solved in fp32 by rows of 16: a thread a column. T before V, X and the scores enter as two bf16 parts, so
// that with U in fp32 what a token adds to outputs and state is fp32 in effect; the state's copy that W and Q
// read, W and T before K are of one part (docs/numerics.md, "The delta rule in blocks"). Bound by bytes in wy
// and output, by the latency of a block (about 1 us) in state_kernel.
#include "backend/cuda/kernels/launch.h"
#include "backend/cuda/kernels/prefill_delta.h"

namespace lily::cuda {
namespace {

constexpr float kEpsilon = 1e-6f;
constexpr float kLog2E = 1.4426950408889634f;

__device__ __forceinline__ uint4 load_frag(const unsigned char* frags, int piece) {
  return *reinterpret_cast<const uint4*>(frags + static_cast<size_t>(piece) * 512 + lane_id() * 16);
}
__device__ __forceinline__ void store_frag(unsigned char* frags, int piece, const uint4& value) {
  *reinterpret_cast<uint4*>(frags + static_cast<size_t>(piece) * 512 + lane_id() * 16) = value;
}

// U^T as accumulators: rows dv 16 tile .., columns tokens 8 n ..
__device__ __forceinline__ float4& u_frag(unsigned char* frags, int tile, int n) {
  return reinterpret_cast<float4*>(frags)[(tile * 8 + n) * 32 + static_cast<int>(lane_id())];
}

// Operand A of rows row .. row + 15, columns 16 step .. of an image.
__device__ __forceinline__ void image_a(uint32_t (&a)[4], uint32_t image, int row, int step) {
  const int l = static_cast<int>(lane_id());
  load_matrices(a, image_piece(image, row + l % 16, 2 * step + l / 16));
}
// Operand B whose n runs over tokens row .. row + 15 and k over columns 16 step ..: {b0, b1} of n 0..7, then
// of 8..15.
__device__ __forceinline__ void image_b(uint32_t (&b)[4], uint32_t image, int row, int step) {
  const int l = static_cast<int>(lane_id());
  load_matrices(b, image_piece(image, row + l % 8 + l / 16 * 8, 2 * step + l / 8 % 2));
}
// Operand B whose k runs over tokens row .. row + 15 and n over columns 16 pair ..
__device__ __forceinline__ void image_b_transposed(uint32_t (&b)[4], uint32_t image, int row, int pair) {
  const int l = static_cast<int>(lane_id());
  load_matrices_transposed(b, image_piece(image, row + l % 16, 2 * pair + l / 16));
}
// Operand A whose rows run over columns 16 tile .. and k over tokens row .. row + 15.
__device__ __forceinline__ void image_a_transposed(uint32_t (&a)[4], uint32_t image, int row, int tile) {
  const int l = static_cast<int>(lane_id());
  load_matrices_transposed(a, image_piece(image, row + l % 8 + l / 16 * 8, 2 * tile + l / 8 % 2));
}

__device__ __forceinline__ void multiply(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  mma_16816(d, a[0], a[1], a[2], a[3], b0, b1);
}

// Two values as operands of products that are fp32 in effect: what bf16 keeps of them, and of the rest.
struct Parts {
  uint32_t high, low;
};
__device__ __forceinline__ Parts parts_of(float x0, float x1) {
  const uint32_t high = bf16_pair(x0, x1);
  return {high, bf16_pair(x0 - bf16_low(high), x1 - bf16_high(high))};
}

struct Copy {
  uint32_t to;
  const unsigned char* from;
  uint32_t bytes;
};
// Copies whole tiles into shared memory; every thread takes part. All may read after finish_copies.
template <int kN>
__device__ __forceinline__ void start_copies(const Copy (&copies)[kN]) {
#pragma unroll
  for (int i = 0; i < kN; ++i)
    for (uint32_t at = threadIdx.x * 16; at < copies[i].bytes; at += blockDim.x * 16)
      copy_16(copies[i].to + at, copies[i].from + at);
  copies_commit();
}
__device__ __forceinline__ void finish_copies() {
  copies_wait<0>();
  block_sync();
}

// ---- U and W
constexpr int kPitch = 68;  // floats of a row of A^T or T: rows 4 banks apart
constexpr uint32_t kMatrixBytes = kDeltaBlock * kPitch * 4;
// K, then A^T of both heads (whose place their V takes once T is solved), T of both heads, gates: two blocks
// an SM.
constexpr uint32_t kWyShared = kImageBytes + 4 * kMatrixBytes + 4 * kDeltaBlock * 4 + 1024;
static_assert(2 * kMatrixBytes >= 2 * kImageBytes);

// Thread (head, column j): column j of T = (I + A)^-1 by forward substitution, 16 rows at a time.
__device__ __forceinline__ void solve(const float* a_transposed, float* t, int column) {
  for (int first = 0; first < kDeltaBlock; first += 16) {
    float acc[16];
#pragma unroll
    for (int r = 0; r < 16; ++r) acc[r] = first + r == column ? 1.0f : 0.0f;
#pragma unroll 4
    for (int k = column / 32 * 32; k < first; ++k) {  // rows above the diagonal are zero
      const float x = t[k * kPitch + column];
      const auto* a = reinterpret_cast<const float4*>(a_transposed + k * kPitch + first);
#pragma unroll
      for (int r = 0; r < 4; ++r) {
        const float4 quad = a[r];
        acc[4 * r] = fmaf(-quad.x, x, acc[4 * r]);
        acc[4 * r + 1] = fmaf(-quad.y, x, acc[4 * r + 1]);
        acc[4 * r + 2] = fmaf(-quad.z, x, acc[4 * r + 2]);
        acc[4 * r + 3] = fmaf(-quad.w, x, acc[4 * r + 3]);
      }
    }
#pragma unroll
    for (int k = 0; k < 16; ++k) {
      t[(first + k) * kPitch + column] = acc[k];
#pragma unroll
      for (int r = k + 1; r < 16; ++r)
        acc[r] = fmaf(-a_transposed[(first + k) * kPitch + first + r], acc[k], acc[r]);
    }
  }
}

__global__ void __launch_bounds__(128) wy_kernel(const __grid_constant__ DeltaParams p) {
  pdl_wait();
  pdl_trigger();
  unsigned char* base = aligned_shared_memory();
  const uint32_t k_image = shared_address(base), v_images = k_image + kImageBytes;
  auto* a_transposed = reinterpret_cast<float*>(base + kImageBytes);  // [2][64][kPitch]
  float* t_matrix = a_transposed + 2 * kDeltaBlock * kPitch;          // [2][64][kPitch]
  float* gamma = t_matrix + 2 * kDeltaBlock * kPitch;                 // [2][64]
  float* beta = gamma + 2 * kDeltaBlock;                              // [2][64]
  const int block = static_cast<int>(blockIdx.x), key_head = static_cast<int>(blockIdx.y);
  const int thread = static_cast<int>(threadIdx.x), warp = thread / 32, lane = static_cast<int>(lane_id());
  const int g = lane / 4, t = lane % 4;
  const size_t head0 = tile_index(p, 2 * key_head, block), head1 = tile_index(p, 2 * key_head + 1, block);
  start_copies<1>({{k_image, p.k + tile_index(p, key_head, block) * kImageBytes, kImageBytes}});
  {
    const size_t from =
        (thread < kDeltaBlock ? head0 : head1) * kDeltaBlock + static_cast<size_t>(thread % kDeltaBlock);
    gamma[thread] = p.gamma[from];
    beta[thread] = p.beta[from];
  }
  finish_copies();

  // Rows 16 warp .. of K K^T, up to the diagonal.
  float gram[8][4] = {};
  for (int step = 0; step < kDim / 16; ++step) {
    uint32_t a[4];
    image_a(a, k_image, 16 * warp, step);
#pragma unroll
    for (int pair = 0; pair < 4; ++pair) {
      if (pair > warp) continue;
      uint32_t b[4];
      image_b(b, k_image, 16 * pair, step);
      multiply(gram[2 * pair], a, b[0], b[1]);
      multiply(gram[2 * pair + 1], a, b[2], b[3]);
    }
  }
#pragma unroll
  for (int h = 0; h < 2; ++h)
#pragma unroll
    for (int n = 0; n < 8; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int i = 16 * warp + g + e / 2 * 8, j = 8 * n + 2 * t + e % 2;
        const float d = i > j ? exp2_fast((gamma[64 * h + i] - gamma[64 * h + j]) * kLog2E) : 0.0f;
        a_transposed[h * kDeltaBlock * kPitch + j * kPitch + i] =
            i > j ? beta[64 * h + i] * gram[n][e] * d : 0.0f;
      }
  block_sync();
  {
    const int h = thread / 64;
    solve(a_transposed + h * kDeltaBlock * kPitch, t_matrix + h * kDeltaBlock * kPitch, thread % 64);
  }
  block_sync();
  start_copies<2>({{v_images, p.v + head0 * kImageBytes, kImageBytes},
                   {v_images + kImageBytes, p.v + head1 * kImageBytes, kImageBytes}});

  // T[i][j], T[i][j + 1] of value head h with column factors, as operand registers.
  const auto t_pair = [&](int h, int i, int j, const float(&f)[2]) {
    const float2 pair = *reinterpret_cast<const float2*>(t_matrix + (h * kDeltaBlock + i) * kPitch + j);
    return parts_of(pair.x * f[0], pair.y * f[1]);
  };
  // W: warp takes tokens 16 warp ..; T is lower triangular.
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    float acc[16][4] = {};
    for (int step = 0; step <= warp; ++step) {
      uint32_t a[4];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int j = 16 * step + 8 * half + 2 * t;
        float f[2];
#pragma unroll
        for (int e = 0; e < 2; ++e) f[e] = beta[64 * h + j + e] * exp2_fast(gamma[64 * h + j + e] * kLog2E);
        a[2 * half] = t_pair(h, 16 * warp + g, j, f).high;
        a[2 * half + 1] = t_pair(h, 16 * warp + g + 8, j, f).high;
      }
#pragma unroll
      for (int pair = 0; pair < 8; ++pair) {
        uint32_t b[4];
        image_b_transposed(b, k_image, 16 * step, pair);
        multiply(acc[2 * pair], a, b[0], b[1]);
        multiply(acc[2 * pair + 1], a, b[2], b[3]);
      }
    }
    unsigned char* w = p.w + (h == 0 ? head0 : head1) * kImageBytes;
#pragma unroll
    for (int pair = 0; pair < 8; ++pair) {
      const float(&lo)[4] = acc[2 * pair];
      const float(&hi)[4] = acc[2 * pair + 1];
      store_frag(w, warp * 8 + pair,
                 make_uint4(bf16_pair(lo[0], lo[1]), bf16_pair(hi[0], hi[1]), bf16_pair(lo[2], lo[3]),
                            bf16_pair(hi[2], hi[3])));
    }
  }
  finish_copies();
  // U^T: warp takes dv 32 warp ..
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    float acc[2][8][4] = {};
#pragma unroll
    for (int step = 0; step < 4; ++step) {
      uint32_t a[2][4];
      float f[2][2];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        image_a_transposed(a[half], v_images + static_cast<uint32_t>(h) * kImageBytes, 16 * step,
                           2 * warp + half);
#pragma unroll
        for (int e = 0; e < 2; ++e) f[half][e] = beta[64 * h + 16 * step + 8 * half + 2 * t + e];
      }
#pragma unroll
      for (int n = 2 * step; n < 8; ++n) {
        const Parts b0 = t_pair(h, 8 * n + g, 16 * step + 2 * t, f[0]);
        const Parts b1 = t_pair(h, 8 * n + g, 16 * step + 8 + 2 * t, f[1]);
#pragma unroll
        for (int m = 0; m < 2; ++m) {
          multiply(acc[m][n], a[m], b0.high, b1.high);
          multiply(acc[m][n], a[m], b0.low, b1.low);
        }
      }
    }
    unsigned char* u = p.u + (h == 0 ? head0 : head1) * kUBytes;
#pragma unroll
    for (int m = 0; m < 2; ++m)
#pragma unroll
      for (int n = 0; n < 8; ++n)
        u_frag(u, 2 * warp + m, n) = make_float4(acc[m][n][0], acc[m][n][1], acc[m][n][2], acc[m][n][3]);
  }
}

// ---- the state
constexpr int kStateStages = 3;
constexpr uint32_t kStateStageBytes = 2 * kImageBytes + kDeltaBlock * 4;  // W, K, gamma
constexpr uint32_t kStateStagePitch = 2 * kImageBytes + 1024;
constexpr uint32_t kStateShared = kStateStages * kStateStagePitch + 64 + 1024;
constexpr int kStateThreads = 64;
constexpr int kStateSplits = kDim / 16 / (kStateThreads / 32);

__global__ void __launch_bounds__(kStateThreads) state_kernel(const __grid_constant__ DeltaParams p) {
  pdl_wait();
  pdl_trigger();
  unsigned char* base = aligned_shared_memory();
  const uint32_t stages = shared_address(base), barriers = stages + kStateStages * kStateStagePitch;
  const int head = static_cast<int>(blockIdx.x);
  const int lane = static_cast<int>(lane_id()), g = lane / 4, t = lane % 4;
  const int tile =
      static_cast<int>(blockIdx.y) * (kStateThreads / 32) + static_cast<int>(threadIdx.x) / 32;  // of 16 dv
  const bool leads = threadIdx.x == 0;
  if (leads) {
    for (int s = 0; s < kStateStages; ++s) barrier_init(barriers + 8u * static_cast<uint32_t>(s), 1);
    barrier_init_fence();
  }
  block_sync();
  const auto fetch = [&](int block) {
    const uint32_t stage = static_cast<uint32_t>(block % kStateStages);
    const uint32_t to = stages + stage * kStateStagePitch, barrier = barriers + 8u * stage;
    barrier_arrive_expect(barrier, kStateStageBytes);
    copy_bulk(to, p.w + tile_index(p, head, block) * kImageBytes, kImageBytes, barrier);
    copy_bulk(to + kImageBytes, p.k + tile_index(p, head / 2, block) * kImageBytes, kImageBytes, barrier);
    copy_bulk(to + 2 * kImageBytes, p.gamma + tile_index(p, head, block) * kDeltaBlock, kDeltaBlock * 4,
              barrier);
  };
  if (leads)
    for (int b = 0; b < min(kStateStages, p.n_blocks); ++b) fetch(b);

  // S^T: rows dv 16 tile + g (+ 8), columns dk 8 n + 2 t (+ 1).
  const auto state_at = [&](int n, int half) {
    return (static_cast<size_t>(head) * kDim + static_cast<size_t>(16 * tile + g + 8 * half)) * kDim +
           static_cast<size_t>(8 * n + 2 * t);
  };
  float s[16][4];
#pragma unroll
  for (int n = 0; n < 16; ++n)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float2 pair = p.args.state_in
                              ? *reinterpret_cast<const float2*>(p.args.state_in + state_at(n, half))
                              : make_float2(0, 0);
      s[n][2 * half] = pair.x, s[n][2 * half + 1] = pair.y;
    }
  float4 u[8];
#pragma unroll
  for (int n = 0; n < 8; ++n) u[n] = u_frag(p.u + tile_index(p, head, 0) * kUBytes, tile, n);
  for (int block = 0; block < p.n_blocks; ++block) {
    const uint32_t stage = static_cast<uint32_t>(block % kStateStages);
    const unsigned char* w = base + stage * kStateStagePitch;
    const uint32_t k_image = stages + stage * kStateStagePitch + kImageBytes;
    const auto* gamma = reinterpret_cast<const float*>(w + 2 * kImageBytes);
    // x starts as -U and becomes W S - U = -X.
    float x[8][4];
#pragma unroll
    for (int n = 0; n < 8; ++n) x[n][0] = -u[n].x, x[n][1] = -u[n].y, x[n][2] = -u[n].z, x[n][3] = -u[n].w;
    if (block + 1 < p.n_blocks)
#pragma unroll
      for (int n = 0; n < 8; ++n) u[n] = u_frag(p.u + tile_index(p, head, block + 1) * kUBytes, tile, n);
    barrier_wait(barriers + 8u * stage, static_cast<uint32_t>(block / kStateStages) & 1u);
    unsigned char* state = p.state + tile_index(p, head, block) * kStateFragBytes;
#pragma unroll
    for (int step = 0; step < 8; ++step) {
      const uint32_t a[4] = {bf16_pair(s[2 * step][0], s[2 * step][1]),
                             bf16_pair(s[2 * step][2], s[2 * step][3]),
                             bf16_pair(s[2 * step + 1][0], s[2 * step + 1][1]),
                             bf16_pair(s[2 * step + 1][2], s[2 * step + 1][3])};
      store_frag(state, tile * 8 + step, make_uint4(a[0], a[1], a[2], a[3]));
#pragma unroll
      for (int pair = 0; pair < 4; ++pair) {
        const uint4 b = load_frag(w, pair * 8 + step);
        multiply(x[2 * pair], a, b.x, b.y);
        multiply(x[2 * pair + 1], a, b.z, b.w);
      }
    }
    const float last = gamma[kDeltaBlock - 1];
    unsigned char* x_frags = p.x + tile_index(p, head, block) * kXBytes;
    uint32_t high[4][4], low[4][4];  // of X with what is left of it at the block's end
#pragma unroll
    for (int pair = 0; pair < 4; ++pair) {
      Parts plain[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {  // register i: row half i % 2, token half i / 2
        const float x0 = -x[2 * pair + i / 2][i % 2 * 2], x1 = -x[2 * pair + i / 2][i % 2 * 2 + 1];
        const float2 at = *reinterpret_cast<const float2*>(gamma + 16 * pair + i / 2 * 8 + 2 * t);
        plain[i] = parts_of(x0, x1);
        const Parts decayed =
            parts_of(x0 * exp2_fast((last - at.x) * kLog2E), x1 * exp2_fast((last - at.y) * kLog2E));
        high[pair][i] = decayed.high, low[pair][i] = decayed.low;
      }
      store_frag(x_frags, tile * 4 + pair,
                 make_uint4(plain[0].high, plain[1].high, plain[2].high, plain[3].high));
      store_frag(x_frags + kImageBytes, tile * 4 + pair,
                 make_uint4(plain[0].low, plain[1].low, plain[2].low, plain[3].low));
    }
    const float keep = exp2_fast(last * kLog2E);
#pragma unroll
    for (int n = 0; n < 16; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e) s[n][e] *= keep;
#pragma unroll
    for (int step = 0; step < 4; ++step)
#pragma unroll
      for (int pair = 0; pair < 8; ++pair) {
        uint32_t b[4];
        image_b_transposed(b, k_image, 16 * step, pair);
        multiply(s[2 * pair], high[step], b[0], b[1]);
        multiply(s[2 * pair + 1], high[step], b[2], b[3]);
        multiply(s[2 * pair], low[step], b[0], b[1]);
        multiply(s[2 * pair + 1], low[step], b[2], b[3]);
      }
    block_sync();  // both warps have read the stage
    if (leads && block + kStateStages < p.n_blocks) fetch(block + kStateStages);
  }
#pragma unroll
  for (int n = 0; n < 16; ++n)
#pragma unroll
    for (int half = 0; half < 2; ++half)
      *reinterpret_cast<float2*>(p.args.state_out + state_at(n, half)) =
          make_float2(s[n][2 * half], s[n][2 * half + 1]);
}

// ---- the output
constexpr uint32_t kOutputShared = 2 * kImageBytes + kStateFragBytes + kXBytes + kDeltaBlock * 4 + 1024;

__global__ void __launch_bounds__(128) output_kernel(const __grid_constant__ DeltaParams p) {
  pdl_wait();
  pdl_trigger();
  const DeltaArgs& args = p.args;
  unsigned char* base = aligned_shared_memory();
  const uint32_t q_image = shared_address(base), k_image = q_image + kImageBytes;
  const unsigned char* state = base + 2 * kImageBytes;
  const unsigned char* x_frags = state + kStateFragBytes;
  auto* gamma = reinterpret_cast<float*>(base + 2 * kImageBytes + kStateFragBytes + kXBytes);
  const int block = static_cast<int>(blockIdx.x), head = static_cast<int>(blockIdx.y);
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(lane_id()), g = lane / 4,
            t = lane % 4;
  const size_t tile = tile_index(p, head, block), key_tile = tile_index(p, head / 2, block);
  if (threadIdx.x < kDeltaBlock) gamma[threadIdx.x] = p.gamma[tile * kDeltaBlock + threadIdx.x];
  start_copies<4>({{q_image, p.q + key_tile * kImageBytes, kImageBytes},
                   {k_image, p.k + key_tile * kImageBytes, kImageBytes},
                   {shared_address(state), p.state + tile * kStateFragBytes, kStateFragBytes},
                   {shared_address(x_frags), p.x + tile * kXBytes, kXBytes}});
  const int row[2] = {16 * warp + g, 16 * warp + g + 8};
  uint32_t gates[2][16];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int64_t token = min(int64_t{block} * kDeltaBlock + row[half], int64_t{args.n_tokens} - 1);
    const uint16_t* z = args.z + token * args.z_stride + head * kDim + 2 * t;
#pragma unroll
    for (int n = 0; n < 16; ++n) gates[half][n] = *reinterpret_cast<const uint32_t*>(z + 8 * n);
  }
  finish_copies();
  const float gamma_row[2] = {gamma[row[0]], gamma[row[1]]};

  float o[16][4] = {};
  float scores[8][4] = {};
#pragma unroll
  for (int step = 0; step < kDim / 16; ++step) {
    uint32_t a[4];
    image_a(a, q_image, 16 * warp, step);
#pragma unroll
    for (int pair = 0; pair < 4; ++pair) {
      if (pair > warp) continue;
      uint32_t b[4];
      image_b(b, k_image, 16 * pair, step);
      multiply(scores[2 * pair], a, b[0], b[1]);
      multiply(scores[2 * pair + 1], a, b[2], b[3]);
    }
#pragma unroll
    for (int dv = 0; dv < 8; ++dv) {
      const uint4 b = load_frag(state, dv * 8 + step);
      multiply(o[2 * dv], a, b.x, b.z);
      multiply(o[2 * dv + 1], a, b.y, b.w);
    }
  }
#pragma unroll
  for (int n = 0; n < 16; ++n)
#pragma unroll
    for (int e = 0; e < 4; ++e) o[n][e] *= exp2_fast(gamma_row[e / 2] * kLog2E);
#pragma unroll
  for (int step = 0; step < 4; ++step) {
    if (step > warp) continue;
    uint32_t high[4], low[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int half = i % 2, j = 16 * step + i / 2 * 8 + 2 * t;
      float value[2];
#pragma unroll
      for (int e = 0; e < 2; ++e)
        value[e] = j + e <= row[half] ? scores[2 * step + i / 2][2 * half + e] *
                                            exp2_fast((gamma_row[half] - gamma[j + e]) * kLog2E)
                                      : 0.0f;
      const Parts score = parts_of(value[0], value[1]);
      high[i] = score.high, low[i] = score.low;
    }
#pragma unroll
    for (int dv = 0; dv < 8; ++dv) {
      const uint4 b = load_frag(x_frags, dv * 4 + step),
                  rest = load_frag(x_frags + kImageBytes, dv * 4 + step);
      multiply(o[2 * dv], high, b.x, b.z);
      multiply(o[2 * dv + 1], high, b.y, b.w);
      multiply(o[2 * dv], low, b.x, b.z);
      multiply(o[2 * dv + 1], low, b.y, b.w);
      multiply(o[2 * dv], high, rest.x, rest.z);
      multiply(o[2 * dv + 1], high, rest.y, rest.w);
    }
  }
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int64_t token = int64_t{block} * kDeltaBlock + row[half];
    float squares = 0;
#pragma unroll
    for (int n = 0; n < 16; ++n)
      squares += o[n][2 * half] * o[n][2 * half] + o[n][2 * half + 1] * o[n][2 * half + 1];
    squares += shuffle_xor(squares, 1);
    squares += shuffle_xor(squares, 2);
    const float scale = 1.0f / sqrtf(squares / kDim + kEpsilon);
    if (token >= args.n_tokens) continue;
    uint16_t* y = args.y + (token * args.n_value_heads + head) * kDim;
#pragma unroll
    for (int n = 0; n < 16; ++n) {
      const int column = 8 * n + 2 * t;
      const uint32_t gate = gates[half][n];
      const float2 norm = *reinterpret_cast<const float2*>(args.norm + column);
      *reinterpret_cast<uint32_t*>(y + column) =
          bf16_pair(o[n][2 * half] * scale * norm.x * silu_fast(bf16_low(gate)),
                    o[n][2 * half + 1] * scale * norm.y * silu_fast(bf16_high(gate)));
    }
  }
}

}  // namespace

void delta_blocks_prefill(const DeltaArgs& args, cudaStream_t stream) {
  const DeltaParams p = delta_params(args);
  delta_prepare(p, stream);
  const auto blocks = static_cast<unsigned>(p.n_blocks), heads = static_cast<unsigned>(args.n_value_heads);
  launch(wy_kernel, p, LaunchShape{dim3(blocks, heads / 2), 128, kWyShared}, stream);
  launch(state_kernel, p, LaunchShape{dim3(heads, kStateSplits), kStateThreads, kStateShared}, stream);
  launch(output_kernel, p, LaunchShape{dim3(blocks, heads), 128, kOutputShared}, stream);
}

}  // namespace lily::cuda
