// How the program ends where an exception may not go: in destructors of libraries, which take memory too.
#pragma once

namespace lily {

// From now on a lack of memory there is one line on stderr and exit code 1, instead of an abort. Sets the
// process's new-handler and terminate-handler; once, before other threads start.
void end_cleanly_without_memory();

}  // namespace lily
