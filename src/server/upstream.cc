#include "server/upstream.h"

#include <algorithm>
#include <set>

#include "base/ascii.h"
#include "base/error.h"
#include "base/printable.h"
#include "server/access.h"

namespace lily::server {
namespace {

constexpr size_t kMaxNameBytes = 200;
constexpr size_t kMaxViaBytes = 1000;  // a request that has passed so many servers goes in a circle
constexpr size_t kMaxPassedBytes = 2000;
// Headers of the client that other engines may need. Its key and its cookies are for this server alone.
constexpr const char* kPassedHeaders[] = {"anthropic-version", "anthropic-beta", "openai-beta"};

bool is_visible(std::string_view text, char least = '!') {
  return std::all_of(text.begin(), text.end(), [least](char c) { return c >= least && c <= '~'; });
}

// The position behind the string that begins at `at`.
size_t end_of_string(std::string_view json, size_t at) {
  for (++at; json[at] != '"'; ++at)
    if (json[at] == '\\') ++at;
  return at + 1;
}

}  // namespace

std::string with_model(std::string_view object, std::string_view model) {
  int depth = 0;
  bool is_value = false;  // of the member "model"
  for (size_t at = 0; at < object.size(); ++at) {
    const char c = object[at];
    if (c == '{' || c == '[') ++depth;
    if (c == '}' || c == ']') --depth;
    if (c != '"') continue;
    const size_t end = end_of_string(object, at);
    const std::string_view text = object.substr(at, end - at);
    if (is_value)
      return std::string(object.substr(0, at)) + to_text(Json(model)) + std::string(object.substr(end));
    const size_t next = object.find_first_not_of(" \t\r\n", end);
    is_value = depth == 1 && object[next] == ':' && Json::parse(text) == "model";
    at = end - 1;
  }
  return std::string(object);
}

std::string key_variable_of(std::string_view name) {
  std::string out = "LILY_UPSTREAM_KEY_";
  for (const char c : name) {
    const bool is_lower = c >= 'a' && c <= 'z';
    const bool is_kept = (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9');
    out += is_lower ? static_cast<char>(c - 32) : is_kept ? c : '_';
  }
  return out;
}

Upstream parse_upstream(const std::string& text) {
  const size_t equals = text.find('=');
  const std::string name = text.substr(0, equals);
  if (equals == text.npos || name.empty() || name.size() > kMaxNameBytes || !is_visible(name))
    fail(Fault::user, "--upstream {}: this is not NAME=URL, as in big=http://gpu:8000/v1", printable(text));
  // What the URL says may be secret, so it is not repeated.
  const std::optional<UrlParts> url = is_visible(text) ? url_parts(text.substr(equals + 1)) : std::nullopt;
  if (!url) fail(Fault::user, "--upstream {}: behind = there is no http or https address", name);
  if (!url->is_bare)
    fail(Fault::user,
         "--upstream {}: the address must have no user, password, query or fragment; a key is read from the "
         "environment, {}",
         name, key_variable_of(name));
  return {.name = name,
          .base = url->origin + (url->path.empty() ? "/v1" : url->path),
          .key = {},
          .is_key_in_clear = url->scheme == "http" && !is_loopback(url->host)};
}

void check_upstreams(const std::vector<Upstream>& upstreams) {
  std::set<std::string> names, variables;
  for (const Upstream& upstream : upstreams) {
    const std::string variable = key_variable_of(upstream.name);
    if (!names.insert(upstream.name).second)
      fail(Fault::user, "--upstream {}: this name is given twice", upstream.name);
    if (!variables.insert(variable).second)
      fail(Fault::user, "--upstream {}: the key of another upstream has the same variable, {}; rename one",
           upstream.name, variable);
    if (!is_visible(upstream.key)) fail(Fault::user, "{} has a character that no key has", variable);
  }
}

Upstreams::Upstreams(UpstreamOptions options) : options_(std::move(options)), id_(new_id("lily-")) {
  for (size_t i = 0; i < options_.upstreams.size(); ++i) counters_.push_back(std::make_unique<Counters>());
  if (!empty()) transport_ = make_transport(options_.connect_timeout, options_.ca_file);
}

Upstreams::~Upstreams() = default;

std::optional<Upstreams::Route> Upstreams::find(std::string_view model, std::string_view local_model) const {
  if (model == local_model) return {};
  std::optional<Route> best;
  size_t best_size = 0;
  for (size_t i = 0; i < options_.upstreams.size(); ++i) {
    const std::string& name = options_.upstreams[i].name;
    if (model == name) return Route{i, {}};
    if (model.size() > name.size() + 1 && model.starts_with(name) && model[name.size()] == '/' &&
        name.size() > best_size) {
      best = Route{i, std::string(model.substr(name.size() + 1))};
      best_size = name.size();
    }
  }
  return best;
}

std::string Upstreams::via_of(const RelayRequest& request) const {
  std::string via;
  for (const auto& [name, value] : request.headers)
    if (ascii_lower(name) == "via") via += value + ", ";
  if (via.find(id_) != via.npos || via.size() > kMaxViaBytes)
    throw ApiError(508, "server_error", "upstream_loop", "model",
                   "this request has been here before: an --upstream leads back to this server");
  return (is_visible(via, ' ') ? via : "") + "1.1 " + id_;
}

std::unique_ptr<Relay> Upstreams::start(const Route& route, const RelayRequest& request) {
  const Upstream& upstream = options_.upstreams[route.index];
  constexpr std::string_view kVersion = "/v1";
  std::string path = request.path;
  if (path.starts_with("/v1/")) path.erase(0, kVersion.size());
  const Api api = api_of(path);
  TransferRequest out;
  out.url = upstream.base + path;
  if (!request.query.empty() && is_visible(request.query)) out.url += "?" + request.query;
  out.headers = {"Content-Type: application/json", "Via: " + via_of(request)};
  if (!upstream.key.empty()) out.headers.push_back("Authorization: Bearer " + upstream.key);
  for (const auto& [name, value] : request.headers) {
    const bool is_wanted = std::find(std::begin(kPassedHeaders), std::end(kPassedHeaders),
                                     ascii_lower(name)) != std::end(kPassedHeaders);
    if (is_wanted && !value.empty() && value.size() <= kMaxPassedBytes && is_visible(value, ' '))
      out.headers.push_back(ascii_lower(name) + ": " + value);
  }
  out.body = route.model.empty() ? std::string(request.body) : with_model(request.body, route.model);
  Counters& counters = *counters_[route.index];
  return std::make_unique<Relay>(transport_->post(std::move(out)),
                                 Relay::Options{.upstream = upstream.name,
                                                .address = upstream.base,
                                                .key_variable = key_variable_of(upstream.name),
                                                .api = api,
                                                .wants_stream = request.wants_stream,
                                                .limits = options_.limits,
                                                .on_end = [&counters](RelayEnd end, const RelayUsage& usage) {
                                                  counters.prompt_tokens += usage.prompt_tokens;
                                                  counters.cached_tokens += usage.cached_tokens;
                                                  counters.completion_tokens += usage.completion_tokens;
                                                  ++(end == RelayEnd::done     ? counters.n_done
                                                     : end == RelayEnd::failed ? counters.n_failed
                                                                               : counters.n_left);
                                                }});
}

std::string Upstreams::label(size_t index) const {
  std::string out;
  for (const char c : options_.upstreams[index].name) {
    if (c == '"' || c == '\\') out += '\\';
    out += c;
  }
  return out;
}

std::string Upstreams::metrics() const {
  if (empty()) return {};
  std::string out;
  const auto begin = [&](const char* name, const char* help) {
    out += fmt::format("# HELP lily_upstream_{} {}\n# TYPE lily_upstream_{} counter\n", name, help, name);
  };
  begin("requests_total", "Requests passed on to other engines by result.");
  for (size_t i = 0; i < counters_.size(); ++i) {
    const auto add = [&](const char* result, int64_t n) {
      out += fmt::format("lily_upstream_requests_total{{upstream=\"{}\",result=\"{}\"}} {}\n", label(i),
                         result, n);
    };
    add("ok", counters_[i]->n_done);
    add("failed", counters_[i]->n_failed);
    add("client_left", counters_[i]->n_left);
  }
  const auto tokens = [&](const char* name, const char* help, std::atomic<int64_t> Counters::* counter) {
    begin(name, help);
    for (size_t i = 0; i < counters_.size(); ++i)
      out += fmt::format("lily_upstream_{}{{upstream=\"{}\"}} {}\n", name, label(i),
                         ((*counters_[i]).*counter).load());
  };
  tokens("prompt_tokens_total", "Tokens of prompts, as far as the other engine tells; cached ones included.",
         &Counters::prompt_tokens);
  tokens("cached_tokens_total", "Of these, tokens that the other engine had in its cache.",
         &Counters::cached_tokens);
  tokens("completion_tokens_total", "Tokens written, as far as the other engine tells.",
         &Counters::completion_tokens);
  return out;
}

}  // namespace lily::server
