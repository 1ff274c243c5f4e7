#!/usr/bin/env bash
# Compiles the CUDA sources for the oldest supported toolkit, 12.9, with those of its parts that can
# be installed as packages. Fails on a register spill or a serialised wgmma, as a build does.
#
#   tools/check_cuda_floor.sh [BUILD_DIRECTORY [K/N]]   default build/release; needs generated files
#
# K/N compiles every Nth source only, from the Kth on. `today/N` takes another share each day.
#
# ptxas 12.9 is on PyPI. No registry has the front end of 12.9, so the front end of 12.4 (Debian's
# nvidia-cuda-toolkit) makes the PTX: code that it compiles also compiles with later front ends. It
# does not know sm_100 and sm_120, so these architectures are left out. 12.9 is the oldest supported
# toolkit because the ptxas of 12.4 to 12.8 serialises the wgmma of every kernel (C7515).
set -euo pipefail
cd "$(dirname "$0")/.."

readonly FLOOR=12.9.86 FRONT_END=12.4
readonly BUILD=${1:-build/release} SHARE=${2:-1/1}
readonly WORK=$PWD/build/cuda-floor
readonly KEYRING=/usr/share/keyrings/debian-archive-keyring.gpg

skip() {
  echo "CUDA floor: not compiled, $1"
  exit 0
}

command -v apt-get >/dev/null && [ -e $KEYRING ] || skip "this system has no Debian packages"
[ "$(dpkg --print-architecture)" = amd64 ] || skip "its packages are for x86-64"

# The front end of Debian's toolkit, without its 900 MB of libraries: headers come from PyPI.
fetch_front_end() {
  local apt=(-oDir::Etc::SourceList="$WORK/sources.list" -oDir::Etc::SourceParts=/dev/null
    -oDir::State::Lists="$WORK/lists" -oDir::Cache="$WORK/cache" -oAPT::Sandbox::User=root)
  mkdir -p "$WORK"/{lists,cache,packages}
  local host
  host=$(grep -rhoE 'https?://[^ ]+/debian/?$' /etc/apt/sources.list /etc/apt/sources.list.d 2>/dev/null |
    head -1) || true
  [ -n "$host" ] || host=$(grep -rhoE 'https?://[^ ]+/debian\b' /etc/apt | head -1)
  [ -n "$host" ] || skip "no Debian mirror is configured"
  echo "deb [signed-by=$KEYRING] $host trixie non-free" >"$WORK/sources.list"
  apt-get "${apt[@]}" update -qq
  (cd "$WORK/packages" && apt-get "${apt[@]}" download -qq nvidia-cuda-toolkit)
  dpkg-deb -x "$WORK"/packages/nvidia-cuda-toolkit_*.deb "$WORK/debian"
}

fetch_wheels() {
  python -m pip download --quiet --disable-pip-version-check --no-deps -d "$WORK/wheels" \
    nvidia-cuda-nvcc-cu12==$FLOOR nvidia-cuda-runtime-cu12==12.9.79 nvidia-cuda-cccl-cu12==12.9.27
  for wheel in "$WORK"/wheels/*.whl; do python -m zipfile -e "$wheel" "$WORK/wheels/all"; done
}

# One folder with the layout in which the front end looks for its parts.
assemble() {
  local debian=$WORK/debian/usr wheels=$WORK/wheels/all/nvidia
  mkdir -p "$WORK"/{bin,include}
  cp "$debian"/lib/nvidia-cuda-toolkit/bin/{nvcc,cicc} "$WORK/bin/"
  cp "$debian"/bin/{cudafe++,fatbinary,bin2c} "$WORK/bin/"
  cp "$wheels/cuda_nvcc/bin/ptxas" "$WORK/bin/ptxas"
  chmod +x "$WORK/bin/ptxas"
  local part
  for part in cuda_runtime cuda_cccl cuda_nvcc; do cp -rT "$wheels/$part/include" "$WORK/include"; done
}

compile() { # SOURCE ARCHITECTURE
  local object
  object=$(mktemp -p "$WORK" --suffix=.o)
  PATH=$WORK/bin:$PATH python cmake/ptxas_gate.py "$WORK/bin/nvcc" -I"$WORK/include" -std=c++20 \
    "-gencode=arch=compute_$2,code=sm_$2" --expt-relaxed-constexpr -Xptxas=-v -Iinclude -Isrc \
    -I"$BUILD/cuda" -c "$1" -o "$object"
  rm "$object" "$object.cost"
}

# Each source is compiled for one architecture: the portable engine for 80 (A100), the rest for Hopper.
list_sources() { # SOURCE ARCHITECTURE in each line
  local name source
  for name in products fp8_plain; do echo "$BUILD/cuda/hopper/instances/$name.cu 90a"; done
  for source in $(find src/cuda -name '*.cu' | sort); do
    case $source in
      src/cuda/hopper/*) echo "$source 90a" ;;
      src/cuda/blackwell/*) ;; # for 100f alone, which the front end does not know
      src/cuda/portable/*) echo "$source 80" ;;
      *) echo "$source 90" ;;
    esac
  done
}

share() { # those of the lines of list_sources that are compiled
  local of=${SHARE#*/} first=${SHARE%/*}
  [ "$first" != today ] || first=$(($(date -u +%s) / 86400 % of + 1))
  list_sources | awk -v first="$first" -v of="$of" 'first <= of && NR % of == first % of'
}

[[ $SHARE =~ ^(today|[1-9][0-9]*)/[1-9][0-9]*$ ]] ||
  { echo "share is $SHARE, must be K/N or today/N" >&2 && exit 2; }
names=$(share | sed 's/ .*//; s|.*/||' | tr '\n' ' ')
[ -n "$names" ] || { echo "share $SHARE has no source" >&2 && exit 2; }
[ -x "$WORK/bin/ptxas" ] || { fetch_front_end && fetch_wheels && assemble; }
export WORK BUILD
export -f compile
share | xargs -P "$(nproc)" -L 1 bash -euo pipefail -c 'compile "$@"' compile
echo "CUDA floor: $(share | wc -l) of $(list_sources | wc -l) files compiled by the front end of" \
  "$FRONT_END and ptxas of $FLOOR: $names"
