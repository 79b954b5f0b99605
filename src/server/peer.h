// Whether the client of a connection is still there. The HTTP library tells a handler the client's address
// only, so its socket is found by that.
#pragma once

#include <string>
#include <vector>

namespace lily::server {

class Peer {
 public:
  // Called by the thread that serves the connection, while it does. Not found: taken to be there always.
  static Peer find(const std::string& remote_address, int remote_port, int local_port);
  // All connections to a port of this process. They belong to other threads, which may close them: what is
  // done to one later than at once may be done to another.
  struct Client;
  static std::vector<Client> all(int local_port);

  // False once the client has closed the connection, or its half of it, or it broke.
  bool is_there() const;
  // Bytes of the client wait to be read.
  bool has_sent() const;
  // Closes the connection once the client has, or after a moment; what it sends until then is dropped. Closed
  // at once, with bytes unread, the client might lose the answer that was sent.
  void hang_up() const;
  // Nothing more is read from this client; what is being written still reaches it.
  void hear_no_more() const;
  // Nor is anything written: the thread that serves it goes on as when the client has left.
  void end() const;

 private:
  explicit Peer(int fd) : fd_(fd) {}
  int fd_;  // the HTTP library's; -1: not found
};

struct Peer::Client {
  std::string address;
  int port = 0;
  Peer peer;
};

}  // namespace lily::server
