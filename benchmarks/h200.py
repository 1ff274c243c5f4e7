"""Times the layer on one CUDA device, with the cuBLAS reference and the compiled grouped_mm layer.

    python benchmarks/h200.py --library build/cuda/libsonicmoe.so --out build/records
    python benchmarks/h200.py --library old=A.so --library new=B.so --rivals bound --configs olmoe
    python benchmarks/h200.py --merge DIR DIR...         merges the parts of one run

Forward includes top-k routing and its metadata, backward the router's gradient; neither includes
the router's matmul. TFLOP/s count model flops: 6 T K n d forward, 12 T K n d backward. Calls of all
contenders alternate in one process, on the same values (three seeds). First, all results are
compared with torch's.

With --states '' nothing is timed, but torch.compile's cache (TORCHINDUCTOR_CACHE_DIR) is filled.

hot      bursts of calls without a pause, in random order; the first 40 % of each are dropped;
         median of 5 over 3 seeds. The chip runs at the clock that its power limit allows. Design
         decisions use the times of this state.
cool     30 ms idle, one warm-up call, one timed call; median of 5. Not for autograd layers, whose
         backward time is the difference of two times.
flushed  small layers: L2 is flushed before each call, for longer than the host needs to enqueue the
         call; events around one call, median of 210. In the hot record only.
"""

from __future__ import annotations

import argparse
import datetime
import gc
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

import torch
from h200_bench import capi, check, contenders, packages, timing
from h200_bench.layer import Data, Ours
from shapes import named

HERE = Path(__file__).resolve().parent
RIVALS_MEASURED = json.loads((HERE / "data/rivals-h200.json").read_text())
CONFIGS = {row["config"]: named(row["config"]) for row in RIVALS_MEASURED["rows"]}
SMALL = ("7B-T2048", "olmoe-T64")
DEFAULT = [name for name in CONFIGS if name != "qwen3-235b-T4096"]
SEEDS = (0, 1, 2)
PASSES = ("fwd", "bwd")
ROUNDS = (2, 2, 1)  # bursts or cool calls for each seed: the median of 5 ignores two outliers
FLUSHED_CALLS = 70  # for each seed
PEAK_FLOPS, PEAK_BYTES = 989e12, 4.8e12  # of the data sheet; a faster result is an error


class Contenders:
    """Everything that is timed on one configuration, by name and pass."""

    def __init__(self, arguments, shape, libraries):
        self.data = Data(shape, torch.device("cuda"))
        self.ours = {name: Ours(library, self.data) for name, library in libraries.items()}
        self.rivals = {}
        self.left_out = {}  # name -> reason
        if "bound" in arguments.rivals:
            self.rivals["bound"] = contenders.Bound(self.data)
        for name in contenders.LAYERS.keys() & set(arguments.rivals):
            try:
                layer = contenders.LAYERS[name](shape)
            except Exception as error:
                if name not in packages.LAYERS and not isinstance(error, ImportError):
                    raise
                self.left_out[name] = packages.problem(name, error)
                print(f"{name} is left out: {self.left_out[name]}", file=sys.stderr)
            else:
                self.rivals[name] = contenders.contender(self.data, layer)

    def sample(self, seed):
        self.data.sample(seed)
        for rival in self.rivals.values():
            rival.sample()

    def check(self):
        """Checks every contender's results except the cuBLAS reference's, which has other data."""
        checker = check.Checker(self.data)
        worst = 0.0
        for name, ours in self.ours.items():
            self.data.poison()
            ours.forward()
            ours.backward()
            worst = max(worst, *checker.check_ours(name).values())
        for name, rival in list(self.rivals.items()):
            if name == "bound":
                continue
            # Out of memory is a RuntimeError; other packages may raise anything.
            theirs = (Exception, SystemExit) if name in packages.LAYERS else RuntimeError
            try:
                checker.check_autograd(name, *rival.results())
            except theirs as error:
                self.left_out[name] = packages.first_line(error)
                print(f"{name} is left out: {self.left_out[name]}", file=sys.stderr)
                del self.rivals[name]
        return worst

    def without_autograd(self, runs):
        """The runs of contenders whose backward is a call of its own."""
        layers = {
            name for name, rival in self.rivals.items() if isinstance(rival, contenders.Forward)
        }
        return {key: run for key, run in runs.items() if key[0] not in layers}

    def runs(self, passes):
        """(name, pass) -> call. An autograd layer has `both`; its backward time is both - fwd."""
        runs = {}
        for name, contender in (self.ours | self.rivals).items():
            contender.forward()  # writes H and metadata, which backward reads
            if "fwd" in passes or hasattr(contender, "both"):
                runs[name, "fwd"] = contender.forward
            for last, call in (("both", "both"), ("bwd", "backward")):
                if "bwd" in passes and hasattr(contender, call):
                    runs[name, last] = getattr(contender, call)
        for run in runs.values():  # compiles and loads kernels
            run()
        return runs


