// Expert choice and expert order of a chunk (prefill_routing.h).
//
// router_kernel: a block takes 8 or 32 tokens and all experts. A warp multiplies 16 experts by its tokens
// with mma on the 8-bit codes themselves (0..255 are exact in bf16) and folds scale * sum + bias * sum(x) in
// fp32 after each group of 64, so that prefill and decode route by the same numbers. Inside a group the lanes
// of a quad take 16 consecutive columns each; both operands use that order, so rows are read as they lie.
// Then a warp chooses for one token at a time. Bound by latency and by turning codes into bf16: 27 us at
// 512 rows, 48 at 4,096.
#include "backend/cuda/kernels/launch.h"
#include "backend/cuda/kernels/prefill_ops.h"
#include "backend/cuda/prefill_routing.h"

namespace lily::cuda {
namespace {

constexpr int kGroup = 64;
constexpr int kMaxWarps = 17;
constexpr int kFewTokens = 1056;  // 132 blocks of 8 tokens: above, blocks of 32 share their codes

// Four codes as the four bf16 of two registers.
__device__ __forceinline__ void codes_to_bf16(uint32_t codes, uint32_t& low, uint32_t& high) {
  low = bf16_pair(byte_float<0>(codes), byte_float<1>(codes));
  high = bf16_pair(byte_float<2>(codes), byte_float<3>(codes));
}

// The block's rows of u into shared memory (rows past the end repeat the last one), and sums[group][token] of
// their groups of 64 columns, fp32. Rows are 16 bytes longer than hidden, so that the lanes of a quarter
// warp, two rows and four pieces 32 bytes apart, meet 32 banks. Each warp takes whole rows.
template <int kTokens>
__device__ __forceinline__ void load_rows(const RouterArgs& p, int first_token, unsigned char* rows,
                                          int row_bytes, float* sums) {
  const int lane = static_cast<int>(lane_id());
  for (int token = static_cast<int>(threadIdx.x) / 32; token < kTokens;
       token += static_cast<int>(blockDim.x) / 32) {
    const uint16_t* from =
        p.u + static_cast<size_t>(min(first_token + token, p.n_tokens - 1)) * static_cast<size_t>(p.hidden);
#pragma unroll 4
    for (int base = 0; base < p.hidden; base += 256) {
      const int column = base + 8 * lane;
      float x[8] = {};
      if (column < p.hidden) {
        const uint4 piece = *reinterpret_cast<const uint4*>(from + column);
        *reinterpret_cast<uint4*>(rows + token * row_bytes + column * 2) = piece;
        unpack8(piece, x);
      }
      float sum = ((x[0] + x[1]) + (x[2] + x[3])) + ((x[4] + x[5]) + (x[6] + x[7]));
      sum += shuffle_xor(sum, 1);
      sum += shuffle_xor(sum, 2);
      sum += shuffle_xor(sum, 4);
      if (lane % 8 == 0 && column < p.hidden) sums[column / kGroup * kTokens + token] = sum;
    }
  }
}

// Up to eight bf16, and the first of them, which then moves out.
__device__ __forceinline__ uint4 load_eight(const uint16_t* from, int n) {
  if (n >= 8 && reinterpret_cast<uintptr_t>(from) % 16 == 0) return *reinterpret_cast<const uint4*>(from);
  const auto pair = [&](int i) {
    return (i < n ? uint32_t{from[i]} : 0u) | (i + 1 < n ? uint32_t{from[i + 1]} : 0u) << 16;
  };
  return make_uint4(pair(0), pair(2), pair(4), pair(6));
}
__device__ __forceinline__ float take_first(uint4& eight) {
  const float x = bf16_low(eight.x);
  eight.x = eight.x >> 16 | eight.y << 16, eight.y = eight.y >> 16 | eight.z << 16;
  eight.z = eight.z >> 16 | eight.w << 16, eight.w >>= 16;
  return x;
}

// Logits of 16 rows of w x 8 kTiles tokens into shared memory; rows from n_rows on are not read and not
// written.
template <int kTiles>
__device__ __forceinline__ void multiply_rows(const RouterArgs& p, const Q8Matrix& w, int first_row,
                                              int n_rows, const unsigned char* rows, int row_bytes,
                                              const float* sums, float* logits, int pitch, int first_column) {
  const int lane = static_cast<int>(lane_id()), g = lane / 4, t = lane % 4;
  const int n_groups = p.hidden / kGroup;
  const uint8_t* codes[2];
  const uint16_t *scales[2], *biases[2];
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const size_t row = static_cast<size_t>(min(first_row + g + 8 * h, n_rows - 1));
    codes[h] = w.codes + row * static_cast<size_t>(p.hidden) + static_cast<size_t>(16 * t);
    scales[h] = w.scales + row * static_cast<size_t>(n_groups);
    biases[h] = w.biases + row * static_cast<size_t>(n_groups);
  }
  float acc[kTiles][4] = {};
  uint4 next[2], scale_bits[2], bias_bits[2];  // scales and biases of 8 groups at a time
#pragma unroll
  for (int h = 0; h < 2; ++h) next[h] = *reinterpret_cast<const uint4*>(codes[h]);
  for (int group = 0; group < n_groups; ++group) {
    const uint4 now[2] = {next[0], next[1]};
    float scale[2], bias[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      if (group + 1 < n_groups) next[h] = *reinterpret_cast<const uint4*>(codes[h] + (group + 1) * kGroup);
      if (group % 8 == 0)
        scale_bits[h] = load_eight(scales[h] + group, n_groups - group),
        bias_bits[h] = load_eight(biases[h] + group, n_groups - group);
      scale[h] = take_first(scale_bits[h]), bias[h] = take_first(bias_bits[h]);
    }
    float products[kTiles][4] = {};
#pragma unroll
    for (int pair = 0; pair < 2; ++pair) {
      uint4 x[kTiles];
#pragma unroll
      for (int j = 0; j < kTiles; ++j)
        x[j] = *reinterpret_cast<const uint4*>(rows + (8 * j + g) * row_bytes + group * kGroup * 2 + 32 * t +
                                               16 * pair);
#pragma unroll
      for (int step = 0; step < 2; ++step) {
        uint32_t a[4];
        codes_to_bf16(pair == 0   ? step == 0 ? now[0].x : now[0].y
                      : step == 0 ? now[0].z
                                  : now[0].w,
                      a[0], a[2]);
        codes_to_bf16(pair == 0   ? step == 0 ? now[1].x : now[1].y
                      : step == 0 ? now[1].z
                                  : now[1].w,
                      a[1], a[3]);
#pragma unroll
        for (int j = 0; j < kTiles; ++j)
          mma_16816(products[j], a[0], a[1], a[2], a[3], step ? x[j].z : x[j].x, step ? x[j].w : x[j].y);
      }
    }
#pragma unroll
    for (int j = 0; j < kTiles; ++j)
#pragma unroll
      for (int i = 0; i < 4; ++i)
        acc[j][i] = fmaf(scale[i / 2], products[j][i],
                         fmaf(bias[i / 2], sums[group * 8 * kTiles + 8 * j + 2 * t + i % 2], acc[j][i]));
  }
#pragma unroll
  for (int j = 0; j < kTiles; ++j)
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int r = first_row + g + i / 2 * 8;
      if (r < n_rows) logits[(8 * j + 2 * t + i % 2) * pitch + first_column + r] = acc[j][i];
    }
}

