// Requests to the hub: redirects, retries and what its refusals mean. The token goes to the hub's own origin
// and to no other, whatever a redirect says.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>

#include "hub/http.h"

namespace lily::hub {

struct HubAddress {
  std::string endpoint = "https://huggingface.co";
  std::string token;       // empty: anonymous
  std::string ca_file;     // of certificates that are trusted instead of the system's; empty: those
  int n_retries = 8;       // in a row without a byte of progress
  double backoff_s = 0.5;  // before the first retry; doubles up to kMaxBackoffS
};

// Thrown when `stop` became true.
struct Stopped {};

class HubClient {
 public:
  // Throws Fault::user if the endpoint or the token is unusable.
  HubClient(HubAddress address, std::function<bool()> stop);

  // Whether a token is there but must stay here, because the endpoint is plain http to another machine.
  bool withholds_token() const { return withholds_token_; }

  // The answer of /api/models/NAME/revision/REVISION?blobs=true.
  std::string listing(const std::string& name, const std::string& revision, uint64_t max_bytes);

  // Bytes [begin, end) of a file of `n_bytes`, in order, each once, whatever happens in between. `on_bytes`
  // may throw.
  void fetch(const std::string& name, const std::string& commit, const std::string& file, uint64_t n_bytes,
             uint64_t begin, uint64_t end, const std::function<void(std::string_view)>& on_bytes);

 private:
  HttpReply follow(HttpRequest request, const HttpClient::OnBody& on_body);
  // Throws if asking again is no use, else waits. `n_failures` in a row so far, this one included.
  void consider(const HttpReply& reply, const std::string& what, const std::string& name, int n_failures,
                int n_retries);
  void wait(double seconds);

  HubAddress address_;
  std::string origin_;  // of the endpoint
  bool withholds_token_ = false;
  std::function<bool()> stop_;
  std::unique_ptr<HttpClient> http_;
  bool answered_by_endpoint_ = true;  // not by a host that it redirected to
};

}  // namespace lily::hub
