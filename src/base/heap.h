// How the C library's heap keeps what was freed.
#pragma once

namespace lily {

// For programs with many threads: by default glibc lets up to eight threads a core each keep freed memory of
// its own, which looks like a leak and is as bad. Few arenas and a fixed size from which blocks are given
// back at once bound it. Before other threads start; does nothing with other C libraries.
void keep_heap_compact();

}  // namespace lily
