# metal_kernel_library(): Metal kernels as embedded text and, for the tests, compiled for the emulator.

include_guard(GLOBAL)

# Expands includes and embeds; needed wherever kernels are.
add_executable(lily_embed_metal ${CMAKE_SOURCE_DIR}/cmake/embed_metal.cc)
target_compile_features(lily_embed_metal PRIVATE cxx_std_20)

# LILY_HAVE_EMULATOR: kernels are compiled for the emulator too.
set(LILY_HAVE_EMULATOR OFF)
if(LILY_EMULATOR AND NOT LILY_TESTS)
  message(STATUS "Metal emulator: left out, it comes with LILY_TESTS")
endif()
if(LILY_EMULATOR AND LILY_TESTS AND EXISTS ${CMAKE_SOURCE_DIR}/emulator/CMakeLists.txt)
  find_program(LILY_KERNEL_CXX NAMES clang++-19 clang++ DOC "clang++ that compiles Metal kernels for the emulator")
  if(NOT CMAKE_SYSTEM_NAME STREQUAL "Linux" OR NOT CMAKE_SYSTEM_PROCESSOR MATCHES "x86_64|AMD64|aarch64|arm64")
    message(STATUS "Metal emulator: left out, it runs on Linux on x86-64 and aarch64")
  elseif(LILY_SANITIZE)
    message(STATUS "Metal emulator: left out, sanitizers do not know its fibers")
  elseif(NOT LILY_KERNEL_CXX)
    message(WARNING "Metal emulator: left out, no clang++ found; install clang-19 to test Metal kernels")
  else()
    set(LILY_HAVE_EMULATOR ON)
  endif()
endif()

if(LILY_HAVE_EMULATOR)
  set(LILY_KERNEL_FLAGS -std=c++20 -O2 -fPIE -ffp-contract=off -fno-math-errno -fno-strict-aliasing
      -Wall -Wextra -Wno-unused-function -Wno-unused-parameter -Wno-unused-const-variable
      -isystem ${CMAKE_SOURCE_DIR}/emulator/shim)
  if(CMAKE_SYSTEM_PROCESSOR MATCHES "x86_64|AMD64")
    # Kernels call fma(); without the instruction that is a slow library call. They only run here.
    include(CheckCXXSourceRuns)
    check_cxx_source_runs("int main() { return __builtin_cpu_supports(\"avx2\") && __builtin_cpu_supports(\"fma\") ? 0 : 1; }"
                          LILY_HOST_HAS_AVX2)
    if(LILY_HOST_HAS_AVX2)
      list(APPEND LILY_KERNEL_FLAGS -mavx2 -mfma -mf16c -mbmi2)
    endif()
  endif()
  # Instrumentation without the sanitizer's runtime: emulator/runtime/sanitizer_hooks.cc has the functions. A read
  # followed by a write of the same place counts as both, and the shim notes atomics itself.
  set(LILY_KERNEL_TRACED_FLAGS -DMSL_TRACED -fsanitize=thread -g1 -mllvm -tsan-instrument-read-before-write=1
      -mllvm -tsan-instrument-atomics=0 -mllvm -tsan-instrument-func-entry-exit=0)
  set(LILY_KERNEL_CHECK_FLAGS -x clcpp -cl-std=clc++2021 --target=x86_64-linux-gnu -cl-no-stdinc -fsyntax-only
      -DMSL_CHECK -Wno-everything -I${CMAKE_SOURCE_DIR}/emulator/shim)
  set(LILY_KERNEL_PREPROCESS_FLAGS -E -x c++ -nostdinc -D__METAL_VERSION__=310 -D__HAVE_BFLOAT__
      -I${CMAKE_SOURCE_DIR}/emulator/stub)
endif()

