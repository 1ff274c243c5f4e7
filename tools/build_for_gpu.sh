#!/usr/bin/env bash
# Builds, on a machine with a GPU, the device tests, the benchmarks and PyTorch's operators for that
# GPU only. Takes about 8 minutes of CPU time and uses all cores. Needs nvcc, CMake, ninja, torch and
# GoogleTest, and no network:
#
#   tools/build_for_gpu.sh build/gpu [CMAKE_PREFIX_PATH]
#   build/gpu/sonicmoe_cuda_tests
#   tools/pack_gpu_job.sh build/gpu job && job/run.sh benchmarks/fp8.py --bench build/gpu/fp8_bench
#
# CMAKE_PREFIX_PATH is a folder with GoogleTest, if it is not installed: on Debian and Ubuntu that of
# `apt-get download libgtest-dev && dpkg -x libgtest-dev*.deb FOLDER`, FOLDER/usr.
set -euo pipefail
[ $# = 1 ] || [ $# = 2 ] || { echo "usage: tools/build_for_gpu.sh BUILD_DIRECTORY [CMAKE_PREFIX_PATH]" >&2 && exit 2; }
build=$(realpath -m "$1") prefix=${2:+$(realpath "$2")}
cd "$(dirname "$0")/.."

capability=$(nvidia-smi --query-gpu=compute_cap --format=csv,noheader | head -n 1 | tr -d .)
cmake -B "$build" -G Ninja -DCMAKE_BUILD_TYPE=Release -DSONICMOE_CUDA_ARCHITECTURES="$capability" \
  -DSONICMOE_BUILD_CLI=OFF -DSONICMOE_BUILD_TORCH=ON -DSONICMOE_EMULATOR=OFF \
  -DCMAKE_PREFIX_PATH="$prefix" -DPython3_EXECUTABLE="$(command -v python3)"
cmake --build "$build" --target sonicmoe_shared sonicmoe_cuda_tests fp8_bench exchange_bench sonicmoe_torch
