# Compiler settings shared by all targets, and the two functions that make a target.

add_library(lily_settings INTERFACE)
target_include_directories(lily_settings INTERFACE ${CMAKE_SOURCE_DIR}/src)
target_compile_options(lily_settings INTERFACE -Wall -Wextra -Wshadow
                       # Designated initialisers name what they set; the rest has defaults.
                       -Wno-missing-field-initializers
                       $<$<CXX_COMPILER_ID:GNU>:-Wno-restrict>
                       # Sums must not depend on what the compiler contracts; kernels say fma where they mean it.
                       $<$<COMPILE_LANGUAGE:CXX>:-ffp-contract=off>)
if(LILY_WERROR)
  target_compile_options(lily_settings INTERFACE $<$<COMPILE_LANGUAGE:CXX>:-Werror>)
endif()
if(CMAKE_SYSTEM_PROCESSOR MATCHES "x86_64|AMD64")
  target_compile_options(lily_settings INTERFACE $<$<COMPILE_LANGUAGE:CXX>:-march=x86-64-v2>)
endif()
if(LILY_SANITIZE)
  add_compile_options(-fsanitize=${LILY_SANITIZE} -fno-omit-frame-pointer -fno-sanitize-recover=all)
  add_link_options(-fsanitize=${LILY_SANITIZE})
endif()

# With LILY_UNITY, compiles the sources of a target in groups of equal size, at most 12: most of the time of a full build
# goes into headers and templates that they share. Names in unnamed namespaces meet in such a group, so they differ
# within a target.
function(lily_unite name)
  if(LILY_UNITY)
    get_target_property(sources ${name} SOURCES)
    list(LENGTH sources n_sources)
    math(EXPR n_groups "(${n_sources} + 11) / 12")
    math(EXPR group "(${n_sources} + ${n_groups} - 1) / ${n_groups}")
    set_target_properties(${name} PROPERTIES UNITY_BUILD ON UNITY_BUILD_BATCH_SIZE ${group})
  endif()
endfunction()

# With sanitizers clang needs half the time for what it need not optimise, and what is light or a test computes little.
# (GCC needs as long for -O0 as for -Og.)
set(LILY_UNOPTIMISED OFF)
if(LILY_SANITIZE AND NOT LILY_FUZZ AND CMAKE_CXX_COMPILER_ID MATCHES "Clang")
  set(LILY_UNOPTIMISED ON)
endif()

# lily_light(NAME): little is computed in this target (JSON, sockets, files, command lines), so the compiler spends a third
# less time on it. What it then knows of values is too little for one of its warnings.
function(lily_light name)
  target_compile_options(${name} PRIVATE $<$<CONFIG:Release>:-O1>
                         $<$<AND:$<CONFIG:Release>,$<CXX_COMPILER_ID:GNU>>:-Wno-maybe-uninitialized>
                         $<$<BOOL:${LILY_UNOPTIMISED}>:-O0>)
endfunction()

# lily_library(NAME SOURCES ... [LINK ...] [SEPARATE] [LIGHT]): one static library for a folder of src/. SEPARATE keeps each
# source a translation unit of its own, as files that are compiled once per instruction set must be. LIGHT: lily_light.
function(lily_library name)
  cmake_parse_arguments(ARG "SEPARATE;LIGHT" "" "SOURCES;LINK" ${ARGN})
  add_library(${name} STATIC ${ARG_SOURCES})
  if(NOT ARG_SEPARATE)
    lily_unite(${name})
  endif()
  if(ARG_LIGHT)
    lily_light(${name})
  endif()
  target_link_libraries(${name} PUBLIC lily_settings ${ARG_LINK})
endfunction()

