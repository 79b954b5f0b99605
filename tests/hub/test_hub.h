// A hub on loopback that serves a folder as one repository, with the manners of the real one: large files are
// redirected to another host by an absolute address, small ones to a path of the same host, ranges work. And
// with faults, on demand.
#pragma once

#include <atomic>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

namespace lily::test {

inline const char* const kTestRepository = "lily-models/tiny";
inline const char* const kTestCommit = "0123456789abcdef0123456789abcdef01234567";

struct HubFaults {
  std::string token;       // the hub wants it; empty: anybody may read
  bool is_gated = false;   // ... and says so in the way of gated repositories
  double bytes_per_s = 0;  // of each connection; 0: as fast as it goes
  int n_busy = 0;          // requests that get 429 with Retry-After: 1
  int n_broken = 0;        // requests that get 500
  int n_cut = 0;           // answers of large files that break off after 300,000 bytes
  std::string corrupt;     // a file one of whose bytes is wrong
  int n_corrupt = 0;       // for so many answers that hold this byte
  bool ignores_ranges = false;
  bool refuses_ranges = false;           // 416 to those that do not begin at 0
  bool sends_other_range = false;        // the wrong bytes, honestly labelled
  std::string store_host = "127.0.0.1";  // where large files are redirected to
  std::string store_address;             // all of it, "https://HOST:PORT"; empty: plain HTTP at its own port
  std::function<void(nlohmann::json&)> edit_listing = {};
};

class TestHub {
 public:
  explicit TestHub(const std::filesystem::path& folder);
  ~TestHub();

  std::string endpoint() const;
  int port() const;
  int store_port() const;
  void set(const HubFaults& faults);
  void add_file(const std::string& name, const std::string& content);
  void set_commit(const std::string& commit);  // the branch has moved on

  std::string blob_id(const std::string& name) const;
  uint64_t size(const std::string& name) const;
  uint64_t n_bytes() const;                    // of all files
  uint64_t n_sent() const { return n_sent_; }  // bytes of files
  uint64_t n_sent_of(const std::string& name) const;
  void forget_sent();
  int n_requests() const { return n_requests_; }
  bool was_token_leaked() const { return was_token_leaked_; }  // the other host has seen it

 private:
  struct Server;
  void serve_file(const void* request, void* response, const std::string& name);

  std::map<std::string, std::string> files_;
  std::map<std::string, std::string> ids_;
  std::string commit_ = kTestCommit;
  mutable std::mutex mutex_;  // of everything above and below
  HubFaults faults_;
  std::map<std::string, uint64_t> sent_;
  std::atomic<uint64_t> n_sent_{0};
  std::atomic<int> n_requests_{0};
  std::atomic<bool> was_token_leaked_{false}, is_ending_{false};
  std::unique_ptr<Server> hub_, store_;
};

}  // namespace lily::test
