#include "backend/cuda/prefill_require.h"

#include "base/error.h"

namespace lily::cuda {

void require(bool holds, const char* what) { LILY_CHECK(holds, "{}", what); }

}  // namespace lily::cuda
