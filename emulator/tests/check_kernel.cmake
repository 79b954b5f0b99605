# Runs the rewriter and the address-space check on SOURCE with ERROR defined, and prints what they say.
function(run)
  execute_process(COMMAND ${ARGV} RESULT_VARIABLE result OUTPUT_VARIABLE output ERROR_VARIABLE output)
  if(NOT result EQUAL 0)
    # As it is; FATAL_ERROR would wrap the lines.
    message("${output}")
    message(FATAL_ERROR "not clean")
  endif()
endfunction()
run(${CXX} ${PREPROCESS_FLAGS} -DERROR=${ERROR} ${SOURCE} -o ${OUTPUT}.i)
run(${REWRITER} checked address_space.metal ${OUTPUT}.i ${OUTPUT}.cc)
run(${CXX} ${CHECK_FLAGS} ${OUTPUT}.cc)
message(STATUS "clean")
