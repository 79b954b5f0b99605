// LILY_CHECK for .cu files, which do not see fmt.
#pragma once

namespace lily::cuda {

void require(bool holds, const char* what);

}  // namespace lily::cuda
