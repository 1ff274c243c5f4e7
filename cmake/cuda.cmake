# The CUDA backend: static runtime, no link to libcuda. AUTO builds it if nvcc is found and there is a
# GPU to run it, or a list of architectures was asked for.
set(SONICMOE_CUDA AUTO CACHE STRING "Build the CUDA backend: AUTO, ON or OFF")
set_property(CACHE SONICMOE_CUDA PROPERTY STRINGS AUTO ON OFF)
set(SONICMOE_WITH_CUDA OFF)

# Leaves the backend out. `reason` is for the reader of this build's output, of `sonicmoe info` and of
# refusals.
macro(sonicmoe_without_cuda reason)
  message(STATUS "CUDA backend: not built, ${reason}")
  set(SONICMOE_CUDA_BUILD "none: ${reason}")
  set_source_files_properties(
    src/backends.cc PROPERTIES COMPILE_DEFINITIONS "SONICMOE_CUDA_ABSENCE=\"${reason}\"")
endmacro()
if(SONICMOE_CUDA STREQUAL "OFF")
  sonicmoe_without_cuda("SONICMOE_CUDA is OFF")
  return()
endif()

# What kernels are compiled for: SASS for each entry. 80 also brings PTX, from which the driver compiles
# for GPUs without SASS; 90 also brings Hopper's engine, 100 Blackwell's.
include(cmake/architectures.cmake)
if(NOT DEFINED CACHE{SONICMOE_CUDA_ARCHITECTURES})
  sonicmoe_architectures_here(architectures)
  if(SONICMOE_CUDA STREQUAL "AUTO" AND NOT architectures)
    sonicmoe_without_cuda("nvidia-smi shows no GPU (SONICMOE_CUDA=ON builds all kernels)")
    return()
  endif()
  if(NOT architectures)
    set(architectures all)
  endif()
endif()
set(SONICMOE_CUDA_ARCHITECTURES "${architectures}"
    CACHE STRING "What CUDA kernels are compiled for, as major * 10 + minor, or all")
if(SONICMOE_CUDA_ARCHITECTURES STREQUAL "all")
  set(SONICMOE_CUDA_ARCHITECTURES ${SONICMOE_EVERY_ARCHITECTURE})
endif()

include(CheckLanguage)
check_language(CUDA)
if(NOT CMAKE_CUDA_COMPILER)
  if(SONICMOE_CUDA STREQUAL "ON")
    message(FATAL_ERROR "SONICMOE_CUDA is ON but no nvcc was found (set CUDACXX).")
  endif()
  sonicmoe_without_cuda("no nvcc was found (set CUDACXX)")
  return()
endif()
foreach(architecture IN LISTS SONICMOE_CUDA_ARCHITECTURES)
  if(NOT architecture MATCHES "^[0-9]+$" OR architecture LESS 80)
    message(FATAL_ERROR "SONICMOE_CUDA_ARCHITECTURES has \"${architecture}\"; it must be numbers "
                        "from 80 on, such as 80;90;100;120, or all.")
  endif()
endforeach()
if(NOT SONICMOE_CUDA_ARCHITECTURES)
  message(FATAL_ERROR "SONICMOE_CUDA_ARCHITECTURES is empty; it must be numbers such as "
                      "80;90;100;120.")
endif()
set(CMAKE_CUDA_ARCHITECTURES OFF) # CMake 3.25 has no sm_90a: -gencode below sets it
enable_language(CUDA)
if(NOT CMAKE_CUDA20_STANDARD_COMPILE_OPTION) # CMake 3.25 does not know nvcc's option for C++20
  set(CMAKE_CUDA20_STANDARD_COMPILE_OPTION -std=c++20)
  set(CMAKE_CUDA20_EXTENSION_COMPILE_OPTION -std=c++20)
endif()
find_package(CUDAToolkit 12.9 REQUIRED)
find_package(Python3 COMPONENTS Interpreter REQUIRED)
set(SONICMOE_WITH_CUDA ON)
# Hopper's engine is compiled for sm_90a alone: wgmma compiled for another target fails to load.
set(hopper_code -gencode=arch=compute_90a,code=sm_90a)
# Blackwell's for the family of 10.0 and 10.3: tcgen05 exists for such targets only.
set(blackwell_code -gencode=arch=compute_100f,code=sm_100f)
set(common_code)
set(SONICMOE_CUDA_CODE)
foreach(architecture IN LISTS SONICMOE_CUDA_ARCHITECTURES)
  list(APPEND common_code -gencode=arch=compute_${architecture},code=sm_${architecture})
  list(APPEND SONICMOE_CUDA_CODE sm_${architecture})
