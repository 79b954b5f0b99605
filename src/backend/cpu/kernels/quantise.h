// Activations for the integer dot products: each group of 64 values of a row becomes one fp32 scale and two
// int8 planes, x ~= scale * (256 * p0 + p1), |256 * p0 + p1| <= 32639, or one, x ~= scale * p0, |p0| <= 127.
// The error is at most half a step: 2^-16 of the group's largest value, or 1/254 of it. Sums of codes times
// planes are exact integers, so a result does not depend on the order in which a kernel adds within a group,
// nor on the instruction set.
#pragma once

#include <cstdint>

#include "model/dims.h"

namespace lily::backend::cpu {

inline constexpr int kPlaneMax = 127 * 256 + 127;  // of two planes
inline constexpr int kOnePlaneMax = 127;

// Per group: the scale, and the sum of (256 * p0 + p1), or of p0, as an exact float (< 2^24).
struct GroupScale {
  float scale;
  float sum;
};

// Quantised rows of one width. In a plane the values of each 8 columns stand in the order 0 2 4 6 1 3 5 7, as
// the nibbles of packed weights come out (pack/cpu_tiles.h). Does not own.
struct QuantisedRows {
  int8_t* planes = nullptr;      // [rows][groups][n_planes][64]
  GroupScale* scales = nullptr;  // [rows][groups]
  int64_t n_groups = 0;          // of 64 columns
  int n_planes = 2;              // or 1

  int64_t group_bytes() const { return n_planes * int64_t{model::kQuantGroup}; }
  int8_t* row_planes(int64_t row) const { return planes + row * n_groups * group_bytes(); }
  GroupScale* row_scales(int64_t row) const { return scales + row * n_groups; }
};

inline int64_t quantised_bytes(int64_t rows, int64_t cols, int n_planes) {
  return rows * (n_planes * cols + cols / model::kQuantGroup * static_cast<int64_t>(sizeof(GroupScale)));
}
// Lays rows out in memory of quantised_bytes(rows, cols, n_planes), 64-byte aligned.
QuantisedRows quantised_rows(void* memory, int64_t rows, int64_t cols, int n_planes);

// Quantises groups [group_begin, group_end) of row `row`, from x[0 .. cols), the whole row. 64-byte alignment
// of x is not needed. A NaN or an infinity makes its group's scale so, and reaches every output.
void quantise_groups(const float* x, const QuantisedRows& out, int64_t row, int64_t group_begin,
                     int64_t group_end);
inline void quantise_row(const float* x, const QuantisedRows& out, int64_t row) {
  quantise_groups(x, out, row, 0, out.n_groups);
}

// Quantises what `row` of `out`, of two planes, leaves of x into `rest`, which has two: the sum of both is x
// to fp32 precision. For the full precision that --kv f32 asks for, at twice the products. x has 64 *
// n_groups values.
void quantise_rest(const float* x, const QuantisedRows& out, const QuantisedRows& rest, int64_t row);

}  // namespace lily::backend::cpu
