// The grouped expert GEMM on the tensor operations of Metal 4; see experts_gemm.h and tensor_tile.h.
#include "experts_gemm.h"
#include "tensor_tile.h"

#define INSTANTIATE(bits, name)                                                                        \
  template [[host_name("experts_gate_up_prefill_tensor_" name)]] [[kernel]]                            \
  decltype(experts_gate_up_prefill<bits, TensorProduct>) experts_gate_up_prefill<bits, TensorProduct>; \
  template [[host_name("experts_linear_prefill_tensor_" name)]] [[kernel]]                             \
  decltype(experts_linear_prefill<bits, TensorProduct>) experts_linear_prefill<bits, TensorProduct>;
INSTANTIATE(4, "q4")
INSTANTIATE(8, "q8")
INSTANTIATE(16, "bf16")
