// The HTTP server: routes, keys, limits and errors around a Service. http.cc is the one file that sees the
// HTTP library.
//
// Threads. listen() blocks in a thread of its own; each connection is served by one thread of a pool, which
// parses its requests, hands them to the engine's queue and writes the answers. A connection that is slow or
// broken holds its own thread only, and that for a bounded time: one more thread watches over it
// (connections.h). Requests that a client sends without waiting for the answer before
// (pipelining) are not supported by the HTTP library: the connection closes after the first one.
#pragma once

#include <functional>
#include <memory>
#include <string>

#include "server/service.h"

namespace lily::server {

struct HttpOptions {
  std::string host = "127.0.0.1";
  int port = 8080;      // 0: any that is free
  std::string api_key;  // empty: none is asked for
  std::string cors;     // an origin that browsers may call from, or "*"; empty: only the server's own
  size_t max_body_bytes = size_t{64} << 20;
  int n_threads = 256;       // connections that are served at the same time
  int read_timeout_s = 10;   // for the next bytes of a request
  int head_timeout_s = 30;   // for all of its head
  int body_timeout_s = 120;  // for all of its body
  int keep_alive_s = 15;     // for the next request of a connection
  int write_timeout_s = 30;  // for a client to take bytes
  int drain_s = 30;          // for the answers that run when the server is stopped
};

class HttpServer {
 public:
  explicit HttpServer(HttpOptions options);
  ~HttpServer();

  // Takes the port; throws Error(Fault::user) if it cannot be had. Returns the port.
  int bind();
  // Serves until stop(); requests that run then are finished, or given up after drain_s. Until a service is
  // there, everything but /health is answered with 503.
  void listen();
  // From any thread. The service outlives the server.
  void set_service(Service& service);
  void stop();

 private:
  class Implementation;
  std::unique_ptr<Implementation> implementation_;
};

}  // namespace lily::server