def measure(arguments, name, shape, libraries):
    """(state -> {(contender, pass): ms}, the largest error, the contenders left out)."""
    torch._dynamo.reset()
    contenders = Contenders(arguments, shape, libraries)
    small = name in SMALL and bool(arguments.states)
    flush = timing.Flusher(contenders.data.device) if small else None
    times = {"flushed": {}} if small else {state: {} for state in arguments.states}
    for seed, rounds in zip(SEEDS, ROUNDS, strict=True):
        contenders.sample(seed)
        if seed == SEEDS[0]:
            error = contenders.check()
        runs = contenders.runs(arguments.passes)
        if "flushed" in times:
            timing.flushed_round(runs, FLUSHED_CALLS, flush, times["flushed"])
        if "hot" in times:
            for _ in range(rounds):
                timing.hot_round(runs, arguments.burst, times["hot"])
        if "cool" in times:
            for _ in range(rounds):
                timing.cool_round(contenders.without_autograd(runs), times["cool"])
    medians = {
        state: {key: statistics.median(samples) for key, samples in of_state.items()}
        for state, of_state in times.items()
    }
    return medians, error, contenders.left_out


def figures(name, shape, medians):
    """A record's part of one contender: milliseconds and TFLOP/s of each pass."""
    result = {}
    ms = {which: medians.get((name, which)) for which in ("fwd", "bwd", "both")}
    if ms["both"] is not None:
        ms["bwd"] = ms["both"] - ms["fwd"]
    for which in ("fwd", "bwd"):
        if ms[which] is None:
            continue
        seconds = 1e-3 * ms[which]
        least = max(shape.flops(which) / PEAK_FLOPS, shape.least_bytes(which) / PEAK_BYTES)
        if name not in ("bound", "torch") and seconds < least:
            raise SystemExit(f"{name} {which} took {seconds:.6f} s, less than {least:.6f} is wrong")
        result[f"{which}_ms"] = round(ms[which], 5)
        result[f"{which}_tflops"] = round(shape.flops(which) / seconds / 1e12, 1)
    return result


def row_of(config, shape, medians):
    row = {"config": config, "T": shape.T, "d": shape.d, "n": shape.n, "E": shape.E, "K": shape.K}
    names = {name for name, _ in medians}
    for name in sorted(names, key=lambda n: (n != "bound", not n.startswith("ours"), n)):
        row[name] = figures(name, shape, medians)
    return row


def driver():
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        return subprocess.run(query, capture_output=True, text=True, check=True).stdout.split()[0]
    except (OSError, subprocess.CalledProcessError, IndexError):
        return "unknown"


def commit():
    if "SONICMOE_COMMIT" in os.environ:  # where there is no git history
        return os.environ["SONICMOE_COMMIT"]
    command = ["git", "-C", str(HERE), "rev-parse", "--short", "HEAD"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    return result.stdout.strip() or "unknown"


def header():
    return {
        "device": torch.cuda.get_device_name(),
        "driver": driver(),
        "torch": torch.__version__,
        "commit": commit(),
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
    }


def sonic_ratio(config, which):
    """sonic-moe's speed over the cuBLAS reference's, from an earlier record."""
    row = next(row for row in RIVALS_MEASURED["rows"] if row["config"] == config)
    return row["sonicmoe"][f"{which}_tflops"] / row["bound"][f"{which}_tflops"]


def print_row(state, row, took):
    print(f"{row['config']:<17} {state:<8}", end="")
    for which in ("fwd", "bwd"):
        cells = []
        bound = row.get("bound", {}).get(f"{which}_ms")
        for name, part in row.items():
            if isinstance(part, dict) and f"{which}_ms" in part:
                text = f"{name} {part[f'{which}_ms']:.4f} ms {part[f'{which}_tflops']:.0f}"
                if bound and name != "bound":
                    text += f" ({bound / part[f'{which}_ms']:.3f})"
                cells.append(text)
        sonic = f"sonic-moe ({sonic_ratio(row['config'], which):.3f})"
        print(f" | {which}: {', '.join([*cells, sonic])}" if cells else "", end="")
    print(f" [{took:.1f} s]", flush=True)


def print_means(records):
    """Prints the geometric mean over large layers of our speed over sonic-moe's."""
    for state in ("hot", "cool"):
        rows = [row for row in records[state]["rows"] if row["config"] not in SMALL]
        names = {n for row in rows for n in row if isinstance(row[n], dict)} - {"bound", "torch"}
        for name in sorted(names):
            for which in ("fwd", "bwd"):
                key = f"{which}_ms"
                found = [
                    row["bound"][key] / row[name][key] / sonic_ratio(row["config"], which)
                    for row in rows
                    if key in row.get("bound", {}) and key in row.get(name, {})
                ]
                if found:
                    mean = statistics.geometric_mean(found)
                    print(
                        f"{state} {name} {which}: over sonic-moe's ratio {mean:.3f} in the mean of "
                        f"{len(found)} rows, {min(found):.3f} at least"
                    )


def write(records, folder):
    for state, record in records.items():
        if record["rows"]:
            path = Path(folder) / f"{state}.json"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(record, indent=1) + "\n")


