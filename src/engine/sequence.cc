#include "engine/sequence.h"

#include <algorithm>
#include <new>
#include <utility>

namespace lily::engine {
namespace {

double ms_between(Clock::time_point from, Clock::time_point to) {
  return std::max(0.0, std::chrono::duration<double, std::milli>(to - from).count());
}

}  // namespace

Sequence::Sequence(Pending pending, const Limits& limits)
    : request(std::move(pending.request)),
      channel(std::move(pending.channel)),
      sampler(request.sampling, request.prompt, limits.n_tokens),
      tokens(std::move(request.prompt)),
      n_prompt(static_cast<int32_t>(tokens.size())),
      n_limit(request.max_tokens > 0 ? n_prompt + request.max_tokens : limits.max_context),
      device_may_choose(sampler.device_can_choose() && request.top_logprobs < 0),
      arrived(pending.arrived),
      started(Clock::now()) {
  if (request.constraint != nullptr) mask.emplace(limits.n_tokens);
  choose_chooser();
}

bool Sequence::decode_ready(int depth) const {
  if (finished || reading_prompt()) return false;
  if (in_flight == 0) return n_submitted < static_cast<int32_t>(tokens.size());
  // The token stands in a slot. The step before generated token n_submitted, counted from 0; this one comes
  // after.
  return !host_chooses && in_flight < depth && token_slots[0] && n_submitted + 1 < n_limit;
}

plan::Ending Sequence::ending(int n_candidates) const {
  if (!host_chooses) return sampler.greedy() ? plan::Ending::greedy : plan::Ending::sampled;
  const bool enough = sampler.candidates_can_do(n_candidates) && request.top_logprobs <= n_candidates;
  return needs_logits || !enough ? plan::Ending::logits : plan::Ending::candidates;
}

void Sequence::rewind() {
  n_submitted = n_done;
  submitted_state = state ? state.id() : backend::kNoState;
}

void Sequence::choose_chooser() {
  const bool constrained = request.constraint != nullptr && !request.constraint->is_free();
  host_chooses = !device_may_choose || constrained;
  if (!host_chooses || in_flight == 0) return;
  ++round;
  rewind();
}

void Sequence::finish(Finish how, int32_t stop_id, Fault fault, std::string_view error) {
  if (finished) return;
  finished = true;
  const Clock::time_point now = Clock::now();
  const bool wrote = n_generated() > 0;
  Finished event{.finish = how, .stop_id = stop_id, .fault = fault, .error = copy_of_error(error)};
  event.usage = {.prompt_tokens = n_prompt,
                 .cached_tokens = n_cached,
                 .completion_tokens = n_generated(),
                 .from_disk = n_cached > 0 && n_from_disk == n_cached};
  event.timings.queued_ms = ms_between(arrived, started);
  event.timings.prefill_ms = ms_between(started, wrote ? first_token_at : now);
  event.timings.ttft_ms = event.timings.queued_ms + event.timings.prefill_ms;
  event.timings.decode_ms = wrote ? ms_between(first_token_at, now) : 0;
  if (request.constraint != nullptr) event.detail = request.constraint->detail();
  event.miss = std::move(miss);
  channel->push(std::move(event));
}

std::string copy_of_error(std::string_view text) noexcept {
  try {
    return std::string(text);
  } catch (const std::bad_alloc&) {
    return "out of memory";  // so short that it is kept in the string itself
  }
}

}  // namespace lily::engine
