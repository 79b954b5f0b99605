// To be included before any Highway header: the targets that kernels are compiled for (targets.h).
#pragma once

// AVX3_DL brings VNNI. AVX-512 without it and SSE4 are served by the targets below them.
#define HWY_WANT_AVX3_DL
#define HWY_DISABLED_TARGETS (HWY_SSE4 | HWY_AVX3 | HWY_SVE | HWY_SVE2 | HWY_SVE_256 | HWY_SVE2_128)
