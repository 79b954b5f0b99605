#include "server/http.h"

#include <httplib.h>
#include <sys/socket.h>

#include <array>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <map>
#include <mutex>
#include <thread>

#include "base/ascii.h"
#include "base/log.h"
#include "base/printable.h"
#include "server/access.h"
#include "server/connections.h"
#include "server/framing.h"
#include "server/messages.h"
#include "server/openai_chat.h"
#include "server/openai_text.h"
#include "server/openapi.h"
#include "server/page.h"
#include "server/peer.h"
#include "server/responses.h"

namespace lily::server {
namespace {

constexpr int kLoadingRetryS = 5;
constexpr size_t kMaxLogged = 200;  // bytes of a path
constexpr std::chrono::milliseconds kWatch{1000}, kWatchStopping{50},
    kStopPoll{1};                                    // how often connections are looked at
constexpr auto kFarewell = std::chrono::seconds(3);  // for answers that were given up to tell so

enum class Family { openai, anthropic };

Family family_of(const std::string& path) {
  return path.find("/messages") != std::string::npos ? Family::anthropic : Family::openai;
}

std::string key_of(const httplib::Request& request) {
  constexpr std::string_view kBearer = "bearer ";
  const std::string authorization = request.get_header_value("Authorization");
  if (authorization.size() > kBearer.size() &&
      ascii_lower(authorization.substr(0, kBearer.size())) == kBearer)
    return authorization.substr(kBearer.size());
  return request.get_header_value("x-api-key");
}

Connections::Key client_of(const httplib::Request& request) {
  return {request.remote_addr, request.remote_port};
}

// ", prompt 21 (5 cached), 20 new, stop": of an answer of the model, for the log.
std::string shown(const Outcome& outcome) {
  if (outcome.client_left) return ", the client left";
  if (!outcome.error.empty()) return ", failed";
  if (!outcome.end) return "";
  const engine::AnswerEnd& end = *outcome.end;
  const char* const finish = end.finish == engine::Finish::length ? "length"
                             : end.n_complete_calls > 0           ? "tool_calls"
                                                                  : "stop";
  return fmt::format(", prompt {} ({} cached), {} new, {}", end.usage.prompt_tokens, end.usage.cached_tokens,
                     end.usage.completion_tokens, finish);
}

std::vector<std::string> values_of(const httplib::Request& request, const char* name) {
  std::vector<std::string> values;
  for (size_t i = 0; i < request.get_header_value_count(name); ++i)
    values.push_back(request.get_header_value(name, i));
  return values;
}

// Nothing where the head can be read in two ways.
std::optional<Framing> framing_in(const httplib::Request& request) {
  for (const auto& [name, value] : request.headers)
    if (!is_header_name(name)) return {};
  if (request.get_header_value_count("Host") > 1) return {};
  return framing_of(values_of(request, "Content-Length"), values_of(request, "Transfer-Encoding"));
}

// The HTTP library takes a request for a constant that is none yet.
httplib::Request& changeable(const httplib::Request& request) {
  return const_cast<httplib::Request&>(request);
}

void replace_header(httplib::Response& response, const char* name, const std::string& value) {
  response.headers.erase(name);
  response.set_header(name, value);
}

void set_json(httplib::Response& response, int status, const Json& json) {
  response.status = status;
  response.set_content(to_text(json), "application/json");
}

}  // namespace

// The HTTP library lets five connections wait to be taken up; a burst of clients needs more.
class Listener : public httplib::Server {
 public:
  void widen_backlog() { ::listen(svr_sock_, SOMAXCONN); }
};

class HttpServer::Implementation {
 public:
  explicit Implementation(HttpOptions o)
      : options_(std::move(o)),
        connections_(std::chrono::seconds(options_.head_timeout_s),
                     std::chrono::seconds(options_.body_timeout_s),
                     std::chrono::seconds(options_.keep_alive_s)) {
    http_.new_task_queue = [n = options_.n_threads] {
      return new httplib::ThreadPool(static_cast<size_t>(n));
    };
    // Not SO_REUSEPORT, the library's choice: a second server on the port would share its clients with the
    // first.
    http_.set_socket_options([](socket_t socket) {
      const int yes = 1;
      setsockopt(socket, SOL_SOCKET, SO_REUSEADDR, &yes, sizeof yes);
    });
    http_.set_keep_alive_max_count(10000);
    http_.set_keep_alive_timeout(options_.keep_alive_s);
    http_.set_read_timeout(options_.read_timeout_s);
    http_.set_write_timeout(options_.write_timeout_s);
    http_.set_payload_max_length(options_.max_body_bytes);
    http_.set_tcp_nodelay(true);
    http_.set_pre_routing_handler(
        [this](const auto& request, auto& response) { return admit(request, response); });
    http_.set_error_handler([this](const auto& request, auto& response) { explain(request, response); });
    http_.set_logger([this](const auto& request, const auto& response) { note(request, response); });
    add_routes();
  }

