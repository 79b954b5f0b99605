// lily serve: the HTTP server.
#include <condition_variable>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <mutex>
#include <thread>

#include "base/error.h"
#include "base/heap.h"
#include "base/log.h"
#include "base/printable.h"
#include "cli/answer.h"
#include "cli/command.h"
#include "cli/hub_settings.h"
#include "server/access.h"
#include "server/http.h"

namespace lily::cli {
namespace {

constexpr auto kPoll = std::chrono::milliseconds(50);  // how soon a signal is noticed
// After --drain: for clients to be told that their answers were given up, and for the step in flight.
constexpr auto kLastStep = std::chrono::seconds(5);

struct ServeOptions {
  ModelOptions model;
  server::HttpOptions http;
  int parallel = 4;
  int queue = 64;
  int step_timeout_s = 600;
  uint64_t memory = 0;  // bytes
  DiskOptions disk;
  bool preserve_thinking = false;
  std::string replay = "on", volatile_text = "drop";
  bool log_misses = false;
  std::vector<std::string> upstreams;  // NAME=URL
  bool quiet = false;
};

std::atomic<bool>& asked_to_stop() {
  static std::atomic<bool> value = false;
  return value;
}

extern "C" void on_stop(int signal) {
  // A second signal does not wait for the answers that run.
  if (asked_to_stop().exchange(true)) std::_Exit(128 + signal);
}

// Ends the program when stopping takes longer than it may: a step that the device never brings back cannot be
// waited for, nor can the engine's thread be ended that waits for it.
class LastResort {
 public:
  explicit LastResort(std::chrono::seconds patience) : thread_([this, patience] { wait(patience); }) {}
  ~LastResort() {
    {
      const std::lock_guard lock(mutex_);
      is_needless_ = true;
    }
    changed_.notify_one();
    thread_.join();
  }
  LastResort(const LastResort&) = delete;
  LastResort& operator=(const LastResort&) = delete;

