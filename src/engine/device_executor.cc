#include "engine/device_executor.h"

#include <fmt/format.h>

#include <algorithm>
#include <bit>
#include <chrono>
#include <map>
#include <utility>

#include "base/error.h"
#include "base/trace.h"

namespace lily::engine {
namespace {

using backend::kKvBlockTokens;

constexpr int kSmallestPromptClass = 8;  // rows
constexpr int64_t kSmallestContextClass = 4096;
// Where the device does not say how much memory it has.
constexpr int kContextOfUnknownMemory = 8192;
// Of the memory for KV and cached states, one part in this many may go to the states.
constexpr int64_t kCacheShare = 4;
// Memory that no context needs buys more states for the cache than were asked for: up to so many times as
// many, for one part in kCacheShare of it.
constexpr int kMostStatesOfOnesAskedFor = 4;
// Every prompt is compared with all of them.
constexpr int kMostStatesOfASharedPool = 1024;  // beside those of the sequences that run
constexpr int64_t kMostBlocks = 1 << 20;

int64_t blocks_of(int64_t n_tokens) { return (n_tokens + kKvBlockTokens - 1) / kKvBlockTokens; }

int64_t power_of_two_from(int64_t n, int64_t smallest) {
  return std::max(smallest, static_cast<int64_t>(std::bit_ceil(static_cast<uint64_t>(n))));
}

int depth_of(const plan::Policy& policy) { return policy.tokens_stay_on_device ? 2 : 1; }

int chunk_rows(const plan::Policy& policy, const MemoryOptions& options, int context) {
  const int rows = options.max_chunk_rows > 0 ? options.max_chunk_rows : policy.max_chunk_rows;
  return std::max(1, std::min(rows, context));
}

// The programs that need most: the largest step of each kind, and the smallest prompt class, whose few rows
// some backends compute in another way.
int64_t scratch_bytes(const model::Dims& dims, const plan::Policy& policy, int rows, int64_t context,
                      const ScratchBytes& scratch_of) {
  std::vector<plan::Plan> plans;
  const auto add = [&](plan::Phase phase, int n_rows, int n_outputs) {
    plans.push_back(plan::forward(dims,
                                  {.phase = phase,
                                   .rows = n_rows,
                                   .outputs = n_outputs,
                                   .context = context,
                                   .ending = plan::Ending::candidates},
                                  policy));
  };
  add(plan::Phase::prefill, rows, 1);
  add(plan::Phase::prefill, std::min(rows, kSmallestPromptClass), 1);
  add(plan::Phase::decode, policy.max_decode_rows, policy.max_decode_rows);
  if (scratch_of) return scratch_of(plans);
  int64_t most = 0;
  for (const plan::Plan& plan : plans) most = std::max(most, plan.scratch_bytes);
  return most;
}

int states_each(const plan::Policy& policy) { return depth_of(policy) + 1; }

// One arena for states and blocks: as large as both kinds together would be each for itself, or all that is
// left of a budget that was given. Where places would not hold what is promised (they are a little larger
// than a state, and the last one of KV is not full), or are bounded to less than that, each kind keeps its
// own memory.
void share_places(MemoryPlan& plan, const backend::SharedPlaces& places, bool budget_was_given,
                  int64_t n_needed_states, int64_t block_bytes) {
  const int64_t n = places.blocks_per_state, place_bytes = n * block_bytes;
  const int64_t n_promised = n_needed_states + (plan.spec.n_kv_blocks + n - 1) / n;
  int64_t bytes = plan.pool_bytes();
  if (places.most_bytes > 0 && places.most_bytes < bytes) return;
  if (budget_was_given) bytes += std::max<int64_t>(0, plan.budget_bytes - plan.total_bytes());
  if (places.most_bytes > 0) bytes = std::min(bytes, places.most_bytes);
  const int64_t n_places =
      std::min({bytes / place_bytes, n_promised + kMostStatesOfASharedPool, kMostBlocks / n});
  if (n_places < n_promised) return;
  plan.spec.shared_places = true;
  plan.state_bytes = n_needed_states * place_bytes;
  plan.cache_bytes = n_places * place_bytes - plan.state_bytes - plan.kv_bytes;
  plan.spec.n_state_slots = static_cast<int>(n_places);
  plan.spec.n_kv_blocks = static_cast<int>(n_places * n);
}

std::string gib(int64_t bytes) {
  if (bytes < int64_t{1} << 28) return fmt::format("{:.1f} MiB", static_cast<double>(bytes) / 0x1p20);
  return fmt::format("{:.2f} GiB", static_cast<double>(bytes) / 0x1p30);
}

}  // namespace

int64_t state_slot_bytes(const model::Dims& dims, const plan::Policy& policy) {
  const int64_t element = policy.activation == plan::FloatType::bf16 ? 2 : 4;
  const int64_t conv = int64_t{model::kConvTaps - 1} * dims.conv_channels() * element;
  return dims.n_delta_layers() * (dims.delta_state_bytes_per_layer() + conv);
}

int64_t kv_block_bytes(const model::Dims& dims, const plan::Policy& policy) {
  return 2 * plan::kv_bytes(policy.kv, int64_t{kKvBlockTokens} * dims.kv_width()) * dims.n_attention_layers();
}

MemoryPlan plan_memory(const model::Dims& dims, const plan::Policy& policy, int64_t device_bytes,
                       int64_t weight_bytes, const MemoryOptions& options, const ScratchBytes& scratch_of,
                       const backend::SharedPlaces& places) {
  if (options.context > dims.max_positions)
    fail(Fault::user, "a context of {} tokens is more than the model's limit of {}", options.context,
         dims.max_positions);
  if (options.context < 0 || options.max_sequences < 1)
    fail(Fault::user, "a context of {} tokens for {} sequences; both must be at least 1", options.context,
         options.max_sequences);
  const int64_t budget = options.budget_bytes > 0 ? options.budget_bytes : device_bytes;
  int wanted = options.context;
  if (wanted == 0)
    wanted = budget > 0 ? dims.max_positions : std::min(dims.max_positions, kContextOfUnknownMemory);

  MemoryPlan plan{.max_sequences = options.max_sequences,
                  .weight_bytes = weight_bytes,
                  .program_bytes = options.program_bytes,
                  .shared_pool = options.shared_pool && places.blocks_per_state == 0 && budget > 0,
                  .budget_bytes = budget};
  const int needed_states = options.max_sequences * states_each(policy);
  const int64_t slot_bytes = state_slot_bytes(dims, policy);
  // A model cut down to its first layers has no attention, and blocks that cost nothing.
  const int64_t block_bytes = std::max<int64_t>(1, kv_block_bytes(dims, policy));
  std::map<int64_t, int64_t> scratch_known;  // by context
  const auto scratch_at = [&](int64_t context) {
    const auto [at, is_new] = scratch_known.try_emplace(context);
    if (is_new)
      at->second = scratch_bytes(dims, policy, chunk_rows(policy, options, static_cast<int>(context)),
                                 context, scratch_of);
    return at->second;
  };
  const auto bytes_of = [&](int64_t context, int n_sequences) {  // without a cache
    const int64_t each = states_each(policy) * slot_bytes + blocks_of(context) * block_bytes;
    return weight_bytes + plan.program_bytes + scratch_at(context) + n_sequences * each;
  };
  // Tokens that each of so many sequences can have, in whole blocks. Scratch memory grows slowly with them:
  // what is left beside that of a guess is the next guess, or shows that this one is the answer.
  const auto context_that_fits = [&](int n_sequences) -> int64_t {
    if (bytes_of(wanted, n_sequences) <= budget) return wanted;
    const auto blocks_beside_scratch_of = [&](int64_t context) {
      const int64_t left =
          budget - bytes_of(context, n_sequences) + n_sequences * blocks_of(context) * block_bytes;
      return std::max<int64_t>(0, left) / (n_sequences * block_bytes);
    };
    int64_t fits = 0, does_not = blocks_of(wanted), guess = blocks_beside_scratch_of(wanted);
    while (does_not - fits > 1) {
      const int64_t n = std::clamp(guess, fits + 1, does_not - 1);
      guess = blocks_beside_scratch_of(n * kKvBlockTokens);
      if (guess < n) {
        does_not = n;
      } else {
        fits = n;
        does_not = std::min(does_not, guess + 1);
      }
    }
    return fits * kKvBlockTokens;
  };
  plan.context = wanted;
  int64_t for_kv = 0;  // when every sequence has its states, but the cache none
  if (budget > 0) {
    const int64_t least = options.context > 0 ? options.context : kKvBlockTokens;
    if (bytes_of(kKvBlockTokens, 1) > budget)
      fail(
          Fault::user,
          "{} MiB of memory are not enough: weights take {}, scratch memory {}, the program {}, the state of "
          "one sequence {}; at least {} MiB are needed",
          budget >> 20, gib(weight_bytes), gib(scratch_at(kKvBlockTokens)), gib(plan.program_bytes),
          gib(states_each(policy) * slot_bytes), (bytes_of(kKvBlockTokens, 1) + (1 << 20) - 1) >> 20);
    const int64_t fits = context_that_fits(options.max_sequences);
    if (fits < least) {
      int n_sequences = options.max_sequences;
      while (n_sequences > 1 && bytes_of(least, n_sequences) > budget) --n_sequences;
      if (bytes_of(least, n_sequences) <= budget)
        fail(Fault::user, "{} sequences of {} tokens do not fit {} of memory; {} of them do{}",
             options.max_sequences, least, gib(budget), n_sequences,
             fits > 0 ? fmt::format(", or a context of {} tokens for each", fits) : "");
      const bool alone = fits == 0 && options.max_sequences > 1;
      fail(Fault::user, "a context of {} tokens does not fit {} of memory; one of {} does{}", options.context,
           gib(budget), alone ? context_that_fits(1) : fits, alone ? ", for one sequence at a time" : "");
    }
    plan.context = static_cast<int>(fits);
    plan.scratch_bytes = scratch_at(fits);
    for_kv = budget - weight_bytes - plan.program_bytes - plan.scratch_bytes - needed_states * slot_bytes;
    // Where the context is ours to choose, the cache's states come before the last tokens of it.
    if (options.context == 0) {
      const int64_t n_reserved =
          std::min<int64_t>(std::max(0, options.n_cached_states), for_kv / kCacheShare / slot_bytes);
      const int64_t n_blocks_each =
          (for_kv - n_reserved * slot_bytes) / (block_bytes * options.max_sequences);
      plan.context = static_cast<int>(
          std::min<int64_t>(plan.context, std::max<int64_t>(1, n_blocks_each) * kKvBlockTokens));
    }
  } else {
    plan.scratch_bytes = scratch_at(wanted);
  }

  const int64_t n_blocks = blocks_of(plan.context) * options.max_sequences;
  int n_cached = std::max(0, options.n_cached_states);
  if (budget > 0) {
    const int64_t left = std::max<int64_t>(0, for_kv - n_blocks * block_bytes);
    const int64_t n_asked = std::min<int64_t>(n_cached, left / slot_bytes);
    const int64_t n_more = std::min<int64_t>((kMostStatesOfOnesAskedFor - 1) * n_asked,
                                             (left - n_asked * slot_bytes) / kCacheShare / slot_bytes);
    n_cached = static_cast<int>(n_asked + n_more);
  }
  plan.spec = {.n_state_slots = needed_states + n_cached,
               .n_kv_blocks = static_cast<int>(n_blocks),
               .n_token_slots = 2 * options.max_sequences,
               .max_rows = chunk_rows(policy, options, plan.context)};
  plan.state_bytes = plan.spec.n_state_slots * slot_bytes;
  plan.kv_bytes = n_blocks * block_bytes;
  if (plan.shared_pool) {
    if (options.budget_bytes > 0 && options.n_cached_states > 0)
      plan.cache_bytes = std::max<int64_t>(0, budget - plan.total_bytes());
    if (options.n_cached_states > 0)
      plan.spec.n_state_slots = static_cast<int>(std::clamp<int64_t>(
          plan.pool_bytes() / slot_bytes, plan.spec.n_state_slots, needed_states + kMostStatesOfASharedPool));
    plan.spec.n_kv_blocks = static_cast<int>(
        std::clamp<int64_t>(plan.pool_bytes() / block_bytes, plan.spec.n_kv_blocks, kMostBlocks));
  } else if (options.shared_pool && places.blocks_per_state > 0 && options.n_cached_states > 0) {
    share_places(plan, places, options.budget_bytes > 0, needed_states, block_bytes);
  }
  return plan;
}

MemoryPlan plan_memory(const backend::Device& device, const model::Dims& dims, const plan::Policy& policy,
                       int64_t weight_bytes, const MemoryOptions& options) {
  backend::SharedPlaces places;
  if (!device.gives_back()) places = device.shared_places(dims, policy);
  MemoryOptions possible = options;
  possible.shared_pool = options.shared_pool && (device.gives_back() || places.blocks_per_state > 0);
  return plan_memory(
      dims, policy, device.info().memory_bytes, weight_bytes, possible,
      [&](std::span<const plan::Plan> plans) { return device.scratch_bytes(plans); }, places);
}

plan::Shape shape_class(const Step& step, const Limits& limits, const plan::Policy& policy) {
  plan::Shape shape{.phase = step.phase, .ending = step.ending};
  // One row of one sequence is the same work whichever phase it belongs to.
  if (step.n_rows() == 1) shape.phase = plan::Phase::decode;
  const bool decode = shape.phase == plan::Phase::decode;
  const int64_t rows = power_of_two_from(step.n_rows(), decode ? 1 : kSmallestPromptClass);
  shape.rows = static_cast<int>(std::max<int64_t>(
      step.n_rows(), std::min<int64_t>(rows, decode ? limits.max_decode_rows : limits.max_chunk_rows)));

  const int64_t context = step.context();
  shape.context = std::max(
      context, std::min<int64_t>(power_of_two_from(context, kSmallestContextClass), limits.max_context));
  // The path of a long cache (D7) is for long caches only.
  const int64_t threshold = policy.fixed_blocks_from_context;
  if (context < threshold && shape.context >= threshold) shape.context = threshold - 1;

  const auto outputs = static_cast<int>(step.output_rows.size());
  shape.outputs = step.ending == plan::Ending::none ? 0
                  : decode                          ? shape.rows
                           : static_cast<int>(std::min<int64_t>(power_of_two_from(outputs, 1), shape.rows));
  return shape;
}

DeviceExecutor::DeviceExecutor(backend::Device& device, const model::Dims& dims, const plan::Policy& policy,
                               const MemoryPlan& memory, int32_t n_tokens, Trace* trace)
    : device_(device), dims_(dims), policy_(policy), trace_(trace) {
  LILY_CHECK(n_tokens > 0 && n_tokens <= dims.vocab, "{} tokens of {}", n_tokens, dims.vocab);
  limits_ = {.vocab = dims.vocab,
             .n_tokens = n_tokens,
             .max_context = memory.context,
             .max_chunk_rows = memory.spec.max_rows,
             .max_decode_rows = policy.max_decode_rows,
             .n_candidates = std::min(plan::Options{}.n_candidates, dims.vocab),
             .depth = depth_of(policy),
             .n_state_slots = memory.spec.n_state_slots,
             .n_kv_blocks = memory.spec.n_kv_blocks,
             .n_token_slots = memory.spec.n_token_slots,
             .state_bytes = state_slot_bytes(dims, policy),
             .block_bytes = kv_block_bytes(dims, policy),
             .pool_bytes = memory.shared_pool ? memory.pool_bytes() : 0};
  if (memory.spec.shared_places) {
    limits_.blocks_per_state = limits_.n_kv_blocks / limits_.n_state_slots;
    const int promised = memory.max_sequences * states_each(policy);
    const int64_t n_for_blocks =
        (blocks_of(memory.context) * memory.max_sequences + limits_.blocks_per_state - 1) /
        limits_.blocks_per_state;
    limits_.n_state_places = promised + (limits_.n_state_slots > promised + n_for_blocks ? 1 : 0);
    limits_.state_bytes = limits_.blocks_per_state * limits_.block_bytes;
  }
  device_.reserve(memory.spec, policy_);
}

backend::Program& DeviceExecutor::program(const plan::Shape& shape) {
  for (const auto& [known, program] : programs_)
    if (known == shape) return *program;
  const plan::Options options{.n_candidates = limits_.n_candidates};
  auto compiled = device_.compile(plan::forward(dims_, shape, policy_, options));
  programs_.emplace_back(shape, std::move(compiled));
  return *programs_.back().second;
}

void DeviceExecutor::submit(const Step& step) {
  LILY_CHECK(static_cast<int>(in_flight_.size()) < limits_.depth, "{} steps in flight", in_flight_.size());
  backend::Program& p = program(shape_class(step, limits_, policy_));
  // Before the step is in flight: this may throw.
  in_flight_.push_back({.program = &p,
                        .begin = std::chrono::steady_clock::now(),
                        .n_rows = static_cast<int32_t>(step.tokens.size()),
                        .position = step.segments.front().position});
  try {
    p.submit({.tokens = step.tokens,
              .segments = step.segments,
              .block_table = step.block_table,
              .output_rows = step.output_rows,
              .sampling = step.sampling,
              .n_tokens = limits_.n_tokens});
  } catch (...) {
    in_flight_.pop_back();
    throw;
  }
}

backend::StepOutputs DeviceExecutor::wait() {
  LILY_CHECK(!in_flight_.empty(), "no step in flight");
  const InFlight oldest = in_flight_.front();
  in_flight_.pop_front();
  const backend::StepOutputs outputs = oldest.program->wait();
  if (trace_ != nullptr)
    trace_->add(Trace::Track::steps,
                oldest.program->plan().shape.phase == plan::Phase::decode ? "decode" : "prefill",
                oldest.begin, std::chrono::steady_clock::now(),
                fmt::format(R"({{"rows": {}, "position": {}}})", oldest.n_rows, oldest.position));
  return outputs;
}

void DeviceExecutor::copy_kv(int32_t from_block, int32_t to_block, int n_tokens) {
  LILY_CHECK(in_flight_.empty(), "a step is in flight");
  for (const int layer : layers_with(model::Mixer::attention))
    for (const auto which : {backend::Device::Kv::k, backend::Device::Kv::v})
      device_.write_kv(which, layer, to_block, n_tokens, device_.read_kv(which, layer, from_block, n_tokens));
}

// ---- Saved sessions: a piece of the state is a delta layer's, its delta state and then its conv state.

std::vector<int> DeviceExecutor::layers_with(model::Mixer mixer) const {
  std::vector<int> layers;
  for (int layer = 0; layer < dims_.n_layers; ++layer)
    if (dims_.mixer(layer) == mixer) layers.push_back(layer);
  return layers;
}

SavedLayout DeviceExecutor::saved_layout() const {
  const int64_t delta = dims_.delta_state_bytes_per_layer() / int64_t{sizeof(float)};
  const int64_t conv = int64_t{model::kConvTaps - 1} * dims_.conv_channels();
  return {.state_floats = std::vector<uint32_t>(static_cast<size_t>(dims_.n_delta_layers()),
                                                static_cast<uint32_t>(delta + conv)),
          .kv_floats = static_cast<uint32_t>(2 * dims_.kv_width() * dims_.n_attention_layers()),
          .kv_type = policy_.kv};
}

std::vector<float> DeviceExecutor::read_state(backend::StateSlot slot, int piece) {
  LILY_CHECK(in_flight_.empty(), "a step is in flight");
  const int layer = layers_with(model::Mixer::delta)[static_cast<size_t>(piece)];
  std::vector<float> values = device_.read_delta_state(slot, layer);
  const std::vector<float> conv = device_.read_conv_state(slot, layer);
  values.insert(values.end(), conv.begin(), conv.end());
  return values;
}

void DeviceExecutor::write_state(backend::StateSlot slot, int piece, std::span<const float> values) {
  LILY_CHECK(in_flight_.empty(), "a step is in flight");
  const int layer = layers_with(model::Mixer::delta)[static_cast<size_t>(piece)];
  const auto n_delta = static_cast<size_t>(dims_.delta_state_bytes_per_layer()) / sizeof(float);
  device_.write_delta_state(slot, layer, values.first(n_delta));
  device_.write_conv_state(slot, layer, values.subspan(n_delta));
}

std::vector<float> DeviceExecutor::read_kv(int32_t block, int n_tokens) {
  LILY_CHECK(in_flight_.empty(), "a step is in flight");
  std::vector<float> values;
  values.reserve(static_cast<size_t>(n_tokens) * saved_layout().kv_floats);
  for (const int layer : layers_with(model::Mixer::attention))
    for (const auto which : {backend::Device::Kv::k, backend::Device::Kv::v}) {
      const std::vector<float> part = device_.read_kv(which, layer, block, n_tokens);
      values.insert(values.end(), part.begin(), part.end());
    }
  return values;
}

void DeviceExecutor::write_kv(int32_t block, int n_tokens, std::span<const float> values) {
  LILY_CHECK(in_flight_.empty(), "a step is in flight");
  const auto n = static_cast<size_t>(n_tokens) * static_cast<size_t>(dims_.kv_width());
  for (const int layer : layers_with(model::Mixer::attention))
    for (const auto which : {backend::Device::Kv::k, backend::Device::Kv::v}) {
      device_.write_kv(which, layer, block, n_tokens, values.first(n));
      values = values.subspan(n);
    }
}

}  // namespace lily::engine
