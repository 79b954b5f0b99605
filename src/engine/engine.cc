#include "engine/engine.h"

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <deque>
#include <functional>
#include <future>
#include <mutex>
#include <new>
#include <thread>
#include <utility>
#include <vector>

#include "base/error.h"
#include "base/log.h"
#include "engine/event_channel.h"
#include "engine/request_queue.h"
#include "engine/sampler.h"
#include "engine/scheduler.h"

namespace lily::engine {

ContextExceeded::ContextExceeded(int64_t prompt, int64_t max_tokens, int64_t context)
    : Error(Fault::user,
            fmt::format(
                "the prompt has {} tokens and {} more were asked for; the context holds {}: shorten the "
                "prompt, ask for fewer tokens, or start with a larger --ctx",
                prompt, max_tokens, context)),
      n_prompt(prompt),
      n_max_tokens(max_tokens),
      n_context(context) {}

// ---- The reader's end

Generation::Generation(std::shared_ptr<EventChannel> channel) : channel_(std::move(channel)) {}
Generation::Generation(Generation&&) noexcept = default;
Generation& Generation::operator=(Generation&& other) noexcept {
  if (this != &other) {
    if (channel_) channel_->cancel();
    channel_ = std::move(other.channel_);
  }
  return *this;
}
Generation::~Generation() {
  if (channel_) channel_->cancel();
}

std::optional<Event> Generation::next() { return channel_->next(std::nullopt); }
std::optional<Event> Generation::next_for(std::chrono::milliseconds timeout) {
  return channel_->next(Clock::now() + timeout);
}
bool Generation::done() const { return channel_->done(); }
void Generation::cancel() { channel_->cancel(); }

// ---- The engine's thread and the queue before it

namespace {

constexpr std::string_view kShuttingDown = "the engine is shutting down";
constexpr const char* kNoMemory =
    "the machine's memory ran out; ask again, or start with a smaller --memory, --ctx or --parallel";
// How often memory is looked at while nothing runs.
constexpr Clock::duration kIdlePressureInterval = std::chrono::seconds(2);

}  // namespace

class Engine::Loop {
 public:
  Loop(std::unique_ptr<Executor> executor, const EngineOptions& options, DiskCache* disk)
      : options_(options),
        executor_(std::move(executor)),
        limits_(executor_->limits()),
        scheduler_(*executor_, options, disk),
        thread_([this] { run(); }) {}

  ~Loop() {
    begin_stop();
    thread_.join();
  }

  void stop() {
    begin_stop();
    std::unique_lock lock(mutex_);
    has_stopped_.wait(lock, [&] { return stopped_; });
  }

  const Limits& limits() const { return limits_; }

  Generation enqueue(GenerateRequest request) {
    validate(request);
    auto channel = std::make_shared<EventChannel>(options_.event_capacity);
    {
      const std::lock_guard lock(mutex_);
      if (stopping_) fail(Fault::device, "{}", kShuttingDown);
      queue_.remove_if(end_if_cancelled);
      if (queue_.size() >= options_.queue_capacity) throw QueueFull(options_.queue_capacity);
      queue_.push({std::move(request), channel, Clock::now()});
    }
    wake_.notify_one();
    return Generation(std::move(channel));
  }

  EngineStats stats() const {
    const std::lock_guard lock(mutex_);
    EngineStats stats = stats_;
    stats.n_waiting = queue_.size();
    return stats;
  }

  void clear_cache() {
    std::unique_lock lock(mutex_);
    const uint64_t ticket = ++clears_wanted_;
    wake_.notify_one();
    cleared_.wait(lock, [&] { return clears_done_ >= ticket || stopping_; });
  }

  // Runs on the engine's thread, between two steps.
  bool run_there(const std::function<bool(Scheduler&)>& task) {
    std::packaged_task<bool()> packaged([&] { return task(scheduler_); });
    std::future<bool> result = packaged.get_future();
    {
      const std::lock_guard lock(mutex_);
      if (stopping_) fail(Fault::device, "{}", kShuttingDown);
      tasks_.push_back(&packaged);
    }
    wake_.notify_one();
    return result.get();
  }

 private:
  void begin_stop() {
    {
      const std::lock_guard lock(mutex_);
      stopping_ = true;
    }
    wake_.notify_one();
    cleared_.notify_all();
  }

  void validate(const GenerateRequest& request) const {
    if (request.prompt.empty()) fail(Fault::user, "the prompt is empty; it needs at least one token");
    for (size_t i = 0; i < request.prompt.size(); ++i)
      if (request.prompt[i] < 0 || request.prompt[i] >= limits_.n_tokens)
        fail(Fault::user, "token {} of the prompt is {}; ids go from 0 to {}", i, request.prompt[i],
             limits_.n_tokens - 1);
    if (request.max_tokens < 0)
      fail(Fault::user, "max_tokens is {}; it must be 1 or more, or 0 for the rest of the context",
           request.max_tokens);
    if (request.top_logprobs > 20)
      fail(Fault::user, "top_logprobs is {}; at most 20 are given", request.top_logprobs);
    const auto n_prompt = static_cast<int64_t>(request.prompt.size());
    const int64_t n_new = std::max(request.max_tokens, 1);
    if (n_prompt + n_new > limits_.max_context) throw ContextExceeded(n_prompt, n_new, limits_.max_context);
    const Sampler checked(request.sampling, {}, limits_.n_tokens);
  }