def merge(folders, out):
    """Merges records of one run. The last header is kept; later rows replace earlier ones."""
    for state in ("hot", "cool"):
        found = [Path(folder) / f"{state}.json" for folder in folders]
        parts = [json.loads(path.read_text()) for path in found if path.exists()]
        if not parts:
            continue
        if len({part["commit"] for part in parts}) > 1:
            raise SystemExit(f"{state} records are of different commits, must be of one")
        rows = {row["config"]: row for part in parts for row in part["rows"]}
        rows = [rows[name] for name in CONFIGS if name in rows]
        # All figures of a row were measured on one chip in one process.
        write({state: parts[-1] | {"parts": len(parts), "rows": rows}}, out)


def check_machine(parser, libraries, configs):
    """Exits with a message if nothing can be measured."""
    for config in configs:
        if config not in CONFIGS:
            parser.error(f'configs has "{config}", must be of: {", ".join(CONFIGS)}')
    for library in libraries:
        if not Path(library).is_file():
            parser.error(f'library is "{library}", must be a file: libsonicmoe.so of a CUDA build')
    if not torch.cuda.is_available():
        parser.error("torch sees no usable CUDA device here")


def parse():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--library", action="append", default=[], help="PATH or NAME=PATH; repeat it to compare"
    )
    parser.add_argument("--configs", default=",".join(DEFAULT))
    parser.add_argument(
        "--rivals", default="bound,torch,ours_torch", help="other contenders to time"
    )
    parser.add_argument("--states", default="hot,cool")
    parser.add_argument("--passes", default="fwd,bwd")
    parser.add_argument("--burst", type=float, default=70.0, help="milliseconds of a hot burst")
    parser.add_argument("--out", default="", help="folder for hot.json and cool.json")
    parser.add_argument("--merge", nargs="+", metavar="DIR")
    arguments = parser.parse_args()
    for name in ("configs", "rivals", "states", "passes"):
        setattr(arguments, name, [v for v in getattr(arguments, name).split(",") if v])
    for rival in set(arguments.rivals) - {"bound", *contenders.LAYERS}:
        parser.error(f'rivals has "{rival}", must be of: bound, {", ".join(contenders.LAYERS)}')
    if not arguments.merge:
        paths = [text.rpartition("=")[2] for text in arguments.library]
        check_machine(parser, paths, arguments.configs)
    return arguments


def open_libraries(given):
    libraries = {}
    for text in given:
        name, _, path = text.rpartition("=")
        libraries[name or "ours_cpp"] = capi.Library(path, torch.device("cuda"))
    return libraries


def add_rows(arguments, config, libraries, records):
    """Measures one configuration and adds its row to the record of each state."""
    began = time.perf_counter()
    shape = CONFIGS[config]
    medians, error, _ = measure(arguments, config, shape, libraries)
    rows = {state: row_of(config, shape, of_state) for state, of_state in medians.items()}
    for state, row in rows.items():
        small = state == "flushed"
        record = records["hot" if small else state]
        record["rows"].append(row | ({"l2": "flushed"} if small else {}))
        print_row(state, row, time.perf_counter() - began)
    print(f"{config:<17} checked: largest error of a row {error:.1e}", flush=True)
    if arguments.out:
        write(records, arguments.out)


def main():
    arguments = parse()
    if arguments.merge:
        return merge(arguments.merge, arguments.out)
    libraries = open_libraries(arguments.library)
    records = {state: header() | {"state": state, "rows": []} for state in ("hot", "cool")}
    print(json.dumps(header()), flush=True)
    failed = 0
    for config in arguments.configs:
        try:
            add_rows(arguments, config, libraries, records)
        except (SystemExit, RuntimeError) as wrong:  # go on with the other configurations
            failed += 1
            print(f"{config:<17} FAILED: {wrong}", flush=True)
        gc.collect()  # without empty_cache(): mapping the memory again would take seconds
    print_means(records)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
