#!/usr/bin/env bash
# Builds with sanitizers and runs their tests with what other work leaves of the cores. Runs in a
# session of its own: Linux first divides time between sessions (autogroup), then by `nice`.
set -euo pipefail
if [ "${1:-}" != session ]; then
  setsid "$0" session &
  trap 'kill -- -$! 2>/dev/null || true' EXIT # also if this is stopped
  wait $!
  exit
fi
cd "$(dirname "$0")/.."

readonly NICE=10
renice -n $NICE $$ >/dev/null
[ ! -e /proc/self/autogroup ] || echo $NICE >/proc/self/autogroup
cmake --preset asan
cmake --build --preset asan
ctest --preset asan --no-tests=error -j "$(nproc)"
