// embed_rows_q4, gather_rows, scan_logits, choose_token. Scanning reads the logits once (1 MB a row at full
// size) and leaves maximum and sum of exponentials of 2,048 chunks; one block then finds the n-th largest
// chunk maximum, which no wanted logit is below, and sorts the few logits that reach it.
#include "backend/cuda/kernels/tokens.h"

#include "backend/cuda/kernels/launch.h"
#include "backend/cuda/kernels/top8.h"

namespace lily::cuda {
namespace {

constexpr unsigned kEmbedThreads = 256;

__global__ void __launch_bounds__(kEmbedThreads) embed_rows_q4(EmbedRows p) {
  const int row = static_cast<int>(blockIdx.x);
  pdl_wait();
  pdl_trigger();
  int32_t token = p.step.tokens[row];
  if (token < 0) token = p.step.token_slots[p.step.token_in[row]];
  if (token < 0 || token >= p.vocab) token = 0;
  const size_t words = static_cast<size_t>(p.hidden) / 8, groups = static_cast<size_t>(p.hidden) / 64,
               t = static_cast<size_t>(token);
  for (int i = static_cast<int>(threadIdx.x); i < p.hidden / 8; i += static_cast<int>(kEmbedThreads)) {
    const uint32_t codes = p.codes[t * words + static_cast<size_t>(i)];
    const float s = bf16_value(p.scales[t * groups + static_cast<size_t>(i / 8)]),
                b = bf16_value(p.biases[t * groups + static_cast<size_t>(i / 8)]);
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      const auto bits =
          static_cast<uint16_t>(bf16_bits(fmaf(s, static_cast<float>(codes >> (4 * j) & 15u), b)));
      const size_t at =
          static_cast<size_t>(row) * static_cast<size_t>(p.hidden) + static_cast<size_t>(8 * i + j);
      if (p.y_f32) static_cast<float*>(p.y)[at] = bf16_value(bits);
      else static_cast<uint16_t*>(p.y)[at] = bits;
    }
  }
  if (threadIdx.x < 32) {
    // Positions reach 262,144: the angle is reduced in double.
    const double turns = p.step.positions[row] * p.rope_frequency[threadIdx.x] * 0.15915494309189533577;
    const auto angle = static_cast<float>((turns - rint(turns)) * 6.283185307179586477);
    p.step.rope[row * 32 + static_cast<int>(threadIdx.x)] = make_float2(cosf(angle), sinf(angle));
  }
}

__global__ void __launch_bounds__(kEmbedThreads) gather_rows(GatherRows p) {
  pdl_wait();
  pdl_trigger();
  const size_t from =
      static_cast<size_t>(p.step.output_rows[blockIdx.x]) * static_cast<size_t>(p.row_bytes / 16);
  const size_t to = static_cast<size_t>(blockIdx.x) * static_cast<size_t>(p.row_bytes / 16);
  for (int i = static_cast<int>(threadIdx.x); i < p.row_bytes / 16; i += static_cast<int>(kEmbedThreads))
    static_cast<uint4*>(p.y)[to + static_cast<size_t>(i)] =
        load_l2(static_cast<const uint4*>(p.x) + from + static_cast<size_t>(i));
}

__device__ __forceinline__ float clean(float x) {
  return x == x ? x : -INFINITY;
}  // NaN counts as minus infinity

__host__ __device__ inline int chunk_size(int vocab) { return (vocab + kChunks - 1) / kChunks; }

constexpr unsigned kScanThreads = kScanWarps * 32;

__global__ void __launch_bounds__(kScanThreads) scan_logits(ChooseToken p) {
  const int output = static_cast<int>(blockIdx.y),
            chunk = static_cast<int>(blockIdx.x) * kScanWarps + static_cast<int>(threadIdx.x / 32);
  const int size = chunk_size(p.vocab), lane = static_cast<int>(lane_id());
  const int first = chunk * size, last = first + size < p.vocab ? first + size : p.vocab;
  pdl_wait();
  pdl_trigger();
  const float* logits = p.logits + static_cast<size_t>(output) * static_cast<size_t>(p.vocab);
  float largest = -INFINITY;
  int32_t id = first;
  for (int i = first + lane; i < last; i += 32) {
    const float x = clean(load_l2(logits + i));
    if (x > largest || i == first + lane) {
      largest = x;
      id = i;
    }
  }
  if (first + lane >= last) id = 0x7fffffff;
#pragma unroll
  for (int m = 16; m; m >>= 1) {
    const float other = shuffle_xor(largest, static_cast<unsigned>(m));
    const int32_t other_id = shuffle_xor(id, static_cast<unsigned>(m));
    if (other > largest || (other == largest && other_id < id)) {
      largest = other;
      id = other_id;
    }
  }
  float sum = 0;
  if (p.choice == Choice::candidates && largest != -INFINITY) {
    for (int i = first + lane; i < last; i += 32) sum += expf(clean(load_l2(logits + i)) - largest);
    sum = warp_sum(sum);
  }
  if (lane == 0) {
    const int at = output * kChunks + chunk;
    p.chunk_max[at] = largest;
    p.chunk_id[at] = id;
    p.chunk_sum[at] = sum;
  }
}

constexpr unsigned kChooseThreads = 1024;
constexpr int kListSize = 1024;

struct ChooseShared {
  float chunk_max[kChunks];
  float value[kListSize];
  int32_t id[kListSize];
  float sorted_value[kMaxCandidates];
  int32_t sorted_id[kMaxCandidates];
  uint64_t weight[kMaxCandidates];
  uint64_t sums[32];
  int n_listed;
  int32_t chosen;
};

// A logit's place in the order "falling logit, then rising id", as a number: larger comes first.
__device__ __forceinline__ uint64_t place(float x, int32_t id) {
  return static_cast<uint64_t>(ordered(x)) << 32 | (0xffffffffu - static_cast<uint32_t>(id));
}

// Integer sum over the block, to all threads. Two barriers.
__device__ __forceinline__ uint64_t block_total(uint64_t x, uint64_t* scratch) {
#pragma unroll
  for (int m = 16; m; m >>= 1) x += shuffle_xor(x, static_cast<unsigned>(m));
  if (lane_id() == 0) scratch[threadIdx.x / 32] = x;
  block_sync();
  x = 0;
  for (unsigned w = 0; w < blockDim.x / 32; ++w) x += scratch[w];
  block_sync();
  return x;
}

__device__ __forceinline__ uint64_t fixed_weight(float x, float largest, float temperature) {
  const double w = exp(static_cast<double>((x - largest) / temperature));
  return w > 0 ? static_cast<uint64_t>(w * 1099511627776.0)
               : 0;  // 2^40; false for NaN: minus infinity less itself
}

__device__ __forceinline__ float uniform_number(const SampleRow& s) {
  uint32_t c[4] = {s.step, s.sequence, 0, 0}, key0 = s.seed_low, key1 = s.seed_high;
  for (int round = 0; round < 10; ++round) {
    const uint32_t a_high = multiply_high(0xD2511F53u, c[0]), a_low = 0xD2511F53u * c[0];
    const uint32_t b_high = multiply_high(0xCD9E8D57u, c[2]), b_low = 0xCD9E8D57u * c[2];
    c[0] = b_high ^ c[1] ^ key0;
    c[1] = b_low;
    c[2] = a_high ^ c[3] ^ key1;
    c[3] = a_low;
    key0 += 0x9E3779B9u;
    key1 += 0xBB67AE85u;
  }
  return static_cast<float>(c[0] >> 8) * 5.9604644775390625e-8f;  // 2^-24
}

// The last place in order whose prefix of weights exceeds (or with `reaches` reaches) the target: the largest
// place P such that the weights at places >= P do. Weights below `least` count as 0.
__device__ uint64_t find_prefix(const float* logits, const uint64_t* weights, int n, uint64_t from,
                                uint64_t least, uint64_t target, bool reaches, uint64_t* scratch) {
  uint64_t found = 0;
  for (int bit = 63; bit >= 0; --bit) {
    const uint64_t tried = found | uint64_t{1} << bit;
    uint64_t mine = 0;
    for (int i = static_cast<int>(threadIdx.x); i < n; i += static_cast<int>(kChooseThreads)) {
      const uint64_t here = place(clean(logits[i]), i), w = weights == nullptr ? 1 : weights[i];
      if (here >= tried && here >= from && w >= least) mine += w;
    }
    const uint64_t total = block_total(mine, scratch);
    if (reaches ? total >= target : total > target) found = tried;
  }
  return found;
}

// Samples from all logits by searching thresholds over the whole row: for settings that may keep many.
__device__ int32_t sample_whole_row(const ChooseToken& p, const float* logits, uint64_t* weights, int n,
                                    float largest, int32_t first_id, const SampleRow& s, uint64_t* scratch) {
  for (int i = static_cast<int>(threadIdx.x); i < n; i += static_cast<int>(kChooseThreads))
    weights[i] = fixed_weight(clean(logits[i]), largest, s.temperature);
  block_sync();
  uint64_t from = 0;
  if (s.top_k > 0 && s.top_k < n)
    from = find_prefix(logits, nullptr, n, 0, 0, static_cast<uint64_t>(s.top_k), true, scratch);
  const auto total_from = [&](uint64_t start, uint64_t least) {
    uint64_t mine = 0;
    for (int i = static_cast<int>(threadIdx.x); i < n; i += static_cast<int>(kChooseThreads))
      if (place(clean(logits[i]), i) >= start && weights[i] >= least) mine += weights[i];
    return block_total(mine, scratch);
  };
  if (s.top_p < 1) {
    const auto target =
        static_cast<uint64_t>(static_cast<double>(s.top_p) * static_cast<double>(total_from(from, 0)));
    const uint64_t cut = find_prefix(logits, weights, n, from, 0, target > 0 ? target : 1, true, scratch);
    if (cut > from) from = cut;
  }
  const auto least = static_cast<uint64_t>(static_cast<double>(s.min_p) * 1099511627776.0);
  const auto target = static_cast<uint64_t>(static_cast<double>(uniform_number(s)) *
                                            static_cast<double>(total_from(from, least)));
  const uint64_t drawn = find_prefix(logits, weights, n, from, least, target, false, scratch);
  static_cast<void>(p);
  return drawn == 0 ? first_id : static_cast<int32_t>(0xffffffffu - static_cast<uint32_t>(drawn));
}

__global__ void __launch_bounds__(kChooseThreads) choose_token(ChooseToken p) {
  auto* s = reinterpret_cast<ChooseShared*>(shared_memory());
  const int output = static_cast<int>(blockIdx.x), thread = static_cast<int>(threadIdx.x);
  pdl_wait();
  pdl_trigger();
  const float* logits = p.logits + static_cast<size_t>(output) * static_cast<size_t>(p.vocab);
  const int n_tokens = p.step.counts->n_tokens < p.vocab ? p.step.counts->n_tokens : p.vocab;
  const uint32_t serial = p.step.counts->serial;
  const int32_t slot = p.choice == Choice::candidates ? -1 : p.step.token_out[output];
  SampleRow settings{};
  if (p.choice == Choice::sample) settings = p.step.sampling[output];

  // The first token in order, and the chunks' maxima.
  float best = -INFINITY;
  int32_t best_id = 0x7fffffff;
  for (int c = thread; c < kChunks; c += static_cast<int>(kChooseThreads)) {
    const float x = load_l2(p.chunk_max + output * kChunks + c);
    const int32_t id = p.chunk_id[output * kChunks + c];
    s->chunk_max[c] = x;
    if (x > best || (x == best && id < best_id)) {
      best = x;
      best_id = id;
    }
  }
  uint64_t first = place(best, best_id);
#pragma unroll
  for (int m = 16; m; m >>= 1) {
    const uint64_t other = shuffle_xor(first, static_cast<unsigned>(m));
    first = other > first ? other : first;
  }
  if (lane_id() == 0) s->sums[thread / 32] = first;
  if (thread == 0) s->n_listed = 0;
  block_sync();
  for (unsigned w = 0; w < blockDim.x / 32; ++w) first = s->sums[w] > first ? s->sums[w] : first;
  block_sync();
  const auto first_id = static_cast<int32_t>(0xffffffffu - static_cast<uint32_t>(first));
  const float largest = clean(load_l2(logits + first_id));

  int32_t token = first_id;
  const bool whole_row = p.choice == Choice::sample && settings.temperature > 0 &&
                         (settings.top_k <= 0 || settings.top_k > kMaxCandidates);
  const bool sorted = p.choice == Choice::candidates ||
                      (p.choice == Choice::sample && settings.temperature > 0 && !whole_row);
  uint64_t* weights = p.weights + static_cast<size_t>(output) * static_cast<size_t>(p.vocab);
  if (whole_row) token = sample_whole_row(p, logits, weights, n_tokens, largest, first_id, settings, s->sums);
  if (sorted) {
    int n = p.choice == Choice::candidates ? p.n_candidates : settings.top_k;
    if (n > n_tokens) n = n_tokens;
    // The n-th largest chunk maximum.
    uint32_t threshold = 0;
    for (int bit = 31; bit >= 0; --bit) {
      const uint32_t tried = threshold | 1u << bit;
      int count = 0;
      for (int c = thread; c < kChunks; c += static_cast<int>(kChooseThreads))
        count += block_count(ordered(s->chunk_max[c]) >= tried);
      if (count >= n) threshold = tried;
    }
    const int size = chunk_size(p.vocab);
    for (int c = thread / 32; c < kChunks; c += static_cast<int>(kChooseThreads / 32)) {
      if (ordered(s->chunk_max[c]) < threshold) continue;
      const int end = (c + 1) * size < n_tokens ? (c + 1) * size : n_tokens;
      for (int i = c * size + static_cast<int>(lane_id()); i < end; i += 32) {
        const float x = clean(load_l2(logits + i));
        if (ordered(x) < threshold) continue;
        const int at = shared_fetch_add(&s->n_listed, 1);
        if (at < kListSize) {
          s->value[at] = x;
          s->id[at] = i;
        }
      }
    }
    block_sync();
    int n_listed = s->n_listed;
    if (n_listed > kListSize || n_listed < n) {  // many equal logits: find the exact n instead
      const uint64_t from =
          find_prefix(logits, nullptr, n_tokens, 0, 0, static_cast<uint64_t>(n), true, s->sums);
      if (thread == 0) s->n_listed = 0;
      block_sync();
      for (int i = thread; i < n_tokens; i += static_cast<int>(kChooseThreads)) {
        const float x = clean(load_l2(logits + i));
        if (place(x, i) < from) continue;
        const int at = shared_fetch_add(&s->n_listed, 1);
        s->value[at] = x;
        s->id[at] = i;
      }
      block_sync();
      n_listed = s->n_listed;
    }
    for (int c = thread; c < n_listed; c += static_cast<int>(kChooseThreads)) {
      const uint64_t mine = place(s->value[c], s->id[c]);
      int rank = 0;
      for (int j = 0; j < n_listed; ++j) rank += place(s->value[j], s->id[j]) > mine;
      if (rank < n) {
        s->sorted_value[rank] = s->value[c];
        s->sorted_id[rank] = s->id[c];
      }
    }
    block_sync();
    if (p.choice == Choice::candidates) {
      for (int c = thread; c < p.n_candidates; c += static_cast<int>(kChooseThreads)) {
        p.ids[output * p.n_candidates + c] = c < n ? s->sorted_id[c] : -1;
        p.values[output * p.n_candidates + c] = c < n ? s->sorted_value[c] : -INFINITY;
      }
    } else {
      if (thread < n)
        s->weight[thread] = fixed_weight(s->sorted_value[thread], largest, settings.temperature);
      block_sync();
      if (thread == 0) {
        int kept = n;
        uint64_t sum = 0;
        for (int i = 0; i < kept; ++i) sum += s->weight[i];
        if (settings.top_p < 1) {
          const auto target =
              static_cast<uint64_t>(static_cast<double>(settings.top_p) * static_cast<double>(sum));
          uint64_t prefix = 0;
          int i = 0;
          while (i < kept) {
            prefix += s->weight[i++];
            if (prefix >= target) break;
          }
          kept = i;
        }
        const auto least = static_cast<uint64_t>(static_cast<double>(settings.min_p) * 1099511627776.0);
        while (kept > 1 && s->weight[kept - 1] < least) --kept;
        uint64_t total = 0, prefix = 0;
        for (int i = 0; i < kept; ++i) total += s->weight[i];
        const auto target =
            static_cast<uint64_t>(static_cast<double>(uniform_number(settings)) * static_cast<double>(total));
        int i = 0;
        for (; i < kept - 1; ++i) {
          prefix += s->weight[i];
          if (prefix > target) break;
        }
        s->chosen = s->sorted_id[i];
      }
      block_sync();
      token = s->chosen;
    }
  }
  if (p.choice == Choice::candidates) {  // in the order of chunks, each warp its run of them
    float sum = 0;
    const int run = kChunks / 32, w = thread / 32;
    for (int c = static_cast<int>(lane_id()); c < run; c += 32) {
      const int chunk = w * run + c;
      if (s->chunk_max[chunk] != -INFINITY)
        sum += expf(s->chunk_max[chunk] - largest) * load_l2(p.chunk_sum + output * kChunks + chunk);
    }
    sum = warp_sum(sum);
    auto* sums = reinterpret_cast<float*>(s->sums);
    if (lane_id() == 0) sums[w] = sum;
    block_sync();
    if (thread == 0) {
      float all = 0;
      for (int i = 0; i < 32; ++i) all += sums[i];
      p.logsumexp[output] = largest == -INFINITY ? -INFINITY : largest + logf(all);
    }
  } else if (thread == 0) {
    p.token[output] = token;
    if (slot >= 0) p.step.token_slots[slot] = token;
    // Nothing of the step is read after this: the host may fill its inputs anew.
    if (p.reports != nullptr)
      store_to_host(p.reports + output, uint64_t{serial} << 32 | static_cast<uint32_t>(token));
  }
}

}  // namespace

void launch_embed_rows(const EmbedRows& p, cudaStream_t stream) {
  LaunchShape shape;
  shape.threads = kEmbedThreads;
  shape.grid = dim3(static_cast<unsigned>(p.rows));
  launch(embed_rows_q4, p, shape, stream);
}

void launch_gather_rows(const GatherRows& p, cudaStream_t stream) {
  LaunchShape shape;
  shape.threads = kEmbedThreads;
  shape.grid = dim3(static_cast<unsigned>(p.outputs));
  launch(gather_rows, p, shape, stream);
}

void launch_choose_token(const ChooseToken& p, cudaStream_t stream) {
  LaunchShape scan;
  scan.threads = kScanThreads;
  scan.grid = dim3(kScanBlocks, static_cast<unsigned>(p.outputs));
  launch(scan_logits, p, scan, stream);
  LaunchShape choose;
  choose.threads = kChooseThreads;
  choose.grid = dim3(static_cast<unsigned>(p.outputs));
  choose.shared_bytes = sizeof(ChooseShared);
  launch(choose_token, p, choose, stream);
}

}  // namespace lily::cuda
