# The CUDA tests without a GPU: the kernels' PTX runs on the CPU (emulator).
if(NOT SONICMOE_EMULATOR OR NOT SONICMOE_BUILD_TESTS OR NOT SONICMOE_WITH_CUDA)
  return()
endif()
if(NOT 90 IN_LIST SONICMOE_CUDA_ARCHITECTURES)
  message(STATUS "PTX emulator: off, it needs 90 in SONICMOE_CUDA_ARCHITECTURES")
  return()
endif()
find_package(GTest REQUIRED)

# Stands in for the CUDA runtime, and under its file name for the driver, which the library opens at
# run time. It is in a folder of its own, so that other programs do not find it.
file(GLOB emulator_sources CONFIGURE_DEPENDS emulator/*.cc emulator/runtime/*.cc)
file(GLOB emulator_tests CONFIGURE_DEPENDS emulator/tests/*.cc)
add_library(sonicmoe_emulator SHARED ${emulator_sources})
target_include_directories(sonicmoe_emulator PUBLIC emulator ${CUDAToolkit_INCLUDE_DIRS})
# GCC 12 warns of overlapping copies in sums of strings, which do not overlap.
set(no_restrict $<$<CXX_COMPILER_ID:GNU>:-Wno-restrict>)
# No other library replaces its functions, so calls among them are direct or inlined.
target_compile_options(sonicmoe_emulator PRIVATE -O3 -fno-semantic-interposition ${no_restrict})
# Products of matrices need not round each term.
set_source_files_properties(emulator/matrix_product.cc PROPERTIES COMPILE_OPTIONS
                                                                        -ffp-contract=fast)
target_link_libraries(sonicmoe_emulator PRIVATE sonicmoe_options Threads::Threads)
precompile_headers(sonicmoe_emulator PRIVATE <algorithm> <functional> <map> <memory> <mutex> <string>
                   <vector>)
target_link_options(sonicmoe_emulator PRIVATE -Wl,--no-undefined -Wl,-Bsymbolic-functions)
set_target_properties(
  sonicmoe_emulator
  PROPERTIES OUTPUT_NAME cuda
             SOVERSION 1
             CXX_VISIBILITY_PRESET default
             VISIBILITY_INLINES_HIDDEN OFF
             LIBRARY_OUTPUT_DIRECTORY ${CMAKE_CURRENT_BINARY_DIR}/emulator)

# An RPATH of the old kind comes before LD_LIBRARY_PATH, which may name the real driver's folder.
add_executable(emulator_test ${emulator_tests})
target_compile_options(emulator_test PRIVATE -O1 ${no_restrict})
target_link_libraries(emulator_test PRIVATE sonicmoe_options sonicmoe_emulator GTest::gtest
                                            GTest::gtest_main)
precompile_headers(emulator_test PRIVATE <gtest/gtest.h>)
target_link_options(emulator_test PRIVATE -Wl,--disable-new-dtags)
# Kernels with tcgen05, for 10.0 and 10.3.
set(pair_product ${CMAKE_CURRENT_BINARY_DIR}/emulator/pair_product.ptx)
set(pair_product_source ${CMAKE_CURRENT_SOURCE_DIR}/emulator/tests/ptx/pair_product.cu)
add_custom_command(
  OUTPUT ${pair_product}
  COMMAND ${CMAKE_CUDA_COMPILER} -std=c++20 -arch=sm_100f -ptx -o ${pair_product}
          ${pair_product_source}
  DEPENDS ${pair_product_source})
target_sources(emulator_test PRIVATE ${pair_product})
set_source_files_properties(
  emulator/tests/pair_product_test.cc PROPERTIES COMPILE_DEFINITIONS
                                                 PAIR_PRODUCT_PTX="${pair_product}")
gtest_discover_tests(emulator_test DISCOVERY_TIMEOUT 120)
foreach(capability 8.0 8.6 10.0 12.0) # and 9.0, the default
  add_test(NAME Capability.Is${capability} COMMAND emulator_test --gtest_filter=Capability.*)
  set_tests_properties(
    Capability.Is${capability}
    PROPERTIES ENVIRONMENT SONICMOE_EMULATED_CAPABILITY=${capability}
               FAIL_REGULAR_EXPRESSION "Running 0 tests")
endforeach()

# The device tests, of the same objects as the library and sonicmoe_cuda_tests. The emulator runs the
# PTX that ptxas_gate.py keeps beside the objects of the kernels.
set(emulated_objects $<TARGET_OBJECTS:sonicmoe_cuda_objects>
                     $<TARGET_OBJECTS:sonicmoe_hopper_objects> $<TARGET_OBJECTS:sonicmoe_fp8_objects>)
if(TARGET sonicmoe_blackwell_objects)
  list(APPEND emulated_objects $<TARGET_OBJECTS:sonicmoe_blackwell_objects>)
endif()
set(emulated_kernels "$<FILTER:${emulated_objects},INCLUDE,\\.cu\\.o$>")
set(gather_script ${CMAKE_CURRENT_SOURCE_DIR}/cmake/gather_ptx.py)
set(emulated_ptx ${CMAKE_CURRENT_BINARY_DIR}/emulated_ptx.c)
add_custom_command(
  OUTPUT ${emulated_ptx}
  COMMAND ${Python3_EXECUTABLE} ${gather_script} ${emulated_ptx} "${emulated_kernels}"
  DEPENDS ${gather_script} "${emulated_kernels}"
  COMMAND_EXPAND_LISTS)
add_executable(
  sonicmoe_emulated_tests
  $<TARGET_OBJECTS:sonicmoe_objects>
  $<TARGET_OBJECTS:sonicmoe_verify>
  $<TARGET_OBJECTS:sonicmoe_cuda_tests>
  ${emulated_objects}
  ${emulated_ptx})
target_link_libraries(sonicmoe_emulated_tests PRIVATE sonicmoe_emulator Threads::Threads
                                                      GTest::gtest)
target_link_options(sonicmoe_emulated_tests PRIVATE -Wl,--disable-new-dtags)
set_target_properties(sonicmoe_emulated_tests PROPERTIES LINKER_LANGUAGE CXX
                                                         CUDA_RUNTIME_LIBRARY None)

# A part of the device tests: seconds to two minutes each. `cases` selects those of the harness. The
# longest tests run a part of them if SONICMOE_DAY is set (takes_turns()). ctest starts the tests of
# most seconds first.
function(add_emulated_test name seconds filter cases)
  add_test(NAME Emulated.${name} COMMAND sonicmoe_emulated_tests --gtest_filter=${filter})
  set_tests_properties(
    Emulated.${name}
    PROPERTIES TIMEOUT 1200
               COST ${seconds}
               ENVIRONMENT "SONICMOE_FILTER=${cases}"
               ENVIRONMENT_MODIFICATION SONICMOE_DAY=unset:
               FAIL_REGULAR_EXPRESSION "Running 0 tests|SKIPPED")
endfunction()
# Lets a test run the cases of the day SONICMOE_DAY, if this variable is set.
function(takes_turns name)
  set_property(TEST Emulated.${name} PROPERTY ENVIRONMENT_MODIFICATION "")
endfunction()
# The same, and lets it run every second one of its tests.
function(takes_turns_by_test name)
  takes_turns(${name})
  set_property(TEST Emulated.${name} APPEND PROPERTY ENVIRONMENT SONICMOE_TURNS=2)
endfunction()
add_emulated_test(Fp8 10 "CudaFp8.*-CudaFp8.EveryRunHasTheSameBits" "")
# Token rounding over 1000 experts and more takes the longest. The six cases of 14 that are left have
# every mode; the other pairs of mode and tile run with fewer experts.
set(rounding "_tile1/t218_e1000 _tile3/t218_e1000 _tile16/t131_e1024 _tile128/t131_e1024")
set(parts 3)
foreach(part RANGE 1 ${parts})
  add_emulated_test(HopperEngine${part} 90 "Each/Cuda.PassesTheHarness/hopper" "")
  set_property(TEST Emulated.HopperEngine${part} APPEND PROPERTY ENVIRONMENT
               "SONICMOE_PART=${part}/${parts}" "SONICMOE_WITHOUT=${rounding}")
  takes_turns(HopperEngine${part})
endforeach()
# Both engines use the same kernels for routing and rounding. HopperEngine has tested them, so these
# tests run only some cases of routing and none of rounding. n = 248 has two tiles of gate and up
# already, so n = 480 is left out. Of the cases with factors these are the layouts, frozen layers and
# single gradients: HopperEngine has the others, with the same host code, and gradients without
# factors are written by the same kernels.
set(portable "Each/Cuda.PassesTheHarness/portable")
add_emulated_test(PortableActivations 80 ${portable} "activation batch/")
add_emulated_test(
  PortableShapes 70 ${portable}
  "wide/n248 shape/ grads/ layout gemm lora/frozen lora/only edges sentinels/ shuffled/ repeated/ no_tokens"
)
takes_turns(PortableActivations)
takes_turns(PortableShapes)
# The engine blackwell does not serve 9.0.
set(serving -*/blackwell)
add_emulated_test(Graphs 5 "Each/CudaGraph.*${serving}" "")
add_emulated_test(LowRank 20 "Each/CudaLowRank.*${serving}" "")
add_emulated_test(Packed 60 "CudaPacked.*:Each/CudaPackedLayer.*${serving}" "")
add_emulated_test(OneRow 1 "Each/CudaOneRow.*${serving}" "")
add_emulated_test(Nan 5 "Each/CudaNan.*${serving}" "")
add_emulated_test(Accumulate 1 "Each/CudaAccumulate.*${serving}" "")
add_emulated_test(
  Routing 25 "CudaRouting.TopK*:CudaRouting.Strided*:CudaRouter.ScratchIsAskedFor:CudaRouter.AnError*" "")
