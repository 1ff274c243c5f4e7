#!/usr/bin/env python3
"""Checks the number, compile time and size of a build's CUDA kernels against a budget.

    python tools/check_kernels.py BUILD_DIRECTORY

An engine has one kernel for each combination of role, tile, dtype and activation, so one more axis
multiplies their number. Therefore each engine has a budget, and the other kernels (metadata,
routing, sums) have one: how many kernels every architecture may have, and the size of all
architectures together. Counts are read from the .cost files that cmake/ptxas_gate.py writes next to
the objects, sizes from the objects.

The CPU time to compile all kernels has one limit. It allows for slow and busy machines: the same
kernels took 200 CPU seconds on one machine and 400 on another. Files from the ccache are counted,
but take no time.
"""

import json
import struct
import sys
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True)
class Budget:
    kernels: int  # of each architecture
    mebibytes: int  # size of all architectures


# By folder of src/cuda. The folders of REST_FOLDERS share the row REST. An engine without a row
# fails.
REST = "metadata, routing, sums, packed, fp8"
# Measured values stand above each row; kernels are those of one architecture.
BUDGETS = {
    # 207 kernels (37 products of FP8), 16.3 MiB
    "hopper": Budget(217, 17),
    # 48 kernels (8 of packed weights, 3.0 MiB), 15.9 MiB on 4 architectures: products that unpack
    # FP8 have a loop of their own, since 256 values have no tables in registers
    "portable": Budget(48, 17),
    # 11 kernels (3 of FP8), 0.8 MiB
    "blackwell": Budget(12, 1),
    # 114 kernels (12 that unpack weights; for sm_90a and sm_100f 2 that quantise), 19.7 MiB on 4
    # architectures: routing computes the score
    # sqrt_softplus in place, for each of up to 32 logits of a lane
    REST: Budget(115, 21),
}
CPU_MINUTES = 45.0  # measured 16 to 24 on two machines
REST_FOLDERS = {"metadata", "routing", "sums", "device", "layer", "exchange", "packed", "fp8"}
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


def faults(name, cost):
    """A line for each limit of its budget that an engine exceeds."""
    budget = BUDGETS.get(name, Budget(0, 0))
    for architecture, kernels in cost.kernels.items():
        if kernels > budget.kernels:
            yield f"{name}: {kernels} kernels for {architecture}, at most {budget.kernels}"
    if cost.bytes > budget.mebibytes << 20:
        yield f"{name}: {cost.bytes / 2**20:.1f} MiB, at most {budget.mebibytes}"


def main(arguments):
    build = Path(arguments[0])
    files = sorted(build.rglob("*.o.cost"))
    if not files:
        raise SystemExit(f"{build} holds no compiled CUDA file")
    engines, cached = {}, 0
    for path in files:
        kernels, seconds = read_cost(path)
        cost = engines.setdefault(engine_of(path.relative_to(build)), Cost())
        cost.kernels.update(kernels)
        cost.bytes += section_bytes(path.with_suffix(""), ".nv_fatbin")
        cost.seconds += seconds
        cached += seconds < CACHED_SECONDS
    for name, cost in engines.items():
        counts = ", ".join(f"{kernels} for {a}" for a, kernels in sorted(cost.kernels.items()))
        print(
            f"{name}: kernels {counts}; {cost.seconds / 60:.1f} CPU minutes; "
            f"{cost.bytes / 2**20:.1f} MiB"
        )
    minutes = sum(cost.seconds for cost in engines.values()) / 60
    print(f"all: {minutes:.1f} CPU minutes; {cached} of {len(files)} files came from a cache")
    found = [fault for name, cost in engines.items() for fault in faults(name, cost)]
    if minutes > CPU_MINUTES:
        found.append(f"all: {minutes:.1f} CPU minutes, at most {CPU_MINUTES:.0f}")
    for fault in found:
        print(f"over the budget: {fault}")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
