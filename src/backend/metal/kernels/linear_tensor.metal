// linear_prefill on the tensor operations of Metal 4; see linear_gemm.h and tensor_tile.h.
#include "linear_gemm.h"
#include "tensor_tile.h"

#define INSTANTIATE(bits, rows, name)                              \
  template [[host_name("linear_prefill_tensor_" name)]] [[kernel]] \
  decltype(linear_prefill<bits, rows, TensorProduct<rows>>) linear_prefill<bits, rows, TensorProduct<rows>>;
INSTANTIATE(4, 16, "q4_16")
INSTANTIATE(8, 16, "q8_16")
INSTANTIATE(16, 16, "bf16_16")
INSTANTIATE(4, 32, "q4_32")
INSTANTIATE(8, 32, "q8_32")
INSTANTIATE(16, 32, "bf16_32")
