#!/usr/bin/env bash
# Prepares this machine for `make build`, `make test` and `make demo`: compiler and libraries from
# the system's packages, everything Python in .venv. .setup/ready holds a digest of the preparation;
# while it matches, a second run does nothing.
#
#   PYTHON=python3.12 tools/setup.sh     uses this interpreter (3.10 or later) instead of python3
set -euo pipefail
cd "$(dirname "$0")/.."

readonly TORCH_VERSION=2.13.0
readonly TRITON_VERSION=3.9.0
readonly VENV=.venv
readonly STAMP=.setup/ready
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
  local pip=("$VENV/bin/python" -m pip install --quiet --disable-pip-version-check)
  if ! reuse_torch "$python"; then
    echo "setup: pip install torch==$TORCH_VERSION (the largest download)"
    "${pip[@]}" "torch==$TORCH_VERSION" || fail "pip could not install torch==$TORCH_VERSION"
  fi
  local requirements=(-r tools/requirements.txt -r tools/requirements-dev.txt)
  # pip takes a package beside the reused torch for installed. Its commands (ninja, cmake, ruff) may
  # lie in a folder that is not on PATH, so install every listed package here whatever is there.
  # Only then their dependencies, among which the reused torch counts.
  "${pip[@]}" --force-reinstall --no-deps "${requirements[@]}" && "${pip[@]}" "${requirements[@]}" ||
    fail "pip could not install tools/requirements.txt and tools/requirements-dev.txt"
  "${pip[@]}" --no-deps -r tools/requirements-no-deps.txt ||
    fail "pip could not install tools/requirements-no-deps.txt"
  # A torch for CUDA brings the version that it needs, one for the CPU none.
  "$VENV/bin/python" -c "$HAS_TRITON" || "${pip[@]}" "triton==$TRITON_VERSION" ||
    fail "pip could not install triton==$TRITON_VERSION"
  "$VENV/bin/python" -c 'import torch' || fail "torch is installed in $VENV but cannot be imported"
}

main() {
  local python digest
  need_python
  python=$(find_python)
  digest=$({ "$python" -VV; echo "$python"; cat tools/setup.sh tools/requirements*.txt; } | sha256sum)
  if [ -x "$VENV/bin/python" ] && [ "$(cat "$STAMP" 2>/dev/null)" = "$digest" ]; then
    return 0
  fi
  rm -f "$STAMP" # so that an interrupted run does not leave the stamp of an earlier one
  install_missing_packages "$python"
  make_environment "$python"
  mkdir -p "$(dirname "$STAMP")"
  echo "$digest" >"$STAMP"
}

main