# lily_test(NAME SOURCES ... LINK ... [LABEL unit] [TIMEOUT seconds] [COST seconds] [SHARDS n] [THREADS n] [SERIAL] [SEPARATE]):
# one GoogleTest program, one ctest entry, or n of them (NAME, NAME_shard1, ...) that share its tests. Tests run in the
# source folder, so that they find models/ and tests/golden/. COST is said of long ones only: ctest starts them first, so
# that none of them runs alone at the end. THREADS is said of tests that compute on so many threads: their barriers cost
# much when others want the same cores. What is labelled slow is built by the target lily_slow_tests, not by "all".
add_custom_target(lily_slow_tests)
function(lily_test name)
  cmake_parse_arguments(ARG "SERIAL;SEPARATE" "LABEL;TIMEOUT;COST;SHARDS;THREADS" "SOURCES;LINK;ARGS" ${ARGN})
  if(NOT ARG_LABEL)
    set(ARG_LABEL unit)
  endif()
  if(NOT ARG_TIMEOUT)
    set(ARG_TIMEOUT 120)
  endif()
  add_executable(${name} ${ARG_SOURCES})
  if(NOT ARG_SEPARATE)
    lily_unite(${name})
  endif()
  target_include_directories(${name} PRIVATE ${CMAKE_SOURCE_DIR})
  if(ARG_LABEL STREQUAL "slow")
    set_target_properties(${name} PROPERTIES EXCLUDE_FROM_ALL ON)
    add_dependencies(lily_slow_tests ${name})
  endif()
  # if (...) EXPECT_... is what gtest is for; test code is compiled once and run once. -Og takes a
  # third less time than -O1, as -O0 does, and still inlines the small functions of headers.
  target_compile_options(${name} PRIVATE -Wno-dangling-else $<$<NOT:$<CONFIG:Debug>>:-Og>
                         $<$<BOOL:${LILY_UNOPTIMISED}>:-O0>
                         $<$<AND:$<NOT:$<CONFIG:Debug>>,$<CXX_COMPILER_ID:GNU>>:-Wno-maybe-uninitialized>)
  target_link_libraries(${name} PRIVATE lily_settings ${ARG_LINK} GTest::gmock GTest::gtest_main)
  set(entries ${name})
  add_test(NAME ${name} COMMAND ${name} ${ARG_ARGS} WORKING_DIRECTORY ${CMAKE_SOURCE_DIR})
  if(ARG_SHARDS)
    set_tests_properties(${name} PROPERTIES ENVIRONMENT "GTEST_TOTAL_SHARDS=${ARG_SHARDS};GTEST_SHARD_INDEX=0")
    math(EXPR last "${ARG_SHARDS} - 1")
    foreach(shard RANGE 1 ${last})
      add_test(NAME ${name}_shard${shard} COMMAND ${name} ${ARG_ARGS} WORKING_DIRECTORY ${CMAKE_SOURCE_DIR})
      set_tests_properties(${name}_shard${shard} PROPERTIES
                           ENVIRONMENT "GTEST_TOTAL_SHARDS=${ARG_SHARDS};GTEST_SHARD_INDEX=${shard}")
      list(APPEND entries ${name}_shard${shard})
    endforeach()
  endif()
  set_tests_properties(${entries} PROPERTIES LABELS "${ARG_LABEL}" TIMEOUT ${ARG_TIMEOUT})
  if(ARG_COST)
    set_tests_properties(${entries} PROPERTIES COST ${ARG_COST})
  endif()
  if(ARG_THREADS)
    set_tests_properties(${entries} PROPERTIES PROCESSORS ${ARG_THREADS})
  endif()
  if(ARG_SERIAL)
    set_tests_properties(${entries} PROPERTIES RUN_SERIAL ON)
  endif()
endfunction()

# lily_fuzz(NAME SOURCES file.cc LINK ... [CORPUS folders]): a libFuzzer target with LILY_FUZZ; in every other build the same code
# with a small main that replays the corpus in fuzz/corpus/NAME, and in the folders named, as a test.
function(lily_fuzz name)
  cmake_parse_arguments(ARG "" "" "SOURCES;LINK;CORPUS" ${ARGN})
  if(LILY_FUZZ)
    add_executable(fuzz_${name} ${ARG_SOURCES})
    target_link_options(fuzz_${name} PRIVATE -fsanitize=fuzzer)
  elseif(LILY_TESTS)
    add_executable(fuzz_${name} ${ARG_SOURCES} ${CMAKE_SOURCE_DIR}/fuzz/replay_main.cc)
    add_test(NAME fuzz_replay_${name} COMMAND fuzz_${name} ${CMAKE_SOURCE_DIR}/fuzz/corpus/${name} ${ARG_CORPUS}
             WORKING_DIRECTORY ${CMAKE_SOURCE_DIR})
    set_tests_properties(fuzz_replay_${name} PROPERTIES LABELS unit TIMEOUT 120)
  endif()
  lily_light(fuzz_${name})
  target_include_directories(fuzz_${name} PRIVATE ${CMAKE_SOURCE_DIR})
  target_link_libraries(fuzz_${name} PRIVATE lily_settings ${ARG_LINK})
endfunction()
