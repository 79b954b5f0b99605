// Whether the client of a connection is still there. The HTTP library tells a handler the client's address
// only, so its socket is found by that.
#pragma once

#include <string>

namespace lily::server {

class Peer {
 public:
  // Called by the thread that serves the connection, while it does. Not found: taken to be there always.
  static Peer find(const std::string& remote_address, int remote_port, int local_port);

  // False once the client has closed the connection or it broke.
  bool is_there() const;
  // Nothing more is read from this client; what is being written still reaches it.
  void hear_no_more() const;

 private:
  explicit Peer(int fd) : fd_(fd) {}
  int fd_;  // the HTTP library's; -1: not found
};

}  // namespace lily::server
