#include <algorithm>
#include <charconv>

#include "base/curl.h"
#include "base/printable.h"
#include "hub/http.h"

namespace lily::hub {
namespace {

constexpr long kConnectTimeoutS = 20;
constexpr long kStallS = 30;  // a transfer that stands still for so long is ended
constexpr long kProxyWantsPassword = 407;
constexpr long kReceiveBytes = 256L << 10;

struct CurlTransfer {
  CURL* handle;
  const HttpClient::OnBody& on_body;
  const std::function<bool()>& stop;
  HttpReply reply;
};

int64_t number(std::string_view text) {
  int64_t value = -1;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  return error == std::errc() && end == text.data() + text.size() ? value : -1;
}

// "bytes 100-199/1000"
void read_content_range(std::string_view value, HttpReply& reply) {
  const size_t dash = value.find('-'), slash = value.find('/');
  if (value.substr(0, 6) != "bytes " || dash == value.npos || slash == value.npos || slash < dash) return;
  reply.range_begin = number(value.substr(6, dash - 6));
  reply.range_total = number(value.substr(slash + 1));
}

size_t on_header(char* bytes, size_t size, size_t n, void* user) {
  CurlTransfer& transfer = *static_cast<CurlTransfer*>(user);
  const std::string_view line(bytes, size * n);
  if (line.substr(0, 5) == "HTTP/") {  // also of a proxy's answer: the last one counts
    transfer.reply = HttpReply{};
    return line.size();
  }
  const size_t colon = line.find(':');
  if (colon == line.npos) return line.size();
  const std::string name = ascii_lower(line.substr(0, colon));
  const std::string_view value = trimmed(line.substr(colon + 1));
  if (name == "content-range") read_content_range(value, transfer.reply);
  if (name == "x-error-code") transfer.reply.error_code = printable(value, 64);
  return line.size();
}

size_t on_bytes(char* bytes, size_t size, size_t n, void* user) {
  CurlTransfer& transfer = *static_cast<CurlTransfer*>(user);
  if (transfer.reply.status == 0) {
    long status = 0;
    curl_easy_getinfo(transfer.handle, CURLINFO_RESPONSE_CODE, &status);
    transfer.reply.status = static_cast<int>(status);
  }
  return transfer.on_body(transfer.reply, std::string_view(bytes, size * n)) ? size * n : 0;
}

int on_progress(void* user, curl_off_t, curl_off_t, curl_off_t, curl_off_t) {
  return static_cast<CurlTransfer*>(user)->stop() ? 1 : 0;
}

class CurlClient : public HttpClient {
 public:
  explicit CurlClient(std::string ca_file) : ca_file_(std::move(ca_file)) {
    start_curl();
    handle_ = curl_easy_init();
    if (handle_ == nullptr) fail(Fault::device, "libcurl cannot be started; is there memory left?");
  }
  ~CurlClient() override { curl_easy_cleanup(handle_); }
  CurlClient(const CurlClient&) = delete;
  CurlClient& operator=(const CurlClient&) = delete;

  HttpReply get(const HttpRequest& request, const OnBody& on_body,
                const std::function<bool()>& stop) override {
    CurlTransfer transfer{handle_, on_body, stop, {}};
    char failure[CURL_ERROR_SIZE] = "";
    curl_easy_reset(handle_);  // keeps the connections
    prepare_curl(handle_, request.url, ca_file_, failure);
    if (request.is_direct) set(CURLOPT_PROXY, "");
    set(CURLOPT_CONNECTTIMEOUT, kConnectTimeoutS);
    set(CURLOPT_LOW_SPEED_LIMIT, 1L);
    set(CURLOPT_LOW_SPEED_TIME, kStallS);
    set(CURLOPT_BUFFERSIZE, kReceiveBytes);
    set(CURLOPT_HEADERFUNCTION, on_header);
    set(CURLOPT_HEADERDATA, &transfer);
    set(CURLOPT_WRITEFUNCTION, on_bytes);
    set(CURLOPT_WRITEDATA, &transfer);
    set(CURLOPT_NOPROGRESS, 0L);
    set(CURLOPT_XFERINFOFUNCTION, on_progress);
    set(CURLOPT_XFERINFODATA, &transfer);
    const std::string range = fmt::format("{}-{}", request.begin, request.end - 1);
    if (request.end > 0) set(CURLOPT_RANGE, range.c_str());
    CurlHeaders headers;
    if (!request.token.empty()) headers.add("Authorization: Bearer " + request.token);
    set(CURLOPT_HTTPHEADER, headers.get());
    const CURLcode code = curl_easy_perform(handle_);

    HttpReply reply = std::move(transfer.reply);
    long status = 0, tunnel_status = 0;
    curl_off_t retry_after_s = 0;
    char* location = nullptr;
    curl_easy_getinfo(handle_, CURLINFO_RESPONSE_CODE, &status);
    curl_easy_getinfo(handle_, CURLINFO_HTTP_CONNECTCODE, &tunnel_status);
    curl_easy_getinfo(handle_, CURLINFO_RETRY_AFTER, &retry_after_s);
    curl_easy_getinfo(handle_, CURLINFO_REDIRECT_URL, &location);
    reply.status = static_cast<int>(status);
    reply.retry_after_s = static_cast<int>(std::clamp<curl_off_t>(retry_after_s, 0, 1 << 30));
    if (location != nullptr && status >= 300 && status < 400) reply.location = location;
    reply.is_final = code == CURLE_PEER_FAILED_VERIFICATION || code == CURLE_SSL_CACERT_BADFILE ||
                     code == CURLE_URL_MALFORMAT || code == CURLE_COULDNT_RESOLVE_PROXY;
    reply.is_cancelled = code == CURLE_ABORTED_BY_CALLBACK;
    if (code != CURLE_OK) reply.failure = printable(*failure != '\0' ? failure : curl_easy_strerror(code));
    if (status == kProxyWantsPassword || (status == 0 && tunnel_status == kProxyWantsPassword)) {
      reply.is_final = true;
      reply.failure =
          "the proxy wants a name and a password; put them into its address, as in "
          "https_proxy=http://NAME:PASSWORD@PROXY";
    }
    return reply;
  }

 private:
  template <typename Value>
  void set(CURLoption option, Value value) {
    set_curl(handle_, option, value);
  }

  const std::string ca_file_;
  CURL* handle_ = nullptr;
};

}  // namespace

std::unique_ptr<HttpClient> make_http_client(const std::string& ca_file) {
  return std::make_unique<CurlClient>(ca_file);
}

std::string origin_of(const std::string& url) {
  const CurlUrl parts(url);
  return parts.is_web() && !parts.host().empty() ? parts.origin() : "";
}

}  // namespace lily::hub
