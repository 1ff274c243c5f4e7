# Every architecture that kernels are compiled for, as major * 10 + minor.
set(SONICMOE_EVERY_ARCHITECTURE 80 90 100 120)

# Sets `result` to the entries that serve the GPUs of this machine: to all if no entry serves one of
# them, to none if nvidia-smi names no GPU.
function(sonicmoe_architectures_here result)
  set(${result} "" PARENT_SCOPE)
  execute_process(COMMAND nvidia-smi --query-gpu=compute_cap --format=csv,noheader
                  RESULT_VARIABLE status OUTPUT_VARIABLE capabilities ERROR_QUIET TIMEOUT 20)
  if(NOT status EQUAL 0)
    return()
  endif()
  string(REGEX MATCHALL "[0-9]+\\.[0-9]+" capabilities "${capabilities}")
  set(found)
  foreach(capability IN LISTS capabilities)
    string(REGEX REPLACE "\\..*" "0" entry ${capability}) # machine code serves later minor versions
    if(NOT entry IN_LIST SONICMOE_EVERY_ARCHITECTURE)
      set(${result} ${SONICMOE_EVERY_ARCHITECTURE} PARENT_SCOPE)
      return()
    endif()
    list(APPEND found ${entry})
  endforeach()
  if(found)
    list(REMOVE_DUPLICATES found)
    list(SORT found COMPARE NATURAL)
    set(${result} ${found} PARENT_SCOPE)
  endif()
endfunction()
