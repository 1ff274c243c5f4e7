#!/usr/bin/env bash
# Prepares this machine: compiler and libraries from the system's packages, everything Python in
# .venv. Files in .setup hold digests of the preparation; while they match, a second run does nothing.
#
#   tools/setup.sh demo                  what `make demo` needs
#   tools/setup.sh                       also what the tests and the docs need
#   PYTHON=python3.12 tools/setup.sh     uses this interpreter (3.10 or later) instead of python3
set -euo pipefail
cd "$(dirname "$0")/.."

readonly TORCH_VERSION=2.13.0
readonly TRITON_VERSION=3.9.0
readonly VENV=.venv
readonly READY=.setup/ready TESTS_READY=.setup/ready-for-tests
# The interpreter that creates the environment must not be the environment's own.
PATH=${PATH//"$PWD/$VENV/bin:"/}

fail() {
  echo "tools/setup.sh: $1" >&2
  exit 2
}

can_install() { [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; }

install_packages() { # NAME...
  can_install || fail "these system packages are missing: sudo apt-get install $*"
  echo "setup: apt-get install $*"
  export DEBIAN_FRONTEND=noninteractive
  apt-get update -qq
  apt-get install -y -qq --no-install-recommends "$@" >/dev/null
}

# Prints the path of a recent enough Python, or nothing.
find_python() {
  local candidate
  for candidate in ${PYTHON:-python3 python3.13 python3.12 python3.11 python3.10}; do
    if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null; then
      "$candidate" -c 'import sys; print(sys.executable)'
      return
    fi
  done
}

need_python() {
  if [ -z "${PYTHON:-}" ] && [ -z "$(find_python)" ] && can_install; then
    install_packages python3
  fi
  [ -n "$(find_python)" ] ||
    fail "needs Python 3.10 or later and found none (tried: ${PYTHON:-python3}); on Debian or Ubuntu: sudo apt-get install python3"
}

has_header() { echo "#include <$1>" | g++ -std=c++20 -E -x c++ - >/dev/null 2>&1; }

# Succeeds if this Python has Python.h, which torch.compile needs on the CPU.
readonly HAS_PYTHON_HEADER='
import os, sys, sysconfig
sys.exit(not os.path.exists(os.path.join(sysconfig.get_path("include"), "Python.h")))'

# Fails if torchtitan is there without triton, which it imports on the CPU, too.
readonly HAS_TRITON='
import sys
from importlib.util import find_spec
sys.exit(find_spec("torchtitan") is not None and find_spec("triton") is None)'

# Prints the names of missing system packages. It tests whether programs and headers can be used, so
# that they may come from another source than the package manager.
missing_packages() {
  local version
  version=$("$1" -c 'import sys; print("python%d.%d" % sys.version_info[:2])')
  command -v g++ >/dev/null || echo g++
  command -v git >/dev/null || echo git
  command -v pkg-config >/dev/null || echo pkg-config
  has_header gtest/gtest.h || echo libgtest-dev
  has_header nlohmann/json.hpp || echo nlohmann-json3-dev
  has_header CLI/CLI.hpp || echo libcli11-dev
  "$1" -c 'import ensurepip, venv' 2>/dev/null || echo "$version-venv"
  "$1" -c "$HAS_PYTHON_HEADER" || echo "$version-dev"
}

install_missing_packages() {
  local python=$1 missing
  missing=$(missing_packages "$python" | xargs)
  [ -n "$missing" ] || return 0
  # shellcheck disable=SC2086  # a list of package names
  install_packages $missing
  missing=$(missing_packages "$python" | xargs)
  [ -z "$missing" ] || fail "still missing after apt-get install: $missing"
}

# Uses an installed torch of 2.10 or later (it may be built for this machine's GPU): appends the
# site folders of its interpreter to those of the new environment, whose own packages come first.
reuse_torch() {
  local python=$1
  "$python" - "$VENV" <<'PY'
import glob, importlib.metadata, os, sys
try:
    version = importlib.metadata.version("torch")
except importlib.metadata.PackageNotFoundError:
    sys.exit(1)
if tuple(int(part) for part in version.split("+")[0].split(".")[:2]) < (2, 10):
    sys.exit(1)
(site,) = glob.glob(os.path.join(sys.argv[1], "lib", "python3*", "site-packages"))
with open(os.path.join(site, "reused_torch.pth"), "w") as file:
    file.writelines(f"{path}\n" for path in sys.path if path.endswith("-packages"))
print(f"setup: using the installed torch {version}")
PY
}

make_environment() {
  local python=$1
  echo "setup: Python environment in $VENV"
  rm -rf "$VENV"
  "$python" -m venv "$VENV"
  if ! reuse_torch "$python"; then
    echo "setup: pip install torch==$TORCH_VERSION (the largest download)"
    pip_install "torch==$TORCH_VERSION"
  fi
  install_requirements tools/requirements.txt
  "$VENV/bin/python" -c 'import torch' || fail "torch is installed in $VENV but cannot be imported"
}

pip_install() {
  "$VENV/bin/python" -m pip install --quiet --disable-pip-version-check "$@" ||
    fail "pip could not install $*"
}

install_requirements() { # FILE
  # pip takes a package beside the reused torch for installed. Its commands (ninja, cmake, ruff) may
  # lie in a folder that is not on PATH, so install every listed package here whatever is there.
  # Only then their dependencies, among which the reused torch counts.
  pip_install --force-reinstall --no-deps -r "$1"
  pip_install -r "$1"
}

add_packages_of_tests() {
  echo "setup: what the tests need"
  install_requirements tools/requirements-dev.txt
  pip_install --no-deps -r tools/requirements-no-deps.txt
  # A torch for CUDA brings the version that it needs, one for the CPU none.
  "$VENV/bin/python" -c "$HAS_TRITON" || pip_install "triton==$TRITON_VERSION"
}

# Runs COMMAND, unless STAMP holds the digest of FILES and of this interpreter from an earlier run.
once() { # STAMP FILES -- COMMAND...
  local stamp=$1 files=() digest
  shift
  while [ "$1" != -- ]; do files+=("$1") && shift; done
  shift
  digest=$({ "$python" -VV; echo "$python"; cat "${files[@]}"; } | sha256sum)
  if [ -x "$VENV/bin/python" ] && [ "$(cat "$stamp" 2>/dev/null)" = "$digest" ]; then return 0; fi
  rm -f "$stamp" # so that an interrupted run does not leave the stamp of an earlier one
  "$@"
  mkdir -p "$(dirname "$stamp")"
  echo "$digest" >"$stamp"
}

prepare() {
  rm -f "$TESTS_READY"
  install_missing_packages "$python"
  make_environment "$python"
}

need_python
python=$(find_python)
once $READY tools/setup.sh tools/requirements.txt -- prepare
if [ "${1:-}" != demo ]; then
  once $TESTS_READY tools/requirements-dev.txt tools/requirements-no-deps.txt -- add_packages_of_tests
fi
