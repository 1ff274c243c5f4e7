#!/usr/bin/env bash
# Builds with sanitizers and runs their tests with what other work leaves of the cores. Runs in a
# session of its own: Linux first divides time between sessions (autogroup), then by `nice`.
set -euo pipefail
[ "${1:-}" = session ] || exec setsid --wait "$0" session
cd "$(dirname "$0")/.."

readonly NICE=10
renice -n $NICE $$ >/dev/null
[ ! -e /proc/self/autogroup ] || echo $NICE >/proc/self/autogroup
cmake --preset asan
cmake --build --preset asan
ctest --preset asan --no-tests=error -j "$(nproc)"
