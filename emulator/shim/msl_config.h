// Words of the language that are macros here, and the two uses of the shim:
//   run    C++20; address spaces are empty words and the code is executed (with MSL_TRACED: instrumented)
//   check  C++ for OpenCL (MSL_CHECK); address spaces are real, nothing runs
#pragma once

#ifdef MSL_TRACED
// Plain and traced kernels may meet in one program; the inline functions of the shim must not.
#define metal metal_traced
#define mpp mpp_traced
#endif

#ifndef MSL_CHECK
#include "msl_runtime.h"
#define device
#define threadgroup
#define thread
#define constant const
#else
#define device __global
#define threadgroup __local
#define thread __private
#define constant __constant
// Names that OpenCL reserves for types of its own.
#define half msl_half_t
#define atomic_uint msl_atomic_uint
#define atomic_int msl_atomic_int
#define atomic_bool msl_atomic_bool
#define atomic_float msl_atomic_float
#endif

#define METAL_FUNC inline __attribute__((always_inline))

// For functions that a kernel must call as one unit: not instrumented, not duplicated.
#define MSL_CALL __attribute__((no_sanitize("thread"), noinline, convergent))
#define MSL_QUIET __attribute__((no_sanitize("thread")))
#define MSL_SITE __builtin_return_address(0)
#define MSL_JOIN_(a, b) a##b
#define MSL_JOIN(a, b) MSL_JOIN_(a, b)
#define MSL_STRIP_(...) __VA_ARGS__
#define MSL_STRIP(x) MSL_STRIP_ x  // removes the parentheses that keep commas together

#define INFINITY __builtin_inff()
#define NAN __builtin_nanf("")
#define MAXFLOAT 3.402823466e+38f
#define FLT_MAX 3.402823466e+38f
#define FLT_MIN 1.175494351e-38f
#define FLT_EPSILON 1.192092896e-07f
#define HALF_MAX half(65504.0f)
#define HUGE_VALF __builtin_inff()
#define M_E_F 2.71828182845904523536f
#define M_LOG2E_F 1.44269504088896340736f
#define M_LN2_F 0.693147180559945309417f
#define M_PI_F 3.14159265358979323846f
#define M_SQRT2_F 1.41421356237309504880f
#define CHAR_BIT 8
#define SHRT_MAX 32767
#define USHRT_MAX 65535
#define INT_MAX 2147483647
#define INT_MIN (-2147483647 - 1)
#define UINT_MAX 4294967295u

typedef unsigned char uchar;
typedef unsigned short ushort;
typedef unsigned int uint;
typedef unsigned long ulong;
#ifdef MSL_CHECK
typedef signed char int8_t;
typedef unsigned char uint8_t;
typedef short int16_t;
typedef ushort uint16_t;
typedef int int32_t;
typedef uint uint32_t;
typedef long int64_t;
typedef ulong uint64_t;
typedef ulong size_t;
typedef long ptrdiff_t;
#endif
