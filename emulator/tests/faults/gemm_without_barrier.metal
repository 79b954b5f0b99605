#define WITHOUT_THREADGROUP_BARRIER
#include "../kernels/gemm_q4.metal"