  int bind() {
    if (options_.port == 0) port_ = http_.bind_to_any_port(options_.host.c_str());
    else port_ = http_.bind_to_port(options_.host.c_str(), options_.port) ? options_.port : -1;
    if (port_ < 0)
      fail(Fault::user,
           "{} port {}: cannot be listened on; is another program using it, or is the address not of this "
           "machine? --port and --host take others",
           options_.host, options_.port);
    http_.widen_backlog();
    return port_;
  }

  void listen() {
    std::thread watcher([this] { watch(); });
    http_.listen_after_bind();
    {
      const std::lock_guard lock(mutex_);
      has_ended_ = true;
    }
    changed_.notify_all();
    watcher.join();
  }

  void set_service(Service& service) { service_.store(&service); }

  void stop() {
    {
      const std::lock_guard lock(mutex_);
      if (!stopped_at_) stopped_at_ = Connections::Clock::now();
    }
    changed_.notify_all();
  }

 private:
  using Request = httplib::Request;
  using Response = httplib::Response;
  using Parse = std::function<Call(const Json&, const ServedModel&)>;

  // A thread of its own, until all connections have ended.
  void watch() {
    bool is_told = false;
    std::unique_lock lock(mutex_);
    while (!has_ended_) {
      if (stopped_at_) changed_.wait_for(lock, is_told ? kWatchStopping : kStopPoll);
      else changed_.wait_for(lock, kWatch, [this] { return has_ended_ || stopped_at_; });
      const auto stopped_at = stopped_at_;
      lock.unlock();
      // The HTTP library forgets a stop that comes before its loop runs.
      if (stopped_at && !is_told && http_.is_running()) {
        http_.stop();
        is_told = true;
      }
      connections_.check(port_, stopped_at.has_value(), static_cast<size_t>(options_.n_threads));
      if (stopped_at) {
        const auto late = Connections::Clock::now() - *stopped_at - std::chrono::seconds(options_.drain_s);
        Service* const service = service_.load();
        if (late >= late.zero() && service != nullptr) service->give_up();
        if (late >= kFarewell) Connections::break_all(port_);
      }
      lock.lock();
    }
  }

  // ---- Before and after the routes

  httplib::Server::HandlerResponse admit(const Request& request, Response& response) {
    using Result = httplib::Server::HandlerResponse;
    connections_.begin(client_of(request));
    const std::optional<Framing> framing = framing_in(request);
    if (!framing) {
      hang_up(response, 400);
      refuse(request, response,
             ApiError::bad_request("the head of this request can be read in two ways; it needs names without "
                                   "spaces, one Host, and one Content-Length or Transfer-Encoding: chunked"));
      return Result::Handled;
    }
    // Answers are whole: a part of JSON is of no use, and a thousand parts of it are too much.
    changeable(request).ranges.clear();
    const Result result = admit(request, *framing, response);
    if (ends_connection(request, *framing) || (framing->has_body() && result == Result::Handled))
      replace_header(response, "Connection", "close");
    // Without a length the HTTP library would wait for the end of the connection.
    if (!framing->is_chunked && !request.has_header("Content-Length")) {
      changeable(request).set_header("Content-Length", "0");
      // Nor does it say of a line that it could not read: if that was the length, the body follows.
      if (request.method == "POST" || request.method == "PUT")
        replace_header(response, "Connection", "close");
    }
    return result;
  }