  static bool end_if_cancelled(const Pending& pending) {
    if (!pending.channel->cancelled()) return false;
    end(pending, "");
    return true;
  }
  static void end(const Pending& pending, std::string_view why) {
    Finished event{.finish = Finish::cancelled, .error = copy_of_error(why)};
    event.usage.prompt_tokens = static_cast<int32_t>(pending.request.prompt.size());
    pending.channel->push(std::move(event));
  }

  void run() {
    for (bool idle = false;;) {
      uint64_t clears = clears_done_;
      try {
        if (!await_work(idle, clears)) break;
        for (std::packaged_task<bool()>* const task : tasks_taken_) (*task)();
        tasks_taken_.clear();
        if (clears > clears_done_) scheduler_.clear_cache();
        const bool admitted = next_.has_value();
        if (admitted) scheduler_.admit(std::move(*next_));
        next_.reset();
        next_channel_.reset();
        idle = !scheduler_.advance() && !admitted;
      } catch (const std::exception& e) {
        end_all(e);
        idle = false;
      }
      publish(clears);
    }
    scheduler_.cancel_all(Finish::cancelled, Fault::device, kShuttingDown);
    {
      const std::lock_guard lock(mutex_);
      queue_.remove_if([](const Pending& pending) { return end(pending, kShuttingDown), true; });
      stopped_ = true;
      has_stopped_.notify_all();
    }
    try {
      scheduler_.save_all();
    } catch (const std::exception& e) {
      log_safely("not everything is saved", e.what());
    }
  }

  // Until there is something to do. False: the end.
  bool await_work(bool idle, uint64_t& clears) {
    std::unique_lock lock(mutex_);
    if (idle) {
      const auto woken = [&] {
        return stopping_ || queue_.size() > 0 || !tasks_.empty() || clears_wanted_ > clears_done_;
      };
      std::optional<Clock::duration> until = scheduler_.next_save(Clock::now());
      if (scheduler_.watches_memory() && options_.available_memory)
        until = std::min(until.value_or(kIdlePressureInterval), kIdlePressureInterval);
      if (until) wake_.wait_for(lock, *until, woken);
      else wake_.wait(lock, woken);
    }
    tasks_taken_.swap(tasks_);
    if (stopping_ && tasks_taken_.empty()) return false;
    clears = clears_wanted_;
    queue_.remove_if(end_if_cancelled);
    // One that does not fit yet holds up those that come after it: they could keep it out for ever.
    const Pending* const first =
        queue_.next([&](const GenerateRequest& request) { return scheduler_.work_of(request); });
    if (first != nullptr && scheduler_.can_admit(first->request)) {
      next_ = queue_.take_next();
      next_channel_ = next_->channel;
    }
    return true;
  }

  // Memory of the host ran out, or the like: what runs cannot be trusted to go on.
  void end_all(const std::exception& e) noexcept {
    const auto* const error = dynamic_cast<const Error*>(&e);
    const bool no_memory = dynamic_cast<const std::bad_alloc*>(&e) != nullptr;
    const Fault fault = error != nullptr ? error->fault() : Fault::device;
    const char* const what = no_memory ? kNoMemory : e.what();
    log_safely("all running requests end", what);
    scheduler_.cancel_all(Finish::error, fault, what);
    // One that failed before it ran; the others have had their last event, and this is dropped.
    if (next_channel_)
      next_channel_->push(Finished{.finish = Finish::error, .fault = fault, .error = copy_of_error(what)});
    next_.reset();
    next_channel_.reset();
  }

  static void log_safely(std::string_view event, const char* why) noexcept {
    try {
      log(LogLevel::error, "engine: {}; {}", why, event);
    } catch (const std::exception&) {  // NOLINT(bugprone-empty-catch)
      // No memory for a line about the lack of memory; clients are told.
    }
  }

  void publish(uint64_t clears) {
    const std::lock_guard lock(mutex_);
    scheduler_.report(stats_);
    if (clears == clears_done_) return;
    clears_done_ = clears;
    cleared_.notify_all();
  }

  const EngineOptions options_;
  const std::unique_ptr<Executor> executor_;
  const Limits limits_;
  // The engine's thread only.
  Scheduler scheduler_;
  std::optional<Pending> next_;  // is being admitted
  std::shared_ptr<EventChannel> next_channel_;
  std::vector<std::packaged_task<bool()>*> tasks_taken_;

  mutable std::mutex mutex_;  // guards what follows
  std::condition_variable wake_, cleared_, has_stopped_;
  RequestQueue queue_;
  std::vector<std::packaged_task<bool()>*> tasks_;  // their callers wait
  EngineStats stats_;
  uint64_t clears_wanted_ = 0, clears_done_ = 0;
  bool stopping_ = false, stopped_ = false;

  std::thread thread_;  // last: it uses all of the above
};

Engine::Engine(std::unique_ptr<Executor> executor, const EngineOptions& options, DiskCache* disk)
    : loop_(std::make_unique<Loop>(std::move(executor), options, disk)) {}
Engine::~Engine() = default;
Generation Engine::generate(GenerateRequest request) { return loop_->enqueue(std::move(request)); }
const Limits& Engine::limits() const { return loop_->limits(); }
EngineStats Engine::stats() const { return loop_->stats(); }
void Engine::stop() { loop_->stop(); }
void Engine::clear_cache() { loop_->clear_cache(); }
bool Engine::save_session(std::span<const int32_t> tokens, const std::filesystem::path& path,
                          SessionHeader header) {
  return loop_->run_there(
      [&](Scheduler& scheduler) { return scheduler.save(tokens, path, std::move(header)); });
}
bool Engine::load_session(SessionReader& reader) {
  return loop_->run_there([&](Scheduler& scheduler) { return scheduler.load(reader); });
}

}  // namespace lily::engine
