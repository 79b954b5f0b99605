// Decode at full size without a checkpoint: random 4-bit weights at the true shapes of all 40 layers, filled
// on the GPU, and the complete graph of one token. Prints the measured read rate, each kernel's time over the
// weights of all layers in turn (19 GB, so nothing stays in the L2) and tokens a second at stated contexts,
// and the time of every eighth context from 256 to 384.
// What the numbers are: kernel and graph time with random weights and a router that follows from them; no
// host work, no file, no tokenizer. Then what an engine adds from token to token: states that move from slot
// to slot, other tokens, and what might stand between two graphs.
//   decode_bench [tokens per figure [tokens]] (`tokens`: whole tokens only), or decode_bench 0: two tokens
//   outside a graph, for a profiler
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <string>
#include <vector>

#include "backend/cuda/kernels/attention_decode.h"
#include "backend/cuda/kernels/delta_decode.h"
#include "backend/cuda/kernels/experts_decode.h"
#include "backend/cuda/kernels/launch.h"
#include "backend/cuda/kernels/linear_decode.h"
#include "backend/cuda/kernels/tokens.h"

namespace {

using namespace lily::cuda;

constexpr int kLayers = 40, kHidden = 2048, kVocab = 248320, kTokens = 248077, kQ = 16, kKv = 2,
              kKeyHeads = 16, kValueHeads = 32;
constexpr int kStateSlots = 3;  // as many as an engine uses for one sequence
constexpr int kExperts = 256, kWidth = 512, kChannels = 8192, kValueWidth = 4096, kMaxContext = 131072;

size_t q4_bytes(size_t rows, size_t cols) { return (rows + 15) / 16 * (cols / 64) * 576; }

__device__ __forceinline__ uint32_t mix(uint64_t x) {
  x ^= x >> 33;
  x *= 0xff51afd7ed558ccdull;
  x ^= x >> 33;
  x *= 0xc4ceb9fe1a85ec53ull;
  return static_cast<uint32_t>(x >> 32);
}
// Records of 576 bytes: 128 words of codes, 16 of scale and bias; weights of zero mean and the given size.
__global__ void fill_q4(uint32_t* words, size_t n, uint64_t seed, float scale) {
  for (size_t i = blockIdx.x * static_cast<size_t>(blockDim.x) + threadIdx.x; i < n;
       i += static_cast<size_t>(gridDim.x) * blockDim.x) {
    const uint32_t r = mix(seed + i);
    if (i % 144 < 128) {
      words[i] = r;
    } else {
      const float s =
          scale * (0.75f + 0.5f * static_cast<float>(r & 0xffffff) / 16777216.0f) * (r >> 31 ? 1.0f : -1.0f);
      words[i] = bf16_pair(s, -7.5f * s);
    }
  }
}
__global__ void fill_bytes(uint32_t* words, size_t n, uint64_t seed) {
  for (size_t i = blockIdx.x * static_cast<size_t>(blockDim.x) + threadIdx.x; i < n;
       i += static_cast<size_t>(gridDim.x) * blockDim.x)
    words[i] = mix(seed + i);
}
__global__ void fill_bf16(uint32_t* pairs, size_t n, uint64_t seed, float low, float high) {
  for (size_t i = blockIdx.x * static_cast<size_t>(blockDim.x) + threadIdx.x; i < n;
       i += static_cast<size_t>(gridDim.x) * blockDim.x) {
    const uint32_t r = mix(seed + i);
    pairs[i] = bf16_pair(low + (high - low) * static_cast<float>(r & 0xffff) / 65536.0f,
                         low + (high - low) * static_cast<float>(r >> 16) / 65536.0f);
  }
}
__global__ void fill_f32(float* x, size_t n, uint64_t seed, float low, float high) {
  for (size_t i = blockIdx.x * static_cast<size_t>(blockDim.x) + threadIdx.x; i < n;
       i += static_cast<size_t>(gridDim.x) * blockDim.x)
    x[i] = low + (high - low) * static_cast<float>(mix(seed + i) >> 8) / 16777216.0f;
}

uint64_t next_seed = 1;
void* allocate(size_t bytes) {
  void* p = nullptr;
  check(cudaMalloc(&p, (bytes + 255) / 256 * 256), "allocating");
  return p;
}
unsigned char* random_q4(size_t rows, size_t cols, float scale) {
  const size_t bytes = q4_bytes(rows, cols);
  auto* p = static_cast<unsigned char*>(allocate(bytes));
  fill_q4<<<1024, 256>>>(reinterpret_cast<uint32_t*>(p), bytes / 4, next_seed++ << 40, scale);
  return p;
}
uint16_t* random_bf16(size_t n, float low, float high) {
  auto* p = static_cast<uint16_t*>(allocate(n * 2));
  fill_bf16<<<512, 256>>>(reinterpret_cast<uint32_t*>(p), n / 2, next_seed++ << 40, low, high);
  return p;
}
float* random_f32(size_t n, float low, float high) {
  auto* p = static_cast<float*>(allocate(n * 4));
  fill_f32<<<512, 256>>>(p, n, next_seed++ << 40, low, high);
  return p;
}
template <typename T>
T* upload(const std::vector<T>& data) {
  auto* p = static_cast<T*>(allocate(data.size() * sizeof(T)));
  check(cudaMemcpy(p, data.data(), data.size() * sizeof(T), cudaMemcpyHostToDevice), "uploading");
  return p;
}

struct Layer {
  bool attention = false;
  float *input_norm, *post_norm;
  unsigned char *in[4], *out;
  uint16_t *conv, *conv_state, *k, *v;
  float *a_log, *dt_bias, *delta_norm, *delta_state, *q_norm, *k_norm;
  uint8_t *router, *shared_gate_row;
  uint16_t *router_scales, *router_biases, *shared_scales, *shared_biases;
  unsigned char *gate, *up, *down, *shared_gate, *shared_up, *shared_down;
};

struct Model {
  std::vector<Layer> layers;
  unsigned char* head;
  float* final_norm;
  uint32_t* embed;
  uint16_t *embed_scales, *embed_biases;
  float *residual, *rows, *logits, *router_logits, *weights, *partial, *chunk_max, *chunk_sum;
  uint16_t *in, *mixed, *normed, *act, *shared_act;
  int32_t *ids, *token, *chunk_id, *position;
  unsigned* counters;
  uint64_t* scratch_weights;
  double* frequency;
  StepView step{};
  bool evict_source = true;
  int n_sms = 132;
};

Model make_model() {
  Model m;
  for (int l = 0; l < kLayers; ++l) {
    Layer y{};
    y.attention = l % 4 == 3;
    y.input_norm = random_f32(kHidden, 0.8f, 1.2f);
    y.post_norm = random_f32(kHidden, 0.8f, 1.2f);
    if (y.attention) {
      y.in[0] = random_q4(2 * kQ * 256, kHidden, 0.005f);
      y.in[1] = random_q4(kKv * 256, kHidden, 0.005f);
      y.in[2] = random_q4(kKv * 256, kHidden, 0.005f);
      y.q_norm = random_f32(256, 0.8f, 1.2f);
      y.k_norm = random_f32(256, 0.8f, 1.2f);
      y.k = random_bf16(static_cast<size_t>(kMaxContext) * kKv * 256, -1, 1);
      y.v = random_bf16(static_cast<size_t>(kMaxContext) * kKv * 256, -1, 1);
    } else {
      y.in[0] = random_q4(kChannels, kHidden, 0.005f);
      y.in[1] = random_q4(kValueWidth, kHidden, 0.005f);
      y.in[2] = random_q4(kValueHeads, kHidden, 0.005f);
      y.in[3] = random_q4(kValueHeads, kHidden, 0.005f);
      y.conv = random_bf16(kChannels * 4, -0.5f, 0.5f);
      y.conv_state = random_bf16(kStateSlots * 3 * kChannels, -1, 1);
      y.a_log = random_f32(kValueHeads, -1, 1);
      y.dt_bias = random_f32(kValueHeads, -1, 1);
      y.delta_norm = random_f32(128, 0.8f, 1.2f);
      y.delta_state = random_f32(static_cast<size_t>(kStateSlots) * kValueHeads * 128 * 128, -0.1f, 0.1f);
    }
    y.out = random_q4(kHidden, kValueWidth, 0.002f);
    y.router = reinterpret_cast<uint8_t*>(allocate(kExperts * kHidden));
    fill_bytes<<<256, 256>>>(reinterpret_cast<uint32_t*>(y.router), kExperts * kHidden / 4,
                             next_seed++ << 40);
    y.shared_gate_row = y.router;
    y.router_scales = y.shared_scales = random_bf16(kExperts * kHidden / 64, 0.0002f, 0.0006f);
    y.router_biases = y.shared_biases = random_bf16(kExperts * kHidden / 64, -0.06f, -0.04f);
    y.gate = random_q4(static_cast<size_t>(kExperts) * kWidth, kHidden, 0.005f);
    y.up = random_q4(static_cast<size_t>(kExperts) * kWidth, kHidden, 0.005f);
    y.down = random_q4(static_cast<size_t>(kExperts) * kHidden, kWidth, 0.005f);
    y.shared_gate = random_q4(kWidth, kHidden, 0.005f);
    y.shared_up = random_q4(kWidth, kHidden, 0.005f);
    y.shared_down = random_q4(kHidden, kWidth, 0.005f);
    m.layers.push_back(y);
  }
  m.head = random_q4(kVocab, kHidden, 0.005f);
  m.final_norm = random_f32(kHidden, 0.8f, 1.2f);
  m.embed = reinterpret_cast<uint32_t*>(allocate(static_cast<size_t>(kVocab) * kHidden / 2));
  fill_bytes<<<1024, 256>>>(m.embed, static_cast<size_t>(kVocab) * kHidden / 8, next_seed++ << 40);
  m.embed_scales = random_bf16(static_cast<size_t>(kVocab) * kHidden / 64, 0.05f, 0.15f);
  m.embed_biases = random_bf16(static_cast<size_t>(kVocab) * kHidden / 64, -1, -0.5f);
  m.residual = random_f32(kHidden, -1, 1);
  m.rows = random_f32(kHidden, -1, 1);
  m.logits = random_f32(kVocab, -1, 1);
  m.router_logits = random_f32(kExperts + 1, -1, 1);
  m.weights = random_f32(8, 0, 1);
  m.partial = random_f32(attention_partial_floats(1, kQ), 0, 1);
  m.chunk_max = random_f32(kChunks, 0, 1);
  m.chunk_sum = random_f32(kChunks, 0, 1);
  m.in = random_bf16(16384, -1, 1);
  m.mixed = random_bf16(4096, -1, 1);
  m.normed = random_bf16(kHidden, -1, 1);
  m.act = random_bf16(8 * kWidth, -1, 1);
  m.shared_act = random_bf16(kWidth, -1, 1);
  m.ids = upload(std::vector<int32_t>{0, 1, 2, 3, 4, 5, 6, 7});
  m.token = upload(std::vector<int32_t>{0});
  m.chunk_id = upload(std::vector<int32_t>(kChunks, 0));
  m.counters = upload(std::vector<unsigned>(kQ, 0));
  m.scratch_weights = static_cast<uint64_t*>(allocate(static_cast<size_t>(kVocab) * 8));
  std::vector<double> frequency;
  for (int i = 0; i < 32; ++i) frequency.push_back(std::pow(1e7, -2.0 * i / 64));
  m.frequency = upload(frequency);
  std::vector<int32_t> table;
  for (int i = 0; i < kMaxContext / kKvBlock; ++i) table.push_back((i * 37) % (kMaxContext / kKvBlock));
  m.position = upload(std::vector<int32_t>{255});
  m.step.counts = upload(std::vector<StepCounts>{{1, 1, 1, kTokens}});
  m.step.tokens = upload(std::vector<int32_t>{-1});
  m.step.positions = m.position;
  m.step.token_in = upload(std::vector<int32_t>{0});
  m.step.table_first = upload(std::vector<int32_t>{0});
  m.step.state_src = upload(std::vector<int32_t>{0});
  m.step.state_dst = upload(std::vector<int32_t>{0});
  m.step.block_table = upload(table);
  m.step.output_rows = upload(std::vector<int32_t>{0});
  m.step.token_out = upload(std::vector<int32_t>{0});
  m.step.sampling = upload(std::vector<SampleRow>{{1.0f, 0.95f, 0.0f, 20, 1, 2, 3, 4}});
  m.step.token_slots = upload(std::vector<int32_t>{1234});
  m.step.rope = static_cast<float2*>(allocate(32 * sizeof(float2)));
  cudaDeviceProp prop;
  check(cudaGetDeviceProperties(&prop, 0), "reading properties");
  m.n_sms = prop.multiProcessorCount;
  return m;
}

// ---- the steps of a token
void norm_linear(const Model& m, const Layer& l, cudaStream_t s) {
  LinearDecode p;
  const int rows_delta[] = {kChannels, kValueWidth, kValueHeads, kValueHeads},
            rows_attention[] = {2 * kQ * 256, kKv * 256, kKv * 256};
  p.n_pieces = l.attention ? 3 : 4;
  int col = 0;
  for (int i = 0; i < p.n_pieces; ++i) {
    const int rows = l.attention ? rows_attention[i] : rows_delta[i];
    p.pieces[i] = {l.in[i], rows, col};
    col += rows;
  }
  p.in = kHidden;
  p.x = m.residual;
  p.x_f32 = true;
  p.x_stride = kHidden;
  p.norm = l.input_norm;
  p.y = m.in;
  p.y_stride = col;
  launch_linear_decode(p, m.n_sms, s);
}
void mixer(const Model& m, const Layer& l, cudaStream_t s) {
  if (l.attention) {
    AttentionDecode p;
    p.q_gate = m.in;
    p.k = m.in + 2 * kQ * 256;
    p.v = p.k + kKv * 256;
    p.stride = 2 * kQ * 256 + 2 * kKv * 256;
    p.q_norm = l.q_norm;
    p.k_norm = l.k_norm;
    p.n_q_heads = kQ;
    p.cache = kv_apart(l.k, l.v, kKv);
    p.step = m.step;
    p.partial = m.partial;
    p.counters = m.counters;
    p.y = m.mixed;
    launch_attention_decode(p, s);
    return;
  }
  DeltaDecode p;
  p.qkv = m.in;
  p.z = m.in + kChannels;
  p.b = p.z + kValueWidth;
  p.a = p.b + kValueHeads;
  p.stride = kChannels + kValueWidth + 2 * kValueHeads;
  p.conv = l.conv;
  p.a_log = l.a_log;
  p.dt_bias = l.dt_bias;
  p.norm = l.delta_norm;
  p.n_key_heads = kKeyHeads;
  p.conv_state = l.conv_state;
  p.conv_slot_stride = 3 * kChannels;
  p.delta_state = l.delta_state;
  p.delta_slot_stride = kValueHeads * 128 * 128;
  p.evict_source = m.evict_source;
  p.step = m.step;
  p.y = m.mixed;
  launch_delta_decode(p, s);
}
void out_projection(const Model& m, const Layer& l, cudaStream_t s) {
  LinearDecode p;
  p.pieces[0] = {l.out, kHidden, 0};
  p.n_pieces = 1;
  p.in = kValueWidth;
  p.x = m.mixed;
  p.x_stride = kValueWidth;
  p.y_stride = kHidden;
  p.residual_in = p.residual_out = m.residual;
  launch_linear_decode(p, m.n_sms, s);
}
void router(const Model& m, const Layer& l, cudaStream_t s) {
  RouterDecode p;
  p.x = m.residual;
  p.norm = l.post_norm;
  p.hidden = kHidden;
  p.n_experts = kExperts;
  p.router_codes = l.router;
  p.router_scales = l.router_scales;
  p.router_biases = l.router_biases;
  p.shared_codes = l.shared_gate_row;
  p.shared_scales = l.shared_scales;
  p.shared_biases = l.shared_biases;
  p.normed = m.normed;
  p.logits = m.router_logits;
  launch_router_decode(p, s);
}
void gate_up(const Model& m, const Layer& l, cudaStream_t s) {
  ExpertsGateUpDecode p;
  p.normed = m.normed;
  p.logits = m.router_logits;
  p.logits_stride = kExperts + 1;
  p.ids = m.ids;
  p.weights = m.weights;
  p.hidden = kHidden;
  p.width = p.shared_width = kWidth;
  p.n_experts = kExperts;
  p.gate = l.gate;
  p.up = l.up;
  p.shared_gate = l.shared_gate;
  p.shared_up = l.shared_up;
  p.act = m.act;
  p.shared_act = m.shared_act;
  launch_experts_gate_up_decode(p, m.n_sms, s);
}
void down(const Model& m, const Layer& l, cudaStream_t s) {
  ExpertsDownDecode p;
  p.act = m.act;
  p.shared_act = m.shared_act;
  p.logits = m.router_logits;
  p.logits_stride = kExperts + 1;
  p.shared_logit = m.router_logits + kExperts;
  p.hidden = kHidden;
  p.width = p.shared_width = kWidth;
  p.n_experts = kExperts;
  p.rows = 1;
  p.down = l.down;
  p.shared_down = l.shared_down;
  p.residual_in = p.residual_out = m.residual;
  launch_experts_down_decode(p, s);
}
void embed(const Model& m, cudaStream_t s) {
  EmbedRows p;
  p.codes = m.embed;
  p.scales = m.embed_scales;
  p.biases = m.embed_biases;
  p.rope_frequency = m.frequency;
  p.hidden = kHidden;
  p.vocab = kVocab;
  p.step = m.step;
  p.y = m.residual;
  launch_embed_rows(p, s);
}
void gather(const Model& m, cudaStream_t s) {
  GatherRows p;
  p.x = m.residual;
  p.y = m.rows;
  p.row_bytes = kHidden * 4;
  p.step = m.step;
  launch_gather_rows(p, s);
}
void head(const Model& m, cudaStream_t s) {
  LinearDecode p;
  p.pieces[0] = {m.head, kVocab, 0};
  p.n_pieces = 1;
  p.in = kHidden;
  p.x = m.rows;
  p.x_f32 = true;
  p.x_stride = kHidden;
  p.norm = m.final_norm;
  p.y = m.logits;
  p.y_f32 = true;
  p.y_stride = kVocab;
  p.n_tokens = kTokens;
  launch_linear_decode(p, m.n_sms, s);
}
void choose(const Model& m, Choice choice, cudaStream_t s) {
  ChooseToken p;
  p.choice = choice;
  p.logits = m.logits;
  p.vocab = kVocab;
  p.step = m.step;
  p.token = m.token;
  p.chunk_max = m.chunk_max;
  p.chunk_id = m.chunk_id;
  p.chunk_sum = m.chunk_sum;
  p.weights = m.scratch_weights;
  launch_choose_token(p, s);
}
using Kernel = void (*)(const Model&, const Layer&, cudaStream_t);
struct NamedKernel {
  const char* name;
  Kernel kernel;
};
constexpr NamedKernel kLayerKernels[] = {{"norm + in", norm_linear},         {"mixer", mixer},
                                         {"out projection", out_projection}, {"norm + router", router},
                                         {"experts gate + up", gate_up},     {"experts down", down}};
void whole_token(const Model& m, Choice choice, cudaStream_t s, Kernel without = nullptr) {
  embed(m, s);
  for (const Layer& l : m.layers)
    for (const NamedKernel& k : kLayerKernels)
      if (k.kernel != without) k.kernel(m, l, s);
  gather(m, s);
  head(m, s);
  choose(m, choice, s);
}

// ---- timing
cudaStream_t stream;
struct Timing {
  double median_us, low_us, high_us;
};
Timing time_graph(const std::function<void()>& body, int warm, int n) {
  cudaGraph_t graph;
  cudaGraphExec_t exec;
  check(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal), "capturing");
  body();
  check(cudaStreamEndCapture(stream, &graph), "capturing");
  check(cudaGraphInstantiate(&exec, graph, 0), "instantiating");
  cudaEvent_t a, b;
  check(cudaEventCreate(&a), "creating an event");
  check(cudaEventCreate(&b), "creating an event");
  for (int i = 0; i < warm; ++i) check(cudaGraphLaunch(exec, stream), "launching");
  std::vector<double> us;
  constexpr int kBatch = 10;  // graphs between two events, one after another
  for (int i = 0; i < n; i += kBatch) {
    check(cudaEventRecord(a, stream), "recording");
    for (int j = 0; j < kBatch; ++j) check(cudaGraphLaunch(exec, stream), "launching");
    check(cudaEventRecord(b, stream), "recording");
    check(cudaEventSynchronize(b), "running");
    float ms = 0;
    check(cudaEventElapsedTime(&ms, a, b), "reading an event");
    us.push_back(ms * 1000.0 / kBatch);
  }
  check(cudaGraphExecDestroy(exec), "destroying");
  check(cudaGraphDestroy(graph), "destroying");
  std::sort(us.begin(), us.end());
  return {us[us.size() / 2], us.front(), us.back()};
}