  // A body that nobody reads would be taken for the next request, and the HTTP library is not strict about
  // where a body in chunks ends.
  bool ends_connection(const Request& request, const Framing& framing) const {
    return framing.is_chunked || (framing.has_body() && !takes_body(request));
  }

  httplib::Server::HandlerResponse admit(const Request& request, const Framing& framing, Response& response) {
    using Result = httplib::Server::HandlerResponse;
    const auto refused = [&](const ApiError& error) {
      refuse(request, response, error);
      return Result::Handled;
    };
    const std::string origin = request.get_header_value("Origin");
    const bool is_own = origin.empty() || authority_of(origin) == request.get_header_value("Host");
    const bool is_allowed = !options_.cors.empty() && (options_.cors == "*" || options_.cors == origin);
    if (is_allowed && !origin.empty()) {
      response.set_header("Access-Control-Allow-Origin", options_.cors);
      response.set_header("Vary", "Origin");
      response.set_header("Access-Control-Allow-Headers", "*, Authorization");
      response.set_header("Access-Control-Allow-Methods", "GET, POST, DELETE, OPTIONS");
      response.set_header("Access-Control-Max-Age", "600");
    }
    if (request.method == "OPTIONS" && (is_own || is_allowed)) {
      response.status = 204;
      return Result::Handled;
    }
    // The HTTP library would read the whole body first, and knows no limit of one that comes in chunks.
    const bool is_long = framing.length > options_.max_body_bytes;
    if (is_long || (framing.is_chunked && !takes_body(request))) {
      hang_up(response, is_long ? 413 : 400);
      explain(request, response);
      return Result::Handled;
    }
    const bool is_open = request.path == "/health" || request.path == "/" || request.path == "/favicon.ico";
    if (is_loopback(options_.host) && !is_loopback(host_of(request.get_header_value("Host")))) {
      // A name of another site that was made to point at this machine.
      return refused({403, "permission_error", "host", "",
                      "this server listens on loopback and answers to localhost, 127.0.0.1 and [::1] only"});
    }
    if (!is_own && !is_allowed) {
      // A page of another site must not use a model that listens on this machine.
      return refused({403, "permission_error", "origin", "",
                      "this origin is not allowed; lily serve --cors ORIGIN allows one"});
    }
    if (!options_.api_key.empty() && !is_open && !is_same_key(key_of(request), options_.api_key)) {
      response.set_header("WWW-Authenticate", "Bearer");
      return refused({401, "authentication_error", "invalid_api_key", "",
                      "a valid API key is needed: Authorization: Bearer KEY, or x-api-key"});
    }
    const std::string encoding = request.get_header_value("Content-Encoding");
    if (!encoding.empty() && ascii_lower(encoding) != "identity") {
      return refused({415, "invalid_request_error", "unsupported_encoding", "",
                      fmt::format("Content-Encoding '{}' is not supported; send the body as it is",
                                  printable(encoding, 40))});
    }
    if (service_.load() == nullptr && !is_open) {
      ApiError error(503, "overloaded_error", "loading", "", "the model is being loaded; try again soon");
      error.retry_after_s = kLoadingRetryS;
      return refused(error);
    }
    return Result::Unhandled;
  }

  // What the HTTP library has refused by itself gets a body.
  void explain(const Request& request, Response& response) {
    if (!response.body.empty() || response.status < 400) return;
    const int status = response.status;
    // Its head could not be read. The HTTP library goes on with the connection all the same; its client must
    // not.
    if (request.remote_addr.empty()) replace_header(response, "Connection", "close");
    // A request that was read but has no route is 404 or 400 to the library, by its method.
    if ((status == 404 || status == 400) && !request.path.empty()) {
      const auto methods = routes_.find(route_of(request.path));
      if (methods == routes_.end())
        return refuse(request, response,
                      {404, "not_found_error", "not_found", "", "there is nothing at this path"});
      if (methods->second.find(request.method) == std::string::npos) {
        response.set_header("Allow", methods->second);
        return refuse(request, response,
                      {405, "not_found_error", "method_not_allowed", "",
                       fmt::format("only {} is possible here", methods->second)});
      }
    }
    if (status == 413)
      return refuse(request, response,
                    {413, "request_too_large", "request_too_large", "",
                     fmt::format("the body is longer than {} MiB", options_.max_body_bytes >> 20)});
    if (status == 416)
      return refuse(request, response,
                    {416, "invalid_request_error", "", "",
                     "this Range cannot be; answers are whole, send the request without one"});
    refuse(request, response,
           {status, status < 500 ? "invalid_request_error" : "server_error", "", "",
            status < 500 ? "this is no valid HTTP request" : "the request could not be handled"});
  }

