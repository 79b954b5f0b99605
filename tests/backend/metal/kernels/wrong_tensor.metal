// linear_prefill with a fault that a GPU could have: each product overwrites the sums instead of adding to
// them, so that only the last columns count.
#include "backend/metal/kernels/linear_gemm.h"

template <int kRows>
struct LastColumns : SimdgroupProduct<kRows> {
  void multiply(threadgroup const bfloat* xs, threadgroup const bfloat* ws, uint sg, uint lid) thread {
    this->clear();
    SimdgroupProduct<kRows>::multiply(xs, ws, sg, lid);
  }
};

template
    [[host_name("linear_prefill_tensor_q4_16")]] [[kernel]] decltype(linear_prefill<4, 16, LastColumns<16>>)
        linear_prefill<4, 16, LastColumns<16>>;
template
    [[host_name("linear_prefill_tensor_q4_32")]] [[kernel]] decltype(linear_prefill<4, 32, LastColumns<32>>)
        linear_prefill<4, 32, LastColumns<32>>;
