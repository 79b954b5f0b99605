// What the environment says about the hub: the variables that its other tools know, too.
#pragma once

#include <filesystem>
#include <string>
#include <vector>

#include "hub/hub_client.h"

namespace lily::cli {

std::string environment(const char* name);  // empty if it is not set

// A file of certificates to trust instead of the system's, as other programs know it: for networks whose
// proxy looks into TLS, and for servers with a certificate of their own.
inline constexpr const char* kTrustedCertificates = "SSL_CERT_FILE";

// HF_ENDPOINT, kTrustedCertificates, and the access token from HF_TOKEN or the file that `hf auth login`
// writes.
hub::HubAddress hub_address();

// HF_HUB_CACHE, else hub/ in HF_HOME, else huggingface/hub/ in XDG_CACHE_HOME or ~/.cache. Throws Fault::user
// if not even HOME is set.
std::filesystem::path hub_cache();

// Every folder where a pulled model may lie: that of LILY_CACHE and the one above first, then the standard
// place.
std::vector<std::filesystem::path> model_caches();

}  // namespace lily::cli
