# Installs libraries, headers, a CMake package and a pkg-config file.
include(CMakePackageConfigHelpers)
set(package_dir ${CMAKE_INSTALL_LIBDIR}/cmake/sonicmoe)

install(
  TARGETS sonicmoe_shared sonicmoe_static
  EXPORT sonicmoe
  RUNTIME DESTINATION ${CMAKE_INSTALL_BINDIR}
  LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR}
  ARCHIVE DESTINATION ${CMAKE_INSTALL_LIBDIR})
install(DIRECTORY include/sonicmoe DESTINATION ${CMAKE_INSTALL_INCLUDEDIR})
install(EXPORT sonicmoe NAMESPACE sonicmoe:: FILE sonicmoe-targets.cmake
        DESTINATION ${package_dir})

configure_package_config_file(cmake/sonicmoe-config.cmake.in sonicmoe-config.cmake
                              INSTALL_DESTINATION ${package_dir})
write_basic_package_version_file(sonicmoe-config-version.cmake COMPATIBILITY SameMinorVersion)
# The prefix relative to the pkg-config file, so that the installed tree can be moved.
file(RELATIVE_PATH SONICMOE_PC_TO_PREFIX ${CMAKE_INSTALL_FULL_LIBDIR}/pkgconfig
     ${CMAKE_INSTALL_PREFIX})
# The static library does not contain the CUDA runtime, which needs dl and rt.
if(SONICMOE_WITH_CUDA)
  set(SONICMOE_PC_CUDA " -L${CUDAToolkit_LIBRARY_DIR} -lcudart_static -ldl -lrt")
endif()
configure_file(cmake/sonicmoe.pc.in sonicmoe.pc @ONLY)
install(FILES ${CMAKE_CURRENT_BINARY_DIR}/sonicmoe-config.cmake
              ${CMAKE_CURRENT_BINARY_DIR}/sonicmoe-config-version.cmake
        DESTINATION ${package_dir})
install(FILES ${CMAKE_CURRENT_BINARY_DIR}/sonicmoe.pc
        DESTINATION ${CMAKE_INSTALL_LIBDIR}/pkgconfig)
