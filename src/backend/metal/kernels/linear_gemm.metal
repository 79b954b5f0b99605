// linear_prefill on simdgroup matrices; see linear_gemm.h. 16-row tiles up to 16 rows, 32-row tiles above.
#include "linear_gemm.h"

#define INSTANTIATE(bits, rows, name)                          \
  template [[host_name("linear_prefill_" name)]] [[kernel]]    \
  decltype(linear_prefill<bits, rows, SimdgroupProduct<rows>>) \
      linear_prefill<bits, rows, SimdgroupProduct<rows>>;
INSTANTIATE(4, 16, "q4_16")
INSTANTIATE(8, 16, "q8_16")
INSTANTIATE(16, 16, "bf16_16")
INSTANTIATE(4, 32, "q4_32")
INSTANTIATE(8, 32, "q8_32")
INSTANTIATE(16, 32, "bf16_32")
