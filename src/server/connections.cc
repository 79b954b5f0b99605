#include "server/connections.h"

#include "server/peer.h"

namespace lily::server {

Connections::Entry& Connections::entry(const Key& client) {
  const auto [at, is_new] = entries_.try_emplace(client);
  if (is_new) at->second.deadline = Clock::now() + request_;
  return at->second;
}

void Connections::begin(const Key& client) {
  const std::lock_guard lock(mutex_);
  entry(client).request = {Clock::now(), {}};
}

void Connections::answering(const Key& client) {
  const std::lock_guard lock(mutex_);
  entry(client).state = State::answering;
}

void Connections::came_to(const Key& client, Outcome outcome) {
  const std::lock_guard lock(mutex_);
  entry(client).request.outcome = std::move(outcome);
}

Connections::Request Connections::end(const Key& client) {
  const std::lock_guard lock(mutex_);
  Entry& e = entry(client);
  e.state = State::reading;
  e.deadline = Clock::now() + idle_ + request_;
  return std::exchange(e.request, {});
}

void Connections::check(int local_port, bool stopping, Clock::time_point now) {
  const std::vector<Peer::Client> clients = Peer::all(local_port);
  const std::lock_guard lock(mutex_);
  for (auto& [key, e] : entries_) e.seen = false;
  for (const Peer::Client& client : clients) {
    Entry& e = entry({client.address, client.port});
    e.seen = true;
    if (e.state == State::reading && (stopping || now > e.deadline)) client.peer.hear_no_more();
  }
  std::erase_if(entries_, [](const auto& item) { return !item.second.seen; });
}

void Connections::break_all(int local_port) {
  for (const Peer::Client& client : Peer::all(local_port)) client.peer.end();
}

}  // namespace lily::server
