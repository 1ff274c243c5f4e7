#!/usr/bin/env bash
# Builds with sanitizers and runs their tests with what other work leaves of the cores. To be started
# by setsid: Linux first divides time between sessions (/proc/self/autogroup), then by `nice`.
set -euo pipefail
cd "$(dirname "$0")/.."

readonly NICE=10
renice -n $NICE $$ >/dev/null
[ ! -e /proc/self/autogroup ] || echo $NICE >/proc/self/autogroup
cmake --preset asan
cmake --build --preset asan
ctest --preset asan --no-tests=error -j "$(nproc)"
