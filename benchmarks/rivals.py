"""Compares this library with every other installed implementation on one CUDA device.

    python benchmarks/rivals.py --library build/cuda/libsonicmoe.so --out DIR

Results are compared with torch first. Then forward and backward are timed hot (small layers: with
L2 flushed), the memory kept for backward is measured, and the first call of each on the smallest
layer is timed with empty compilation caches. The record names each implementation that is not
installed, cannot be called by these adapters or gives wrong results, with the reason.
"""

from __future__ import annotations

import argparse
import json
import sys
import time

import h200
import torch
import torch._inductor.config
from h200_bench import check, contenders, packages
from h200_bench.layer import Data
from h200_extra import free, kept_by, write

CONFIGS = "7B-T2048,olmoe-T64,7B-n256,olmoe,qwen3-next,120B-n1024"
FIRST = "7B-T2048"


def availability(shape):
    """name -> "timed", "timed, forward only: ...", or the reason why it is not timed."""
    found = {}
    for name, make in contenders.LAYERS.items():
        try:
            layer = make(shape)
        except Exception as error:  # an unexpected version of a package may raise anything
            found[name] = packages.problem(name, error)
        else:
            only = getattr(layer, "no_backward", None)
            found[name] = f"timed, forward only: {only}" if only else "timed"
    return found


def timed(rivals):
    return [name for name, state in rivals.items() if state.startswith("timed")]


def first_calls(rivals, shape, device="cuda"):
    """Seconds of each layer's first forward and backward, with empty compilation caches. A package
    whose calls fail or give wrong results is removed from timing; `rivals` gets the reason."""
    found = {}
    with torch._inductor.config.patch(force_disable_caches=True):
        for name in timed(rivals):
            torch._dynamo.reset()
            data = Data(shape, torch.device(device))
            data.sample(0)
            try:
                found[name] = first_call(
                    contenders.contender(data, contenders.LAYERS[name](shape)), name
                )
            except (Exception, SystemExit) as error:
                if name not in packages.LAYERS:
                    raise
                rivals[name] = packages.problem(name, error)
            del data
            free()
    return found


def first_call(contender, name):
    wait = getattr(torch, contender.data.device.type).synchronize
    wait()
    began = time.perf_counter()
    results = contender.results()
    wait()
    seconds = time.perf_counter() - began
    check.Checker(contender.data).check_autograd(name, *results)
    return round(seconds, 3)


def kept(names, shape):
    """MiB that each layer keeps for backward, and its peak."""
    data = Data(shape, torch.device("cuda"))
    data.sample(0)
    found = {}
    for name in names:
        try:
            found[name] = kept_by(contenders.LAYERS[name](shape), data)
        except RuntimeError as error:  # includes out of memory
            print(f"{name} has no memory figure: {packages.first_line(error)}")
    return found


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--library", required=True)
    parser.add_argument("--configs", default=CONFIGS)
    parser.add_argument("--burst", type=float, default=60.0, help="milliseconds of a hot burst")
    parser.add_argument("--out", default="")
    arguments = parser.parse_args()
    configs = arguments.configs.split(",")
    h200.check_machine(parser, [arguments.library], configs)
    rivals = availability(h200.CONFIGS[FIRST])
    first = first_calls(rivals, h200.CONFIGS[FIRST])
    for name, state in rivals.items():
        print(f"{name}: {state}")
    names = timed(rivals)
    arguments.rivals, arguments.states, arguments.passes = ["bound", *names], ["hot"], h200.PASSES
    print(f"first call, s: {json.dumps(first)}", flush=True)
    libraries = h200.open_libraries([arguments.library])
    rows = []
    for config in configs:
        began = time.perf_counter()
        shape = h200.CONFIGS[config]
        memory = kept(names, shape)
        free()
        medians, _, left_out = h200.measure(arguments, config, shape, libraries)
        for state, of_state in medians.items():
            row = h200.row_of(config, shape, of_state) | {"state": state}
            row |= {"left_out": left_out} if left_out else {}
            for name, part in memory.items():
                row.setdefault(name, {}).update(part)
            rows.append(row)
            h200.print_row(state, row, time.perf_counter() - began)
        record = {"state": "hot", "rivals": rivals, "rows": rows}
        record |= {"first_call": {"config": FIRST, "seconds": first}}
        write(arguments.out, "rivals", record)  # so that an interrupted run leaves a record
        free()
    return 0


if __name__ == "__main__":
    sys.exit(main())
