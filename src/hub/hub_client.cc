#include "hub/hub_client.h"

#include <algorithm>
#include <chrono>
#include <exception>
#include <thread>

#include "base/error.h"
#include "base/log.h"
#include "base/printable.h"

namespace lily::hub {
namespace {

constexpr int kMaxRedirects = 8;
constexpr int kRangeRefused = 416;
constexpr double kMaxBackoffS = 30;
constexpr int kMaxListingRetries = 3;  // somebody without a network wants to know at once
constexpr int kMaxRetryAfterS = 300;   // longer than that nobody wants a program to sit still

// This machine, by names that no other has.
bool is_local(std::string_view origin) {
  const std::string_view authority = origin.substr(std::min(origin.size(), origin.find("://") + 3));
  for (const char* start : {"127.0.0.1:", "localhost:", "[::1]:"})
    if (authority.starts_with(start)) return true;
  return false;
}

}  // namespace

HubClient::HubClient(HubAddress address, std::function<bool()> stop)
    : address_(std::move(address)), stop_(std::move(stop)), http_(make_http_client(address_.ca_file)) {
  while (!address_.endpoint.empty() && address_.endpoint.back() == '/') address_.endpoint.pop_back();
  origin_ = origin_of(address_.endpoint);
  if (origin_.empty())
    fail(Fault::user, "HF_ENDPOINT is {}, which is not an http or https address",
         printable(address_.endpoint.substr(0, address_.endpoint.find('@'))));
  for (const char c : address_.token)
    if (c <= ' ' || c > '~')
      fail(Fault::user,
           "the access token has a character that no token has; look at HF_TOKEN or the token file");
  withholds_token_ = !address_.token.empty() && origin_.starts_with("http://") && !is_local(origin_);
  if (withholds_token_) address_.token.clear();
}

HttpReply HubClient::follow(HttpRequest request, const HttpClient::OnBody& on_body) {
  for (int n = 0; n <= kMaxRedirects; ++n) {
    const std::string origin = origin_of(request.url);
    answered_by_endpoint_ = origin == origin_;
    // What may be said to this machine in the clear must not pass through another one.
    request.is_direct = is_local(origin);
    request.token = answered_by_endpoint_ ? address_.token : "";
    HttpReply reply = http_->get(request, on_body, stop_);
    if (reply.is_cancelled || stop_()) throw Stopped{};
    if (reply.location.empty()) return reply;
    const std::string next = origin_of(reply.location);
    if (next.empty() || (origin.starts_with("https:") && !next.starts_with("https:")))
      fail(Fault::model, "{} redirects to an address that is not https; nothing was fetched from there",
           origin);
    request.url = reply.location;
  }
  fail(Fault::model, "{} redirects more than {} times", origin_, kMaxRedirects);
}

void HubClient::wait(double seconds) {
  using Clock = std::chrono::steady_clock;
  const auto end = Clock::now() + std::chrono::duration<double>(seconds);
  while (Clock::now() < end) {
    if (stop_()) throw Stopped{};
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
  }
}

void HubClient::consider(const HttpReply& reply, const std::string& what, const std::string& name,
                         int n_failures, int n_retries) {
  const int status = reply.status;
  if (answered_by_endpoint_ && reply.failure.empty()) {
    if (reply.error_code == "GatedRepo" || status == 403)
      fail(Fault::model,
           "{} is gated or private: accept its terms at {}/{} and set HF_TOKEN to a token of that account "
           "(HTTP {})",
           name, origin_, name, status);
    if (status == 401)  // the hub's answer for what does not exist, too, when nobody is logged in
      fail(Fault::model, "{} {} (HTTP 401)", name,
           address_.token.empty()
               ? "does not exist or is private: look at its spelling, or set HF_TOKEN to a token that may "
                 "read it"
               : "may not be read with this token: look at the name's spelling and at HF_TOKEN");
    if (reply.error_code == "RevisionNotFound")
      fail(Fault::model, "{} has no such revision (HTTP {})", name, status);
    if (status == 404) fail(Fault::model, "{} is not on {} (HTTP 404); look at its spelling", what, origin_);
  }
  // Other hosts refuse when an address they signed has expired; asking the hub again gives a new one.
  const bool is_worth_it = status == 0 || !reply.failure.empty() || status == 408 || status == 429 ||
                           status >= 500 || (!answered_by_endpoint_ && status >= 400);
  const std::string problem = !reply.failure.empty() ? reply.failure : fmt::format("HTTP {}", status);
  if (reply.is_final) fail(Fault::device, "{}: no answer from {}: {}", what, origin_, problem);
  if (!is_worth_it) fail(Fault::device, "{}: {} says: {}", what, origin_, problem);
  if (n_failures > n_retries)
    fail(Fault::device, "{}: {}, after {}; what has arrived is kept: run lily pull again", what, problem,
         counted(n_failures, "attempt"));
  if (reply.retry_after_s > kMaxRetryAfterS)
    fail(Fault::device, "{}: the hub asks to wait {} s ({}); run lily pull again then", what,
         reply.retry_after_s, problem);
  const double backoff_s =
      std::min(kMaxBackoffS, address_.backoff_s * static_cast<double>(1 << std::min(n_failures - 1, 20)));
  const double wait_s = reply.retry_after_s > 0 ? reply.retry_after_s : backoff_s;
  log(LogLevel::info, "{}: {}; again in {:.1f} s", what, problem, wait_s);
  wait(wait_s);
}

std::string HubClient::listing(const std::string& name, const std::string& revision, uint64_t max_bytes) {
  const HttpRequest request{
      .url = fmt::format("{}/api/models/{}/revision/{}?blobs=true", address_.endpoint, name, revision)};
  for (int n_failures = 1;; ++n_failures) {
    std::string text;
    bool is_too_long = false;
    const HttpReply reply = follow(request, [&](const HttpReply&, std::string_view bytes) {
      is_too_long = text.size() + bytes.size() > max_bytes;
      if (!is_too_long) text += bytes;
      return !is_too_long;
    });
    if (is_too_long)
      fail(Fault::model, "{}: the hub's description has more than {} bytes; is HF_ENDPOINT right?", name,
           max_bytes);
    if (reply.status == 200 && reply.failure.empty()) return text;
    consider(reply, name, name, n_failures, std::min(address_.n_retries, kMaxListingRetries));
  }
}

void HubClient::fetch(const std::string& name, const std::string& commit, const std::string& file,
                      uint64_t n_bytes, uint64_t begin, uint64_t end,
                      const std::function<void(std::string_view)>& on_bytes) {
  HttpRequest request{.url = fmt::format("{}/{}/resolve/{}/{}", address_.endpoint, name, commit, file)};
  uint64_t at = begin;
  for (int n_failures = 1; at < end; ++n_failures) {
    const uint64_t before = at;
    request.begin = at;
    request.end = end;
    uint64_t body_at = 0;  // place in the file of the next byte of the body
    bool is_first = true, is_foreign = false;
    std::exception_ptr error;
    const HttpReply reply = follow(request, [&](const HttpReply& head, std::string_view bytes) {
      if (head.status != 206 && head.status != 200) return true;  // the page of an error or a redirect
      if (is_first) {
        is_first = false;
        // A server that does not know ranges sends the whole file: what is not missing is dropped.
        body_at = head.status == 206 ? static_cast<uint64_t>(head.range_begin) : 0;
        is_foreign = head.status == 206 && (head.range_begin != static_cast<int64_t>(before) ||
                                            head.range_total != static_cast<int64_t>(n_bytes));
        if (is_foreign) return false;
      }
      if (body_at < at) {
        const auto n = static_cast<size_t>(std::min<uint64_t>(at - body_at, bytes.size()));
        body_at += n;
        bytes.remove_prefix(n);
      }
      bytes = bytes.substr(0, static_cast<size_t>(std::min<uint64_t>(bytes.size(), end - at)));
      if (bytes.empty()) return at < end;
      try {
        on_bytes(bytes);
      } catch (...) {  // must not fly through C code
        error = std::current_exception();
        return false;
      }
      at += bytes.size();
      body_at += bytes.size();
      return head.status == 206 || at < end;
    });
    if (error) std::rethrow_exception(error);
    if (at == end) return;
    if (reply.status == kRangeRefused)
      fail(Fault::model,
           "{}: the hub says that it has {} bytes and yet refuses those from {} on (HTTP 416); what has "
           "arrived is kept: run lily pull again later",
           file, n_bytes, at);
    if (at > before) n_failures = 1;
    HttpReply judged = reply;
    if (is_foreign) judged.failure = "the answer has other bytes than those asked for";
    else if (judged.failure.empty() && (judged.status == 206 || judged.status == 200))
      judged.failure = "the answer ends too early";
    consider(judged, file, name, n_failures, address_.n_retries);
  }
}

}  // namespace lily::hub
