"""This library and every other implementation that is installed, side by side on one CUDA device.

    python benchmarks/peers.py --library build/cuda/libsonicmoe.so --out DIR

For each layer: all results compared with torch, then the first call, forward and backward hot (or,
for small work, with L2 flushed), and what a layer keeps for backward. Peers that are not installed,
or that nothing here knows how to call, are named in the record: none is skipped silently.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
import time
from pathlib import Path

import h200
import torch
from h200_bench import rivals
from h200_bench.layer import Data
from h200_extra import free, kept_by

CONFIGS = "7B-n256,olmoe,qwen3-next,120B-n1024,7B-T2048"


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
    """Seconds of the first forward and backward of each layer in this process, and MiB kept."""
    result = {}
    for name in names:
        torch._dynamo.reset()
        data = Data(shape, torch.device("cuda"))
        data.draw(0)
        layer = rivals.LAYERS[name](shape)
        contender = rivals.Autograd(data, layer)
        torch.cuda.synchronize()
        began = time.perf_counter()
        contender.both()
        torch.cuda.synchronize()
        result[name] = {"first_call_s": round(time.perf_counter() - began, 3)}
        result[name] |= kept_by(layer, data)
        del data, contender, layer
        free()
    return result


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--library", required=True)
    parser.add_argument("--configs", default=CONFIGS)
    parser.add_argument("--burst", type=float, default=60.0, help="milliseconds of a hot burst")
    parser.add_argument("--out", default="")
    arguments = parser.parse_args()
    peers = availability(h200.CONFIGS["7B-T2048"])
    for name, state in peers.items():
        print(f"{name}: {state}")
    timed = [name for name, state in peers.items() if state == "timed"]
    arguments.peers, arguments.states, arguments.passes = ["bound", *timed], ["hot"], h200.PASSES
    libraries = h200.open_libraries([arguments.library])
    rows = []
    for config in arguments.configs.split(","):
        shape = h200.CONFIGS[config]
        first = first_calls(timed, shape)
        medians, _ = h200.measure(arguments, config, shape, libraries)
        for state, of_state in medians.items():
            row = h200.row_of(config, shape, of_state) | {"state": state}
            for name, part in first.items():
                row.setdefault(name, {}).update(part)
            rows.append(row)
            print(json.dumps(row), flush=True)
        free()
    if arguments.out:
        record = h200.header() | {"what": "peers", "peers": peers, "rows": rows}
        path = Path(arguments.out) / "peers.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(record, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
