// Prefill of the real model's shapes, all 40 layers with weights of their own, random but in the resident
// layout: tokens a second at 512 / 4K / 32K / 128K, time and rate of each kind of kernel.
//
//   cuda_prefill_bench [chunk rows] [prompt lengths ...]
//
// The embedding has a component that all tokens share, so that the router prefers some experts, as real
// routers do; the loads it leads to are printed. Whole runs are timed without events between kernels; a
// second run with an event around each kernel gives the shares.
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <string>
#include <vector>

#include "backend/cuda/prefill_attention.h"
#include "backend/cuda/prefill_delta.h"
#include "backend/cuda/prefill_linear.h"
#include "backend/cuda/prefill_routing.h"
#include "pack/mma_q4_layout.h"

using namespace lily::cuda;
namespace q4 = lily::pack::mma_q4;

namespace {

constexpr int kHidden = 2048, kLayers = 40, kVocab = 248320, kQHeads = 16, kKvHeads = 2, kKeyHeads = 16,
              kValueHeads = 32;
constexpr int kExperts = 256, kWidth = 512, kQkv = 8192, kZ = 4096, kDeltaOut = kQkv + kZ + 2 * kValueHeads;
constexpr int kQGate = kQHeads * 512, kKv = kKvHeads * 256, kAttentionOut = kQGate + 2 * kKv;

void ok(cudaError_t status, const char* what) {
  if (status == cudaSuccess) return;
  std::fprintf(stderr, "%s: %s\n", what, cudaGetErrorString(status));
  std::exit(1);
}

__device__ uint32_t mix(uint64_t x) {
  x ^= x >> 33, x *= 0xff51afd7ed558ccdull, x ^= x >> 33, x *= 0xc4ceb9fe1a85ec53ull, x ^= x >> 33;
  return static_cast<uint32_t>(x);
}
__device__ uint32_t bf16(float x) { return __float_as_uint(x) >> 16; }

__global__ void fill_records(uint32_t* out, size_t n_records, float scale, uint64_t seed) {
  const size_t record = blockIdx.x;
  const uint32_t r = mix(seed + record * 144 + threadIdx.x);
  uint32_t word = r;
  if (threadIdx.x >= 128) {
    const float s = scale * (0.5f + static_cast<float>(r & 0xffff) / 65536.0f) * (r >> 31 ? -1.0f : 1.0f);
    word = bf16(s) | bf16(-7.5f * s) << 16;
  }
  if (record < n_records) out[record * 144 + threadIdx.x] = word;
}
__global__ void fill_words(uint32_t* out, size_t n, uint64_t seed) {
  for (size_t i = blockIdx.x * 256ull + threadIdx.x; i < n; i += gridDim.x * 256ull) out[i] = mix(seed + i);
}
__global__ void fill_bf16(uint16_t* out, size_t n, float mean, float spread, uint64_t seed) {
  for (size_t i = blockIdx.x * 256ull + threadIdx.x; i < n; i += gridDim.x * 256ull)
    out[i] = static_cast<uint16_t>(
        bf16(mean + spread * (static_cast<float>(mix(seed + i) & 0xffff) / 32768.0f - 1.0f)));
}
__global__ void fill_floats(float* out, size_t n, float mean, float spread, uint64_t seed) {
  for (size_t i = blockIdx.x * 256ull + threadIdx.x; i < n; i += gridDim.x * 256ull)
    out[i] = mean + spread * (static_cast<float>(mix(seed + i) & 0xffff) / 32768.0f - 1.0f);
}

uint64_t seed = 1;
template <typename T>
T* allocate(size_t n) {
  T* p = nullptr;
  ok(cudaMalloc(&p, n * sizeof(T)), "cudaMalloc");
  return p;
}
std::byte* random_matrix(int n_rows, int n_cols, int n_matrices = 1) {
  const size_t records =
      q4::packed_bytes(n_rows, n_cols) / q4::kRecordBytes * static_cast<size_t>(n_matrices);
  auto* p = allocate<std::byte>(records * q4::kRecordBytes);
  fill_records<<<static_cast<unsigned>(records), 144>>>(
      reinterpret_cast<uint32_t*>(p), records, 0.22f / sqrtf(static_cast<float>(n_cols)), seed += 1ull << 40);
  return p;
}
uint16_t* random_bf16(size_t n, float mean, float spread) {
  auto* p = allocate<uint16_t>(n);
  fill_bf16<<<1024, 256>>>(p, n, mean, spread, seed += 1ull << 40);
  return p;
}
float* random_floats(size_t n, float mean, float spread) {
  auto* p = allocate<float>(n);
  fill_floats<<<1024, 256>>>(p, n, mean, spread, seed += 1ull << 40);
  return p;
}
uint8_t* random_bytes(size_t n) {
  auto* p = allocate<uint8_t>(n);
  fill_words<<<1024, 256>>>(reinterpret_cast<uint32_t*>(p), n / 4, seed += 1ull << 40);
  return p;
}

struct Layer {
  bool attention;
  float *input_norm, *post_norm;
  std::byte *in[4], *out;
  uint16_t* conv;
  float *a_log, *dt_bias, *delta_norm, *q_norm, *k_norm;
  float* state;
  uint16_t* conv_state;
  KvCache cache;
  Q8Matrix router, shared_gate;
  std::byte *gate, *up, *down, *s_gate, *s_up, *s_down;
};

struct Profile {
  bool on = false;
  struct Span {
    std::string kind;
    cudaEvent_t from, to;
  };
  std::vector<Span> spans;
  template <typename F>
  void run(const char* kind, F f) {
    if (!on) return f();
    Span s{kind, {}, {}};
    cudaEventCreate(&s.from), cudaEventCreate(&s.to);
    cudaEventRecord(s.from);
    f();
    cudaEventRecord(s.to);
    spans.push_back(s);
  }
};

struct Bench {
  int chunk, n_sm;
  std::vector<Layer> layers;
  uint32_t* embed_codes;
  uint16_t *embed_scales, *embed_biases;
  float* final_norm;
  std::byte* head;
  int32_t *ids, *table, *chosen, *expert_rows, *token_of_row, *row_of_choice, *n_tiles;
  float *x, *chosen_weight, *shared_weight, *row_weight, *logits;
  uint16_t *u, *projected, *q, *mixed, *act, *y;
  ExpertTile* tiles;
  std::byte* scratch;
  float2* rope;
  Profile profile;

