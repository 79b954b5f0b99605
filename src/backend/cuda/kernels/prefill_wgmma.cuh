// Warpgroup matrix products (sm_90a): D[64 x N] += A[64 x 16] * B[16 x N], bf16 operands, fp32 accumulators.
//
// A is four registers a lane (the 16 x 16 fragment of mma.m16n8k16 for each of the 4 warps) or a descriptor;
// B is a descriptor of 128-byte-swizzled shared memory. Accumulator 4 j + {0, 1, 2, 3} of a lane, with g =
// lane / 4 and t = lane % 4, is D[16 warp + g][8 j + 2 t], [..][8 j + 2 t + 1], [16 warp + g + 8][8 j + 2 t],
// [..][8 j + 2 t + 1].
//
// The instruction names every register, hence the lists below. Included by prefill_ops.h on the device only.
#pragma once

#include <cstdint>

namespace lily::cuda {

// clang-format off
#define LILY_REGS_0 "%0, %1, %2, %3, %4, %5, %6, %7"
#define LILY_REGS_1 ", %8, %9, %10, %11, %12, %13, %14, %15"
#define LILY_REGS_2 ", %16, %17, %18, %19, %20, %21, %22, %23"
#define LILY_REGS_3 ", %24, %25, %26, %27, %28, %29, %30, %31"
#define LILY_REGS_4 ", %32, %33, %34, %35, %36, %37, %38, %39"
#define LILY_REGS_5 ", %40, %41, %42, %43, %44, %45, %46, %47"
#define LILY_REGS_6 ", %48, %49, %50, %51, %52, %53, %54, %55"
#define LILY_REGS_7 ", %56, %57, %58, %59, %60, %61, %62, %63"
#define LILY_REGS_8 ", %64, %65, %66, %67, %68, %69, %70, %71"
#define LILY_REGS_9 ", %72, %73, %74, %75, %76, %77, %78, %79"
#define LILY_REGS_10 ", %80, %81, %82, %83, %84, %85, %86, %87"
#define LILY_REGS_11 ", %88, %89, %90, %91, %92, %93, %94, %95"
#define LILY_REGS_12 ", %96, %97, %98, %99, %100, %101, %102, %103"
#define LILY_REGS_13 ", %104, %105, %106, %107, %108, %109, %110, %111"
#define LILY_REGS_14 ", %112, %113, %114, %115, %116, %117, %118, %119"
#define LILY_REGS_15 ", %120, %121, %122, %123, %124, %125, %126, %127"
#define LILY_LIST_0 LILY_REGS_0
#define LILY_LIST_1 LILY_LIST_0 LILY_REGS_1
#define LILY_LIST_2 LILY_LIST_1 LILY_REGS_2
#define LILY_LIST_3 LILY_LIST_2 LILY_REGS_3
#define LILY_LIST_4 LILY_LIST_3 LILY_REGS_4
#define LILY_LIST_5 LILY_LIST_4 LILY_REGS_5
#define LILY_LIST_6 LILY_LIST_5 LILY_REGS_6
#define LILY_LIST_7 LILY_LIST_6 LILY_REGS_7
#define LILY_LIST_8 LILY_LIST_7 LILY_REGS_8
#define LILY_LIST_9 LILY_LIST_8 LILY_REGS_9
#define LILY_LIST_10 LILY_LIST_9 LILY_REGS_10
#define LILY_LIST_11 LILY_LIST_10 LILY_REGS_11
#define LILY_LIST_12 LILY_LIST_11 LILY_REGS_12
#define LILY_LIST_13 LILY_LIST_12 LILY_REGS_13
#define LILY_LIST_14 LILY_LIST_13 LILY_REGS_14
#define LILY_LIST_15 LILY_LIST_14 LILY_REGS_15
#define LILY_ACC8(d, i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), "+f"(d[i + 6]), "+f"(d[i + 7])
#define LILY_ACC_0(d) LILY_ACC8(d, 0)
#define LILY_ACC_1(d) LILY_ACC_0(d), LILY_ACC8(d, 8)
#define LILY_ACC_2(d) LILY_ACC_1(d), LILY_ACC8(d, 16)
#define LILY_ACC_3(d) LILY_ACC_2(d), LILY_ACC8(d, 24)
#define LILY_ACC_4(d) LILY_ACC_3(d), LILY_ACC8(d, 32)
#define LILY_ACC_5(d) LILY_ACC_4(d), LILY_ACC8(d, 40)
#define LILY_ACC_6(d) LILY_ACC_5(d), LILY_ACC8(d, 48)
#define LILY_ACC_7(d) LILY_ACC_6(d), LILY_ACC8(d, 56)
#define LILY_ACC_8(d) LILY_ACC_7(d), LILY_ACC8(d, 64)
#define LILY_ACC_9(d) LILY_ACC_8(d), LILY_ACC8(d, 72)
#define LILY_ACC_10(d) LILY_ACC_9(d), LILY_ACC8(d, 80)
#define LILY_ACC_11(d) LILY_ACC_10(d), LILY_ACC8(d, 88)
#define LILY_ACC_12(d) LILY_ACC_11(d), LILY_ACC8(d, 96)
#define LILY_ACC_13(d) LILY_ACC_12(d), LILY_ACC8(d, 104)
#define LILY_ACC_14(d) LILY_ACC_13(d), LILY_ACC8(d, 112)
#define LILY_ACC_15(d) LILY_ACC_14(d), LILY_ACC8(d, 120)

// d = a * b + (accumulate ? d : 0); kTransposeB: b is an n_major_descriptor.
template <int kN> struct Wgmma;
#define LILY_WGMMA_RS(n, k, a0, a1, a2, a3, b, s, t)                                                                   \
  template <> struct Wgmma<n> {                                                                                     \
    template <int kTransposeB = 0>                                                                                  \
    __device__ static void rs(float* d, const uint32_t* a, uint64_t b_desc, int accumulate) {                       \
      asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #s ", 0;\n"                                                 \
                   "wgmma.mma_async.sync.aligned.m64n" #n "k16.f32.bf16.bf16 {" LILY_LIST_##k "}, "                 \
                   "{%" #a0 ", %" #a1 ", %" #a2 ", %" #a3 "}, %" #b ", p, 1, 1, %" #t ";\n}\n"                   \
                   : LILY_ACC_##k(d)                                                                                \
                   : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b_desc), "r"(accumulate), "n"(kTransposeB)); \
    }                                                                                                               \
  };