// What may stand between the graphs of two tokens.
struct Between {
  bool event = false;   // recorded behind each
  bool output = false;  // four bytes copied to the host behind each
  bool inputs = false;  // inputs copied on another stream, and an event of it waited for
};
// Tokens in turn, each through the graph of one of `models`.
Timing time_turns(const std::vector<Model>& models, int n, const Between& between) {
  std::vector<cudaGraphExec_t> execs;
  for (const Model& m : models) {
    cudaGraph_t graph;
    cudaGraphExec_t exec;
    check(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal), "capturing");
    whole_token(m, Choice::greedy, stream);
    check(cudaStreamEndCapture(stream, &graph), "capturing");
    check(cudaGraphInstantiate(&exec, graph, 0), "instantiating");
    check(cudaGraphDestroy(graph), "destroying");
    execs.push_back(exec);
  }
  int32_t* host = nullptr;
  void* inputs = allocate(4096);
  check(cudaMallocHost(reinterpret_cast<void**>(&host), 4096), "allocating");
  cudaStream_t copies;
  cudaEvent_t a, b, done, copied;
  check(cudaStreamCreateWithFlags(&copies, cudaStreamNonBlocking), "creating a stream");
  for (cudaEvent_t* e : {&a, &b}) check(cudaEventCreate(e), "creating an event");
  for (cudaEvent_t* e : {&done, &copied})
    check(cudaEventCreateWithFlags(e, cudaEventDisableTiming), "creating an event");
  const auto round = [&] {
    for (size_t i = 0; i < execs.size(); ++i) {
      if (between.inputs) {
        check(cudaMemcpyAsync(inputs, host + 16, 2048, cudaMemcpyHostToDevice, copies), "copying");
        check(cudaEventRecord(copied, copies), "recording");
        check(cudaStreamWaitEvent(stream, copied), "waiting");
      }
      check(cudaGraphLaunch(execs[i], stream), "launching");
      if (between.output)
        check(cudaMemcpyAsync(host, models[i].token, 4, cudaMemcpyDeviceToHost, stream), "copying");
      if (between.event) check(cudaEventRecord(done, stream), "recording");
    }
  };
  round();
  std::vector<double> us;
  for (int i = 0; i < n; i += static_cast<int>(execs.size())) {
    check(cudaEventRecord(a, stream), "recording");
    round();
    check(cudaEventRecord(b, stream), "recording");
    check(cudaEventSynchronize(b), "running");
    float ms = 0;
    check(cudaEventElapsedTime(&ms, a, b), "reading an event");
    us.push_back(ms * 1000.0 / static_cast<double>(execs.size()));
  }
  for (cudaGraphExec_t exec : execs) check(cudaGraphExecDestroy(exec), "destroying");
  for (cudaEvent_t e : {a, b, done, copied}) check(cudaEventDestroy(e), "destroying");
  check(cudaStreamDestroy(copies), "destroying");
  check(cudaFreeHost(host), "freeing");
  check(cudaFree(inputs), "freeing");
  std::sort(us.begin(), us.end());
  return {us[us.size() / 2], us.front(), us.back()};
}

