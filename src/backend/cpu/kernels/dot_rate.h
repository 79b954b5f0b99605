// How fast the 8-bit dot product of dot_tile-inl.h can be: the instructions of its innermost line on operands
// in registers, without loads, unpacking and folding.
#pragma once

#include <cstdint>

namespace lily::backend::cpu {

// At least n multiplications of 8-bit values, each with its addition; how many they were.
int64_t run_dot_products(int64_t n);

}  // namespace lily::backend::cpu
