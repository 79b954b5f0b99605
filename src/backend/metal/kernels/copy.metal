// copy_slot: a state slot, all layers of it, to another slot, or zeros. 16 bytes a thread; bound by bytes.
#include "quantised.h"

[[kernel]] void copy_slot(device uint4* slots [[buffer(0)]], constant CopyParams& p [[buffer(20)]],
                          uint i [[thread_position_in_grid]]) {
  if (i >= p.n) return;
  uint4 words = uint4(0u);
  if (p.from >= 0) words = slots[ulong(uint(p.from)) * p.stride + i];
  slots[ulong(p.to) * p.stride + i] = words;
}
