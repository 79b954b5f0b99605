// What the rates of a processor are measured with (processor_rates.h): how fast the 8-bit dot product of
// dot_tile-inl.h can be, by the instructions of its innermost line on operands in registers, without loads,
// unpacking and folding; and how fast memory can be read, by loads as wide as the kernels'.
#pragma once

#include <cstdint>
#include <span>

namespace lily::backend::cpu {

// At least n multiplications of 8-bit values, each with its addition; how many they were.
int64_t run_dot_products(int64_t n);

// The sum of all words, modulo 2^64; with or without asking for memory ahead as the kernels do, whichever a
// processor reads faster with.
uint64_t sum_words(std::span<const uint64_t> words, bool asks_ahead);

}  // namespace lily::backend::cpu