  Bench(int chunk_rows, int max_tokens) : chunk(chunk_rows) {
    cudaDeviceProp properties{};
    ok(cudaGetDeviceProperties(&properties, 0), "device");
    n_sm = properties.multiProcessorCount;
    std::printf("%s, %d SMs; chunk %d\n", properties.name, n_sm, chunk);
    const size_t n_blocks = static_cast<size_t>(max_tokens + 63) / 64;
    for (int l = 0; l < kLayers; ++l) {
      Layer y_{};
      y_.attention = l % 4 == 3;
      y_.input_norm = random_floats(kHidden, 1, 0.2f), y_.post_norm = random_floats(kHidden, 1, 0.2f);
      if (y_.attention) {
        y_.in[0] = random_matrix(kQGate, kHidden), y_.in[1] = random_matrix(kKv, kHidden),
        y_.in[2] = random_matrix(kKv, kHidden);
        y_.q_norm = random_floats(256, 1, 0.2f), y_.k_norm = random_floats(256, 1, 0.2f);
        y_.cache = kv_apart(random_bf16(n_blocks * kKvHeads * 64 * 256, 0, 1),
                            random_bf16(n_blocks * kKvHeads * 64 * 256, 0, 1), kKvHeads);
      } else {
        y_.in[0] = random_matrix(kQkv, kHidden), y_.in[1] = random_matrix(kZ, kHidden),
        y_.in[2] = random_matrix(kValueHeads, kHidden), y_.in[3] = random_matrix(kValueHeads, kHidden);
        y_.conv = random_bf16(kQkv * 4, 0, 0.5f), y_.a_log = random_floats(kValueHeads, -1, 2),
        y_.dt_bias = random_floats(kValueHeads, 0, 1);
        y_.delta_norm = random_floats(128, 1, 0.2f);
        y_.state = random_floats(size_t{kValueHeads} * 128 * 128, 0, 0.01f),
        y_.conv_state = random_bf16(3 * kQkv, 0, 1);
      }
      y_.out = random_matrix(kHidden, 4096);
      y_.router = {random_bytes(size_t{kExperts} * kHidden),
                   random_bf16(kExperts * kHidden / 64, 0.00018f, 0.00005f),
                   random_bf16(kExperts * kHidden / 64, -0.023f, 0.006f)};
      y_.shared_gate = {random_bytes(kHidden), random_bf16(kHidden / 64, 0.0002f, 0.00005f),
                        random_bf16(kHidden / 64, -0.025f, 0.006f)};
      y_.gate = random_matrix(kWidth, kHidden, kExperts), y_.up = random_matrix(kWidth, kHidden, kExperts),
      y_.down = random_matrix(kHidden, kWidth, kExperts);
      y_.s_gate = random_matrix(kWidth, kHidden), y_.s_up = random_matrix(kWidth, kHidden),
      y_.s_down = random_matrix(kHidden, kWidth);
      layers.push_back(y_);
    }
    embed_codes = reinterpret_cast<uint32_t*>(random_bytes(size_t{kVocab} * kHidden / 2));
    embed_scales = random_bf16(size_t{kVocab} * kHidden / 64, 0.02f, 0.005f),
    embed_biases = random_bf16(size_t{kVocab} * kHidden / 64, -0.13f, 0.01f);
    final_norm = random_floats(kHidden, 1, 0.2f);
    head = random_matrix(kVocab, kHidden);
    const size_t n = static_cast<size_t>(chunk);
    std::vector<int32_t> host_ids(static_cast<size_t>(max_tokens)), host_table(n_blocks);
    for (size_t i = 0; i < host_ids.size(); ++i)
      host_ids[i] = static_cast<int32_t>((i * 2654435761ull >> 7) % kVocab);
    for (size_t i = 0; i < n_blocks; ++i) host_table[i] = static_cast<int32_t>(n_blocks - 1 - i);
    ids = allocate<int32_t>(host_ids.size()), table = allocate<int32_t>(n_blocks);
    ok(cudaMemcpy(ids, host_ids.data(), host_ids.size() * 4, cudaMemcpyHostToDevice), "ids");
    ok(cudaMemcpy(table, host_table.data(), n_blocks * 4, cudaMemcpyHostToDevice), "table");
    x = allocate<float>(n * kHidden), u = allocate<uint16_t>(n * kHidden),
    projected = allocate<uint16_t>(n * kDeltaOut);
    q = allocate<uint16_t>(n * 4096), mixed = allocate<uint16_t>(n * 4096);
    act = allocate<uint16_t>(n * 9 * kWidth), y = allocate<uint16_t>(n * 9 * kHidden);
    chosen = allocate<int32_t>(n * 8), chosen_weight = allocate<float>(n * 8),
    shared_weight = allocate<float>(n);
    expert_rows = allocate<int32_t>(kExperts), token_of_row = allocate<int32_t>(n * 9),
    row_weight = allocate<float>(n * 9);
    row_of_choice = allocate<int32_t>(n * 8), n_tiles = allocate<int32_t>(1),
    logits = allocate<float>(kVocab);
    tiles = allocate<ExpertTile>(static_cast<size_t>(max_expert_tiles(chunk, kExperts)));
    scratch = allocate<std::byte>(delta_scratch_bytes(chunk, kKeyHeads, kValueHeads));
    rope = allocate<float2>(n * 32);
    ok(cudaDeviceSynchronize(), "setting up");
  }