  // Paths that end in an id share a route.
  static std::string route_of(const std::string& path) {
    for (const char* parent : {"/models/", "/responses/"})
      if (const size_t at = path.find(parent); at == 0 || at == 3)  // with or without /v1
        return path.substr(0, at + std::string_view(parent).size()) + "{id}";
    return path;
  }

  // One line a request, without content.
  void note(const Request& request, const Response& response) {
    const Connections::Request told = connections_.end(client_of(request));
    const Outcome outcome = told.outcome.value_or(Outcome{});
    if (Service* service = service_.load(); service != nullptr && !outcome.client_left)
      service->count(outcome.error.empty() ? response.status : 500);
    const auto now = Connections::Clock::now();
    const auto ms = std::chrono::duration_cast<std::chrono::milliseconds>(now - told.begun.value_or(now));
    log(LogLevel::info, "{} {} {} {} {} ms{}", request.remote_addr, printable(request.method, kMaxLogged),
        printable(request.path, kMaxLogged), response.status, ms.count(), shown(outcome));
    // The answer has been sent; what is still coming is no request.
    const std::optional<Framing> framing = framing_in(request);
    const bool is_refused = response.status >= 400 && response.get_header_value("Connection") == "close";
    if (is_refused || !framing || ends_connection(request, *framing))
      Peer::find(request.remote_addr, request.remote_port, port_).hang_up();
  }

  static void refuse(const Request& request, Response& response, const ApiError& error) {
    if (error.retry_after_s > 0) response.set_header("Retry-After", std::to_string(error.retry_after_s));
    const std::string id = new_id("req_");
    if (error.status >= 500) log(LogLevel::error, "{}: {}", id, error.what());
    replace_header(response, "x-request-id", id);
    set_json(response, error.status,
             family_of(request.path) == Family::anthropic ? anthropic_error(error, id) : openai_error(error));
  }

  // ---- Routes

  using Handler = std::function<void(const Request&, Response&)>;

  // Runs the handler; what it throws becomes an error of the path's family.
  httplib::Server::Handler guarded(Handler handler) {
    return [this, handler = std::move(handler)](const Request& request, Response& response) {
      connections_.answering(client_of(request));
      try {
        handler(request, response);
      } catch (const std::exception& e) {
        refuse(request, response, api_error_of(e));
      }
    };
  }

  void get(const std::string& path, Handler handler) {
    routes_[path] = "GET, HEAD";
    http_.Get(path, guarded(std::move(handler)));
  }
  void post(const std::string& path, Handler handler) {
    routes_[path] = "POST";
    http_.Post(path, [this, handler = guarded(std::move(handler))](const Request& request, Response& response,
                                                                   const httplib::ContentReader& read) {
      Request whole = request;
      if (read_body(read, whole, response)) handler(whole, response);
    });
  }

  bool takes_body(const Request& request) const {
    const auto methods = routes_.find(route_of(request.path));
    return request.method == "POST" && methods != routes_.end() && methods->second == "POST";
  }

  // False if it does not come to its end, or not soon enough.
  bool read_body(const httplib::ContentReader& read, Request& request, Response& response) const {
    if (request.is_multipart_form_data()) {
      hang_up(response, 400);
      refuse(request, response, ApiError::bad_request("the body has to be JSON, and not a form"));
      return false;
    }
    bool is_long = false;
    const bool is_whole = read([&](const char* bytes, size_t n) {
      is_long = request.body.size() + n > options_.max_body_bytes;
      if (!is_long) request.body.append(bytes, n);
      return !is_long;
    });
    if (!is_whole) hang_up(response, is_long ? 413 : 400);
    return is_whole;
  }

  // The connection ends with this answer: what comes after it is no request.
  static void hang_up(Response& response, int status) {
    response.status = status;
    replace_header(response, "Connection", "close");
  }

