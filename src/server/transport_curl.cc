#include <charconv>
#include <mutex>
#include <string_view>
#include <utility>

#include "base/curl.h"
#include "base/printable.h"
#include "server/transport.h"

namespace lily::server {
namespace {

constexpr size_t kMaxHeadBytes = 256 << 10;
constexpr size_t kMaxIdle = 16;  // handles that are kept, each with its connections

// A multi handle of its own for each transfer: the thread that writes to the client also reads from the other
// server, and nothing is shared while it does.
struct Handle {
  CURLM* multi = nullptr;
  CURL* easy = nullptr;
};

void release(const Handle& handle) {
  curl_easy_cleanup(handle.easy);
  curl_multi_cleanup(handle.multi);
}

class HandlePool {
 public:
  HandlePool() = default;
  ~HandlePool() {
    for (const Handle& handle : idle_) release(handle);
  }
  HandlePool(const HandlePool&) = delete;
  HandlePool& operator=(const HandlePool&) = delete;

  Handle take() {
    {
      const std::lock_guard lock(mutex_);
      if (!idle_.empty()) return pop();
    }
    const Handle handle{curl_multi_init(), curl_easy_init()};
    if (handle.multi == nullptr || handle.easy == nullptr) {
      release(handle);
      fail(Fault::device, "libcurl cannot be started; is there memory left?");
    }
    return handle;
  }
  void give_back(const Handle& handle) {
    curl_easy_reset(handle.easy);  // forgets the key, keeps the connections
    const std::lock_guard lock(mutex_);
    if (idle_.size() < kMaxIdle) idle_.push_back(handle);
    else release(handle);
  }

 private:
  Handle pop() {
    const Handle handle = idle_.back();
    idle_.pop_back();
    return handle;
  }

  std::mutex mutex_;
  std::vector<Handle> idle_;
};

// A handle for as long as a transfer takes.
class Lease {
 public:
  explicit Lease(std::shared_ptr<HandlePool> pool) : pool_(std::move(pool)), handle_(pool_->take()) {}
  ~Lease() {
    curl_multi_remove_handle(handle_.multi, handle_.easy);  // closes a connection that is in use
    pool_->give_back(handle_);
  }
  Lease(const Lease&) = delete;
  Lease& operator=(const Lease&) = delete;
  const Handle* operator->() const { return &handle_; }

 private:
  const std::shared_ptr<HandlePool> pool_;
  const Handle handle_;
};

TransferEnd end_of(CURLcode code, bool has_head) {
  switch (code) {
    case CURLE_OK:
      return TransferEnd::done;
    case CURLE_PEER_FAILED_VERIFICATION:
    case CURLE_SSL_CACERT_BADFILE:
    case CURLE_SSL_ISSUER_ERROR:
      return TransferEnd::not_trusted;
    case CURLE_OPERATION_TIMEDOUT:
      return TransferEnd::timed_out;
    case CURLE_COULDNT_RESOLVE_HOST:
    case CURLE_COULDNT_RESOLVE_PROXY:
    case CURLE_COULDNT_CONNECT:
      return TransferEnd::unreachable;
    default:
      return has_head ? TransferEnd::broke_off : TransferEnd::unreachable;
  }
}

class CurlTransfer : public Transfer {
 public:
  CurlTransfer(std::shared_ptr<HandlePool> pool, TransferRequest request,
               std::chrono::milliseconds connect_timeout, const std::string& ca_file)
      : request_(std::move(request)), handle_(std::move(pool)) {
    for (const std::string& line : request_.headers) headers_.add(line);
    headers_.add("Expect:");  // long bodies would wait to be asked for
    prepare_curl(handle_->easy, request_.url, ca_file, failure_);
    set(CURLOPT_CONNECTTIMEOUT_MS, static_cast<long>(connect_timeout.count()));
    set(CURLOPT_TCP_NODELAY, 1L);
    set(CURLOPT_SUPPRESS_CONNECT_HEADERS, 1L);
    set(CURLOPT_POST, 1L);
    set(CURLOPT_POSTFIELDSIZE_LARGE, static_cast<curl_off_t>(request_.body.size()));
    set(CURLOPT_POSTFIELDS, request_.body.data());
    set(CURLOPT_HTTPHEADER, headers_.get());
    set(CURLOPT_HEADERFUNCTION, on_header);
    set(CURLOPT_HEADERDATA, this);
    set(CURLOPT_WRITEFUNCTION, on_bytes);
    set(CURLOPT_WRITEDATA, this);
    if (curl_multi_add_handle(handle_->multi, handle_->easy) != CURLM_OK)
      fail(Fault::device, "libcurl cannot start a transfer; is there memory left?");
  }
  CurlTransfer(const CurlTransfer&) = delete;
  CurlTransfer& operator=(const CurlTransfer&) = delete;

