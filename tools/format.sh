#!/usr/bin/env bash
# --fix formats the sources. --check reports the changes that --fix would make and the findings of
# ruff, and fails if there are any.
set -euo pipefail
cd "$(dirname "$0")/.."

case ${1:-} in
  --fix) clang=(-i) ruff_lint=(--fix) ruff_format=() ;;
  --check) clang=(--dry-run -Werror) ruff_lint=() ruff_format=(--check) ;;
  *) echo "usage: tools/format.sh --fix | --check" >&2 && exit 2 ;;
esac

status=0
find . \( -name 'build*' -o -name '.*' ! -name . -o -name out -o -name dist \) -type d -prune -o -type f \
  \( -name '*.h' -o -name '*.c' -o -name '*.cc' -o -name '*.cu' -o -name '*.cuh' \) -print0 |
  xargs -0 -r -n 16 -P "$(nproc)" clang-format --style=file "${clang[@]}" || status=1
ruff check --quiet "${ruff_lint[@]}" . || status=1
ruff format --quiet "${ruff_format[@]}" . || status=1
exit $status
