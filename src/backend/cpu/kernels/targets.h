// Which instruction set the kernels run on. Every kernel file is compiled once for each target below and
// picks the best one that the processor has when it is first called:
//   x86-64   AVX-512 with VNNI (Highway's AVX3_DL), AVX2 with FMA, SSSE3
//   aarch64  NEON, with dot products where the compiler's baseline has them
#pragma once

#include <string_view>
#include <vector>

namespace lily::backend::cpu {

enum class SimdTarget { avx512_vnni, avx2, ssse3, neon, scalar };

std::string_view to_string(SimdTarget target);

// Targets that are compiled in and that this processor can run, best first.
std::vector<SimdTarget> runnable_targets();
SimdTarget current_target();

// Makes all kernels use one of runnable_targets(), while no kernel runs. The choice is the process's: a
// device says anew what it wants before each step. Costs nothing where it changes nothing.
void use_target(SimdTarget target);

}  // namespace lily::backend::cpu