add_emulated_test(Exchange 70 "Exchange.*" "")
add_emulated_test(ExchangeInC 2 "ExchangeInC.*" "")
add_emulated_test(ExchangeLists 4 "ExchangeLists.*" "")
add_emulated_test(ExchangeKept 20 "ExchangeKept.*" "")
add_emulated_test(ExchangeLowRank 15
                  "ExchangeHarness.FewLowRankFactors:ExchangeHarness.RejectsFactorsOfAnotherRank" "")
add_emulated_test(
  ExchangeRepeats 45
  "ExchangeRepeats.OwnRows*:ExchangeRepeats.FourRanks*:ExchangeRepeats.TwoExchanges*" "")
add_emulated_test(ExchangeBetweenProcesses 15 "ExchangeProcesses.*" "")
add_emulated_test(ExchangeOfRanks 70
                  "ExchangeHarness.NumberOf*:*.NoTokens:*.RejectsABrokenExchange:*.PortableEngine" "")
foreach(name Packed Exchange ExchangeKept ExchangeOfRanks ExchangeRepeats)
  takes_turns_by_test(${name})
endforeach()

# Code for other architectures, on devices of other capabilities: A100 (8.0), GPUs of 8.6, which run
# the code for 8.0 with less shared memory, B200 (10.0) and RTX 5090 (12.0). The cases have every
# product of the layer, gated and not, with weights of both orders, in bf16 and fp16; those of 8.0 and
# 12.0 also more routings. Top-k routing has its plain form in code for 8.0 only.
set(some_cases "layout/concatenated wide/n248_transposed wide/n248_paired gemm lora/frozen")
set(more_cases
    "layout/concatenated layout/transposed activation/swiglu_paired/ wide/n248 gemm lora/frozen"
    "routing/ids_sentinels_k11/bf16/integers routing/pairs_many_of_each/bf16/integers"
    "routing/ids_many_experts/bf16/random routing/grouped_gaps/bf16/random")
