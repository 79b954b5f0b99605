// The few CUDA types that launch interfaces mention, for code that no device compiler sees.
#pragma once

#ifdef LILY_CUDA_EMULATED
#include "tests/backend/cuda/emulation/emulated_device.h"
#else
#include <cuda_runtime_api.h>
#endif
