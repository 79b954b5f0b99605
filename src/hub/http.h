// One HTTP GET at a time. http_curl.cc sees libcurl; http_none.cc stands for it in builds without.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>

namespace lily::hub {

struct HttpRequest {
  std::string url;
  std::string token;  // sent as a bearer; empty: none. Redirects are not followed, so it goes nowhere else
  bool is_direct = false;       // past every proxy
  uint64_t begin = 0, end = 0;  // bytes [begin, end) of the resource; end 0: all of it
};

struct HttpReply {
  int status = 0;       // 0: there was no answer
  std::string failure;  // one line if there was none, or if it broke off
  bool is_cancelled = false;
  bool is_final = false;                       // asking again is no use: a bad certificate
  std::string location;                        // of a redirect, absolute
  std::string error_code;                      // the hub's X-Error-Code
  int retry_after_s = 0;                       // 0: not said
  int64_t range_begin = -1, range_total = -1;  // of Content-Range
};

class HttpClient {
 public:
  virtual ~HttpClient() = default;
  // `on_body` gets the reply's head with each piece of its body and ends the transfer by returning false;
  // `stop` is asked several times a second and ends it by returning true.
  using OnBody = std::function<bool(const HttpReply& head, std::string_view bytes)>;
  virtual HttpReply get(const HttpRequest& request, const OnBody& on_body,
                        const std::function<bool()>& stop) = 0;
};

// Throws Fault::user in a build without libcurl. A client is used by one thread at a time and keeps its
// connections. `ca_file`: HubAddress::ca_file.
std::unique_ptr<HttpClient> make_http_client(const std::string& ca_file);

// "https://host:443", in lower case; empty if this is not an http or https URL.
std::string origin_of(const std::string& url);

}  // namespace lily::hub