list(JOIN more_cases " " more_cases)
function(add_capability_test name seconds capability filter cases)
  add_emulated_test(${name} ${seconds} ${filter} "${cases}")
  set_property(TEST Emulated.${name} APPEND
               PROPERTY ENVIRONMENT "SONICMOE_EMULATED_CAPABILITY=${capability}")
endfunction()
if(80 IN_LIST SONICMOE_CUDA_ARCHITECTURES)
  add_capability_test(Portable80 40 8.0 ${portable} "${more_cases}")
  add_capability_test(Portable86 10 8.6 ${portable} "${some_cases}")
  add_capability_test(Packed80 20 8.0 "CudaPacked.*:Each/CudaPackedLayer.*/portable" "")
  add_capability_test(Routing80 15 8.0 "CudaRouting.TopK*:CudaRouter.AnError*" "")
  takes_turns_by_test(Packed80)
  takes_turns_by_test(Routing80)
endif()
if(100 IN_LIST SONICMOE_CUDA_ARCHITECTURES)
  add_capability_test(Portable100 10 10.0 ${portable} "${some_cases}")
  # Of the engine blackwell: every product, all activations, experts of 0 to 511 rows, and sums beside
  # weight gradients.
  set(blackwell "Each/Cuda.PassesTheHarness/blackwell")
  add_capability_test(Blackwell 35 10.0 ${blackwell}
                      "${some_cases} routing/grouped_edges routing/ids_more_edges_k2 routing/ids_sentinels_k11/bf16")
  set_property(TEST Emulated.Blackwell APPEND PROPERTY ENVIRONMENT
                                                       SONICMOE_EMULATED_SEED=today/3)
  # A sixth of the changes, others each day: all of them take two to three minutes of two cores.
  add_test(NAME Emulated.BlackwellMutations
           COMMAND ${Python3_EXECUTABLE} ${CMAKE_CURRENT_SOURCE_DIR}/tests/blackwell_mutations.py
                   $<TARGET_FILE:sonicmoe_emulated_tests> --share today/6)
  set_tests_properties(Emulated.BlackwellMutations PROPERTIES TIMEOUT 1800 COST 100)
  add_capability_test(BlackwellExchange 15 10.0 "ExchangeHarness.BlackwellEngine" "")
  add_capability_test(BlackwellExchangeFp8 20 10.0
                      "ExchangeHarness.BlackwellFp8:ExchangeHarness.BlackwellRefuses*" "")
  add_capability_test(BlackwellExchangeKept 15 10.0 "ExchangeKept.TwoRanks*" "")
  set_property(TEST Emulated.BlackwellExchangeKept APPEND PROPERTY ENVIRONMENT
                                                                   SONICMOE_ENGINE=blackwell)
  add_test(NAME Emulated.BlackwellFaults
           COMMAND ${Python3_EXECUTABLE} ${CMAKE_CURRENT_SOURCE_DIR}/tests/blackwell_faults.py
                   $<TARGET_FILE:sonicmoe_emulated_tests>)
  add_capability_test(BlackwellActivations 40 10.0 ${blackwell} "activation")
  takes_turns(BlackwellActivations)
  add_capability_test(BlackwellFp8 15 10.0 ${blackwell}
                      "fp8/shape/d256_n384 fp8/shape/tail_d128_n320 fp8/shape/tail_d448 fp8/routing/ids_edges")
  set_property(TEST Emulated.BlackwellFp8 APPEND PROPERTY ENVIRONMENT "SONICMOE_WITHOUT=roundings")
  add_capability_test(
    BlackwellGraphs 12 10.0
    "Each/CudaGraph.*/blackwell:Each/CudaNan.*/blackwell:Each/CudaAccumulate.*/blackwell" "")
endif()
if(120 IN_LIST SONICMOE_CUDA_ARCHITECTURES)
  add_capability_test(Portable120 30 12.0 ${portable} "${more_cases}")
  add_capability_test(Packed120 20 12.0 "CudaPacked.*:Each/CudaPackedLayer.*/portable" "")
  takes_turns_by_test(Packed120)
endif()