// Monotone map of a float to an unsigned integer.
__device__ __forceinline__ uint32_t ordered(float x) {
  const uint32_t b = float_bits(x);
  return b & 0x80000000u ? ~b : b | 0x80000000u;
}

template <int kTiles>
__global__ void __launch_bounds__(kMaxWarps * 32, 1) router_kernel(const __grid_constant__ RouterArgs p) {
  pdl_wait();
  pdl_trigger();
  constexpr int kTokens = 8 * kTiles;
  const int row_bytes = p.hidden * 2 + 16;
  unsigned char* rows = shared_memory();
  float* sums = reinterpret_cast<float*>(rows + kTokens * row_bytes);
  float* logits = sums + p.hidden / kGroup * kTokens;
  const int pitch = p.n_experts + 2;
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(lane_id());
  const int n_warps = static_cast<int>(blockDim.x) / 32;
  const int first_token = static_cast<int>(blockIdx.x) * kTokens;
  load_rows<kTokens>(p, first_token, rows, row_bytes, sums);
  block_sync();
  for (int tile = warp; tile <= p.n_experts / 16; tile += n_warps) {
    if (tile < p.n_experts / 16)
      multiply_rows<kTiles>(p, p.router, 16 * tile, p.n_experts, rows, row_bytes, sums, logits, pitch, 0);
    else multiply_rows<kTiles>(p, p.shared_gate, 0, 1, rows, row_bytes, sums, logits, pitch, p.n_experts);
  }
  block_sync();
  for (int i = warp; i < kTokens && first_token + i < p.n_tokens; i += n_warps) {
    const float* row = logits + i * pitch;
    const size_t token = static_cast<size_t>(first_token + i);
    uint32_t key[kMaxExperts / 32];
#pragma unroll
    for (int j = 0; j < kMaxExperts / 32; ++j) {
      const int e = lane + 32 * j;
      key[j] = e < p.n_experts ? ordered(row[e]) : 0;
      if (p.logits && e < p.n_experts)
        p.logits[token * static_cast<size_t>(p.n_experts) + static_cast<size_t>(e)] = row[e];
    }
    int mine = 0;  // lane j keeps choice j
    float top = 0, chosen_logit = 0, sum = 0;
    for (int choice = 0; choice < kRouted; ++choice) {
      uint32_t best = 0;
#pragma unroll
      for (int j = 0; j < kMaxExperts / 32; ++j) best = max(best, key[j]);
      best = warp_max_bits(best);
      uint32_t where = ~0u;
#pragma unroll
      for (int j = kMaxExperts / 32 - 1; j >= 0; --j)
        if (key[j] == best) where = static_cast<uint32_t>(lane + 32 * j);
      where = warp_min_bits(where);
#pragma unroll
      for (int j = 0; j < kMaxExperts / 32; ++j)
        if (where == static_cast<uint32_t>(lane + 32 * j)) key[j] = 0;
      const float logit = row[where];
      if (choice == 0) top = logit;
      sum += expf(logit - top);
      if (lane == choice) mine = static_cast<int>(where), chosen_logit = logit;
    }
    if (lane < kRouted) {
      p.chosen[token * kRouted + static_cast<size_t>(lane)] = mine;
      p.chosen_weight[token * kRouted + static_cast<size_t>(lane)] = expf(chosen_logit - top) / sum;
    }
    if (lane == 0) p.shared_weight[token] = sigmoid(row[p.n_experts]);
  }
}