// Reads n bytes with 16 loads in flight a thread; the measured ceiling.
__global__ void read_all(const uint4* p, size_t n, uint32_t* out) {
  uint32_t a = 0;
  const size_t step = static_cast<size_t>(gridDim.x) * blockDim.x;
  size_t i = blockIdx.x * static_cast<size_t>(blockDim.x) + threadIdx.x;
  for (; i + 7 * step < n; i += 8 * step) {
    uint4 v[8];
#pragma unroll
    for (int k = 0; k < 8; ++k) v[k] = __ldcs(p + i + static_cast<size_t>(k) * step);
#pragma unroll
    for (int k = 0; k < 8; ++k) a ^= v[k].x ^ v[k].y ^ v[k].z ^ v[k].w;
  }
  if (a == 0x12345678u) *out = a;
}

}  // namespace

int main(int argc, char** argv) {
  const int n = argc > 1 ? std::atoi(argv[1]) : 100;
  check(cudaStreamCreate(&stream), "creating a stream");
  const Model m = make_model();
  check(cudaDeviceSynchronize(), "filling");
  std::printf("random weights at full size, one row, %d SMs; medians of %d graph replays\n", m.n_sms, n);

  if (n == 0) {
    for (int i = 0; i < 2; ++i) whole_token(m, Choice::sample, stream);
    check(cudaStreamSynchronize(stream), "running");
    return 0;
  }
  const size_t probe = 4ull << 30;
  auto* big = static_cast<uint4*>(allocate(probe));
  fill_bytes<<<1024, 256>>>(reinterpret_cast<uint32_t*>(big), probe / 4, 77);
  check(cudaDeviceSynchronize(), "filling");
  const Timing read = time_graph(
      [&] {
        read_all<<<m.n_sms * 4, 512, 0, stream>>>(big, probe / 16, reinterpret_cast<uint32_t*>(m.token));
      },
      2, 20);
  const double rate = static_cast<double>(probe) / read.median_us * 1e-6;  // TB/s
  std::printf("read rate %.3f TB/s\n", rate);

  std::vector<const Layer*> delta, attention, all;
  for (const Layer& l : m.layers) {
    all.push_back(&l);
    (l.attention ? attention : delta).push_back(&l);
  }
  const auto set_context = [&](int tokens) {
    const int32_t position = tokens - 1;
    check(cudaMemcpy(m.position, &position, 4, cudaMemcpyHostToDevice), "uploading");
  };
  const auto row = [&](const char* name, const std::vector<const Layer*>& layers, double mb,
                       void (*f)(const Model&, const Layer&, cudaStream_t)) {
    const Timing t = time_graph(
        [&] {
          for (const Layer* l : layers) f(m, *l, stream);
        },
        3, n);
    const double us = t.median_us / static_cast<double>(layers.size());
    std::printf("%-28s %6.2f us (%.2f .. %.2f), %6.2f MB, %5.2f TB/s, %3.0f %% of the read rate\n", name, us,
                t.low_us / static_cast<double>(layers.size()), t.high_us / static_cast<double>(layers.size()),
                mb, mb / us, 100 * mb / us / rate);
  };
  const double q4 = 0.5625e-6;
  if (argc <= 2) {
    row("delta: norm + in", delta, 12352 * 2048 * q4, norm_linear);
    row("delta: mixer", delta, 2 * 2.097152 + 0.16, mixer);
    row("attention: norm + in", attention, 9216 * 2048 * q4, norm_linear);
    for (const int context : {256, 4096, 32768, 131072}) {
      set_context(context);
      row(("attention @" + std::to_string(context)).c_str(), attention, context * 2048e-6, mixer);
    }
    row("out projection", all, 2048 * 4096 * q4, out_projection);
    row("norm + router", all, 0.56, router);
    row("experts gate + up", all, 9 * 1024 * 2048 * q4, gate_up);
    row("experts down", all, 9 * 512 * 2048 * q4, down);
    const auto single = [&](const char* name, double mb, const std::function<void()>& f) {
      const Timing t = time_graph(f, 3, n);
      std::printf("%-28s %6.2f us (%.2f .. %.2f), %6.2f MB, %5.2f TB/s\n", name, t.median_us, t.low_us,
                  t.high_us, mb, mb / t.median_us);
    };
    single("embed", 0.001, [&] { embed(m, stream); });
    single("head", 248320.0 * 2048 * q4, [&] {
      gather(m, stream);
      head(m, stream);
    });
    single("greedy token", 1, [&] { choose(m, Choice::greedy, stream); });
    single("sampled token", 1, [&] { choose(m, Choice::sample, stream); });
  }

  for (const Choice choice : {Choice::greedy, Choice::sample})
    for (const int context : {256, 4096, 32768, 131072}) {
      set_context(context);
      const Timing t = time_graph([&] { whole_token(m, choice, stream); }, 5, n);
      const double bytes = 1669.6e6 + 125.8e6 + 2.9e6 + 20480.0 * context;
      std::printf(
          "token @%-6d %-7s %8.1f us (%.1f .. %.1f) = %6.0f tok/s, %.2f TB/s, %.0f %% of the read rate\n",
          context, choice == Choice::greedy ? "greedy" : "sampled", t.median_us, t.low_us, t.high_us,
          1e6 / t.median_us, bytes / t.median_us * 1e-6, bytes / t.median_us * 1e-4 / rate);
    }
  // Contexts beside one another: where keys do not divide among warps, a step must not cost more.
  {
    double sum = 0, most = 0;
    int n_contexts = 0;
    for (int context = 256; context <= 384; context += 8) {
      set_context(context);
      const double us = time_graph([&] { whole_token(m, Choice::greedy, stream); }, 5, n).median_us;
      std::printf("token @%-6d greedy  %8.1f us\n", context, us);
      sum += us, most = std::max(most, us), ++n_contexts;
    }
    std::printf("token @256..384 greedy: mean %.1f us, most %.1f us\n", sum / n_contexts, most);
  }
  // From token to token, each row with one thing more.
  set_context(256);
  {
    constexpr int kTurns = 12;
    const auto models = [&](bool states, bool tokens, bool evict_source = true) {
      std::vector<Model> all(kTurns, m);
      for (Model& one : all) one.evict_source = evict_source;
      for (int i = 0; i < kTurns; ++i) {
        StepView& step = all[static_cast<size_t>(i)].step;
        if (states) {
          step.state_src = upload(std::vector<int32_t>{i % kStateSlots});
          step.state_dst = upload(std::vector<int32_t>{(i + 1) % kStateSlots});
        }
        if (tokens) step.tokens = upload(std::vector<int32_t>{(i * 104729 + 7919) % kTokens});
      }
      return all;
    };
    const auto line = [&](const char* name, const std::vector<Model>& all, const Between& between) {
      const Timing t = time_turns(all, std::max(n, 60), between);
      std::printf("token @256, %-44s %8.1f us (%.1f .. %.1f)\n", name, t.median_us, t.low_us, t.high_us);
    };
    const std::vector<Model> same = models(false, false), states = models(true, false),
                             others = models(true, true);
    line("one graph a turn", same, {});
    line("states from slot to slot, all kept in the L2", models(true, false, false), {});
    line("states from slot to slot", states, {});
    line("and other tokens", others, {});
    line("and an event behind each", others, {true, false, false});
    line("and a copy to the host", others, {true, true, false});
    line("and inputs copied, their event waited for", others, {true, true, true});
    const Timing two = time_graph(
        [&] {
          whole_token(m, Choice::greedy, stream);
          whole_token(m, Choice::greedy, stream);
        },
        5, n);
    std::printf("token @256, two tokens in a graph %*s %8.1f us (%.1f .. %.1f)\n", 22, "", two.median_us / 2,
                two.low_us / 2, two.high_us / 2);
  }
  // What a kernel costs where it stands: the token with and without it.
  for (const int context : {256, 32768}) {
    set_context(context);
    const double whole = time_graph([&] { whole_token(m, Choice::greedy, stream); }, 5, n).median_us;
    for (const NamedKernel& k : kLayerKernels) {
      const double rest =
          time_graph([&] { whole_token(m, Choice::greedy, stream, k.kernel); }, 5, n).median_us;
      std::printf("token @%-6d without %-18s %8.1f us: %.2f us a layer\n", context, k.name, rest,
                  (whole - rest) / kLayers);
    }
  }
  int32_t token = 0;
  std::vector<float> residual(kHidden);
  check(cudaMemcpy(&token, m.token, 4, cudaMemcpyDeviceToHost), "reading");
  check(cudaMemcpy(residual.data(), m.residual, kHidden * 4, cudaMemcpyDeviceToHost), "reading");
  double square = 0;
  for (const float x : residual) square += static_cast<double>(x) * x;
  std::printf("last token %d, residual RMS %.3f\n", token, std::sqrt(square / kHidden));
  return std::isfinite(square) ? 0 : 1;
}