  void linear(const char* kind, const uint16_t* from, int n, int n_cols, std::vector<LinearSegment> segments,
              LinearOutput output, const float* residual = nullptr) {
    LinearArgs args{from, n, n_cols, static_cast<int>(segments.size()), {}, output, residual};
    std::copy(segments.begin(), segments.end(), args.segments);
    profile.run(kind, [&] { linear_q4_prefill(args, n_sm, nullptr); });
  }

  void run_chunk(int position, int n) {
    profile.run("embed+rope", [&] { rope_table_prefill(rope, n, position, 1e7, nullptr); });
    profile.run("embed+rope", [&] {
      embedding_q4_prefill(
          {ids + position, embed_codes, embed_scales, embed_biases, n, kHidden, x, layers[0].input_norm, u},
          nullptr);
    });
    for (size_t i = 0; i < layers.size(); ++i) {
      const Layer& l = layers[i];
      if (l.attention) {
        linear("attention in", u, n, kHidden,
               {{l.in[0], kQGate, projected, kAttentionOut},
                {l.in[1], kKv, projected + kQGate, kAttentionOut},
                {l.in[2], kKv, projected + kQGate + kKv, kAttentionOut}},
               LinearOutput::bf16);
        const AttentionArgs a{n,
                              position,
                              kQHeads,
                              projected,
                              projected + kQGate,
                              projected + kQGate + kKv,
                              kAttentionOut,
                              kAttentionOut,
                              l.q_norm,
                              l.k_norm,
                              rope,
                              l.cache,
                              table,
                              q,
                              mixed};
        profile.run("qk prepare", [&] { qk_prepare_prefill(a, nullptr); });
        profile.run("attention", [&] { attention_prefill(a, nullptr); });
      } else {
        linear("delta in", u, n, kHidden,
               {{l.in[0], kQkv, projected, kDeltaOut},
                {l.in[1], kZ, projected + kQkv, kDeltaOut},
                {l.in[2], kValueHeads, projected + kQkv + kZ, kDeltaOut},
                {l.in[3], kValueHeads, projected + kQkv + kZ + kValueHeads, kDeltaOut}},
               LinearOutput::bf16);
        const bool first = position == 0;
        const DeltaArgs d{n,
                          kKeyHeads,
                          kValueHeads,
                          projected,
                          projected + kQkv,
                          projected + kQkv + kZ,
                          projected + kQkv + kZ + kValueHeads,
                          kDeltaOut,
                          kDeltaOut,
                          kDeltaOut,
                          l.conv,
                          l.a_log,
                          l.dt_bias,
                          l.delta_norm,
                          first ? nullptr : l.conv_state,
                          l.conv_state,
                          first ? nullptr : l.state,
                          l.state,
                          mixed,
                          scratch};
        profile.run("delta rule", [&] { delta_blocks_prefill(d, nullptr); });
      }
      linear("out projection", mixed, n, 4096, {{l.out, kHidden, x, kHidden}}, LinearOutput::residual, x);
      profile.run("norm", [&] { rms_norm_prefill(x, l.post_norm, u, n, kHidden, nullptr); });
      profile.run("router", [&] {
        router_q8_prefill(
            {u, n, kHidden, kExperts, l.router, l.shared_gate, chosen, chosen_weight, shared_weight, nullptr},
            nullptr);
      });
      profile.run("grouping", [&] {
        group_by_expert_prefill(
            {chosen, chosen_weight, shared_weight, n, kExperts, true, expert_rows, token_of_row, row_weight,
             row_of_choice, tiles, n_tiles, expert_tile_rows(n, kExperts)},
            nullptr);
      });
      profile.run("gate_up", [&] {
        experts_gate_up_q4_prefill({tiles, n_tiles, kExperts, u, token_of_row, row_weight, l.gate, l.up,
                                    l.s_gate, l.s_up, kWidth, kHidden, act, expert_tile_rows(n, kExperts)},
                                   n_sm, nullptr);
      });
      profile.run("down", [&] {
        experts_down_q4_prefill({tiles, n_tiles, kExperts, act, nullptr, nullptr, l.down, nullptr, l.s_down,
                                 nullptr, kHidden, kWidth, y, expert_tile_rows(n, kExperts)},
                                n_sm, nullptr);
      });
      if (profile.on) count_load(n);
      const float* next = i + 1 < layers.size() ? layers[i + 1].input_norm : final_norm;
      profile.run("combine", [&] {
        combine_experts_prefill(
            {y, y + size_t{8} * static_cast<size_t>(n) * kHidden, row_of_choice, x, n, kHidden, x, next, u},
            nullptr);
      });
    }
  }

