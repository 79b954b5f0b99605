// POST requests to another server, as they go: the head, and the bytes of the answer when they come.
// transport_curl.cc sees libcurl; transport_none.cc stands for it in builds without.
#pragma once

#include <chrono>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace lily::server {

struct TransferRequest {
  std::string url;
  std::vector<std::string> headers;  // "Name: value"
  std::string body;
};

struct TransferHead {
  int status = 0;
  std::map<std::string, std::string> headers;  // names in lower case; of several the last one
};

enum class TransferEnd { none, done, unreachable, timed_out, not_trusted, broke_off };

// Used by one thread. Its end closes the connection if the answer is not there as a whole.
class Transfer {
 public:
  virtual ~Transfer() = default;

  // Until something has come or the transfer has ended, at most so long. While there are bytes that nobody
  // has taken nothing more is read, so that a slow client slows the other server down.
  virtual void wait(std::chrono::milliseconds most) = 0;
  virtual const TransferHead* head() const = 0;  // null until it is there
  virtual std::string take() = 0;                // the bytes that have come since
  virtual TransferEnd ended() const = 0;
  virtual std::string failure() const = 0;  // one line, for every end but done
};

// Any thread may post. Connections that are free are used again. Redirects are not followed, certificates are
// checked.
class Transport {
 public:
  virtual ~Transport() = default;
  virtual std::unique_ptr<Transfer> post(TransferRequest request) = 0;
};

// Throws Fault::user in a build without libcurl.
std::unique_ptr<Transport> make_transport(std::chrono::milliseconds connect_timeout,
                                          const std::string& ca_file);

struct UrlParts {
  std::string origin;  // "https://host:443", in lower case
  std::string scheme, host;
  std::string path;      // without slashes at its end
  bool is_bare = false;  // neither user nor password, query or fragment
};

// Nothing if this is not an http or https URL. Throws Fault::user in a build without libcurl.
std::optional<UrlParts> url_parts(const std::string& url);

}  // namespace lily::server
