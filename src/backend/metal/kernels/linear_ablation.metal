// linear_prefill without matrix units (P6 off); see linear_gemm.h.
#include "linear_gemm.h"

#define INSTANTIATE(bits, rows, name)                              \
  template [[host_name("linear_prefill_vector_" name)]] [[kernel]] \
  decltype(linear_prefill<bits, rows, VectorProduct<rows>>) linear_prefill<bits, rows, VectorProduct<rows>>;
INSTANTIATE(4, 16, "q4_16")
INSTANTIATE(8, 16, "q8_16")
INSTANTIATE(16, 16, "bf16_16")
INSTANTIATE(4, 32, "q4_32")
INSTANTIATE(8, 32, "q8_32")
INSTANTIATE(16, 32, "bf16_32")