  double load_max = 0, load_touched = 0;
  int load_samples = 0;
  void count_load(int n) {
    std::vector<int32_t> rows(kExperts);
    ok(cudaMemcpy(rows.data(), expert_rows, kExperts * 4, cudaMemcpyDeviceToHost), "loads");
    load_max += *std::max_element(rows.begin(), rows.end()) / (n * 8.0 / kExperts);
    load_touched += static_cast<double>(std::count_if(rows.begin(), rows.end(), [](int r) { return r > 0; }));
    ++load_samples;
  }

  void prefill(int n_tokens) {
    for (int position = 0; position < n_tokens; position += chunk)
      run_chunk(position, std::min(chunk, n_tokens - position));
    const int last = (n_tokens - 1) % chunk;
    linear("head", u + static_cast<size_t>(last) * kHidden, 1, kHidden, {{head, kVocab, logits, kVocab}},
           LinearOutput::floats);
  }

  void measure(int n_tokens) {
    const int repeats = n_tokens <= 4096 ? 7 : n_tokens <= 32768 ? 3 : 1;
    cudaEvent_t from, to;
    cudaEventCreate(&from), cudaEventCreate(&to);
    std::vector<float> ms;
    for (int r = 0; r < repeats + (n_tokens <= 32768 ? 1 : 0); ++r) {
      cudaEventRecord(from);
      prefill(n_tokens);
      cudaEventRecord(to);
      ok(cudaEventSynchronize(to), "prefill");
      float t = 0;
      cudaEventElapsedTime(&t, from, to);
      if (n_tokens > 32768 || r > 0) ms.push_back(t);
    }
    std::sort(ms.begin(), ms.end());
    const double median = ms[ms.size() / 2];
    std::vector<float> sample(1024);
    ok(cudaMemcpy(sample.data(), logits, sample.size() * 4, cudaMemcpyDeviceToHost), "logits");
    const bool finite = std::all_of(sample.begin(), sample.end(), [](float v) { return std::isfinite(v); });
    std::printf("\n%d tokens: %.2f ms (%.2f .. %.2f, %zu runs) = %.0f tok/s%s\n", n_tokens, median,
                ms.front(), ms.back(), ms.size(), n_tokens / median * 1000,
                finite ? "" : "  LOGITS NOT FINITE");
    if (n_tokens > 40000) return;
    profile.on = true;
    profile.spans.clear();
    load_max = load_touched = 0, load_samples = 0;
    prefill(n_tokens);
    ok(cudaDeviceSynchronize(), "profile");
    profile.on = false;
    std::map<std::string, std::pair<double, int>> kinds;
    double total = 0;
    for (auto& s : profile.spans) {
      float t = 0;
      cudaEventElapsedTime(&t, s.from, s.to);
      kinds[s.kind].first += t, ++kinds[s.kind].second, total += t;
      cudaEventDestroy(s.from), cudaEventDestroy(s.to);
    }
    const double n = n_tokens;
    const std::map<std::string, double> flops = {{"delta in", 30.0 * 2 * n * kHidden * kDeltaOut},
                                                 {"attention in", 10.0 * 2 * n * kHidden * kAttentionOut},
                                                 {"out projection", 40.0 * 2 * n * 4096 * kHidden},
                                                 {"gate_up", 40.0 * 9 * 2 * n * kHidden * 2 * kWidth},
                                                 {"down", 40.0 * 9 * 2 * n * kHidden * kWidth},
                                                 {"attention", 10.0 * 4 * kQHeads * 256 * n * (n + 1) / 2},
                                                 {"router", 40.0 * 2 * n * kHidden * (kExperts + 1)},
                                                 {"head", 2.0 * kHidden * kVocab}};
    std::printf("  loads: fullest expert %.1f x the mean, %.0f experts touched\n", load_max / load_samples,
                load_touched / load_samples);
    for (const auto& [kind, time] : kinds) {
      std::printf("  %-15s %8.3f ms %5.1f %%  %4d launches %8.1f us each", kind.c_str(), time.first,
                  100 * time.first / total, time.second, 1000 * time.first / time.second);
      if (flops.count(kind)) std::printf("  %6.1f TF/s", flops.at(kind) / time.first * 1e-9);
      std::printf("\n");
    }
    std::printf("  sum of kinds %.3f ms\n", total);
  }
};

}  // namespace

int main(int argc, char** argv) {
  const int chunk = argc > 1 ? std::atoi(argv[1]) : 4096;
  std::vector<int> lengths;
  for (int i = 2; i < argc; ++i) lengths.push_back(std::atoi(argv[i]));
  if (lengths.empty()) lengths = {512, 4096, 32768, 131072};
  Bench bench(chunk, *std::max_element(lengths.begin(), lengths.end()));
  for (int n : lengths) bench.measure(n);
  return 0;
}
