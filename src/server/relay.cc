#include "server/relay.h"

#include <algorithm>

#include "base/ascii.h"
#include "base/log.h"
#include "base/printable.h"

namespace lily::server {
namespace {

constexpr auto kPoll = std::chrono::milliseconds(100);  // how soon a client that left is noticed
constexpr size_t kMaxErrorBytes = 1 << 20;              // of an error's body
constexpr size_t kMaxLineBytes = size_t{4} << 20;       // of an event whose usage is counted
constexpr size_t kMaxHeaderBytes = 256;
constexpr size_t kMaxMessageBytes = 2000;

// Headers of the answer that mean something to a client; all others stay here.
constexpr const char* kPassed[] = {"retry-after", "x-request-id", "request-id", "openai-processing-ms"};
constexpr const char* kPassedPrefixes[] = {"x-ratelimit-", "anthropic-ratelimit-"};

bool is_passed(const std::string& name, const std::string& value) {
  const bool is_wanted = std::find(std::begin(kPassed), std::end(kPassed), name) != std::end(kPassed) ||
                         std::any_of(std::begin(kPassedPrefixes), std::end(kPassedPrefixes),
                                     [&](const char* prefix) { return name.starts_with(prefix); });
  return is_wanted && value.size() <= kMaxHeaderBytes &&
         std::all_of(value.begin(), value.end(), [](char c) { return c >= ' ' && c <= '~'; });
}

std::string header_of(const TransferHead& head, const char* name) {
  const auto it = head.headers.find(name);
  return it == head.headers.end() ? "" : it->second;
}

// "Text/Event-Stream; charset=utf-8" -> "text/event-stream"
std::string media_type_of(const TransferHead& head) {
  const std::string type = header_of(head, "content-type");
  return ascii_lower(type.substr(0, type.find_first_of("; ")));
}

std::string shown(const std::string& media_type) {
  return media_type.empty() ? "something without a type" : printable(media_type, 60);
}

const char* type_of(int status) {
  switch (status) {
    case 403:
      return "permission_error";
    case 404:
      return "not_found_error";
    case 413:
      return "request_too_large";
    case 429:
      return "rate_limit_error";
    case 503:
      return "overloaded_error";
    default:
      return status < 500 ? "invalid_request_error" : "server_error";
  }
}

Json error_of(Api api, const ApiError& error) {
  return api == Api::anthropic ? anthropic_error(error, new_id("req_")) : openai_error(error);
}

bool has_text(const Json& json, const char* name) {
  return json.is_object() && json.contains(name) && json[name].is_string();
}

// The error as the API that was called has it.
bool has_shape_of(Api api, const Json& json) {
  if (!json.contains("error") || !has_text(json["error"], "message")) return false;
  return api != Api::anthropic || (json.value("type", Json()) == "error" && has_text(json["error"], "type"));
}

// Engines differ in where they say what is wrong.
std::string message_of(const Json& json) {
  if (json.contains("error") && has_text(json["error"], "message"))
    return json["error"]["message"].get<std::string>();
  for (const char* name : {"error", "message", "detail"})
    if (has_text(json, name)) return json[name].get<std::string>();
  return {};
}

}  // namespace

Api api_of(const std::string& path) {
  if (path.find("/messages") != path.npos) return Api::anthropic;
  return path.ends_with("/responses") ? Api::responses : Api::openai;
}

Relay::Relay(std::unique_ptr<Transfer> transfer, Options options)
    : transfer_(std::move(transfer)), options_(std::move(options)) {}

Relay::~Relay() {
  if (options_.on_end) options_.on_end(end_ == RelayEnd::none ? RelayEnd::client_left : end_, usage_);
}

void Relay::fail(int status, const char* code, const std::string& what) const {
  throw ApiError(status, "server_error", code, "",
                 fmt::format("upstream {} ({}) {}", options_.upstream, options_.address, what));
}

void Relay::check_transfer() const {
  switch (transfer_->ended()) {
    case TransferEnd::none:
    case TransferEnd::done:
      return;
    case TransferEnd::unreachable:
      fail(502, "upstream_unreachable", "cannot be reached: " + transfer_->failure());
    case TransferEnd::timed_out:
      fail(504, "upstream_timeout", "cannot be reached in time: " + transfer_->failure());
    case TransferEnd::not_trusted:
      fail(502, "upstream_not_trusted", "has no certificate that is trusted here: " + transfer_->failure());
    case TransferEnd::broke_off:
      fail(502, "upstream_broke_off", "broke off its answer: " + transfer_->failure());
  }
}

void Relay::check_silence() const {
  const auto silent = Clock::now() - last_heard_;
  if (silent > options_.limits.silence)
    fail(504, "upstream_timeout",
         fmt::format("has sent nothing for {} s; the request was given up",
                     std::chrono::duration_cast<std::chrono::seconds>(silent).count()));
}

bool Relay::leave() {
  transfer_.reset();
  end_ = RelayEnd::client_left;
  return false;
}

std::vector<std::pair<std::string, std::string>> Relay::headers() const {
  std::vector<std::pair<std::string, std::string>> out;
  if (const TransferHead* head = transfer_->head())
    for (const auto& [name, value] : head->headers)
      if (is_passed(name, value)) out.emplace_back(name, value);
  const bool has_id =
      std::any_of(out.begin(), out.end(), [](const auto& h) { return h.first == "x-request-id"; });
  if (!has_id) out.emplace_back("x-request-id", new_id("req_"));
  return out;
}

RelayReply Relay::head_of_stream() const {
  RelayReply reply{.status = 200, .headers = headers(), .is_stream = true, .body = {}};
  reply.headers.emplace_back("Cache-Control", "no-cache");
  reply.headers.emplace_back("X-Accel-Buffering", "no");
  return reply;
}

RelayReply Relay::whole_reply() {
  const Json answer = Json::parse(collected_, nullptr, false);
  if (!answer.is_object())
    fail(502, "upstream_bad_answer",
         fmt::format("answers with {} bytes of {} that are no JSON object; does it speak this API?",
                     collected_.size(), shown(media_type_of(*transfer_->head()))));
  read_usage(answer);
  return {.status = 200, .headers = headers(), .is_stream = false, .body = collected_};
}

RelayReply Relay::refusal(int status) const {
  RelayReply reply{.status = status, .headers = headers(), .is_stream = false, .body = {}};
  std::string message;
  try {
    const Json json = parse_json(collected_);
    if (json.is_object() && has_shape_of(options_.api, json)) {
      reply.body = collected_;
      return reply;
    }
    if (json.is_object()) message = printable(message_of(json), kMaxMessageBytes);
  } catch (const ApiError&) {  // NOLINT(bugprone-empty-catch)
    // No JSON: a proxy's page for example. It is not passed on.
  }
  if (message.empty())
    message = fmt::format("upstream {} answers {} with {} and no message", options_.upstream, status,
                          shown(media_type_of(*transfer_->head())));
  // The message may quote the prompt: it goes to the client and not to the log.
  reply.body = to_text(error_of(options_.api, {status, type_of(status), "upstream_error", "", message}));
  return reply;
}

std::optional<RelayReply> Relay::judge() {
  const TransferHead* head = transfer_->head();
  if (head == nullptr) {
    check_transfer();
    return {};
  }
  const int status = head->status;
  const bool is_error = status >= 400 && status < 600;
  if (status >= 300 && status < 400)
    fail(502, "upstream_redirects",
         fmt::format(
             "redirects to \"{}\"; nothing is sent there, --upstream has to name the right address",
             printable(header_of(*head, "location").substr(0, header_of(*head, "location").find('?')))));
  if (status == 401 || status == 407)
    fail(502, "upstream_refuses_key",
         fmt::format("refuses the key (HTTP {}); is {} set where lily serve was started, and right?", status,
                     options_.key_variable));
  if (status != 200 && !is_error)
    fail(502, "upstream_bad_answer", fmt::format("answers HTTP {}; does it speak this API?", status));
  const std::string encoding = header_of(*head, "content-encoding");
  if (!encoding.empty() && encoding != "identity")
    fail(502, "upstream_bad_answer",
         fmt::format("answers in the encoding \"{}\", which nobody asked for", printable(encoding, 40)));
  if (!is_error && options_.wants_stream) {
    if (media_type_of(*head) != "text/event-stream")
      fail(
          502, "upstream_bad_answer",
          fmt::format("answers with {} where a stream of events was asked for", shown(media_type_of(*head))));
    is_streaming_ = true;
    return head_of_stream();
  }
  if (const std::string bytes = transfer_->take(); !bytes.empty()) {
    collected_ += bytes;
    last_heard_ = Clock::now();
  }
  const size_t most = is_error ? kMaxErrorBytes : options_.limits.max_body_bytes;
  if (collected_.size() > most) {
    if (is_error) return refusal(status);
    fail(502, "upstream_bad_answer", fmt::format("answers with more than {} bytes", most));
  }
  check_transfer();
  if (transfer_->ended() == TransferEnd::none) return {};
  return is_error ? refusal(status) : whole_reply();
}

std::optional<RelayReply> Relay::reply(const IsThere& is_there) {
  try {
    const auto start = Clock::now();
    while (true) {
      if (!is_there()) {
        leave();
        return {};
      }
      if (std::optional<RelayReply> out = judge()) {
        if (!out->is_stream) end_ = out->status < 400 ? RelayEnd::done : RelayEnd::failed;
        return out;
      }
      const bool is_late = Clock::now() - start >= options_.limits.keep_alive;
      if (options_.wants_stream && is_late && transfer_->head() == nullptr) return head_of_stream();
      check_silence();
      transfer_->wait(kPoll);
    }
  } catch (...) {
    transfer_.reset();
    end_ = RelayEnd::failed;
    throw;
  }
}

// OpenAI's names or those of the responses and messages; in a stream the latest figures count, of which a
// message has those of its prompt at its start and those of its answer at its end.
void Relay::read_usage(const Json& answer) {
  const auto member = [](const Json* json, const char* name) -> const Json* {
    if (json == nullptr || !json->is_object()) return nullptr;
    const auto at = json->find(name);
    return at == json->end() ? nullptr : &*at;
  };
  const Json* usage = member(&answer, "usage");
  for (const char* whole : {"response", "message"})
    if (usage == nullptr) usage = member(member(&answer, whole), "usage");
  const auto count = [&](const Json* from, const char* name) -> std::optional<int64_t> {
    const Json* const value = member(from, name);
    if (value == nullptr || !value->is_number_integer()) return {};
    return std::max<int64_t>(value->get<int64_t>(), 0);
  };
  if (const auto n = count(usage, "prompt_tokens")) usage_.prompt_tokens = *n;
  if (const auto n = count(usage, "completion_tokens")) usage_.completion_tokens = *n;
  if (const auto n = count(usage, "output_tokens")) usage_.completion_tokens = *n;
  if (const auto n = count(usage, "input_tokens")) usage_.prompt_tokens = *n;
  for (const char* details : {"prompt_tokens_details", "input_tokens_details"})
    if (const auto n = count(member(usage, details), "cached_tokens")) usage_.cached_tokens = *n;
  if (options_.api != Api::anthropic) return;
  // Its input_tokens are those that were in no cache.
  const auto cached = count(usage, "cache_read_input_tokens");
  if (cached) usage_.cached_tokens = *cached;
  if (count(usage, "input_tokens"))
    usage_.prompt_tokens += cached.value_or(0) + count(usage, "cache_creation_input_tokens").value_or(0);
}

// Follows the framing of events: nothing may be put into one that is not complete.
void Relay::follow(const std::string& bytes) {
  for (const char c : bytes) {
    if (c == '\r') continue;
    if (c == '\n') {
      if (is_line_data_ && line_.find("\"usage\"") != line_.npos && line_.size() < kMaxLineBytes)
        read_usage(Json::parse(line_.substr(line_.find(':') + 1), nullptr, false));
      line_.clear();
    } else if (line_.size() < kMaxLineBytes) {
      line_ += c;
    }
    if (c != '\n') {
      if (is_line_empty_ && c == 'd') is_line_data_ = true;
      is_line_empty_ = is_between_events_ = false;
      continue;
    }
    if (is_line_empty_ && !is_between_events_) {
      is_between_events_ = true;
      if (std::exchange(is_line_data_, false)) ++n_events_;
    }
    is_line_empty_ = true;
  }
}

std::string Relay::keep_alive() const {
  // Anthropic's clients expect the message's start before anything else, but for comments.
  return options_.api == Api::anthropic && n_events_ > 0 ? sse("ping", {{"type", "ping"}})
                                                         : ": keep-alive\n\n";
}

std::string Relay::failure_event(const Json& error) const {
  if (options_.api == Api::openai) return sse(error);
  if (options_.api == Api::anthropic) return sse("error", error);
  const Json& inner = error["error"];
  return sse("error", {{"type", "error"},
                       {"sequence_number", n_events_},
                       {"code", inner.value("code", Json())},
                       {"message", inner["message"]},
                       {"param", inner.value("param", Json())}});
}

bool Relay::pump(const Send& send, const IsThere& is_there) {
  while (true) {
    if (!is_there()) return leave();
    if (!is_streaming_)
      if (const std::optional<RelayReply> late = judge(); late && !late->is_stream) {
        end_ = RelayEnd::failed;
        return send(failure_event(Json::parse(late->body)));
      }
    const std::string bytes = is_streaming_ ? transfer_->take() : std::string();
    if (!bytes.empty()) {
      follow(bytes);
      if (!send(bytes)) return leave();
      last_heard_ = last_sent_ = Clock::now();
      continue;
    }
    check_transfer();
    if (transfer_->ended() == TransferEnd::done) {
      if (n_events_ == 0 || !is_between_events_)
        fail(502, "upstream_bad_answer", "ended its stream without an event, or within one");
      end_ = RelayEnd::done;
      return true;
    }
    if (is_between_events_ && Clock::now() - last_sent_ >= options_.limits.keep_alive) {
      if (!send(keep_alive())) return leave();
      last_sent_ = Clock::now();
    }
    check_silence();
    transfer_->wait(kPoll);
  }
}

bool Relay::stream(const Send& send, const IsThere& is_there) {
  try {
    return pump(send, is_there);
  } catch (const std::exception& e) {
    const ApiError error = api_error_of(e);
    log(LogLevel::error, "an answer failed: {}", error.what());
    transfer_.reset();
    end_ = RelayEnd::failed;
    // A client that got half an event is told by the end of the connection.
    return is_between_events_ && send(failure_event(error_of(options_.api, error)));
  }
}

}  // namespace lily::server
