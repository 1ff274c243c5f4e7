#!/usr/bin/env bash
# Runs every check of `make test`, also after a failure, and prints a summary.
set -uo pipefail
cd "$(dirname "$0")/.."

summary=()
failed=0

check() { # NAME COMMAND...
  local name=$1 began=$SECONDS verdict=passed
  shift
  echo "== $name"
  "$@" || { verdict=FAILED && failed=$((failed + 1)); }
  summary+=("$(printf '%-8s %-28s %4d s' "$verdict" "$name" $((SECONDS - began)))")
}

check "format and lint" tools/format.sh --check
check "structure" python tools/check_structure.py
check "C++ tests" ctest --preset release --no-tests=error -j "$(nproc)"
poison=$PWD/build/release/tests/libsonicmoe_poison.so
if [[ $poison == *[[:space:]:]* ]]; then # LD_PRELOAD cannot contain such a path
  copy=$(mktemp)
  trap 'rm -f "$copy"' EXIT
  cp "$poison" "$copy" && poison=$copy
fi
# One worker more than cores, because many tests wait for ranks. At most four, because a process of
# torch takes about 1 GiB. A GPU is for one test at a time.
workers=$(($(nproc) < 4 ? $(nproc) + 1 : 4))
if nvidia-smi -L >/dev/null 2>&1; then workers=0; fi
check "Python tests" env SONICMOE_POISON=1 LD_PRELOAD="$poison" \
  python -m pytest -q tests/python -n "$workers" --dist loadfile --no-loadscope-reorder

echo "== summary"
printf '%s\n' "${summary[@]}"
exit $((failed > 0))
