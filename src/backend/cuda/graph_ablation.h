// D3 off: the graph of a step without overlap.
#pragma once

#include <cuda_runtime_api.h>

namespace lily::cuda {

// Kernels are captured with programmatic edges: one may start, fetch its weights and wait, while the one in
// front still runs. Makes each of them an ordinary edge, behind which a kernel starts when the other has
// ended.
void remove_overlap(cudaGraph_t graph);

}  // namespace lily::cuda
