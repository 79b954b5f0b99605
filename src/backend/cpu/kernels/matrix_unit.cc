#include "backend/cpu/kernels/matrix_unit.h"

#include "base/error.h"

#if defined(__x86_64__) && defined(__linux__)
#include <cpuid.h>
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>

#if !defined(__clang__)
// GCC 12's own headers of intrinsics leave the unused input of a masked operation so on purpose.
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif
#define LILY_AMX __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,amx-tile,amx-int8")))

namespace lily::backend::cpu {
namespace {

// Palette 1: eight tiles of at most 16 rows of 64 bytes.
struct alignas(64) TileShapes {
  uint8_t palette = 1;
  uint8_t start_row = 0;
  uint8_t reserved[14] = {};
  uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};
static_assert(sizeof(TileShapes) == 64);
constexpr TileShapes kShapes;  // in memory: the compiler does not know how much of it an instruction reads

bool ask_for_unit() {
  unsigned a = 0, b = 0, c = 0, d = 0;
  if (__get_cpuid_count(7, 0, &a, &b, &c, &d) == 0) return false;
  constexpr unsigned kAmxTile = 1u << 24, kAmxInt8 = 1u << 25;
  if ((d & kAmxTile) == 0 || (d & kAmxInt8) == 0) return false;
  // The state of the tiles is large: the system grants it on request.
  constexpr long kRequestPermission = 0x1023, kTileData = 18;
  return ::syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
}

// Plain loads and stores do not pass the unit's own, of which the compiler knows nothing.
inline void order() { std::atomic_signal_fence(std::memory_order_seq_cst); }

// What the unit has just stored is slow to load, so some groups are summed before the first of them is
// folded; as many as keep the rows' planes, the codes and the sums in L1 while the tiles of a call pass.
constexpr int64_t kGroupsAhead = 2;

// Integer sums of a group for 16 rows, by plane.
template <int kPlanes>
struct alignas(64) Sums {
  int32_t of[kPlanes][16][16];
};

template <int kPlanes>
LILY_AMX inline __attribute__((always_inline)) void sum_group(const uint8_t* codes, const int8_t* planes,
                                                              Sums<kPlanes>& sums) {
  order();
  _tile_zero(0);
  if constexpr (kPlanes == 2) _tile_zero(1);
  _tile_loadd(4, codes, 64);
  _tile_loadd(5, planes, 64);
  if constexpr (kPlanes == 2) _tile_loadd(6, planes + 1024, 64);
  _tile_dpbsud(0, 5, 4);
  if constexpr (kPlanes == 2) _tile_dpbsud(1, 6, 4);
  _tile_stored(0, sums.of[0], 64);
  if constexpr (kPlanes == 2) _tile_stored(1, sums.of[1], 64);
  order();
}

// Adds groups [first, last) of a tile to out; from zero where first is 0.
template <int kPlanes>
LILY_AMX void multiply_groups(const MatrixTile& tile, int64_t first, int64_t last, const MatrixRows& rows,
                              float (*out)[16]) {
  constexpr int64_t kGroupBytes = 9 * 64;
  Sums<kPlanes> sums[kGroupsAhead];
  for (int64_t group = first; group < last; ++group)
    sum_group(tile.codes + group * 1024, rows.planes + group * (1024 * kPlanes), sums[group - first]);
  __m512 y[16];
#pragma GCC unroll 16
  for (int r = 0; r < 16; ++r) y[r] = first == 0 ? _mm512_setzero_ps() : _mm512_load_ps(out[r]);
  for (int64_t group = first; group < last; ++group) {
    const Sums<kPlanes>& s = sums[group - first];
    const __m512i scale_line = _mm512_load_si512(tile.packed + group * kGroupBytes + 8 * 64);
    const __m512 scale = _mm512_castsi512_ps(_mm512_slli_epi32(scale_line, 16));
    const __m512 bias = _mm512_castsi512_ps(_mm512_and_si512(scale_line, _mm512_set1_epi32(-65536)));
    const float* x_scales = rows.scales + group * 16;
    const float* x_sums = rows.sums + group * 16;
#pragma GCC unroll 16
    for (int r = 0; r < 16; ++r) {
      __m512i sum = _mm512_load_si512(s.of[0][r]);
      if constexpr (kPlanes == 2)
        sum = _mm512_add_epi32(_mm512_slli_epi32(sum, 8), _mm512_load_si512(s.of[1][r]));
      const __m512 total = _mm512_cvtepi32_ps(sum);
      const __m512 folded = _mm512_fmadd_ps(scale, total, _mm512_mul_ps(bias, _mm512_set1_ps(x_sums[r])));
      y[r] = _mm512_fmadd_ps(folded, _mm512_set1_ps(x_scales[r]), y[r]);
    }
  }
#pragma GCC unroll 16
  for (int r = 0; r < 16; ++r) _mm512_store_ps(out[r], y[r]);
}

LILY_AMX void unpack(const uint8_t* tile, int64_t n_groups, uint8_t* codes) {
  const __m512i nibble = _mm512_set1_epi8(0x0f);
  for (int64_t group = 0; group < n_groups; ++group, tile += 9 * 64, codes += 1024) {
#pragma GCC unroll 8
    for (int line = 0; line < 8; ++line) {
      const __m512i words = _mm512_loadu_si512(tile + 64 * line);
      _mm512_store_si512(codes + 128 * line, _mm512_and_si512(words, nibble));
      _mm512_store_si512(codes + 128 * line + 64, _mm512_and_si512(_mm512_srli_epi32(words, 4), nibble));
    }
  }
}

LILY_AMX void products(int64_t n) {
  for (int64_t i = 0; i < n; i += 4) {
    _tile_dpbsud(0, 4, 6);
    _tile_dpbsud(1, 5, 6);
    _tile_dpbsud(2, 4, 7);
    _tile_dpbsud(3, 5, 7);
  }
}

LILY_AMX void load_shapes() { _tile_loadconfig(&kShapes); }
LILY_AMX void release() { _tile_release(); }

}  // namespace

bool matrix_unit_present() {
  static const bool present = ask_for_unit();
  return present;
}

MatrixUnit::MatrixUnit() {
  LILY_CHECK(matrix_unit_present());
  load_shapes();
}
MatrixUnit::~MatrixUnit() { release(); }

void MatrixUnit::unpack_codes(const uint8_t* tile, int64_t n_groups, uint8_t* codes) {
  unpack(tile, n_groups, codes);
}

void MatrixUnit::multiply(std::span<const MatrixTile> tiles, int64_t n_groups, const MatrixRows& rows,
                          float (*out)[16][16]) {
  const auto groups = rows.n_planes == 1 ? multiply_groups<1> : multiply_groups<2>;
  for (int64_t first = 0; first < n_groups; first += kGroupsAhead)
    for (size_t i = 0; i < tiles.size(); ++i)
      groups(tiles[i], first, std::min(first + kGroupsAhead, n_groups), rows, out[i]);
}

int64_t MatrixUnit::run_products(int64_t n) {
  n = (n + 3) / 4 * 4;
  products(n);
  return n * 16 * 16 * 64;
}

}  // namespace lily::backend::cpu

#else

namespace lily::backend::cpu {

bool matrix_unit_present() { return false; }
MatrixUnit::MatrixUnit() { LILY_CHECK(matrix_unit_present()); }
MatrixUnit::~MatrixUnit() = default;
void MatrixUnit::unpack_codes(const uint8_t*, int64_t, uint8_t*) {}
void MatrixUnit::multiply(std::span<const MatrixTile>, int64_t, const MatrixRows&, float (*)[16][16]) {}
int64_t MatrixUnit::run_products(int64_t) { return 0; }

}  // namespace lily::backend::cpu

#endif
