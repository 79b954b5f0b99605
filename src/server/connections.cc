#include "server/connections.h"

#include <algorithm>
#include <vector>

#include "server/peer.h"

namespace lily::server {

Connections::Entry& Connections::entry(const Key& client) {
  const auto [at, is_new] = entries_.try_emplace(client);
  if (is_new) at->second.deadline = Clock::now() + head_;
  return at->second;
}

void Connections::begin(const Key& client) {
  const std::lock_guard lock(mutex_);
  Entry& e = entry(client);
  e.request = {Clock::now(), {}};
  e.deadline = Clock::now() + body_;
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
  e.deadline = Clock::now() + idle_ + head_;
  return std::exchange(e.request, {});
}

void Connections::check(int local_port, bool stopping, size_t most, Clock::time_point now) {
  const std::vector<Peer::Client> clients = Peer::all(local_port);
  const std::lock_guard lock(mutex_);
  for (auto& [key, e] : entries_) e.seen = false;
  std::vector<std::pair<Clock::time_point, const Peer*>> silent;
  for (const Peer::Client& client : clients) {
    Entry& e = entry({client.address, client.port});
    e.seen = true;
    if (e.state != State::reading) continue;
    // What was sent and not read yet waits for a thread: the client is not late.
    const bool waits_for_thread = !e.request.begun && client.peer.has_sent();
    if (stopping || (now > e.deadline && !waits_for_thread)) client.peer.hear_no_more();
    else if (!e.request.begun && !waits_for_thread) silent.emplace_back(e.deadline, &client.peer);
  }
  if (clients.size() > most) {
    std::sort(silent.begin(), silent.end());
    silent.resize(std::min(silent.size(), clients.size() - most));
    for (const auto& [deadline, peer] : silent) peer->hear_no_more();
  }
  std::erase_if(entries_, [](const auto& item) { return !item.second.seen; });
}

void Connections::break_all(int local_port) {
  for (const Peer::Client& client : Peer::all(local_port)) client.peer.end();
}

}  // namespace lily::server
