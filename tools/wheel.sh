#!/usr/bin/env bash
# Puts a wheel and a source distribution into dist/. Called by `make wheel`, after `make build`.
#
# auditwheel grants the wheel's tag if the library needs no symbol of glibc or libstdc++ that a system
# of that tag lacks; RHEL 9 has manylinux_2_34. torch's libraries stay outside of the wheel, because
# `import torch` has loaded them before.
set -euo pipefail
cd "$(dirname "$0")/.."
source tools/package.sh

readonly PLATFORM=manylinux_2_34_x86_64
built=$(mktemp -d build/wheel.XXXXXX)
trap 'rm -rf "$built"' EXIT

rm -rf dist
pip_package wheel -w "$built" -C cmake.define.SONICMOE_CUDA_ARCHITECTURES=all
python -m auditwheel repair --plat "$PLATFORM" --exclude 'libtorch*.so' --exclude 'libc10*.so' \
  -w dist "$built"/*.whl || {
  python -m auditwheel show "$built"/*.whl >&2
  echo "tools/wheel.sh: the library needs more than $PLATFORM has (above): build on Debian 12 or RHEL 9" >&2
  exit 1
}
python -m build --no-isolation --sdist -o dist . >/dev/null
du -h dist/*
