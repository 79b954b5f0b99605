// Bytes from one connection to another, both ways, as proxies pass them on.
#pragma once

#include <cstdint>

namespace lily::test {

// A connection to a port of this machine; negative if there is none.
int connect_to(uint16_t port);

// Until one of the two ends.
void pump(int one, int other);

}  // namespace lily::test
