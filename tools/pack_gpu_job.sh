#!/usr/bin/env bash
# Packs stripped libraries, the Python package, benchmarks and examples, to measure this build on a GPU
# machine without a network, a compiler or this repository. That machine needs torch with its CUDA:
#
#   tools/pack_gpu_job.sh build/release job && rsync -a job/ gpu:job/
#   ssh gpu 'cd job && ./run.sh benchmarks/h200.py --library ./libsonicmoe.so --out records'
#
# Records name the commit that was packed: HEAD, or SONICMOE_COMMIT in a copy without .git.
# torch.compile's cache stays in job/inductor.
set -euo pipefail
[ $# = 2 ] || { echo "usage: tools/pack_gpu_job.sh BUILD_DIRECTORY JOB_DIRECTORY" >&2 && exit 2; }
build=$(realpath "$1") job=$(realpath -m "$2")
cd "$(dirname "$0")/.."

mkdir -p "$job/benchmarks"
strip -o "$job/libsonicmoe.so" "$(realpath "$build/libsonicmoe.so")"
operators=$build/python/libsonicmoe_torch.so # with -DSONICMOE_BUILD_TORCH=ON
if [ -e "$operators" ]; then
  rm -rf "$job/sonicmoe_cpp"
  cp -r python/sonicmoe_cpp "$job/"
  strip -o "$job/sonicmoe_cpp/libsonicmoe_torch.so" "$operators"
else
  echo "$operators does not exist: the PyTorch path is left out" >&2
fi
cp -r benchmarks/*.py benchmarks/*_bench benchmarks/data "$job/benchmarks/"
rm -rf "$job/examples" && cp -r examples "$job/"
find "$job" -name __pycache__ -prune -exec rm -rf {} +
echo "${SONICMOE_COMMIT:-$(git rev-parse --short HEAD)}" >"$job/commit"
cat >"$job/run.sh" <<'RUN'
#!/usr/bin/env bash
cd "$(dirname "$0")"
export SONICMOE_COMMIT=$(cat commit) PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH} TORCHINDUCTOR_CACHE_DIR=$PWD/inductor
export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True
exec python3 "$@"
RUN
chmod +x "$job/run.sh"
du -sh "$job"