  void wait(std::chrono::milliseconds most) override {
    if (end_ != TransferEnd::none || !bytes_.empty()) return;
    const bool had_head = has_head_;
    perform();
    if (end_ != TransferEnd::none || !bytes_.empty() || has_head_ != had_head) return;
    curl_multi_poll(handle_->multi, nullptr, 0, static_cast<int>(most.count()), nullptr);
    perform();
  }
  const TransferHead* head() const override { return has_head_ ? &head_ : nullptr; }
  std::string take() override { return std::exchange(bytes_, {}); }
  TransferEnd ended() const override { return end_; }
  std::string failure() const override { return why_; }

 private:
  template <typename Value>
  void set(CURLoption option, Value value) {
    set_curl(handle_->easy, option, value);
  }

  void perform() {
    int n_running = 0, n_left = 0;
    curl_multi_perform(handle_->multi, &n_running);
    while (const CURLMsg* message = curl_multi_info_read(handle_->multi, &n_left)) {
      if (message->msg != CURLMSG_DONE) continue;
      const CURLcode code = message->data.result;
      end_ = end_of(code, has_head_);
      if (code == CURLE_OK && !has_head_) end_ = TransferEnd::broke_off;
      if (end_ != TransferEnd::done && why_.empty())
        why_ = printable(*failure_ != '\0' ? failure_ : curl_easy_strerror(code));
    }
  }

  static size_t on_header(char* bytes, size_t size, size_t n, void* user) {
    CurlTransfer& self = *static_cast<CurlTransfer*>(user);
    return self.read_header({bytes, size * n}) ? size * n : 0;
  }

  bool read_header(std::string_view line) {
    n_head_bytes_ += line.size();
    if (n_head_bytes_ > kMaxHeadBytes) {
      why_ = "the head of the answer is longer than 256 KiB";
      return false;
    }
    if (has_head_) return true;  // trailers
    if (line.starts_with("HTTP/")) {
      head_ = {};
      const size_t space = line.find(' ');
      if (space != line.npos)
        std::from_chars(line.data() + space + 1, line.data() + line.size(), head_.status);
    } else if (const size_t colon = line.find(':'); colon != line.npos) {
      head_.headers[ascii_lower(line.substr(0, colon))] = trimmed(line.substr(colon + 1));
    } else if (trimmed(line).empty() && head_.status >= 200) {  // an interim answer is none
      has_head_ = true;
    }
    return true;
  }

  static size_t on_bytes(char* bytes, size_t size, size_t n, void* user) {
    static_cast<CurlTransfer*>(user)->bytes_.append(bytes, size * n);
    return size * n;
  }

  const TransferRequest request_;  // curl reads the body from here
  CurlHeaders headers_;
  char failure_[CURL_ERROR_SIZE] = "";
  TransferHead head_;
  bool has_head_ = false;
  size_t n_head_bytes_ = 0;
  std::string bytes_, why_;
  TransferEnd end_ = TransferEnd::none;
  const Lease handle_;  // goes first, what it points to is still there then
};

class CurlTransport : public Transport {
 public:
  CurlTransport(std::chrono::milliseconds connect_timeout, std::string ca_file)
      : connect_timeout_(connect_timeout), ca_file_(std::move(ca_file)) {
    start_curl();
  }
  std::unique_ptr<Transfer> post(TransferRequest request) override {
    return std::make_unique<CurlTransfer>(pool_, std::move(request), connect_timeout_, ca_file_);
  }

 private:
  const std::chrono::milliseconds connect_timeout_;
  const std::string ca_file_;
  const std::shared_ptr<HandlePool> pool_ = std::make_shared<HandlePool>();
};

}  // namespace

std::unique_ptr<Transport> make_transport(std::chrono::milliseconds connect_timeout,
                                          const std::string& ca_file) {
  return std::make_unique<CurlTransport>(connect_timeout, ca_file);
}

std::optional<UrlParts> url_parts(const std::string& text) {
  const CurlUrl url(text);
  if (!url.is_web()) return {};
  UrlParts parts;
  parts.scheme = url.scheme();
  parts.host = url.host();
  parts.path = url.part(CURLUPART_PATH);
  while (parts.path.ends_with('/')) parts.path.pop_back();
  parts.origin = url.origin();
  parts.is_bare = url.part(CURLUPART_USER).empty() && url.part(CURLUPART_PASSWORD).empty() &&
                  url.part(CURLUPART_QUERY).empty() && url.part(CURLUPART_FRAGMENT).empty();
  return parts;
}

}  // namespace lily::server
