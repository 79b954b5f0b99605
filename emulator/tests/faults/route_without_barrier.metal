#define WITHOUT_THREADGROUP_BARRIER
#include "../kernels/route.metal"