endforeach()
if(80 IN_LIST SONICMOE_CUDA_ARCHITECTURES)
  list(APPEND common_code -gencode=arch=compute_80,code=compute_80)
  list(APPEND SONICMOE_CUDA_CODE compute_80)
endif()
if(90 IN_LIST SONICMOE_CUDA_ARCHITECTURES)
  list(APPEND SONICMOE_CUDA_CODE sm_90a)
endif()
if(100 IN_LIST SONICMOE_CUDA_ARCHITECTURES)
  list(APPEND SONICMOE_CUDA_CODE sm_100f)
endif()
list(JOIN SONICMOE_CUDA_CODE " " SONICMOE_CUDA_CODE)
message(STATUS "CUDA backend: built, nvcc ${CMAKE_CUDA_COMPILER_VERSION}, ${SONICMOE_CUDA_CODE}")
set(SONICMOE_CUDA_BUILD ${SONICMOE_CUDA_CODE})

set_source_files_properties(src/backends.cc PROPERTIES COMPILE_DEFINITIONS SONICMOE_WITH_CUDA)

set(cuda_source ${CMAKE_CURRENT_SOURCE_DIR}/src/cuda)
set(cuda_build ${CMAKE_CURRENT_BINARY_DIR}/cuda)
file(MAKE_DIRECTORY ${cuda_build})
set(cached)
set(cached_by_dependencies)
if(CCACHE) # relative paths in the hash: all checkouts use the same cached results
  set(cached ${CMAKE_COMMAND} -E env CCACHE_BASEDIR=${CMAKE_CURRENT_SOURCE_DIR} CCACHE_NOHASHDIR=1
      ${CCACHE})
  # By default ccache compares preprocessed text, and nvcc preprocesses for one architecture only. A
  # change to code of another architecture alone would be missed. With CCACHE_DEPEND ccache compares
  # all included files instead.
  set(cached_by_dependencies
      ${CMAKE_COMMAND} -E env CCACHE_BASEDIR=${CMAKE_CURRENT_SOURCE_DIR} CCACHE_NOHASHDIR=1
      CCACHE_DEPEND=1 ${CCACHE})
endif()
set(ptxas_gate ${Python3_EXECUTABLE} ${CMAKE_CURRENT_SOURCE_DIR}/cmake/ptxas_gate.py)
list(JOIN SONICMOE_CUDA_ARCHITECTURES "," architectures)
# With tests, the gate writes the PTX of every architecture beside each object. The emulator runs this
# PTX, and early_loads_test.py reads it.
set(common_ptx)
set(hopper_ptx)
set(blackwell_ptx)
if(SONICMOE_BUILD_TESTS AND 90 IN_LIST SONICMOE_CUDA_ARCHITECTURES)
  set(common_ptx --ptx ${architectures})
  set(hopper_ptx --ptx 90a)
  set(blackwell_ptx --ptx 100f)
endif()
# An empty list (no tests, no ccache) adds no element.
set(common_launcher ${ptxas_gate} ${common_ptx} ${cached_by_dependencies})
set(hopper_launcher ${ptxas_gate} ${hopper_ptx} ${cached})
set(blackwell_launcher ${ptxas_gate} ${blackwell_ptx} ${cached})

# An object library whose kernels are compiled by the options `code`.
function(add_cuda_objects name sources code launcher)
  set(verbose)
  if(launcher MATCHES "ptxas_gate") # which reads what ptxas prints
    set(verbose -Xptxas=-v)
  endif()
  add_library(${name} OBJECT ${sources})
  target_include_directories(${name} PRIVATE ${CMAKE_CURRENT_SOURCE_DIR}/include
                                             ${CMAKE_CURRENT_SOURCE_DIR}/src ${cuda_build}
                                             ${CUDAToolkit_INCLUDE_DIRS})
  target_compile_options(
    ${name} PRIVATE $<$<COMPILE_LANGUAGE:CXX>:-Wall -Wextra -ffp-contract=off>
                    $<$<COMPILE_LANGUAGE:CUDA>:${code} --expt-relaxed-constexpr ${verbose}
                    -Xcompiler=-Wall>)
  set_target_properties(
    ${name} PROPERTIES CUDA_STANDARD 20 CUDA_SEPARABLE_COMPILATION OFF
                       CUDA_COMPILER_LAUNCHER "${launcher}")
endfunction()

