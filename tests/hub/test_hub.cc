#include "tests/hub/test_hub.h"

#include <gtest/gtest.h>
#include <httplib.h>

#include <chrono>
#include <thread>

#include "hub/blob_hash.h"
#include "tests/support/temp_folder.h"

namespace lily::test {
namespace {

constexpr size_t kWriteBytes = 16384;
constexpr size_t kCutAfterBytes = 300'000;

bool is_large(const std::string& name) {
  return name.size() > 12 && name.substr(name.size() - 12) == ".safetensors";
}

}  // namespace

struct TestHub::Server {
  httplib::Server http;
  int port = 0;
  std::thread thread;

  void start() {
    http.new_task_queue = [] { return new httplib::ThreadPool(24); };
    http.set_keep_alive_timeout(1);
    port = http.bind_to_any_port("127.0.0.1");
    thread = std::thread([this] { http.listen_after_bind(); });
    while (!http.is_running()) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  ~Server() {
    http.stop();
    if (thread.joinable()) thread.join();
  }
};

TestHub::TestHub(const std::filesystem::path& folder)
    : hub_(std::make_unique<Server>()), store_(std::make_unique<Server>()) {
  for (const auto& entry : std::filesystem::directory_iterator(folder))
    add_file(entry.path().filename().string(), read_file(entry.path()));
  add_file(".gitattributes", "*.safetensors filter=lfs\n");

  using httplib::Request;
  using httplib::Response;
  // Whether the request may pass; else the response has been written.
  const auto may_pass = [this](const Request& request, Response& response) {
    ++n_requests_;
    const std::lock_guard lock(mutex_);
    if (faults_.n_busy > 0) {
      --faults_.n_busy;
      response.status = 429;
      response.set_header("Retry-After", "1");
      return false;
    }
    if (faults_.n_broken > 0) {
      --faults_.n_broken;
      response.status = 500;
      return false;
    }
    if (!faults_.token.empty() && request.get_header_value("Authorization") != "Bearer " + faults_.token) {
      response.status = 401;
      if (faults_.is_gated) response.set_header("X-Error-Code", "GatedRepo");
      return false;
    }
    return true;
  };
  const std::string repository = kTestRepository;
  hub_->http.Get("/api/models/(.*)/revision/(.*)", [=, this](const Request& request, Response& response) {
    if (!may_pass(request, response)) return;
    const std::lock_guard lock(mutex_);
    if (request.matches[1] != repository || (request.matches[2] != "main" && request.matches[2] != commit_)) {
      response.status = 404;
      response.set_header("X-Error-Code",
                          request.matches[1] == repository ? "RevisionNotFound" : "RepoNotFound");
      return;
    }
    nlohmann::json listing = {{"id", repository}, {"sha", commit_}, {"siblings", nlohmann::json::array()}};
    for (const auto& [name, content] : files_) {
      nlohmann::json file = {{"rfilename", name}, {"size", content.size()}};
      file["blobId"] = hub::blob_hash_of(std::string(40, '0'), content);
      if (is_large(name))
        file["lfs"] = {{"sha256", ids_[name]}, {"size", content.size()}, {"pointerSize", 134}};
      listing["siblings"].push_back(file);
    }
    if (faults_.edit_listing) faults_.edit_listing(listing);
    response.set_content(listing.dump(), "application/json");
  });
  hub_->http.Get("/" + repository + "/resolve/(\\w+)/(.*)", [=, this](const Request& request,
                                                                      Response& response) {
    if (!may_pass(request, response)) return;
    const std::string name = request.matches[2];
    const std::lock_guard lock(mutex_);
    if (request.matches[1] != commit_ || !files_.contains(name)) {
      response.status = 404;
      return;
    }
    response.set_header("X-Repo-Commit", commit_);
    const_cast<Request&>(request).ranges.clear();  // a redirect has none, but the library would look for them
    response.set_content("Found. Redirecting.", "text/plain");
    response.status = is_large(name) ? 302 : 307;
    const std::string store = faults_.store_address.empty()
                                  ? "http://" + faults_.store_host + ":" + std::to_string(store_->port)
                                  : faults_.store_address;
    response.set_header("Location",
                        is_large(name) ? store + "/signed/" + name : "/api/resolve-cache/" + name);
  });
  hub_->http.Get("/api/resolve-cache/(.*)", [=, this](const Request& request, Response& response) {
    if (may_pass(request, response)) serve_file(&request, &response, request.matches[1]);
  });
  store_->http.Get("/signed/(.*)", [this](const Request& request, Response& response) {
    ++n_requests_;
    if (request.has_header("Authorization")) was_token_leaked_ = true;
    serve_file(&request, &response, request.matches[1]);
  });
  hub_->start();
  store_->start();
}

TestHub::~TestHub() { is_ending_ = true; }

void TestHub::serve_file(const void* request_pointer, void* response_pointer, const std::string& name) {
  const auto& request = *static_cast<const httplib::Request*>(request_pointer);
  auto& response = *static_cast<httplib::Response*>(response_pointer);
  const std::lock_guard lock(mutex_);
  // The library answers ranges by itself; to change that, the request has to be another one.
  auto& ranges = const_cast<httplib::Request&>(request).ranges;
  if (faults_.ignores_ranges) ranges.clear();
  if (faults_.refuses_ranges && !ranges.empty() && ranges[0].first > 0) {
    ranges.clear();
    response.status = 416;
    return;
  }
  if (faults_.sends_other_range && !ranges.empty()) ranges[0].first += 1;
  const bool is_cut = is_large(name) && faults_.n_cut > 0;
  if (is_cut) --faults_.n_cut;
  const std::string& content = files_.at(name);
  const uint64_t bad_byte = content.size() / 3;
  auto n_left_before_cut = std::make_shared<size_t>(is_cut ? kCutAfterBytes : SIZE_MAX);
  response.set_content_provider(
      content.size(), "application/octet-stream",
      [this, name, &content, bad_byte, n_left_before_cut](size_t offset, size_t length,
                                                          httplib::DataSink& sink) {
        double bytes_per_s = 0;
        std::string bytes = content.substr(offset, std::min({length, kWriteBytes, *n_left_before_cut}));
        {
          const std::lock_guard inner(mutex_);
          bytes_per_s = faults_.bytes_per_s;
          if (faults_.corrupt == name && faults_.n_corrupt > 0 && offset <= bad_byte &&
              bad_byte < offset + bytes.size()) {
            --faults_.n_corrupt;
            bytes[bad_byte - offset] = static_cast<char>(bytes[bad_byte - offset] ^ 1);
          }
        }
        if (bytes.empty() || is_ending_) return false;
        if (bytes_per_s > 0)
          std::this_thread::sleep_for(
              std::chrono::duration<double>(static_cast<double>(bytes.size()) / bytes_per_s));
        if (!sink.write(bytes.data(), bytes.size())) return false;
        *n_left_before_cut -= bytes.size();
        n_sent_ += bytes.size();
        const std::lock_guard inner(mutex_);
        sent_[name] += bytes.size();
        return true;
      });
}

std::string TestHub::endpoint() const { return "http://127.0.0.1:" + std::to_string(hub_->port); }

int TestHub::port() const { return hub_->port; }
int TestHub::store_port() const { return store_->port; }

void TestHub::set_commit(const std::string& commit) {
  const std::lock_guard lock(mutex_);
  commit_ = commit;
}

void TestHub::set(const HubFaults& faults) {
  const std::lock_guard lock(mutex_);
  faults_ = faults;
}

void TestHub::add_file(const std::string& name, const std::string& content) {
  const std::lock_guard lock(mutex_);
  files_[name] = content;
  ids_[name] = hub::blob_hash_of(std::string(is_large(name) ? 64 : 40, '0'), content);
}

std::string TestHub::blob_id(const std::string& name) const { return ids_.at(name); }
uint64_t TestHub::size(const std::string& name) const { return files_.at(name).size(); }

uint64_t TestHub::n_bytes() const {
  uint64_t n = 0;
  for (const auto& [name, content] : files_) n += content.size();
  return n;
}

uint64_t TestHub::n_sent_of(const std::string& name) const {
  const std::lock_guard lock(mutex_);
  const auto it = sent_.find(name);
  return it == sent_.end() ? 0 : it->second;
}

void TestHub::forget_sent() {
  const std::lock_guard lock(mutex_);
  sent_.clear();
  n_sent_ = 0;
}

}  // namespace lily::test
