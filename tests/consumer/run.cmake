# Installs the build into a fresh tree, moves it, and builds the consumer against it: both libraries
# by find_package, both by pkg-config.
# Arguments: BUILD, SOURCE, WORK, CXX, CC, NM, READELF, PKG_CONFIG (may be NOTFOUND), FLAGS.
function(step)
  execute_process(COMMAND ${ARGN} RESULT_VARIABLE result OUTPUT_VARIABLE output
                  ERROR_VARIABLE output)
  if(NOT result EQUAL 0)
    list(JOIN ARGN " " command)
    message(FATAL_ERROR "failed (${result}): ${command}\n${output}")
  endif()
endfunction()

file(REMOVE_RECURSE ${WORK})
step(${CMAKE_COMMAND} --install ${BUILD} --prefix ${WORK}/installed)
file(RENAME ${WORK}/installed ${WORK}/moved) # nothing may remember where it was installed
set(prefix ${WORK}/moved)

step(${CMAKE_COMMAND} -S ${SOURCE} -B ${WORK}/build -DCMAKE_PREFIX_PATH=${prefix}
     -DCMAKE_CXX_COMPILER=${CXX} -DCMAKE_CXX_FLAGS=${FLAGS} -DCMAKE_BUILD_TYPE=Release)
step(${CMAKE_COMMAND} --build ${WORK}/build)
step(${WORK}/build/consumer_core)
step(${WORK}/build/consumer_core_static)

# The wheel's module is not a part of the library, even where both were built in one folder.
if(EXISTS ${prefix}/sonicmoe_cpp)
  message(FATAL_ERROR "the install tree has a folder sonicmoe_cpp of the Python package")
endif()

# The shared library needs no CUDA toolkit, whether it has the CUDA backend or not.
step(${CMAKE_COMMAND} -S ${SOURCE} -B ${WORK}/build_shared -DCMAKE_PREFIX_PATH=${prefix}
     -DCMAKE_CXX_COMPILER=${CXX} -DCMAKE_CXX_FLAGS=${FLAGS} -DCMAKE_BUILD_TYPE=Release
     -DFLAVOURS=core -DCMAKE_DISABLE_FIND_PACKAGE_CUDAToolkit=ON)

# Every exported name is of the interface and carries its version.
file(GLOB_RECURSE library ${prefix}/*/libsonicmoe.so)
# With static thread-local storage the library could not be loaded after torch: glibc keeps only
# some 1.6 KB for libraries that are loaded late.
execute_process(COMMAND ${READELF} -d ${library} OUTPUT_VARIABLE dynamic COMMAND_ERROR_IS_FATAL ANY)
if(dynamic MATCHES "STATIC_TLS")
  message(FATAL_ERROR "${library} has static thread-local storage")
endif()
execute_process(COMMAND ${NM} -D --defined-only ${library} OUTPUT_VARIABLE names
                COMMAND_ERROR_IS_FATAL ANY)
string(REGEX MATCHALL "[^\n]+" names "${names}")
foreach(line IN LISTS names)
  if(NOT line MATCHES "( smoe_[a-z0-9_]+@@SONICMOE_0.1$)|( _Z.*sonicmoe.*@@SONICMOE_CXX_0.1$)|( A SONICMOE_)")
    message(FATAL_ERROR "libsonicmoe.so exports a name that is not of its interface: ${line}")
  endif()
endforeach()

if(NOT PKG_CONFIG)
  message(STATUS "pkg-config is not installed: its half of this test is skipped")
  return()
endif()
get_filename_component(lib_dir ${library} DIRECTORY)
set(ENV{PKG_CONFIG_PATH} ${lib_dir}/pkgconfig)
execute_process(COMMAND ${PKG_CONFIG} --cflags --libs sonicmoe OUTPUT_VARIABLE flags
                COMMAND_ERROR_IS_FATAL ANY)
separate_arguments(flags UNIX_COMMAND "${flags}")
separate_arguments(extra UNIX_COMMAND "${FLAGS}")
step(${CC} -std=c99 -pedantic -Wall -Werror ${extra} ${SOURCE}/main.c -o ${WORK}/c_consumer
     ${flags} -Wl,-rpath,${lib_dir})
step(${WORK}/c_consumer)

# The static library by pkg-config: without the shared one, -lsonicmoe means the archive.
file(GLOB shared ${lib_dir}/libsonicmoe.so*)
file(REMOVE ${shared})
execute_process(COMMAND ${PKG_CONFIG} --static --cflags --libs sonicmoe OUTPUT_VARIABLE flags
                COMMAND_ERROR_IS_FATAL ANY)
separate_arguments(flags UNIX_COMMAND "${flags}")
step(${CC} -std=c99 -pedantic -Wall -Werror ${extra} ${SOURCE}/main.c -o ${WORK}/c_consumer_static
     ${flags})
step(${WORK}/c_consumer_static)