# Everything else than the engines of some architectures, and what they share: for every one.
file(GLOB_RECURSE SONICMOE_CUDA_SOURCES CONFIGURE_DEPENDS ${cuda_source}/*.cu ${cuda_source}/*.cc)
list(FILTER SONICMOE_CUDA_SOURCES EXCLUDE REGEX "/src/cuda/(hopper|blackwell|fp8)/")
add_cuda_objects(sonicmoe_cuda_objects "${SONICMOE_CUDA_SOURCES}" "${common_code}"
                 "${common_launcher}")
set_source_files_properties(
  ${cuda_source}/device/architectures.cc
  PROPERTIES COMPILE_DEFINITIONS
             "SONICMOE_CUDA_ARCHITECTURES=${architectures};SONICMOE_CUDA_CODE=\"${SONICMOE_CUDA_CODE}\"")
set(cuda_libraries sonicmoe_cuda_objects)
set(engines)

if(90 IN_LIST SONICMOE_CUDA_ARCHITECTURES)
  set(wgmma_script ${cuda_source}/hopper/ptx/generate_wgmma.py)
  set(instance_script ${cuda_source}/hopper/instances/generate.py)
  set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS ${wgmma_script} ${instance_script})
  execute_process(COMMAND ${Python3_EXECUTABLE} ${wgmma_script} ${cuda_build}/wgmma_generated.cuh
                          ${cuda_build}/wgmma_e4m3_generated.cuh
                  COMMAND_ERROR_IS_FATAL ANY)
  execute_process(COMMAND ${Python3_EXECUTABLE} ${instance_script} ${cuda_build}/hopper/instances
                  OUTPUT_VARIABLE instances COMMAND_ERROR_IS_FATAL ANY)
  string(REPLACE "\n" ";" instances "${instances}")
  list(FILTER instances EXCLUDE REGEX "^$")
  file(GLOB_RECURSE SONICMOE_HOPPER_SOURCES CONFIGURE_DEPENDS ${cuda_source}/hopper/*.cu
       ${cuda_source}/hopper/*.cc)
  add_cuda_objects(sonicmoe_hopper_objects "${SONICMOE_HOPPER_SOURCES};${instances}"
                   "${hopper_code}" "${hopper_launcher}")
  list(APPEND engines SONICMOE_WITH_HOPPER)
  list(APPEND cuda_libraries sonicmoe_hopper_objects)
endif()

if(100 IN_LIST SONICMOE_CUDA_ARCHITECTURES)
  file(GLOB_RECURSE SONICMOE_BLACKWELL_SOURCES CONFIGURE_DEPENDS ${cuda_source}/blackwell/*.cu
       ${cuda_source}/blackwell/*.cc)
  add_cuda_objects(sonicmoe_blackwell_objects "${SONICMOE_BLACKWELL_SOURCES}" "${blackwell_code}"
                   "${blackwell_launcher}")
  list(APPEND engines SONICMOE_WITH_BLACKWELL)
  list(APPEND cuda_libraries sonicmoe_blackwell_objects)
endif()

# The quantisers of FP8, for the engines that have it: e4m3 needs sm_89.
set(fp8_code)
set(fp8_ptx)
if(90 IN_LIST SONICMOE_CUDA_ARCHITECTURES)
  list(APPEND fp8_code ${hopper_code})
  list(APPEND fp8_ptx 90a)
endif()
if(100 IN_LIST SONICMOE_CUDA_ARCHITECTURES)
  list(APPEND fp8_code ${blackwell_code})
  list(APPEND fp8_ptx 100f)
endif()
if(fp8_code)
  list(JOIN fp8_ptx "," fp8_ptx)
  set(fp8_launcher ${ptxas_gate})
  if(common_ptx)
    list(APPEND fp8_launcher --ptx ${fp8_ptx})
  endif()
  list(APPEND fp8_launcher ${cached_by_dependencies})
  file(GLOB SONICMOE_FP8_SOURCES CONFIGURE_DEPENDS ${cuda_source}/fp8/*.cu)
  add_cuda_objects(sonicmoe_fp8_objects "${SONICMOE_FP8_SOURCES}" "${fp8_code}" "${fp8_launcher}")
  list(APPEND cuda_libraries sonicmoe_fp8_objects)
endif()
set_source_files_properties(${cuda_source}/engines.cc PROPERTIES COMPILE_DEFINITIONS "${engines}")

foreach(lib sonicmoe_shared sonicmoe_static)
  set_target_properties(${lib} PROPERTIES CUDA_ARCHITECTURES OFF) # created before CUDA was enabled
  foreach(objects IN LISTS cuda_libraries)
    target_sources(${lib} PRIVATE $<TARGET_OBJECTS:${objects}>)
  endforeach()
  target_link_libraries(${lib} PRIVATE $<BUILD_INTERFACE:CUDA::cudart_static>)
endforeach()

# One executable with every device test. It needs a GPU, so it is not registered with ctest.
if(SONICMOE_BUILD_TESTS)
  find_package(GTest REQUIRED)
  file(GLOB SONICMOE_CUDA_TESTS CONFIGURE_DEPENDS tests/cuda/*.cc)
  add_executable(sonicmoe_cuda_tests ${SONICMOE_CUDA_TESTS})
  target_include_directories(sonicmoe_cuda_tests PRIVATE src tests ${CUDAToolkit_INCLUDE_DIRS})
  target_compile_options(sonicmoe_cuda_tests PRIVATE -O1 -Wall -Wextra -ffp-contract=off)
  target_link_libraries(sonicmoe_cuda_tests PRIVATE sonicmoe_verify CUDA::cudart_static GTest::gtest)
  precompile_headers(sonicmoe_cuda_tests PRIVATE <gtest/gtest.h>)
  target_link_options(sonicmoe_cuda_tests PRIVATE -static-libstdc++ -static-libgcc)
endif()

# Metadata, routing and sums build for every GPU from sm_80 on. Compiled for sm_80 they show that they
# need nothing newer; from PTX of compute_80 their tests run the plain forms on any GPU. Built by name
# only, because the library has the same sources for sm_80.
if(SONICMOE_BUILD_TESTS)
  file(GLOB sm80_sources CONFIGURE_DEPENDS ${cuda_source}/metadata/*.cu ${cuda_source}/routing/*.cu
       ${cuda_source}/sums/*.cu)
  add_executable(
    sonicmoe_cuda_sm80_tests EXCLUDE_FROM_ALL ${sm80_sources} tests/cuda/metadata_cuda_test.cc
                             tests/cuda/routing_cuda_test.cc tests/cuda/sums_cuda_test.cc)
  target_include_directories(sonicmoe_cuda_sm80_tests PRIVATE src tests ${CUDAToolkit_INCLUDE_DIRS})
  target_compile_options(
    sonicmoe_cuda_sm80_tests
    PRIVATE $<$<COMPILE_LANGUAGE:CXX>:-Wall -Wextra -ffp-contract=off>
            $<$<COMPILE_LANGUAGE:CUDA>:-gencode=arch=compute_80,code=sm_80
            -gencode=arch=compute_80,code=compute_80 --expt-relaxed-constexpr -Xcompiler=-Wall>)
  set_target_properties(sonicmoe_cuda_sm80_tests PROPERTIES CUDA_STANDARD 20
                                                            CUDA_COMPILER_LAUNCHER "${cached}")
  target_link_libraries(sonicmoe_cuda_sm80_tests PRIVATE sonicmoe_verify CUDA::cudart_static
                                                         GTest::gtest GTest::gtest_main)
  target_link_options(sonicmoe_cuda_sm80_tests PRIVATE -static-libstdc++ -static-libgcc)
endif()

if(SONICMOE_BUILD_TESTS)
  add_executable(h200_routing benchmarks/h200_routing.cc)
  target_include_directories(h200_routing PRIVATE src ${CUDAToolkit_INCLUDE_DIRS})
  target_link_libraries(h200_routing PRIVATE sonicmoe_static CUDA::cudart_static)
  target_link_options(h200_routing PRIVATE -static-libstdc++ -static-libgcc)
endif()

if(SONICMOE_BUILD_TESTS)
  add_executable(exchange_bench benchmarks/exchange.cc)
  target_include_directories(exchange_bench PRIVATE src tests ${CUDAToolkit_INCLUDE_DIRS})
  target_link_libraries(exchange_bench PRIVATE sonicmoe_static CUDA::cudart_static GTest::gtest)
  target_link_options(exchange_bench PRIVATE -static-libstdc++ -static-libgcc)
endif()

if(SONICMOE_BUILD_TESTS)
  add_executable(fp8_bench benchmarks/fp8.cc)
  target_include_directories(fp8_bench PRIVATE src ${CUDAToolkit_INCLUDE_DIRS})
  target_link_libraries(fp8_bench PRIVATE sonicmoe_static CUDA::cudart_static)
  target_link_options(fp8_bench PRIVATE -static-libstdc++ -static-libgcc)
endif()
