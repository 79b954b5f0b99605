// The chat page at `/`: one file without anything from the network.
#pragma once

#include <string>
#include <string_view>

namespace lily::server {

// The page for one request. `nonce` is a word that the Content-Security-Policy of the same response names:
// only the page's own script and style run.
std::string chat_page(std::string_view nonce);
std::string page_policy(std::string_view nonce);

}  // namespace lily::server
