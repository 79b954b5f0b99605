// Metal Shading Language on the host; included by the rewriter at the top of every kernel file.
#pragma once

#include "msl_kernel.h"
#include "msl_tensor.h"