# Rewritten source, two objects and the address-space check of one expanded .metal file; appends the objects.
function(_lily_compile_kernel symbol expanded tensor objects_variable)
  get_filename_component(name ${expanded} NAME)
  get_filename_component(directory ${expanded} DIRECTORY)
  get_filename_component(stem ${expanded} NAME_WE)
  set(base ${directory}/${stem})
  set(tensor_flags)
  if(tensor)
    set(tensor_flags -U__METAL_VERSION__ -D__METAL_VERSION__=400 -D__HAVE_TENSOR__)
  endif()
  file(GLOB shim CONFIGURE_DEPENDS ${CMAKE_SOURCE_DIR}/emulator/shim/*.h)
  foreach(build plain traced)
    add_custom_command(OUTPUT ${base}_${build}.cc
      COMMAND ${LILY_KERNEL_CXX} ${LILY_KERNEL_PREPROCESS_FLAGS} ${tensor_flags} ${expanded} -o ${base}_${build}.i
      COMMAND lily_msl_rewriter ${symbol}_${build} ${name} ${base}_${build}.i ${base}_${build}.cc
      DEPENDS ${expanded} lily_msl_rewriter VERBATIM)
  endforeach()
  add_custom_command(OUTPUT ${base}.checked
    COMMAND ${LILY_KERNEL_CXX} ${LILY_KERNEL_CHECK_FLAGS} ${base}_plain.cc
    COMMAND ${CMAKE_COMMAND} -E touch ${base}.checked
    DEPENDS ${base}_plain.cc ${shim} COMMENT "Checking address spaces of ${name}" VERBATIM)
  add_custom_command(OUTPUT ${base}_plain.o
    COMMAND ${CMAKE_CXX_COMPILER_LAUNCHER} ${LILY_KERNEL_CXX} ${LILY_KERNEL_FLAGS}
            -c ${base}_plain.cc -o ${base}_plain.o
    DEPENDS ${base}_plain.cc ${base}.checked ${shim} COMMENT "Compiling kernels of ${name}" VERBATIM)
  add_custom_command(OUTPUT ${base}_traced.o
    COMMAND ${CMAKE_CXX_COMPILER_LAUNCHER} ${LILY_KERNEL_CXX} ${LILY_KERNEL_FLAGS} ${LILY_KERNEL_TRACED_FLAGS}
            -c ${base}_traced.cc -o ${base}_traced.o
    DEPENDS ${base}_traced.cc ${shim} COMMENT "Compiling traced kernels of ${name}" VERBATIM)
  set(${objects_variable} ${${objects_variable}} ${base}_plain.o ${base}_traced.o PARENT_SCOPE)
endfunction()

# metal_kernel_library(NAME KERNELS a.metal ... [MATH safe|fast] [TENSOR_OPS])
#
# Target NAME: a library with `lily::metal::NAME` (a KernelLibrary, declared in "NAME.h"), the text of the kernels.
# Target NAME_emulated, if LILY_HAVE_EMULATOR: the same kernels compiled, `lily::emulator::NAME_plain` and
# `NAME_traced` (declared in "NAME_emulated.h"). Their address spaces are checked while building.
function(metal_kernel_library name)
  cmake_parse_arguments(ARG "TENSOR_OPS" "MATH" "KERNELS" ${ARGN})
  if(NOT ARG_MATH)
    set(ARG_MATH safe)
  endif()
  set(tensor false)
  if(ARG_TENSOR_OPS)
    set(tensor true)
  endif()
  set(out ${CMAKE_CURRENT_BINARY_DIR}/${name})
  set(files)
  set(expanded)
  foreach(kernel ${ARG_KERNELS})
    get_filename_component(path ${kernel} ABSOLUTE)
    get_filename_component(file ${kernel} NAME)
    list(APPEND files ${path})
    list(APPEND expanded ${out}/${file})
  endforeach()
  add_custom_command(OUTPUT ${out}/${name}.cc ${expanded}
    COMMAND lily_embed_metal ${name} ${ARG_MATH} ${tensor} ${CMAKE_SOURCE_DIR} ${out} ${files}
    DEPENDS ${files} lily_embed_metal DEPFILE ${out}/${name}.d COMMENT "Embedding ${name}" VERBATIM)
  file(CONFIGURE OUTPUT ${out}/${name}.h @ONLY CONTENT
"#pragma once

#include \"backend/metal/device.h\"

namespace lily::metal {
extern const KernelLibrary @name@;
}  // namespace lily::metal
")
  add_library(${name} STATIC ${out}/${name}.cc)
  target_link_libraries(${name} PUBLIC lily_settings)
  target_include_directories(${name} PUBLIC ${out})
  if(NOT LILY_HAVE_EMULATOR)
    return()
  endif()

  set(objects)
  set(declarations)
  set(plain)
  set(traced)
  foreach(file ${expanded})
    get_filename_component(stem ${file} NAME_WE)
    set(symbol msl_${name}_${stem})
    _lily_compile_kernel(${symbol} ${file} ${tensor} objects)
    string(APPEND declarations "extern const lily::emulator::CompiledFile ${symbol}_plain, ${symbol}_traced;\n")
    string(APPEND plain "&${symbol}_plain, ")
    string(APPEND traced "&${symbol}_traced, ")
  endforeach()
  list(LENGTH expanded n_files)
  file(CONFIGURE OUTPUT ${out}/${name}_emulated.h @ONLY CONTENT
"#pragma once

#include \"emulator/shim/msl_runtime.h\"

namespace lily::emulator {
extern const CompiledLibrary @name@_plain, @name@_traced;
}  // namespace lily::emulator
")
  file(CONFIGURE OUTPUT ${out}/${name}_emulated.cc @ONLY CONTENT
"#include \"@name@_emulated.h\"

@declarations@
namespace lily::emulator {
namespace {
const CompiledFile* const kPlain[] = {@plain@};
const CompiledFile* const kTraced[] = {@traced@};
}  // namespace
const CompiledLibrary @name@_plain = {\"@name@\", kPlain, @n_files@, false};
const CompiledLibrary @name@_traced = {\"@name@\", kTraced, @n_files@, true};
}  // namespace lily::emulator
")
  add_library(${name}_emulated STATIC ${out}/${name}_emulated.cc ${objects})
  set_source_files_properties(${objects} PROPERTIES EXTERNAL_OBJECT ON GENERATED ON)
  target_link_libraries(${name}_emulated PUBLIC ${name} lily_emulator)
endfunction()