LILY_WGMMA_RS(16, 0, 8, 9, 10, 11, 12, 13, 14)
LILY_WGMMA_RS(32, 1, 16, 17, 18, 19, 20, 21, 22)
LILY_WGMMA_RS(48, 2, 24, 25, 26, 27, 28, 29, 30)
LILY_WGMMA_RS(64, 3, 32, 33, 34, 35, 36, 37, 38)
LILY_WGMMA_RS(80, 4, 40, 41, 42, 43, 44, 45, 46)
LILY_WGMMA_RS(96, 5, 48, 49, 50, 51, 52, 53, 54)
LILY_WGMMA_RS(112, 6, 56, 57, 58, 59, 60, 61, 62)
LILY_WGMMA_RS(128, 7, 64, 65, 66, 67, 68, 69, 70)
LILY_WGMMA_RS(256, 15, 128, 129, 130, 131, 132, 133, 134)
#undef LILY_WGMMA_RS

// Both operands in shared memory, K contiguous.
__device__ inline void wgmma64_ss(float* d, uint64_t a_desc, uint64_t b_desc, int accumulate) {
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %34, 0;\n"
               "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {" LILY_LIST_3 "}, %32, %33, p, 1, 1, 0, 0;\n}\n"
               : LILY_ACC_3(d)
               : "l"(a_desc), "l"(b_desc), "r"(accumulate));
}
// clang-format on

}  // namespace lily::cuda