 private:
  void wait(std::chrono::seconds patience) {
    std::unique_lock lock(mutex_);
    if (changed_.wait_for(lock, patience, [&] { return is_needless_; })) return;
    fmt::print(stderr,
               "lily: the device has not brought back its step within {} s; the program ends without it, and "
               "without saving what was not saved\n",
               patience.count());
    std::_Exit(1);
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  bool is_needless_ = false;
  std::thread thread_;  // last: it uses all of the above
};

void print_memory(const engine::MemoryPlan& plan) {
  const auto line = [](const char* what, int64_t n_bytes, const std::string& purpose) {
    if (n_bytes > 0) fmt::print(stderr, "  {:16} {:>8}  {}\n", what, human_bytes(n_bytes), purpose);
  };
  line("weights", plan.weight_bytes, "read from the checkpoint");
  line("KV cache", plan.kv_bytes,
       fmt::format("{} at once, up to {} each", counted(plan.max_sequences, "answer"),
                   counted(plan.context, "token")));
  line("states", plan.state_bytes, "what the same answers keep beside it");
  line("earlier prompts", plan.cache_bytes, "so that what comes again is not read again");
  line("scratch", plan.scratch_bytes, "while a step is computed");
  line("program", plan.program_bytes, "requests, threads, responses that are stored");
  line("in all", plan.total_bytes(),
       plan.budget_bytes > 0
           ? fmt::format("of {} that it may take (--memory)", human_bytes(plan.budget_bytes))
           : "without a bound (--memory)");
}

void print_settings(const std::string& host, int port, const std::string& model, bool has_key) {
  const std::string shown = host == "0.0.0.0" || host == "::" ? "localhost" : host;
  const std::string url =
      fmt::format("http://{}:{}", shown.find(':') == std::string::npos ? shown : "[" + shown + "]", port);
  const char* const key = has_key ? "$LILY_API_KEY" : "none";
  fmt::print(stderr,
             "lily: ready at {}\n"
             "  in a browser       {}/    (a chat page)\n"
             "  OpenAI clients     OPENAI_BASE_URL={}/v1 OPENAI_API_KEY={}    (model: {})\n"
             "  Anthropic clients  ANTHROPIC_BASE_URL={} ANTHROPIC_API_KEY={}\n"
             "  try it             curl {}/v1/chat/completions -d '{{\"messages\": [{{\"role\": \"user\", "
             "\"content\": \"Hello\"}}]}}'\n",
             url, url, url, key, model, url, key, url);
}

// With their keys, which come from the environment only.
server::UpstreamOptions upstream_options(const std::vector<std::string>& texts,
                                         const std::string& local_model) {
  server::UpstreamOptions options;
  options.ca_file = environment(kTrustedCertificates);
  for (const std::string& text : texts) {
    server::Upstream upstream = server::parse_upstream(text);
    const std::string variable = server::key_variable_of(upstream.name);
    if (upstream.name == local_model)
      fail(Fault::user, "--upstream {}: this is the name of the model that is served here", upstream.name);
    if (const char* key = std::getenv(variable.c_str())) upstream.key = key;
    if (upstream.is_key_in_clear && !upstream.key.empty())
      log(LogLevel::warning, "{} goes to {} unencrypted", variable, upstream.base);
    options.upstreams.push_back(std::move(upstream));
  }
  server::check_upstreams(options.upstreams);
  return options;
}

// The folder's name; of a model in the hub's cache (models--ORG--NAME/snapshots/COMMIT) its name there.
std::string model_name(const std::string& folder) {
  constexpr std::string_view kPrefix = "models--";
  const std::filesystem::path path = std::filesystem::path(folder).lexically_normal();
  for (const std::filesystem::path& part : path) {
    std::string name = part.string();
    if (!name.starts_with(kPrefix)) continue;
    name.erase(0, kPrefix.size());
    if (const size_t at = name.find("--"); at != std::string::npos) name.replace(at, 2, "/");
    return name;
  }
  const std::string name = (path.has_filename() ? path : path.parent_path()).filename().string();
  return name.empty() ? "lily" : name;
}

int run_serve(ServeOptions o) {
  if (o.http.api_key.empty())
    if (const char* key = std::getenv("LILY_API_KEY")) o.http.api_key = key;
  if (!o.quiet) set_verbosity(1);
  std::signal(SIGINT, on_stop);
  std::signal(SIGTERM, on_stop);
  keep_heap_compact();

  const std::string folder = find_model(o.model.model);
  const server::UpstreamOptions upstreams = upstream_options(o.upstreams, model_name(folder));
  engine::LoadOptions load = load_options(o.model);
  load.memory.max_sequences = o.parallel;
  load.memory.budget_bytes = static_cast<int64_t>(o.memory);
  engine::EngineOptions options{.max_sequences = o.parallel, .queue_capacity = o.queue};
  plan_for_sessions(load, options);
  engine::Assistant assistant(folder, load, options);
  keep_on_disk(assistant, o.disk);
  if (o.replay == "off") assistant.set_replay(0);
  show_notices();
  fmt::print(stderr, "lily: {} on {} will take this memory:\n", folder, assistant.backend());
  print_memory(assistant.model()->memory());

  server::HttpServer http(o.http);
  const int port = http.bind();
  if (!server::is_loopback(o.http.host) && o.http.api_key.empty())
    log(LogLevel::warning, "{} can be reached from other machines, and no --api-key is set", o.http.host);
  std::optional<server::Service> service;
  std::thread listener([&] { http.listen(); });
  const auto end = [&] {
    http.stop();
    listener.join();
  };
  try {
    ProgressBar bar("loading");
    assistant.load([&](int64_t done, int64_t total) {
      bar.update(done, total);
      return !asked_to_stop();
    });
  } catch (...) {
    end();
    if (asked_to_stop()) return 0;
    throw;
  }
  service.emplace(assistant, server::ServiceOptions{.model_id = model_name(folder),
                                                    .preserve_thinking = o.preserve_thinking,
                                                    .keep_volatile = o.volatile_text == "keep",
                                                    .log_misses = o.log_misses,
                                                    .step_timeout = std::chrono::seconds(o.step_timeout_s),
                                                    .upstreams = upstreams});
  http.set_service(*service);
  print_settings(o.http.host, port, service->model().id, !o.http.api_key.empty());
  for (const server::Upstream& upstream : upstreams.upstreams)
    fmt::print(stderr, "  model {} is answered by {}, {} {}\n", upstream.name, upstream.base,
               upstream.key.empty() ? "without a key:" : "key from",
               server::key_variable_of(upstream.name) + (upstream.key.empty() ? " is not set" : ""));
  while (!asked_to_stop()) std::this_thread::sleep_for(kPoll);
  fmt::print(stderr, "lily: stopping; answers that run have {} s, a second signal ends them\n",
             o.http.drain_s);
  const LastResort last_resort(std::chrono::seconds(o.http.drain_s) + kLastStep);
  end();
  assistant.engine().stop();
  return 0;
}

}  // namespace

void add_serve(CLI::App& app, Action& action) {
  auto options = std::make_shared<ServeOptions>();
  CLI::App* command = app.add_subcommand("serve", "The HTTP server: OpenAI's and Anthropic's APIs");
  add_model_options(*command, options->model);
  add_profile_option(*command, options->model);
  command->add_option("--host", options->http.host, "Address to listen on")
      ->check([](const std::string& host) { return host.empty() ? "an address is needed" : ""; })
      ->capture_default_str();
  command->add_option("--port", options->http.port, "0: any that is free")
      ->check(CLI::Range(0, 65535))
      ->capture_default_str();
  command->add_option("--api-key", options->http.api_key,
                      "Key that clients must send (default: LILY_API_KEY)");
  command->add_option("--cors", options->http.cors, "Origin whose pages may call the server, or *");
  command->add_option("--parallel", options->parallel, "Answers computed at the same time")
      ->check(CLI::Range(1, 256))
      ->capture_default_str();
  command->add_option("--queue", options->queue, "Requests that may wait; more are refused with 503")
      ->check(CLI::Range(1, 100000))
      ->capture_default_str();
  command
      ->add_option("--memory", options->memory,
                   "Bytes that weights, states, KV and the program itself may take, as in 20GB; 0: what the "
                   "device has")
      ->transform(as_size());
  add_disk_options(*command, options->disk);
  command->add_flag("--preserve-thinking", options->preserve_thinking,
                    "Keep the thinking of earlier turns in prompts, where a request does not say");
  command
      ->add_option(
          "--replay", options->replay,
          "on: earlier answers that come back are continued token for token, thinking included; off: as "
          "the chat template has it")
      ->check(CLI::IsMember({"on", "off"}))
      ->capture_default_str();
  command
      ->add_option("--drain", options->http.drain_s,
                   "Seconds that answers which run may take when the server is stopped")
      ->check(CLI::Range(0, 86400))
      ->capture_default_str();
  command
      ->add_option(
          "--step-timeout", options->step_timeout_s,
          "Seconds without a step of the model, or a byte of an --upstream, after which an answer has "
          "failed")
      ->check(CLI::Range(1, 86400))
      ->capture_default_str();
  command
      ->add_option(
          "--volatile", options->volatile_text,
          "drop: known noise that differs in every request, such as a billing header, is left out of "
          "prompts, so that they stay in the cache; keep: prompts are as they come")
      ->check(CLI::IsMember({"drop", "keep"}))
      ->capture_default_str();
  command->add_flag(
      "--log-misses", options->log_misses,
      "Log the texts at which a prompt differs from the nearest one in the cache; without it no text of a "
      "prompt is logged");
  command
      ->add_option(
          "--upstream", options->upstreams,
          "NAME=URL: requests for the model NAME go to another engine with OpenAI's API, and those for "
          "NAME/MODEL to its MODEL; the key is read from LILY_UPSTREAM_KEY_NAME. May be repeated")
      ->expected(1)
      ->multi_option_policy(CLI::MultiOptionPolicy::TakeAll);
  command->add_flag("--quiet", options->quiet, "No line for each request");
  command->footer(
      "Examples:\n  lily serve\n  lily serve -m models/lily-tiny --port 9000\n"
      "  LILY_API_KEY=secret lily serve --host 0.0.0.0\n"
      "  LILY_UPSTREAM_KEY_BIG=secret lily serve --upstream big=https://gpu.example.org/v1");
  command->callback([options, &action] { action = [options] { return run_serve(*options); }; });
}

}  // namespace lily::cli
