#include "engine/scheduler.h"

#include <algorithm>
#include <utility>

#include "base/error.h"
#include "base/log.h"

namespace lily::engine {

using backend::kKvBlockTokens;

namespace {

// A state in the middle of a prompt costs a chunk of its own. It is kept if that saves at least so many
// tokens.
constexpr int32_t kLeastTokensBetweenStates = 64;
// Nobody knows how long an answer becomes; what it may be at most says little above this.
constexpr int32_t kUsualAnswerTokens = 1024;
// How often the machine's memory is looked at.
constexpr auto kPressureInterval = std::chrono::milliseconds(500);

}  // namespace

Scheduler::Scheduler(Executor& executor, const EngineOptions& options, DiskCache* disk)
    : executor_(executor),
      limits_(executor.limits()),
      options_(options),
      pool_(executor),
      tokens_(limits_.n_token_slots),
      cache_(limits_.state_bytes, limits_.block_bytes),
      disk_(disk) {
  if (disk_ != nullptr) saver_.emplace(executor_, *disk_);
  LILY_CHECK(pool_.fits(limits_.depth + 1, blocks_needed(limits_.max_context)),
             "{} blocks for a context of {}", limits_.n_kv_blocks, limits_.max_context);
  LILY_CHECK(limits_.n_state_slots > limits_.depth, "{} state slots", limits_.n_state_slots);
  LILY_CHECK(limits_.depth == 1 || limits_.n_token_slots >= 2, "{} token slots", limits_.n_token_slots);
  LILY_CHECK(options.max_sequences > 0, "max_sequences {}", options.max_sequences);
}

Scheduler::~Scheduler() { cancel_all(Finish::cancelled, Fault::device, "the engine is shutting down"); }

int Scheduler::blocks_needed(int64_t n_tokens) const {
  return static_cast<int>((n_tokens + kKvBlockTokens - 1) / kKvBlockTokens);
}

// ---- Admission

int64_t Scheduler::work_of(const GenerateRequest& request) const {
  const auto n_prompt = static_cast<int64_t>(request.prompt.size());
  const int32_t n_answer = request.max_tokens > 0 ? request.max_tokens : kUsualAnswerTokens;
  return n_prompt - cache_.n_known(request.prompt, n_prompt - 1) + std::min(n_answer, kUsualAnswerTokens);
}

bool Scheduler::can_admit(const GenerateRequest& request) const {
  const auto n_running = static_cast<int64_t>(running_.size());
  if (n_running >= options_.max_sequences) return false;
  if (limits_.depth > 1 && (n_running + 1) * 2 > limits_.n_token_slots) return false;
  const int64_t n_tokens = request.max_tokens > 0
                               ? static_cast<int64_t>(request.prompt.size()) + request.max_tokens
                               : limits_.max_context;
  // One state that stands, and one that each step in flight writes.
  return pool_.fits((n_running + 1) * (limits_.depth + 1), n_promised_blocks_ + blocks_needed(n_tokens));
}

void Scheduler::admit(Pending pending) {
  ++totals_.n_requests;
  auto sequence = std::make_unique<Sequence>(std::move(pending), limits_);
  Sequence& s = *sequence;
  running_.push_back(std::move(sequence));  // may throw; what is promised after it is given back with it
  n_promised_blocks_ += blocks_needed(s.n_limit);
  if (limits_.depth > 1 && s.device_may_choose)
    for (TokenHold& slot : s.token_slots) slot = std::move(tokens_.take()).value();
  try {
    reuse_cached(s);
    plan_states(s);
  } catch (const Error& e) {
    end_failed(s, e.fault(), e.what());
  }
  s.rewind();
}

// At least the prompt's last token is computed: its logits are wanted.
void Scheduler::reuse_cached(Sequence& s) {
  s.miss = cache_.explain(s.tokens);
  if (disk_ != nullptr) fetch_saved(s);
  const Snapshot* const snapshot = cache_.find(s.tokens, s.n_prompt - 1);
  if (snapshot == nullptr) {
    ++totals_.cache_misses;
    totals_.cache_misses_parted += s.miss ? 1 : 0;
    return;
  }
  const auto n = static_cast<int32_t>(snapshot->tokens.size());
  const int in_last_block = n % kKvBlockTokens;
  StateHold state = snapshot->state.share();
  std::vector<KvBlock> blocks;
  for (const KvBlock& block : snapshot->blocks) {
    const bool partial = in_last_block != 0 && blocks.size() + 1 == snapshot->blocks.size();
    blocks.push_back(block.share(partial ? in_last_block : kKvBlockTokens));
  }
  // From here on the snapshot itself may be evicted; what is held stays.
  if (in_last_block != 0 && !blocks.back().make_writable(in_last_block)) {
    while (!flights_.empty()) complete_one();
    // With the block it is copied from, this is one more than the sequence was promised: there may be none.
    std::optional<KvBlock> copy = pool_.take_block();
    while (!copy && make_room_for_block()) copy = pool_.take_block();
    if (!copy) {
      ++totals_.cache_misses;
      return;
    }
    executor_.copy_kv(blocks.back().id(), copy->id(), in_last_block);
    blocks.back() = std::move(*copy);
  }
  ++totals_.cache_hits;
  s.state = std::move(state);
  s.blocks = std::move(blocks);
  s.n_cached = s.n_done = n;
}

void Scheduler::plan_states(Sequence& s) {
  s.n_last_kept = s.n_cached;
  if (!s.request.keep_states) return;
  std::vector<int32_t> places = std::move(s.request.branches);
  if (s.miss && cache_.parts_again_after(std::span(s.tokens).first(static_cast<size_t>(s.miss->position))))
    places.push_back(s.miss->position);
  std::sort(places.begin(), places.end());
  const int32_t end = s.request.n_stable > 0 ? std::min(s.request.n_stable, s.n_prompt) : s.n_prompt;
  int32_t last = s.n_cached;
  for (const int32_t place : places) {
    if (place - last < kLeastTokensBetweenStates || place >= end) continue;
    s.keep_at.push_back(place);
    last = place;
  }
  if (s.request.n_stable > last && s.request.n_stable < s.n_prompt) s.keep_at.push_back(s.request.n_stable);
}

// What is being saved holds memory that nobody was promised, like the cache.
bool Scheduler::make_memory(Wanted wanted) { return cache_.evict(wanted) || (saver_ && saver_->give_up()); }

bool Scheduler::make_room_for_block() { return make_memory(pool_.wanted_for_block()); }

KvBlock Scheduler::take_block() {
  for (;;) {
    if (auto block = pool_.take_block()) return std::move(*block);
    if (make_room_for_block()) continue;
    // What was promised is had, however short the machine's memory is.
    LILY_CHECK(pool_.is_shrunk(), "promised KV blocks are missing");
    pool_.grow_back();
  }
}

StateHold Scheduler::take_state() {
  for (;;) {
    if (auto state = pool_.take_state()) return std::move(*state);
    if (make_memory(pool_.wanted_for_state())) continue;
    LILY_CHECK(pool_.is_shrunk(), "promised state slots are missing");
    pool_.grow_back();
  }
}

void Scheduler::relieve_pressure(Clock::time_point now) {
  if (!pool_.gives_back() || !options_.available_memory || now < pressure_seen_ + kPressureInterval) return;
  pressure_seen_ = now;
  const int64_t available = options_.available_memory();
  if (available < 0) return;
  if (available >= 2 * options_.least_available_bytes) return pool_.grow_back();
  const int64_t missing = options_.least_available_bytes - available;
  if (missing <= 0) return;
  const int64_t before = pool_.resident_bytes(), n_evicted = cache_.n_evictions();
  while (!pool_.shrink_to(before - missing) && make_memory(Wanted::memory)) {
  }
  const int64_t given_back = before - pool_.resident_bytes();
  totals_.given_back_bytes += given_back;
  if (given_back > 0)
    log(LogLevel::notice,
        "memory is short: {} MB are available, {} MB are to be; the cache gives back {} MB, {} states among "
        "it",
        available >> 20, options_.least_available_bytes >> 20, given_back >> 20,
        cache_.n_evictions() - n_evicted);
}

// ---- Saved sessions

void Scheduler::fetch_saved(Sequence& s) {
  const Snapshot* const known = cache_.find(s.tokens, s.n_prompt - 1);
  const int64_t n_known = known == nullptr ? 0 : std::ssize(known->tokens);
  // What the sequence was promised is enough for it.
  while (auto reader = disk_->find(std::span(s.tokens), n_known, s.n_prompt - 1)) {
    while (!flights_.empty()) complete_one();
    try {
      auto snapshot =
          restore(*reader, executor_, [this] { return take_state(); }, [this] { return take_block(); });
      s.n_from_disk = static_cast<int32_t>(snapshot.tokens.size());
      cache_.insert(std::move(snapshot));
      ++totals_.cache_disk_hits;
      return;
    } catch (const Error& e) {
      disk_->ignore(reader->path(), e.what());
    }
  }
}

std::optional<Clock::duration> Scheduler::next_save(Clock::time_point now) const {
  return saver_ ? saver_->next_due(now) : std::nullopt;
}

bool Scheduler::save_a_piece() {
  if (!saver_ || !saver_->is_due(Clock::now(), !running_.empty())) return false;
  while (!flights_.empty()) complete_one();
  return saver_->advance(cache_);
}

void Scheduler::save_all() {
  LILY_CHECK(flights_.empty(), "a step is in flight");
  if (saver_) saver_->save_all(cache_);
}

bool Scheduler::save(std::span<const int32_t> tokens, const std::filesystem::path& path,
                     SessionHeader header) {
  while (!flights_.empty()) complete_one();
  const Snapshot* const snapshot = cache_.find(tokens, std::ssize(tokens));
  if (snapshot == nullptr) return false;
  SessionHeader whole = header_of(*snapshot, executor_.saved_layout());
  whole.kind = header.kind;
  whole.identity = std::move(header.identity);
  whole.conversation = std::move(header.conversation);
  whole.replay = std::move(header.replay);
  whole.messages = std::move(header.messages);
  SessionWriter writer(path, std::move(whole));
  write_snapshot(*snapshot, executor_, writer);
  writer.publish();
  return true;
}

bool Scheduler::load(SessionReader& reader) {
  const auto n_needed = n_promised_blocks_ + blocks_needed(std::ssize(reader.header().tokens));
  const auto n_running = static_cast<int64_t>(running_.size());
  if (!pool_.fits(n_running * (limits_.depth + 1) + 1, n_needed)) return false;
  if (cache_.contains(reader.header().tokens)) return true;
  while (!flights_.empty()) complete_one();
  cache_.insert(restore(reader, executor_, [this] { return take_state(); }, [this] { return take_block(); }));
  return true;
}

void Scheduler::clear_cache() {
  cache_.clear();
  if (!saver_) return;
  saver_->forget_all();
  disk_->clear();
}

// ---- Steps

bool Scheduler::advance() {
  relieve_pressure(Clock::now());
  drop_cancelled();
  release_finished();
  const bool saved = save_a_piece();
  const bool submitted = static_cast<int>(flights_.size()) < limits_.depth && submit_one();
  if (!flights_.empty() && (!submitted || static_cast<int>(flights_.size()) >= limits_.depth)) complete_one();
  else if (!submitted) return saved || !running_.empty();
  release_finished();
  return true;
}

bool Scheduler::submit_one() {
  if (prompt_was_last_) return submit_decode() || submit_prompt_chunk();
  return submit_prompt_chunk() || submit_decode();
}

bool Scheduler::submit_prompt_chunk() {
  for (const Flight& flight : flights_)
    if (flight.phase == plan::Phase::prefill) return false;
  for (size_t i = 0; i < running_.size(); ++i) {
    const size_t at = (prompt_turn_ + i) % running_.size();
    Sequence& s = *running_[at];
    if (!s.prompt_ready()) continue;
    prompt_turn_ = at + 1;
    const bool others_write = std::any_of(running_.begin(), running_.end(), [](const auto& other) {
      return !other->finished && !other->reading_prompt();
    });
    int32_t n_rows = limits_.max_chunk_rows;
    if (others_write && options_.shared_chunk_rows > 0) n_rows = std::min(n_rows, options_.shared_chunk_rows);
    n_rows = std::min(n_rows, s.n_prompt - s.n_submitted);
    const auto place = std::upper_bound(s.keep_at.begin(), s.keep_at.end(), s.n_submitted);
    if (place != s.keep_at.end()) n_rows = std::min(n_rows, *place - s.n_submitted);
    const bool last = s.n_submitted + n_rows == s.n_prompt;
    step_.clear();
    Flight flight{.phase = plan::Phase::prefill,
                  .ending = last ? s.ending(limits_.n_candidates) : plan::Ending::none};
    add_rows(flight, s, n_rows, last);
    prompt_was_last_ = true;
    return submit(std::move(flight));
  }
  return false;
}

bool Scheduler::submit_decode() {
  step_.clear();
  Flight flight{.phase = plan::Phase::decode, .ending = plan::Ending::greedy};
  bool host_chooses = false;
  size_t next_turn = decode_turn_;
  for (size_t i = 0; i < running_.size() && step_.n_rows() < limits_.max_decode_rows; ++i) {
    const size_t at = (decode_turn_ + i) % running_.size();
    Sequence& s = *running_[at];
    if (!s.decode_ready(limits_.depth)) continue;
    const plan::Ending ending = s.ending(limits_.n_candidates);
    if (flight.parts.empty()) {
      host_chooses = s.host_chooses;
      flight.ending = ending;
      next_turn = at + 1;
    }
    if (s.host_chooses != host_chooses) continue;
    // Sampling with temperature 0 is arg max, and whole logits contain the candidates.
    if (ending == plan::Ending::sampled || ending == plan::Ending::logits) flight.ending = ending;
    add_rows(flight, s, 1, true);
    if (step_.n_rows() == limits_.max_decode_rows) next_turn = at + 1;
  }
  if (flight.parts.empty()) return false;
  decode_turn_ = next_turn;
  prompt_was_last_ = false;
  return submit(std::move(flight));
}

void Scheduler::add_rows(Flight& flight, Sequence& s, int n_rows, bool with_output) {
  const int32_t n_after = s.n_submitted + n_rows;
  while (static_cast<int>(s.blocks.size()) < blocks_needed(n_after)) s.blocks.push_back(take_block());
  // A choice among candidates can turn out void, and is made again from the state before. If the step fails,
  // its sequence ends and nothing of it is remembered.
  const bool in_place = limits_.writes_in_place(flight.phase) && s.state && !s.state.shared() &&
                        s.ending(limits_.n_candidates) != plan::Ending::candidates;
  Part part{.sequence = &s,
            .n_after = n_after,
            .state = in_place ? s.state.share() : take_state(),
            .output = -1,
            .round = s.round};

  backend::Segment segment{.first_row = step_.n_rows(),
                           .n_rows = n_rows,
                           .position = s.n_submitted,
                           .src = s.submitted_state,
                           .dst = part.state.id(),
                           .first_block = static_cast<int32_t>(step_.block_table.size())};
  for (int i = 0; i < blocks_needed(n_after); ++i)
    step_.block_table.push_back(s.blocks[static_cast<size_t>(i)].id());
  for (int32_t p = s.n_submitted; p < n_after; ++p) {
    if (p < static_cast<int32_t>(s.tokens.size())) {
      step_.tokens.push_back(s.tokens[static_cast<size_t>(p)]);
    } else {  // the step in flight leaves it in a slot
      step_.tokens.push_back(backend::kTokenFromSlot);
      segment.token_in = s.token_slots[p % 2].id();
    }
  }
  if (with_output) {
    part.output = static_cast<int>(step_.output_rows.size());
    step_.output_rows.push_back(step_.n_rows() - 1);
    if (s.token_slots[0] && !s.host_chooses) segment.token_out = s.token_slots[n_after % 2].id();
    if (!s.host_chooses) step_.sampling.push_back(s.sampler.device_settings(s.step_of(n_after)));
  }
  step_.segments.push_back(segment);
  s.n_submitted = n_after;
  s.submitted_state = part.state.id();
  ++s.in_flight;
  flight.parts.push_back(std::move(part));
}

bool Scheduler::submit(Flight flight) {
  step_.phase = flight.phase;
  step_.ending = flight.ending;
  if (flight.ending != plan::Ending::sampled) step_.sampling.clear();
  ++totals_.n_steps;
  flights_.push_back(std::move(flight));  // before the step is in flight: this may throw
  try {
    executor_.submit(step_);
  } catch (const Error& e) {
    for (Part& part : flights_.back().parts) {
      --part.sequence->in_flight;
      end_failed(*part.sequence, e.fault(), e.what());
    }
    flights_.pop_back();
  } catch (...) {
    flights_.pop_back();
    throw;
  }
  return true;
}

void Scheduler::complete_one() {
  Flight flight = std::move(flights_.front());
  flights_.pop_front();
  for (Part& part : flight.parts) --part.sequence->in_flight;
  backend::StepOutputs outputs;
  try {
    outputs = executor_.wait();
  } catch (const Error& e) {
    for (Part& part : flight.parts) end_failed(*part.sequence, e.fault(), e.what());
    return;
  }
  for (Part& part : flight.parts) {
    // One step too many, a cancelled one, or one whose choice a constraint has made void.
    if (part.sequence->finished || part.round != part.sequence->round) continue;
    try {
      settle(part, flight.ending, outputs);
    } catch (const Error& e) {
      end_failed(*part.sequence, e.fault(), e.what());
    }
  }
}

void Scheduler::settle(Part& part, plan::Ending ending, const backend::StepOutputs& outputs) {
  Sequence& s = *part.sequence;
  std::optional<Token> token;
  if (part.output >= 0) {
    token = choose(s, ending, part.output, s.step_of(part.n_after), outputs);
    if (!token) {  // the same rows again, for whole logits: the state before them stands
      LILY_CHECK(!s.needs_logits && s.in_flight == 0, "whole logits were not enough");
      s.needs_logits = true;
      s.rewind();
      return;
    }
    s.needs_logits = false;
  }
  s.state = std::move(part.state);
  s.n_done = part.n_after;
  if (s.n_done <= s.n_prompt) {
    s.channel->push(PromptProgress{.n_done = s.n_done, .n_total = s.n_prompt, .n_cached = s.n_cached});
    if (s.n_done == s.n_prompt) remember(s, Snapshot::Kind::prompt_end);
    else if (s.n_done == s.request.n_stable) remember(s, Snapshot::Kind::stable);
    else if (std::binary_search(s.keep_at.begin(), s.keep_at.end(), s.n_done))
      remember(s, Snapshot::Kind::branch);
    else if (options_.state_interval > 0 && s.n_done - s.n_last_kept >= options_.state_interval)
      remember(s, Snapshot::Kind::sparse);
  }
  if (token) deliver(s, std::move(*token));
}

std::optional<Token> Scheduler::choose(Sequence& s, plan::Ending ending, int output, uint32_t step,
                                       const backend::StepOutputs& outputs) {
  const auto row = [&](auto span, int columns) {
    return span.subspan(static_cast<size_t>(output) * static_cast<size_t>(columns),
                        static_cast<size_t>(columns));
  };
  if (!s.host_chooses) {
    const int32_t id = outputs.tokens[static_cast<size_t>(output)];
    if (id < 0 || id >= limits_.n_tokens)
      fail(Fault::device, "the device chose token {}, which does not exist; the step is lost", id);
    return Token{.id = id};
  }
  TokenConstraint* const constraint = s.request.constraint.get();
  const bool by_token = constraint != nullptr && !constraint->is_free() && constraint->can_ask_single() &&
                        s.sampler.candidates_can_do(limits_.n_candidates);
  const auto mask = [&]() -> const TokenMask* {
    if (constraint == nullptr || !s.mask) return nullptr;
    s.mask->forbid_all();
    return constraint->allowed(*s.mask) ? &*s.mask : nullptr;
  };
  const int n_top = s.request.top_logprobs;
  if (ending == plan::Ending::logits) {
    const std::span<const float> logits = row(outputs.logits, limits_.vocab);
    // As from candidates, so that the company in the step changes nothing.
    std::optional<int32_t> chosen;
    if (by_token) chosen = choose_from_top(s, logits, step);
    const int32_t id = chosen ? *chosen : s.sampler.choose(logits, mask(), step);
    return n_top < 0 ? Token{.id = id} : with_logprobs(id, logits, limits_.n_tokens, n_top);
  }
  const CandidateRow candidates{.ids = row(outputs.candidate_ids, limits_.n_candidates),
                                .logits = row(outputs.candidate_logits, limits_.n_candidates),
                                .logsumexp = outputs.logsumexp[static_cast<size_t>(output)]};
  const std::optional<int32_t> id =
      by_token ? s.sampler.choose(candidates, *constraint, step) : s.sampler.choose(candidates, mask(), step);
  if (!id) return std::nullopt;
  return n_top < 0 ? Token{.id = *id} : with_logprobs(*id, candidates, n_top);
}

std::optional<int32_t> Scheduler::choose_from_top(Sequence& s, std::span<const float> logits,
                                                  uint32_t step) const {
  const auto top =
      plan::top_candidates(logits.first(static_cast<size_t>(limits_.n_tokens)), limits_.n_candidates);
  std::vector<int32_t> ids;
  std::vector<float> values;
  for (const plan::Candidate& c : top) {
    ids.push_back(c.id);
    values.push_back(c.logit);
  }
  return s.sampler.choose(CandidateRow{.ids = ids, .logits = values}, *s.request.constraint, step);
}

void Scheduler::deliver(Sequence& s, Token token) {
  const int32_t id = token.id;
  if (s.n_generated() == 0) s.first_token_at = Clock::now();
  s.tokens.push_back(id);
  s.sampler.accept(id);
  if (s.request.constraint != nullptr) {
    s.request.constraint->accept(id);
    s.choose_chooser();
  }
  const auto& stops = s.request.stop_ids;
  if (std::find(stops.begin(), stops.end(), id) != stops.end()) return end(s, Finish::stop, id);
  // A reader that has stopped reading is treated as one that has left.
  if (!s.channel->push(std::move(token))) return end(s, Finish::cancelled);
  if (static_cast<int32_t>(s.tokens.size()) >= s.n_limit) end(s, Finish::length);
}

// ---- Endings

void Scheduler::end(Sequence& s, Finish how, int32_t stop_id) {
  if (s.finished) return;
  remember(s, s.n_done < s.n_prompt ? Snapshot::Kind::prompt_end : Snapshot::Kind::turn_end);
  s.finish(how, stop_id);
}

void Scheduler::end_failed(Sequence& s, Fault fault, std::string_view error) {
  if (s.finished) return;
  ++totals_.n_failed;
  s.finish(Finish::error, -1, fault, error);
}

// Of the n_done tokens, of which the last generated one is never part.
void Scheduler::remember(Sequence& s, Snapshot::Kind kind) {
  if (!s.request.keep_states || !s.state || s.n_done == 0) return;
  LILY_CHECK(limits_.depth > 1 || s.in_flight == 0, "a state that is being written in place");
  s.n_last_kept = s.n_done;
  const std::span<const int32_t> tokens(s.tokens.data(), static_cast<size_t>(s.n_done));
  if (cache_.contains(tokens)) return;
  Snapshot snapshot{.kind = kind, .session = s.request.session, .tokens = {tokens.begin(), tokens.end()}};
  snapshot.state = s.state.share();
  const int n_blocks = blocks_needed(s.n_done);
  for (int i = 0; i < n_blocks; ++i) {
    const int used = std::min(kKvBlockTokens, s.n_done - i * kKvBlockTokens);
    snapshot.blocks.push_back(s.blocks[static_cast<size_t>(i)].share(used));
  }
  if (saver_) saver_->note(snapshot);
  cache_.insert(std::move(snapshot));
}

void Scheduler::drop_cancelled() {
  for (const auto& s : running_)
    if (s->channel->cancelled()) end(*s, Finish::cancelled);
}

void Scheduler::release_finished() {
  std::erase_if(running_, [&](const std::unique_ptr<Sequence>& s) {
    if (!s->finished || s->in_flight > 0) return false;
    n_promised_blocks_ -= blocks_needed(s->n_limit);
    totals_.prompt_tokens += s->n_prompt;
    totals_.cached_tokens += s->n_cached;
    totals_.completion_tokens += s->n_generated();
    return true;
  });
}

void Scheduler::cancel_all(Finish how, Fault fault, std::string_view why) noexcept {
  for (const auto& s : running_) {
    if (how == Finish::error) end_failed(*s, fault, why);
    else s->finish(how, -1, fault, why);
  }
  while (!flights_.empty()) {
    try {
      complete_one();
    } catch (const std::exception&) {  // NOLINT(bugprone-empty-catch)
      // Nobody waits for what the step was to bring; only that it no longer runs counts.
    }
  }
  for (const auto& s : running_) s->in_flight = 0;
  release_finished();
}

void Scheduler::report(EngineStats& stats) const {
  const int n_waiting = stats.n_waiting;
  stats = totals_;
  stats.n_waiting = n_waiting;
  stats.n_running = n_running();
  stats.n_cached_states = cache_.size();
  stats.cache_evictions = cache_.n_evictions();
  stats.n_free_blocks = pool_.blocks().n_free();
  stats.n_blocks = pool_.blocks().n_total();
  stats.n_free_states = pool_.states().n_free();
  stats.n_states = pool_.states().n_total();
  stats.resident_bytes = pool_.resident_bytes();
  stats.pool_bytes = pool_.pool_bytes();
}

void Scheduler::check_integrity() const {
  pool_.states().check_integrity();
  tokens_.check_integrity();
  pool_.blocks().check_integrity();
  LILY_CHECK(pool_.resident_bytes() <= pool_.pool_bytes(), "{} bytes of {}", pool_.resident_bytes(),
             pool_.pool_bytes());
  if (!running_.empty()) return;
  LILY_CHECK(flights_.empty() && n_promised_blocks_ == 0, "{} steps, {} blocks promised to nobody",
             flights_.size(), n_promised_blocks_);
  LILY_CHECK(tokens_.n_free() == tokens_.n_total(), "token slots held by nobody");
  if (cache_.size() == 0 && !(saver_ && saver_->is_copying()))
    LILY_CHECK(
        pool_.states().n_free() == limits_.n_state_slots && pool_.blocks().n_free() == limits_.n_kv_blocks,
        "{} of {} states and {} of {} blocks free with an empty cache", pool_.states().n_free(),
        limits_.n_state_slots, pool_.blocks().n_free(), limits_.n_kv_blocks);
}

}  // namespace lily::engine
