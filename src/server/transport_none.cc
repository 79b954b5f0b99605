#include "base/error.h"
#include "server/transport.h"

namespace lily::server {
namespace {

[[noreturn]] void refuse() {
  fail(Fault::user,
       "this lily was built without libcurl and cannot pass requests on; install it (Debian: "
       "libcurl4-openssl-dev) and build again, or leave --upstream out");
}

}  // namespace

std::unique_ptr<Transport> make_transport(std::chrono::milliseconds, const std::string&) { refuse(); }

std::optional<UrlParts> url_parts(const std::string&) { refuse(); }

}  // namespace lily::server
