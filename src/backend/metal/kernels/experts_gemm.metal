// The grouped expert GEMM on simdgroup matrices; see experts_gemm.h.
#include "experts_gemm.h"

#define INSTANTIATE(bits, name)                                                                              \
  template [[host_name("experts_gate_up_prefill_" name)]] [[kernel]]                                         \
  decltype(experts_gate_up_prefill<bits, SimdgroupProduct>) experts_gate_up_prefill<bits, SimdgroupProduct>; \
  template [[host_name("experts_linear_prefill_" name)]] [[kernel]]                                          \
  decltype(experts_linear_prefill<bits, SimdgroupProduct>) experts_linear_prefill<bits, SimdgroupProduct>;
INSTANTIATE(4, "q4")
INSTANTIATE(8, "q8")
INSTANTIATE(16, "bf16")
