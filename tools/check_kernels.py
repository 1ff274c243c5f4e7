#!/usr/bin/env python3
"""Checks the number, compile time and size of a build's CUDA kernels against a budget.

    python tools/check_kernels.py BUILD_DIRECTORY

An engine has one kernel for each combination of role, tile, dtype and activation, so one more axis
multiplies their number. Therefore each engine has a maximum number of kernels, the other kernels
(metadata, routing, sums) have one, and all together have limits of CPU time and size. Counts and
CPU times are read from the .cost files that cmake/ptxas_gate.py writes next to the objects, the
size from the shared library. Files from the ccache are counted, but have no time.

The same kernels took 200 CPU seconds on one machine and 400 on another, busy one. So the unit of
time is one compilation of the engine's headers: the time of a file of the same build that includes
them and has no kernel. If every such file came from the ccache, time is not judged.
"""

import json
import statistics
import struct
import sys
from pathlib import Path

# An engine is a folder cuda/ENGINE/instances of the build directory. One without a row here fails.
MAX_KERNELS = {"hopper": 165, "metadata, routing, sums": 95}
REST = "metadata, routing, sums"
MAX_COMPILATIONS = 140.0  # of the headers; measured: 104 with 144 kernels
MAX_BYTES = 24 << 20
CACHED_SECONDS = 1.0  # a faster compilation came from the ccache


def section_bytes(path, wanted):
    """Size of a section of a 64-bit little-endian ELF file, 0 when it has none."""
    data = path.read_bytes()
    if data[:6] != b"\x7fELF\x02\x01":
        raise SystemExit(f"{path} is no 64-bit little-endian ELF file")
    (table,) = struct.unpack_from("<Q", data, 0x28)
    entry, count, names = struct.unpack_from("<HHH", data, 0x3A)
    headers = [struct.unpack_from("<IIQQQQ", data, table + i * entry) for i in range(count)]
    start = headers[names][4]
    for name, _, _, _, _, size in headers:
        end = data.index(b"\0", start + name)
        if data[start + name : end].decode() == wanted:
            return size
    return 0


def engine_of(path):
    """The engine whose instance a file is, REST for every other one."""
    parts = path.parts
    return parts[parts.index("instances") - 1] if "instances" in parts else REST


def main(arguments):
    build = Path(arguments[0])
    files = list(build.rglob("*.o.cost"))
    costs = [json.loads(path.read_text()) for path in files]
    if not costs:
        raise SystemExit(f"{build} holds no compiled CUDA file")
    kernels = dict.fromkeys(MAX_KERNELS, 0)
    for cost, path in zip(costs, files, strict=True):
        kernels[engine_of(path)] = kernels.get(engine_of(path), 0) + cost["kernels"]
    compiled = [cost for cost in costs if cost["cpu_seconds"] >= CACHED_SECONDS]
    seconds = sum(cost["cpu_seconds"] for cost in compiled)
    headers = [cost["cpu_seconds"] for cost in compiled if cost["kernels"] == 0]
    compilations = seconds / statistics.median(headers) if headers else 0.0
    size = section_bytes(build / "libsonicmoe.so", ".nv_fatbin")
    cached = len(costs) - len(compiled)
    times = f"{compilations:.0f} times" if headers else "not measured by"
    counts = [f"{name}: {n} kernels of {MAX_KERNELS.get(name, 0)}" for name, n in kernels.items()]
    print(
        f"{'; '.join(counts)}; {seconds / 60:.1f} CPU minutes, {times} the headers' "
        f"(at most {MAX_COMPILATIONS:.0f} times), {cached} of {len(costs)} files from a cache; "
        f"{size / 2**20:.1f} MiB of at most {MAX_BYTES >> 20}"
    )
    many = any(n > MAX_KERNELS.get(name, 0) for name, n in kernels.items())
    return 1 if many or compilations > MAX_COMPILATIONS or size > MAX_BYTES else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
