// ERROR = 1 ... 11 each seed one error that only the check build, or the rewriter, can see.
#include <metal_stdlib>
#include <metal_tensor>
using namespace metal;

struct Params {
  uint n;
  float4 v;
};
inline float sum_of(threadgroup const float* p, uint n) {
  float s = 0.0f;
  for (uint i = 0; i < n; i++) s += p[i];
  return s;
}
inline device float* pass(device float* p) { return p; }

kernel void seeded(device float* a [[buffer(0)]], device const half* h [[buffer(1)]],
                   constant Params& p [[buffer(2)]], device float4* o [[buffer(3)]],
                   uint i [[thread_position_in_grid]]) {
  threadgroup float t[32];
  t[i] = float(h[i]);
  o[i] = p.v * 2.0f;
  o[i].xy = float2(1.0f, 2.0f);
  float x = sum_of(t, p.n);
#if ERROR == 1
  x += sum_of(a, p.n);  // device for threadgroup
#elif ERROR == 2
  device float* q = t;  // threadgroup for device
  x += q[0];
#elif ERROR == 3
  p.n = 1;  // write to constant
#elif ERROR == 4
  float l = 1.0f;
  device float* q = &l;  // thread for device
  x += *q;
#elif ERROR == 5
  a = pass((threadgroup float*)t);  // threadgroup for device, through a call
#elif ERROR == 6
  float* q = a;  // no address space
  x += q[0];
#elif ERROR == 7
  double d = 1.0f;
  x += float(d);
#elif ERROR == 8
  *h = half(1.0f);  // write through const
#elif ERROR == 9
  x += 0.5;  // double on the host
#elif ERROR == 10
  uint local = 3u;  // keyword of the checking compiler
  x += float(local);
#elif ERROR == 11
  // threadgroup for device, as a tensor
  tensor<device float, dextents<int, 2>, tensor_inline> view(t, dextents<int, 2>(8, 4));
#endif
  a[i] = x;
}
