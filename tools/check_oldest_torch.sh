#!/usr/bin/env bash
# Compiles the operators of the Python package against the headers of torch 2.10, the oldest that it
# supports: a name that only newer headers have would pass every other check. Nothing is linked. The
# headers come from the wheel for macOS (80 MB): they are the same in every wheel, and the wheels
# for Linux are ten times as large.
#
#   tools/check_oldest_torch.sh [INCLUDE]     INCLUDE: headers that are there, nothing is downloaded
set -euo pipefail
cd "$(dirname "$0")/.."

readonly TORCH_VERSION=2.10.0
readonly WHEEL=(--platform macosx_11_0_arm64 --python-version 3.11 --only-binary=:all:)

headers=${1:-build/torch-$TORCH_VERSION/torch/include}
if [ $# = 0 ] && [ ! -d "$headers" ]; then
  mkdir -p build
  download=$(mktemp -d build/torch.XXXXXX)
  trap 'rm -rf "$download"' EXIT
  python -m pip download --quiet --disable-pip-version-check --no-deps "${WHEEL[@]}" \
    -d "$download" "torch==$TORCH_VERSION"
  # Under another name first: an interrupted run must not leave half of the headers.
  python - "$download" <<'PY'
import pathlib, sys, zipfile
folder = pathlib.Path(sys.argv[1])
(wheel,) = folder.glob("*.whl")
with zipfile.ZipFile(wheel) as archive:
    names = [name for name in archive.namelist() if name.startswith("torch/include/")]
    archive.extractall(folder / "unpacked", names)
PY
  rm -rf "build/torch-$TORCH_VERSION"
  mv "$download/unpacked" "build/torch-$TORCH_VERSION"
fi

"${CXX:-g++}" -std=c++20 -fsyntax-only -fvisibility=hidden -Wall -Wextra -Werror \
  -DSONICMOE_CUDA_BUILD='""' -Iinclude -isystem "$headers" python/csrc/ops.cc
echo "operators compile against the headers of torch $TORCH_VERSION"
