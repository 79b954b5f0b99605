#include "base/heap.h"

#include <cstdlib>

#ifdef __GLIBC__
#include <malloc.h>
#endif

namespace lily {

void keep_heap_compact() {
#ifdef __GLIBC__
  constexpr int kArenas = 8, kLargeBlockBytes = 256 << 10;
  mallopt(M_ARENA_MAX, kArenas);
  mallopt(M_MMAP_THRESHOLD, kLargeBlockBytes);
#endif
}

}  // namespace lily
