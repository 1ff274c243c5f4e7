# Sourced by tools/build.sh and tools/wheel.sh.

# Builds the Python package in build/release, with the options of the library and its tests there, so
# that no kernel is compiled twice. No isolation: it takes the headers of the torch that is installed.
pip_package() { # install | wheel, OPTIONS...
  python -m pip "$@" --quiet --disable-pip-version-check --no-build-isolation --no-deps \
    -C build-dir=build/release -C cmake.define.SONICMOE_BUILD_TESTS=ON \
    -C cmake.define.SONICMOE_BUILD_CLI=ON .
}
