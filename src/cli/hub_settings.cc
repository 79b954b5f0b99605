#include "cli/hub_settings.h"

#include <algorithm>
#include <cstdlib>
#include <fstream>

#include "base/error.h"

namespace lily::cli {
namespace {

namespace fs = std::filesystem;

constexpr size_t kMaxTokenBytes = 4096;

fs::path under_home(const char* path) {
  const std::string home = environment("HOME");
  return home.empty() ? fs::path() : fs::path(home) / path;
}

fs::path hub_home() {
  if (const std::string home = environment("HF_HOME"); !home.empty()) return home;
  if (const std::string cache = environment("XDG_CACHE_HOME"); !cache.empty())
    return fs::path(cache) / "huggingface";
  return under_home(".cache/huggingface");
}

std::string stored_token() {
  std::string path = environment("HF_TOKEN_PATH");
  if (path.empty() && !hub_home().empty()) path = (hub_home() / "token").string();
  std::ifstream in(path, std::ios::binary);
  std::string token(kMaxTokenBytes, '\0');
  in.read(token.data(), static_cast<std::streamsize>(token.size()));
  token.resize(static_cast<size_t>(in.gcount()));
  return token;
}

}  // namespace

std::string environment(const char* name) {
  const char* value = std::getenv(name);
  return value == nullptr ? "" : value;
}

hub::HubAddress hub_address() {
  hub::HubAddress address;
  if (const std::string endpoint = environment("HF_ENDPOINT"); !endpoint.empty()) address.endpoint = endpoint;
  address.ca_file = environment(kTrustedCertificates);
  address.token = environment("HF_TOKEN");
  if (address.token.empty()) address.token = stored_token();
  const size_t end = address.token.find_last_not_of(" \t\r\n");
  address.token.resize(end == std::string::npos ? 0 : end + 1);
  address.token.erase(0, std::min(address.token.size(), address.token.find_first_not_of(" \t\r\n")));
  return address;
}

fs::path hub_cache() {
  if (const std::string cache = environment("HF_HUB_CACHE"); !cache.empty()) return cache;
  if (!hub_home().empty()) return hub_home() / "hub";
  fail(Fault::user, "there is no place for downloads: set HOME, HF_HOME or HF_HUB_CACHE");
}

std::vector<fs::path> model_caches() {
  std::vector<fs::path> caches;
  const auto add = [&](const fs::path& path) {
    if (!path.empty() && std::find(caches.begin(), caches.end(), path) == caches.end())
      caches.push_back(path);
  };
  if (const std::string own = environment("LILY_CACHE"); !own.empty()) add(own);
  else add(under_home(".cache/lily"));
  add(environment("HF_HUB_CACHE"));
  if (!hub_home().empty()) add(hub_home() / "hub");
  add(under_home(".cache/huggingface/hub"));
  return caches;
}

}  // namespace lily::cli
