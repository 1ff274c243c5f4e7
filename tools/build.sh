#!/usr/bin/env bash
# Builds library, command and C++ tests into build/release and installs the Python package into the
# active environment. Called by `make build`; skips what is up to date.
set -euo pipefail
cd "$(dirname "$0")/.."
source tools/package.sh

readonly PACKAGE_STAMP=.setup/package

# The same path of the interpreter as in the Python package's build: the commands that compile
# kernels contain it, and another path would compile all kernels again.
cmake --preset release --log-level=WARNING \
  -DPython3_EXECUTABLE="$(python -c 'import sys; print(sys.executable)')" >/dev/null
cmake --build --preset release

# The wheel contains the library: the wheel is stale if a source of either is newer than its stamp.
if [ -e "$PACKAGE_STAMP" ] && python -c 'import importlib.util as u, sys; sys.exit(not u.find_spec("sonicmoe_cpp"))' &&
  [ -z "$(find src include python cmake CMakeLists.txt pyproject.toml -newer "$PACKAGE_STAMP" -not -name '*.pyc' -type f -print -quit)" ]; then
  exit 0
fi
echo "build: Python package sonicmoe_cpp"
began=$(mktemp)
trap 'rm -f "$began"' EXIT
pip_package install
mkdir -p "$(dirname "$PACKAGE_STAMP")"
touch -r "$began" "$PACKAGE_STAMP" # sources edited during the build are newer than this
