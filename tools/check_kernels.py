#!/usr/bin/env python3
"""Checks the number, compile time and size of a build's CUDA kernels against a budget.

    python tools/check_kernels.py BUILD_DIRECTORY

An engine has one kernel for each combination of role, tile, dtype and activation, so one more axis
multiplies their number. Therefore each engine has a budget, and the other kernels (metadata,
routing, sums) have one: how many kernels every architecture may have, and the CPU time and size of
all architectures together. Counts and CPU times are read from the .cost files that
cmake/ptxas_gate.py writes next to the objects, sizes from the objects. Files from the ccache are
counted, but have no time.

The same kernels took 200 CPU seconds on one machine and 400 on another, busy one. So the unit of
time is one compilation of the Hopper engine's headers: the time of a file of the same build that
includes them and has no kernel. If every such file came from the ccache, time is not judged.
"""

import json
import statistics
import struct
import sys
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True)
class Budget:
    kernels: int  # of each architecture
    compilations: float  # CPU time of all architectures, in compilations of the headers
    mebibytes: int  # size of all architectures


# By folder of src/cuda. The folders of REST_FOLDERS share the row REST. An engine without a row
# fails.
REST = "metadata, routing, sums"
# Measured values stand above each row; kernels are those of one architecture.
BUDGETS = {
    # 180 kernels (34 products and 2 quantisers of FP8), 13 MiB; 104 compilations without FP8
    "hopper": Budget(200, 175.0, 17),
    # 40 kernels, 12.0 MiB on 4 architectures; 67 compilations (elsewhere 78 for 32 kernels)
    "portable": Budget(44, 120.0, 14),
    # 95 kernels, 73 compilations on a busy machine, 15.6 MiB on 4 architectures
    REST: Budget(105, 90.0, 18),
}
REST_FOLDERS = {"metadata", "routing", "sums", "device", "layer", "exchange"}
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


@dataclass
class Cost:
    kernels: Counter = field(default_factory=Counter)  # by architecture
    seconds: float = 0.0
    bytes: int = 0


def engine_of(path):
    """The engine whose file this is, REST for the folders that are no engine's."""
    parts = path.parts
    folder = parts[len(parts) - parts[::-1].index("cuda")] if "cuda" in parts else ""
    return REST if folder in REST_FOLDERS else folder


def read_cost(path):
    """Kernels by architecture, and CPU seconds, from a .cost file."""
    found = json.loads(path.read_text())
    if not isinstance(found["kernels"], dict):
        raise SystemExit(
            f"{path} has no kernels by architecture: an older version of cmake/ptxas_gate.py wrote "
            "it. Delete the build directory and build again."
        )
    return found["kernels"], found["cpu_seconds"]


def faults(name, cost, unit):
    """A line for each limit of its budget that an engine exceeds. `unit`: seconds of a compilation,
    0 if not measured."""
    budget = BUDGETS.get(name, Budget(0, 0.0, 0))
    for architecture, kernels in cost.kernels.items():
        if kernels > budget.kernels:
            yield f"{name}: {kernels} kernels for {architecture}, at most {budget.kernels}"
    if unit and cost.seconds / unit > budget.compilations:
        yield f"{name}: {cost.seconds / unit:.0f} compilations, at most {budget.compilations:.0f}"
    if cost.bytes > budget.mebibytes << 20:
        yield f"{name}: {cost.bytes / 2**20:.1f} MiB, at most {budget.mebibytes}"


def main(arguments):
    build = Path(arguments[0])
    files = sorted(build.rglob("*.o.cost"))
    if not files:
        raise SystemExit(f"{build} holds no compiled CUDA file")
    engines, header_seconds, cached = {}, [], 0
    for path in files:
        kernels, seconds = read_cost(path)
        cost = engines.setdefault(engine_of(path.relative_to(build)), Cost())
        cost.kernels.update(kernels)
        cost.bytes += section_bytes(path.with_suffix(""), ".nv_fatbin")
        if seconds < CACHED_SECONDS:
            cached += 1
            continue
        cost.seconds += seconds
        if not kernels:
            header_seconds.append(seconds)
    unit = statistics.median(header_seconds) if header_seconds else 0.0
    for name, cost in engines.items():
        counts = ", ".join(f"{kernels} for {a}" for a, kernels in sorted(cost.kernels.items()))
        times = f"{cost.seconds / unit:.0f} times" if unit else "not measured by"
        print(
            f"{name}: kernels {counts}; {cost.seconds / 60:.1f} CPU minutes, {times} the headers'; "
            f"{cost.bytes / 2**20:.1f} MiB"
        )
    print(f"{cached} of {len(files)} files came from a cache")
    found = [fault for name, cost in engines.items() for fault in faults(name, cost, unit)]
    for fault in found:
        print(f"over the budget: {fault}")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
