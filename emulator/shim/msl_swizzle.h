// Member lists of all swizzles: MSL_SWIZZLES_N(T) declares Swizzle<T, N, ...> members named by their letters.
// Each level of nesting needs macros of its own, since a macro does not expand within itself.
#pragma once

#define MSL_MEMBER(T, n, name, ...) Swizzle<T, n, __VA_ARGS__> name;

#define MSL_D2(T, n, p, ...) MSL_MEMBER(T, n, p##x, __VA_ARGS__, 0) MSL_MEMBER(T, n, p##y, __VA_ARGS__, 1)
#define MSL_D3(T, n, p, ...) MSL_D2(T, n, p, __VA_ARGS__) MSL_MEMBER(T, n, p##z, __VA_ARGS__, 2)
#define MSL_D4(T, n, p, ...) MSL_D3(T, n, p, __VA_ARGS__) MSL_MEMBER(T, n, p##w, __VA_ARGS__, 3)

#define MSL_C(last, T, n, name, ...) MSL_MEMBER(T, n, name, __VA_ARGS__) last(T, n, name, __VA_ARGS__)
#define MSL_C2(last, T, n, p, ...) \
  MSL_C(last, T, n, p##x, __VA_ARGS__, 0) MSL_C(last, T, n, p##y, __VA_ARGS__, 1)
#define MSL_C3(last, T, n, p, ...) MSL_C2(last, T, n, p, __VA_ARGS__) MSL_C(last, T, n, p##z, __VA_ARGS__, 2)
#define MSL_C4(last, T, n, p, ...) MSL_C3(last, T, n, p, __VA_ARGS__) MSL_C(last, T, n, p##w, __VA_ARGS__, 3)

#define MSL_B(third, last, T, n, name, ...) \
  MSL_MEMBER(T, n, name, __VA_ARGS__) third(last, T, n, name, __VA_ARGS__)
#define MSL_B2(third, last, T, n, p, i) \
  MSL_B(third, last, T, n, p##x, i, 0) MSL_B(third, last, T, n, p##y, i, 1)
#define MSL_B3(third, last, T, n, p, i) MSL_B2(third, last, T, n, p, i) MSL_B(third, last, T, n, p##z, i, 2)
#define MSL_B4(third, last, T, n, p, i) MSL_B3(third, last, T, n, p, i) MSL_B(third, last, T, n, p##w, i, 3)

#define MSL_SWIZZLES_2(T) MSL_B2(MSL_C2, MSL_D2, T, 2, x, 0) MSL_B2(MSL_C2, MSL_D2, T, 2, y, 1)
#define MSL_SWIZZLES_3(T)            \
  MSL_B3(MSL_C3, MSL_D3, T, 3, x, 0) \
  MSL_B3(MSL_C3, MSL_D3, T, 3, y, 1) \
  MSL_B3(MSL_C3, MSL_D3, T, 3, z, 2)
#define MSL_SWIZZLES_4(T)            \
  MSL_B4(MSL_C4, MSL_D4, T, 4, x, 0) \
  MSL_B4(MSL_C4, MSL_D4, T, 4, y, 1) \
  MSL_B4(MSL_C4, MSL_D4, T, 4, z, 2) \
  MSL_B4(MSL_C4, MSL_D4, T, 4, w, 3)