  void post_json(const std::string& path, Json (Service::*make)(const Json&) const) {
    post(path, [this, make](const Request& request, Response& response) {
      set_json(response, 200, (service().*make)(parse_json(request.body)));
    });
  }

  void add_routes() {
    get("/health", [this](const Request&, Response& response) {
      const bool ready = service_.load() != nullptr;
      set_json(response, ready ? 200 : 503, {{"status", ready ? "ready" : "loading"}});
    });
    get("/metrics", [this](const Request&, Response& response) {
      response.set_content(service().metrics(), "text/plain; version=0.0.4");
    });
    get("/cache", [this](const Request&, Response& response) { set_json(response, 200, service().cache()); });
    routes_["/cache"] = "GET, HEAD, DELETE";
    http_.Delete("/cache", guarded([this](const Request&, Response& response) {
                   service().clear_cache();
                   set_json(response, 200, service().cache());
                 }));
    post_json("/tokenize", &Service::tokenize);
    post_json("/detokenize", &Service::detokenize);
    post_json("/apply-template", &Service::apply_template);
    for (const std::string prefix : {"/v1", ""}) {
      get(prefix + "/models",
          [this](const Request&, Response& response) { set_json(response, 200, service().models()); });
      routes_[prefix + "/models/{id}"] = "GET, HEAD";
      http_.Get(prefix + "/models/(.+)", guarded([this](const Request& request, Response& response) {
                  const std::optional<Json> entry = service().model_entry(request.matches[1]);
                  if (!entry)
                    throw ApiError(
                        404, "not_found_error", "model_not_found", "model",
                        fmt::format("there is no model of this name; {} is served", service().model().id));
                  set_json(response, 200, *entry);
                }));
      answers(prefix + "/chat/completions", parse_chat_completion);
      answers(prefix + "/completions", parse_text_completion);
      answers(prefix + "/messages", parse_message);
      post(prefix + "/messages/count_tokens", [this](const Request& request, Response& response) {
        const Json body = parse_json(request.body);
        if (relayed(body, request, response)) return;
        set_json(response, 200, service().count_tokens(parse_count_tokens(body, service().model())));
      });
      add_responses(prefix + "/responses");
    }
    get("/", [](const Request&, Response& response) {
      const std::string nonce = new_id("");
      response.set_header("Content-Security-Policy", page_policy(nonce));
      response.set_header("X-Content-Type-Options", "nosniff");
      response.set_content(chat_page(nonce), "text/html; charset=utf-8");
    });
    get("/favicon.ico", [](const Request&, Response& response) { response.status = 204; });
    get("/openapi.json", [](const Request&, Response& response) {
      response.set_content(std::string(openapi_json()), "application/json");
    });
  }

  // With the answers that are kept.
  void add_responses(const std::string& path) {
    answers(path, [this](const Json& body, const ServedModel& model) {
      return parse_response(body, model, responses_);
    });
    const auto unknown = [](const std::string& id) {
      return ApiError(404, "not_found_error", "response_not_found", "response_id",
                      fmt::format("there is no stored response \"{}\"", printable(id, 80)));
    };
    routes_[path + "/{id}"] = "GET, HEAD, DELETE";
    http_.Get(path + "/([^/]+)", guarded([this, unknown](const Request& request, Response& response) {
                const std::optional<StoredResponse> stored = responses_.find(request.matches[1].str());
                if (!stored) throw unknown(request.matches[1]);
                set_json(response, 200, stored->response);
              }));
    http_.Delete(path + "/([^/]+)", guarded([this, unknown](const Request& request, Response& response) {
                   const std::string id = request.matches[1];
                   if (!responses_.erase(id)) throw unknown(id);
                   set_json(response, 200, {{"id", id}, {"object", "response"}, {"deleted", true}});
                 }));
  }

  void answers(const std::string& path, Parse parse) {
    post(path, [this, parse = std::move(parse)](const Request& request, Response& response) {
      answer(parse, request, response);
    });
  }

