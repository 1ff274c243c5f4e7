#!/usr/bin/env bash
# Builds and installs the Python package into the active environment, and before it library, command
# and C++ tests. Skips what is up to date.
#
#   tools/build.sh package    for `make demo`: the package alone, with kernels only for this machine's GPUs
#   tools/build.sh            for `make build`: everything; without a GPU all kernels, if nvcc is found
set -euo pipefail
cd "$(dirname "$0")/.."
source tools/package.sh

readonly PACKAGE_STAMP=.setup/package
readonly GOAL=${1:-everything}

if [ "$GOAL" = everything ]; then
  if command -v "${CUDACXX:-nvcc}" >/dev/null; then export SONICMOE_CUDA=${SONICMOE_CUDA:-ON}; fi
  # The same path of the interpreter as in the Python package's build: the commands that compile
  # kernels contain it, and another path would compile all kernels again.
  cmake --preset release --log-level=WARNING -DSONICMOE_CUDA="${SONICMOE_CUDA:-AUTO}" \
    -DPython3_EXECUTABLE="$(python -c 'import sys; print(sys.executable)')" >/dev/null
  cmake --build --preset release
fi

# The wheel contains the library: the wheel is stale if a source of either is newer than its stamp.
# The package of `make demo` may lack the kernels that `make test` needs.
if grep -qsx -e everything -e "$GOAL" "$PACKAGE_STAMP" &&
  python -c 'import importlib.util as u, sys; sys.exit(not u.find_spec("sonicmoe_cpp"))' &&
  [ -z "$(find src include python cmake CMakeLists.txt pyproject.toml -newer "$PACKAGE_STAMP" -not -name '*.pyc' -type f -print -quit)" ]; then
  exit 0
fi
echo "build: Python package sonicmoe_cpp"
began=$(mktemp)
trap 'rm -f "$began"' EXIT
pip_package install
mkdir -p "$(dirname "$PACKAGE_STAMP")"
echo "$GOAL" >"$PACKAGE_STAMP"
touch -r "$began" "$PACKAGE_STAMP" # sources edited during the build are newer than this
python -c 'import sonicmoe_cpp as s; print("build: CUDA kernels:", s.show_config().split("kernels: ")[1])'