// ---- expert order
constexpr int kGroupThreads = 256;

// Sum over the threads before this one, and over all of them; threads up to 1,024.
__device__ __forceinline__ int scan_block(int x, int* total, int* partial) {
  const int lane = static_cast<int>(lane_id()), warp = static_cast<int>(threadIdx.x) / 32;
  int before = x;
#pragma unroll
  for (unsigned m = 1; m < 32; m *= 2) {
    const int other = shuffle_from(before, static_cast<unsigned>(lane) - m);
    if (static_cast<unsigned>(lane) >= m) before += other;
  }
  block_sync();
  if (lane == 31) partial[warp] = before;
  block_sync();
  int base = 0, all = 0;
  for (int w = 0; w < static_cast<int>(blockDim.x) / 32; ++w) {
    if (w < warp) base += partial[w];
    all += partial[w];
  }
  *total = all;
  return base + before - x;
}

// Block e counts the rows of expert e: n_tokens * 8 ids through L2 for each, which is cheaper than a second
// pass over partial histograms up to some 16 K tokens.
__global__ void __launch_bounds__(kGroupThreads) histogram_kernel(const __grid_constant__ GroupArgs p) {
  pdl_wait();
  pdl_trigger();
  int* partial = reinterpret_cast<int*>(shared_memory());
  const int expert = static_cast<int>(blockIdx.x);
  int count = 0;
  for (int t = static_cast<int>(threadIdx.x); t < p.n_tokens; t += kGroupThreads) {
    const auto* ids = reinterpret_cast<const uint4*>(p.chosen + static_cast<size_t>(t) * kRouted);
    const uint4 a = ids[0], b = ids[1];
    const uint32_t e = static_cast<uint32_t>(expert);
    count +=
        (a.x == e) + (a.y == e) + (a.z == e) + (a.w == e) + (b.x == e) + (b.y == e) + (b.z == e) + (b.w == e);
  }
  int total;
  scan_block(count, &total, partial);
  if (threadIdx.x == 0) p.expert_rows[expert] = total;
}

__device__ __forceinline__ void list_rows(const GroupArgs& p, int expert, int* partial) {
  int before = 0;
  for (int e = static_cast<int>(threadIdx.x); e < expert; e += kGroupThreads) before += p.expert_rows[e];
  int next;
  scan_block(before, &next, partial);
  for (int first = 0; first < p.n_tokens; first += kGroupThreads) {
    const int token = first + static_cast<int>(threadIdx.x);
    int choice = -1;
    if (token < p.n_tokens) {
      const auto* ids = reinterpret_cast<const uint4*>(p.chosen + static_cast<size_t>(token) * kRouted);
      const uint4 a = ids[0], b = ids[1];
      const uint32_t id[kRouted] = {a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w};
#pragma unroll
      for (int j = 0; j < kRouted; ++j)
        if (id[j] == static_cast<uint32_t>(expert)) choice = j;
    }
    int n;
    const int row = next + scan_block(choice >= 0 ? 1 : 0, &n, partial);
    if (choice >= 0) {
      const size_t at = static_cast<size_t>(token) * kRouted + static_cast<size_t>(choice);
      p.token_of_row[row] = token;
      p.row_weight[row] = p.chosen_weight[at];
      p.row_of_choice[at] = row;
    }
    next += n;
  }
}