  void answer(const Parse& parse, const Request& request, Response& response) {
    const Json body = parse_json(request.body);
    if (relayed(body, request, response)) return;
    Call call = parse(body, service().model());
    engine::AnswerStream stream = service().start(call);
    const Peer peer = Peer::find(request.remote_addr, request.remote_port, port_);
    const std::string id = new_id("req_");
    response.set_header("x-request-id", id);
    if (!call.stream) {
      Outcome outcome;
      const std::optional<Json> whole =
          service().whole(stream, *call.writer, [&] { return peer.is_there(); }, outcome);
      if (whole) set_json(response, 200, *whole);
      connections_.came_to(client_of(request), std::move(outcome));
      return;
    }
    response.set_header("Cache-Control", "no-cache");
    response.set_header("X-Accel-Buffering", "no");  // proxies pass events on as they come
    // The HTTP library copies its callbacks, and a stream cannot be copied.
    struct Job {
      engine::AnswerStream stream;
      std::unique_ptr<AnswerWriter> writer;
    };
    auto job = std::make_shared<Job>(Job{std::move(stream), std::move(call.writer)});
    response.set_chunked_content_provider(
        "text/event-stream",
        [this, job, peer, id, client = client_of(request)](size_t, httplib::DataSink& sink) {
          const auto send = [&](const std::string& bytes) { return sink.write(bytes.data(), bytes.size()); };
          const Outcome outcome =
              service().stream(job->stream, *job->writer, send, [&] { return peer.is_there(); }, id);
          connections_.came_to(client, outcome);
          if (outcome.client_left) return false;
          sink.done();
          return true;
        });
  }

  // Passes a request for another engine's model on to that one; false if the model is the one here.
  bool relayed(const Json& body, const Request& request, Response& response) {
    if (service().upstreams().empty() || !body.is_object()) return false;
    const Json model = body.value("model", Json());
    if (!model.is_string()) return false;
    const auto route = service().upstreams().find(model.get_ref<const std::string&>(), service().model().id);
    if (!route) return false;
    const size_t query = request.target.find('?');
    const std::shared_ptr<Relay> relay = service().upstreams().start(
        *route, {.path = request.path,
                 .query = query == std::string::npos ? "" : request.target.substr(query + 1),
                 .headers = {request.headers.begin(), request.headers.end()},
                 .body = request.body,
                 .wants_stream = body.value("stream", Json()) == true});
    const Peer peer = Peer::find(request.remote_addr, request.remote_port, port_);
    const auto is_there = [peer] { return peer.is_there(); };
    const std::optional<RelayReply> reply = relay->reply(is_there);
    if (!reply) {
      connections_.came_to(client_of(request), Outcome{.client_left = true});
      return true;
    }
    response.status = reply->status;
    for (const auto& [name, value] : reply->headers) response.set_header(name, value);
    if (!reply->is_stream) {
      response.set_content(reply->body, "application/json");
      return true;
    }
    response.set_chunked_content_provider(
        "text/event-stream",
        [this, relay, is_there, client = client_of(request)](size_t, httplib::DataSink& sink) {
          const auto send = [&](const std::string& bytes) { return sink.write(bytes.data(), bytes.size()); };
          const bool is_whole = relay->stream(send, is_there);
          connections_.came_to(client, Outcome{.client_left = relay->ended() == RelayEnd::client_left});
          if (!is_whole) return false;
          sink.done();
          return true;
        });
    return true;
  }

  Service& service() { return *service_.load(); }

  const HttpOptions options_;
  Listener http_;
  int port_ = -1;
  std::atomic<Service*> service_ = nullptr;
  Connections connections_;
  ResponseStore responses_;
  std::map<std::string, std::string> routes_;  // path -> methods

  std::mutex mutex_;  // guards what follows
  std::condition_variable changed_;
  std::optional<Connections::Clock::time_point> stopped_at_;
  bool has_ended_ = false;
};

HttpServer::HttpServer(HttpOptions options)
    : implementation_(std::make_unique<Implementation>(std::move(options))) {}
HttpServer::~HttpServer() = default;
int HttpServer::bind() { return implementation_->bind(); }
void HttpServer::listen() { implementation_->listen(); }
void HttpServer::set_service(Service& service) { implementation_->set_service(service); }
void HttpServer::stop() { implementation_->stop(); }

}  // namespace lily::server
