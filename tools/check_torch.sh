#!/usr/bin/env bash
# Checks the operators of the Python package with another torch than the installed one.
#
#   tools/check_torch.sh oldest      compiles them against the headers of torch 2.10, the oldest that
#                                    is supported: a name that only newer headers have would pass
#                                    every other check. The headers come from the wheel for macOS
#                                    (80 MB): they are the same in every wheel, and the wheels for
#                                    Linux are ten times as large.
#   tools/check_torch.sh newest      installs the newest torch into build/ (3 GB), compiles them
#                                    against its headers, and runs tests with the installed package:
#                                    operators that were built against an older torch must work.
set -euo pipefail
cd "$(dirname "$0")/.."

readonly OLDEST=2.10.0 NEWEST=2.14.1
readonly WHEEL=(--platform macosx_11_0_arm64 --python-version 3.11 --only-binary=:all:)
readonly TESTS=(tests/python/layer/test_{ops,errors,gradcheck,equality,module,lora,saved_tensors,fp8}.py)

fetch_headers() { # FOLDER
  local download
  mkdir -p build
  download=$(mktemp -d build/torch.XXXXXX)
  # shellcheck disable=SC2064  # the folder of now
  trap "rm -rf '$download'" EXIT
  python -m pip download --quiet --disable-pip-version-check --no-deps "${WHEEL[@]}" \
    -d "$download" "torch==$OLDEST"
  # Under another name first: an interrupted run must not leave half of the headers.
  python - "$download" <<'PY'
import pathlib, sys, zipfile
folder = pathlib.Path(sys.argv[1])
(wheel,) = folder.glob("*.whl")
with zipfile.ZipFile(wheel) as archive:
    names = [name for name in archive.namelist() if name.startswith("torch/include/")]
    archive.extractall(folder / "unpacked", names)
PY
  rm -rf "$1"
  mv "$download/unpacked" "$1"
}

# An environment with the newest torch, and the other packages of the current one.
make_environment() { # FOLDER
  local others
  rm -rf "$1"
  python -m venv "$1"
  "$1/bin/python" -m pip install --quiet --disable-pip-version-check --no-compile "torch==$NEWEST"
  others=$(python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
  echo "$others" >"$(echo "$1"/lib/python3*/site-packages)/others.pth"
  touch "$1/complete"
}

compile() { # HEADERS VERSION
  "${CXX:-g++}" -std=c++20 -fsyntax-only -fvisibility=hidden -Wall -Wextra -Werror \
    -DSONICMOE_CUDA_BUILD='""' -Iinclude -isystem "$1" python/csrc/ops.cc
  echo "operators compile against the headers of torch $2"
}

case ${1:-} in
  oldest)
    headers=build/torch-$OLDEST/torch/include
    [ -d "$headers" ] || fetch_headers "build/torch-$OLDEST"
    compile "$headers" "$OLDEST"
    ;;
  newest)
    environment=build/torch-$NEWEST
    [ -e "$environment/complete" ] || make_environment "$environment"
    compile "$(echo "$environment"/lib/python3*/site-packages/torch/include)" "$NEWEST"
    "$environment/bin/python" -m pytest -q -p no:cacheprovider "${TESTS[@]}"
    ;;
  *)
    echo "usage: tools/check_torch.sh oldest | newest" >&2 && exit 2
    ;;
esac