// Tiles of an expert: as few as tile_rows allows, of even size rounded up to 16.
__device__ __forceinline__ void list_tiles(const GroupArgs& p, int* partial) {
  int* rows = partial + 32;              // [n_all] rows of each expert
  int* first = rows + kMaxExperts + 1;   // [n_all] its first row
  int* order = first + kMaxExperts + 1;  // [n_all] experts by descending rows
  const int n_all = p.n_experts + (p.with_shared ? 1 : 0);
  int next = 0;
  for (int base = 0; base < n_all; base += kGroupThreads) {
    const int e = base + static_cast<int>(threadIdx.x);
    const int mine = e < p.n_experts ? p.expert_rows[e] : e < n_all ? p.n_tokens : 0;
    int total;
    const int before = scan_block(mine, &total, partial);
    if (e < n_all) rows[e] = mine, first[e] = next + before;
    next += total;
  }
  block_sync();
  for (int e = static_cast<int>(threadIdx.x); e < n_all; e += kGroupThreads) {
    int rank = 0;
#pragma unroll 8
    for (int other = 0; other < n_all; ++other)
      rank += rows[other] > rows[e] || (rows[other] == rows[e] && other < e) ? 1 : 0;
    order[rank] = e;
  }
  block_sync();
  int next_tile = 0;
  for (int base = 0; base < n_all; base += kGroupThreads) {
    const int rank = base + static_cast<int>(threadIdx.x);
    const int e = rank < n_all ? order[rank] : 0;
    const int n = rank < n_all ? rows[e] : 0;
    const int n_tiles = (n + p.tile_rows - 1) / p.tile_rows;
    int total;
    const int before = scan_block(n_tiles, &total, partial);
    if (n_tiles > 0) {
      const int size = ((n + n_tiles - 1) / n_tiles + 15) / 16 * 16;
      for (int i = 0; i < n_tiles; ++i)
        p.tiles[next_tile + before + i] = {e, first[e] + i * size, min(size, n - i * size)};
    }
    next_tile += total;
  }
  if (threadIdx.x == 0) *p.n_tiles = next_tile;
}

__global__ void __launch_bounds__(kGroupThreads) group_kernel(const __grid_constant__ GroupArgs p) {
  pdl_wait();
  pdl_trigger();
  int* partial = reinterpret_cast<int*>(shared_memory());
  const int block = static_cast<int>(blockIdx.x);
  if (block < p.n_experts) return list_rows(p, block, partial);
  list_tiles(p, partial);
  if (!p.with_shared) return;
  for (int t = static_cast<int>(threadIdx.x); t < p.n_tokens; t += kGroupThreads) {
    const size_t row = static_cast<size_t>(p.n_tokens) * kRouted + static_cast<size_t>(t);
    p.token_of_row[row] = t;
    p.row_weight[row] = p.shared_weight[t];
  }
}

}  // namespace

void router_q8_prefill(const RouterArgs& args, cudaStream_t stream) {
  require(args.n_tokens > 0 && args.hidden % kGroup == 0 && args.hidden <= 4096,
          "router: tokens, and hidden up to 4,096 in groups of 64");
  require(args.n_experts >= 16 && args.n_experts % 16 == 0 && args.n_experts <= kMaxExperts,
          "router: 16 to 512 experts");
  const int warps = min(args.n_experts / 16 + 1, kMaxWarps);
  // 32 rows of 2,048 columns are what shared memory holds.
  const int tokens = args.n_tokens <= kFewTokens || args.hidden > 2048 ? 8 : 32;
  launch(tokens == 8 ? router_kernel<1> : router_kernel<4>, args,
         LaunchShape{dim3(static_cast<unsigned>((args.n_tokens + tokens - 1) / tokens)),
                     static_cast<unsigned>(warps) * 32,
                     static_cast<unsigned>(
                         tokens * (4 * (args.n_experts + 2 + args.hidden / kGroup) + args.hidden * 2 + 16))},
         stream);
}

void group_by_expert_prefill(const GroupArgs& args, cudaStream_t stream) {
  require(args.n_tokens > 0 && args.n_experts > 0 && args.n_experts <= kMaxExperts,
          "grouping: up to 512 experts");
  const unsigned bytes = (32 + 3 * (kMaxExperts + 1)) * 4;
  launch(histogram_kernel, args,
         LaunchShape{dim3(static_cast<unsigned>(args.n_experts)), kGroupThreads, bytes}, stream);
  launch(group_kernel, args,
         LaunchShape{dim3(static_cast<unsigned>(args.n_experts) + 1), kGroupThreads, bytes}, stream);
}

}  // namespace lily::cuda
