// How the program ends where an exception may not go: in destructors of libraries, which take memory too.
#pragma once

namespace lily {

// From now on a lack of memory there is one line on stderr and exit code 1, instead of an abort.
void end_cleanly_without_memory();

}  // namespace lily
