// What every user of libcurl needs of it: handles that are set up alike, headers and addresses that free
// themselves. Only files that are compiled where libcurl is found include this.
//
// Each handle and each list is used by one thread at a time.
#pragma once

#include <curl/curl.h>
#include <fmt/format.h>

#include <memory>
#include <mutex>
#include <string>

#include "base/ascii.h"
#include "base/error.h"

namespace lily {

// To be called before the first handle is made, as often as one likes.
inline void start_curl() {
  static std::once_flag once;
  std::call_once(once, [] { curl_global_init(CURL_GLOBAL_DEFAULT); });
}

template <typename Value>
void set_curl(CURL* handle, CURLoption option, Value value) {
  const CURLcode code = curl_easy_setopt(handle, option, value);
  if (code != CURLE_OK) fail(Fault::device, "libcurl refuses an option: {}", curl_easy_strerror(code));
}

// http and https only, no redirects, no password files, no signals; what went wrong is written to `failure`
// (CURL_ERROR_SIZE bytes), which outlives the transfer. `ca_file`: certificates that are trusted instead of
// the system's; empty: those.
inline void prepare_curl(CURL* handle, const std::string& url, const std::string& ca_file, char* failure) {
  set_curl(handle, CURLOPT_URL, url.c_str());
  set_curl(handle, CURLOPT_ERRORBUFFER, failure);
  set_curl(handle, CURLOPT_USERAGENT, "lily");
  set_curl(handle, CURLOPT_NOSIGNAL, 1L);
  set_curl(handle, CURLOPT_FOLLOWLOCATION, 0L);
#if LIBCURL_VERSION_NUM >= 0x075500
  set_curl(handle, CURLOPT_PROTOCOLS_STR, "http,https");
#else
  set_curl(handle, CURLOPT_PROTOCOLS, static_cast<long>(CURLPROTO_HTTP | CURLPROTO_HTTPS));
#endif
  if (!ca_file.empty()) {
    set_curl(handle, CURLOPT_CAINFO, ca_file.c_str());
    // A folder of certificates that the library was built with counts besides.
    set_curl(handle, CURLOPT_CAPATH, static_cast<const char*>(nullptr));
  }
  set_curl(handle, CURLOPT_NETRC, static_cast<long>(CURL_NETRC_IGNORED));
}

class CurlHeaders {
 public:
  void add(const std::string& line) {
    curl_slist* const longer = curl_slist_append(list_.get(), line.c_str());
    if (longer == nullptr) fail(Fault::device, "libcurl cannot take a header; is there memory left?");
    static_cast<void>(list_.release());  // it is the end of `longer`
    list_.reset(longer);
  }
  curl_slist* get() const { return list_.get(); }

 private:
  struct Free {
    void operator()(curl_slist* list) const { curl_slist_free_all(list); }
  };
  std::unique_ptr<curl_slist, Free> list_;
};

class CurlUrl {
 public:
  explicit CurlUrl(const std::string& text) : url_(curl_url()) {
    is_good_ = url_ != nullptr && curl_url_set(url_, CURLUPART_URL, text.c_str(), 0) == CURLUE_OK;
  }
  ~CurlUrl() { curl_url_cleanup(url_); }
  CurlUrl(const CurlUrl&) = delete;
  CurlUrl& operator=(const CurlUrl&) = delete;

  // An address that http or https can reach.
  bool is_web() const { return is_good_ && (scheme() == "http" || scheme() == "https"); }
  // Empty where there is none.
  std::string part(CURLUPart which, unsigned flags = 0) const {
    char* text = nullptr;
    if (curl_url_get(url_, which, &text, flags) != CURLUE_OK) return {};
    std::string out(text);
    curl_free(text);
    return out;
  }
  std::string scheme() const { return ascii_lower(part(CURLUPART_SCHEME)); }
  std::string host() const { return ascii_lower(part(CURLUPART_HOST)); }
  // "https://host:443"
  std::string origin() const {
    return fmt::format("{}://{}:{}", scheme(), host(), part(CURLUPART_PORT, CURLU_DEFAULT_PORT));
  }

 private:
  CURLU* url_;
  bool is_good_;
};

}  // namespace lily
