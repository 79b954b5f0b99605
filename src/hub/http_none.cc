#include "base/error.h"
#include "hub/http.h"

namespace lily::hub {

std::unique_ptr<HttpClient> make_http_client(const std::string&) {
  fail(Fault::user,
       "this lily was built without libcurl and cannot download; install it (Debian: libcurl4-openssl-dev) "
       "and "
       "build again, or fetch the files with another tool and name their folder with -m");
}

std::string origin_of(const std::string&) { return {}; }

}  // namespace lily::hub
