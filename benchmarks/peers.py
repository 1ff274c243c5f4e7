"""This library and every other implementation that is installed, side by side on one CUDA device.

    python benchmarks/peers.py --library build/cuda/libsonicmoe.so --out DIR

All results are compared with torch, then forward and backward timed hot (small work: with L2
flushed), and what a layer keeps for backward; the first call of each on the smallest layer, with
nothing compiled before. Peers that are not installed, or that nothing here knows how to call, are
named in the record: none is skipped silently.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
import time

import h200
import torch
import torch._inductor.config
from h200_bench import rivals
from h200_bench.layer import Data
from h200_extra import free, kept_by, write

CONFIGS = "7B-T2048,olmoe-T64,7B-n256,olmoe,qwen3-next,120B-n1024"
FIRST = "7B-T2048"


def installed(module):
    return importlib.util.find_spec(module) is not None


def availability(shape):
    """name -> "timed", or why not."""
    found = {}
    for name, make in rivals.LAYERS.items():
        try:
            make(shape)
            found[name] = "timed"
        except ImportError as absent:
            found[name] = f"absent: {absent}"
    for name, module in rivals.NOT_ADAPTED.items():
        found[name] = "installed, but nothing here calls it" if installed(module) else "absent"
    return found


def first_calls(names, shape):
    """Seconds of each layer's first forward and backward here, nothing compiled before."""
    found = {}
    with torch._inductor.config.patch(force_disable_caches=True):
        for name in names:
            torch._dynamo.reset()
            data = Data(shape, torch.device("cuda"))
            data.draw(0)
            torch.cuda.synchronize()
            began = time.perf_counter()
            rivals.Autograd(data, rivals.LAYERS[name](shape)).both()
            torch.cuda.synchronize()
            found[name] = round(time.perf_counter() - began, 3)
            del data
            free()
    return found


def kept(names, shape):
    """What each layer keeps for backward, and what it needs meanwhile, in MiB."""
    data = Data(shape, torch.device("cuda"))
    data.draw(0)
    return {name: kept_by(rivals.LAYERS[name](shape), data) for name in names}


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--library", required=True)
    parser.add_argument("--configs", default=CONFIGS)
    parser.add_argument("--burst", type=float, default=60.0, help="milliseconds of a hot burst")
    parser.add_argument("--out", default="")
    arguments = parser.parse_args()
    peers = availability(h200.CONFIGS[FIRST])
    for name, state in peers.items():
        print(f"{name}: {state}")
    timed = [name for name, state in peers.items() if state == "timed"]
    arguments.peers, arguments.states, arguments.passes = ["bound", *timed], ["hot"], h200.PASSES
    first = first_calls(timed, h200.CONFIGS[FIRST])
    print(f"first call, s: {json.dumps(first)}", flush=True)
    libraries = h200.open_libraries([arguments.library])
    rows = []
    for config in arguments.configs.split(","):
        began = time.perf_counter()
        shape = h200.CONFIGS[config]
        memory = kept(timed, shape)
        free()
        medians, _ = h200.measure(arguments, config, shape, libraries)
        for state, of_state in medians.items():
            row = h200.row_of(config, shape, of_state) | {"state": state}
            for name, part in memory.items():
                row.setdefault(name, {}).update(part)
            rows.append(row)
            h200.print_row(state, row, time.perf_counter() - began)
        record = {"state": "hot", "peers": peers, "rows": rows}
        record |= {"first_call": {"config": FIRST, "seconds": first}}
        write(arguments.out, "peers", record)  # a long run may be cut off
        free()
    return 0


if __name__ == "__main__":
    sys.exit(main())
