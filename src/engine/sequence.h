// A request being computed. Engine thread only; the scheduler drives it.
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "engine/event_channel.h"
#include "engine/executor.h"
#include "engine/kv_blocks.h"
#include "engine/prefix_cache.h"
#include "engine/request.h"
#include "engine/sampler.h"
#include "engine/slots.h"

namespace lily::engine {

using TokenHold = Slot<backend::TokenSlot>;
using Clock = std::chrono::steady_clock;

// A request on its way to the engine's thread.
struct Pending {
  GenerateRequest request;
  std::shared_ptr<EventChannel> channel;
  Clock::time_point arrived;
};

// Two counts tell where a sequence is: tokens fed to the device by steps that are done, and by steps that
// have been submitted. The state after n_done tokens is held until the next step is done, so that a step can
// always be undone: the one after a stop token, one that failed, one whose candidates were not enough.
struct Sequence {
  Sequence(Pending pending, const Limits& limits);

  GenerateRequest request;
  std::shared_ptr<EventChannel> channel;
  Sampler sampler;
  std::optional<TokenMask> mask;  // with a constraint

  std::vector<int32_t> tokens;  // prompt and what was generated, as far as the host knows it
  int32_t n_prompt;
  int32_t n_limit;  // tokens, at most
  int32_t n_cached = 0;
  int32_t n_from_disk = 0;  // of n_cached: a saved state's
  std::optional<CacheMiss> miss;
  std::vector<int32_t> keep_at;  // places in the prompt, rising, after which its state is kept
  int32_t n_last_kept = 0;       // the newest of the prompt's states that the cache has
  int32_t n_submitted = 0, n_done = 0;
  int in_flight = 0;

  StateHold state;                                         // after n_done tokens; empty: the zero state
  backend::StateSlot submitted_state = backend::kNoState;  // after n_submitted tokens
  std::vector<KvBlock> blocks;
  TokenHold token_slots[2];  // where tokens stay on the device; step n writes the slot of n's parity

  bool device_may_choose;     // unless a constraint says otherwise
  bool host_chooses = true;   // the token of a step is known only after the host has chosen it
  int round = 0;              // steps of earlier rounds do not count
  bool needs_logits = false;  // candidates were not enough for the next token
  bool finished = false;      // Finished has been sent; steps may still be in flight

  Clock::time_point arrived, started, first_token_at;

  bool reading_prompt() const { return n_submitted < n_prompt; }
  // Index of the token that a step ending after n_after tokens generates.
  uint32_t step_of(int32_t n_after) const { return static_cast<uint32_t>(n_after - n_prompt); }
  int32_t n_generated() const { return static_cast<int32_t>(tokens.size()) - n_prompt; }
  bool prompt_ready() const { return !finished && reading_prompt() && in_flight == 0; }
  // One more token can be fed: the host knows it, or it is on the device and will be used.
  bool decode_ready(int depth) const;
  // What a step that generates this sequence's next token has to end in.
  plan::Ending ending(int n_candidates) const;
  // Nothing of the steps that are not done counts.
  void rewind();
  // The device chooses as long as nothing constrains the next token. A step in flight has chosen already:
  // where the constraint wants a say in it, it is computed again.
  void choose_chooser();

  void finish(Finish how, int32_t stop_id = -1, Fault fault = Fault::device, std::string_view error = {});
};

// A copy, or "out of memory" where there is none for it: the last word to a client must not fail.
std::string copy_of_error(std::string_view text) noexcept;

}  // namespace lily::engine
