#!/usr/bin/env python3
"""Compares the layer in fp8 with the layer in bf16 on one Hopper GPU; writes fp8.json.

    cmake --build --preset release --target fp8_bench
    python benchmarks/fp8.py                        benchmarks/results/h200/fp8.json
    python benchmarks/fp8.py --summary RECORD       the record's figures and their goals

All contenders are called as in training code, with routing and all casts, hot, in one process and
in random order. torch_scaled is h200_bench/scaled.py, deep_gemm h200_bench/blocks.py. First, the
cosines of all results with those of a bf16 layer in plain torch are recorded; a layer with wrong
results is not timed.

burst_ms, rounds length of a burst, and the number of bursts of each contender
fwd_ms, bwd_ms   a call; the weights of fp8, auto and deep_gemm are quantised before it, those of
                 torch_scaled in forward and again in backward
quantise_ms      the call that quantises the weights
step_ms          whole steps of 1 and of 4 micro-batches; a step quantises the weights once
products         fp8_bench's times of A, Y, dH and dX~, with gather and epilogue; and the time of
                 cuBLAS's product of the same shape with block scales, of rows that are gathered and
                 quantised already

The record is written after each layer. Run again with the same --out to measure what is missing.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path

import h200
import torch
from h200_bench import blocks, check, packages, timing
from h200_bench.contenders import Autograd
from h200_bench.layer import Data
from h200_bench.scaled import scaled_layer
from shapes import Shape

ROOT = Path(__file__).resolve().parents[1]
TINY = {"tiny": Shape(96, 128, 128, 4, 2)}
CONFIGS = {
    name: shape
    for name, shape in h200.CONFIGS.items()
    if shape.d % 128 == shape.n % 128 == 0 and name not in h200.SMALL
} | TINY
PRECISIONS = {"bf16": None, "fp8": "fp8", "auto": "auto"}
# The other implementations: make(shape, device) returns a layer.
RIVALS = {"torch_scaled": lambda shape, _: scaled_layer(shape), "deep_gemm": blocks.BlocksLayer}
MICRO_BATCHES = (1, 4)
# The least cosine with torch's bf16 layer that shows a correct layer.
LEAST_COSINE = {"bf16": 0.9995, "fp8": 0.99, "auto": 0.99} | dict.fromkeys(RIVALS, 0.99)
PRODUCT_CONFIGS = ("30B-n1024", "qwen3-235b", "olmoe", "d2048-n2048", "7B-n512", "d7168-n2048")
# (N, K) of a product over C rows, by the name of fp8_bench's step.
PRODUCTS = {
    "A": lambda s: (2 * s.n, s.d),
    "Y": lambda s: (s.d, s.n),
    "dH": lambda s: (s.n, s.d),
    "dX~": lambda s: (s.d, 2 * s.n),
}


# ---- contenders ----------------------------------------------------------------------------------


class Ours:
    """This library's layer with routing; its quantised weights are made by quantise()."""

    def __init__(self, data, precision):
        import sonicmoe_cpp as smoe

        self.smoe, self.precision, self.codes = smoe, precision, None
        self.autograd = Autograd(data, self.layer)
        self.forward, self.both = self.autograd.forward, self.autograd.both
        self.results = self.autograd.results

    def layer(self, x, logits, w_up, w_down):
        ids, weights = self.smoe.route(logits, self.autograd.data.shape.K)
        options = {"precision": self.precision, "fp8_weights": self.codes}
        return self.smoe.moe(x, ids, weights, w_up, w_down, **options)

    def quantise(self):
        if self.precision is not None:
            data = self.autograd.data
            self.codes = self.smoe.quantize_weights(data.w_up, data.w_down)

    def step(self, micro_batches):
        self.quantise()
        for _ in range(micro_batches):
            self.both()

    def kept_bytes(self):
        """Bytes of the tensors saved for backward, without arguments and quantised weights."""
        given = {t.untyped_storage().data_ptr() for t in self.autograd.leaves}
        if self.codes is not None:
            given.add(self.codes.codes.untyped_storage().data_ptr())
        kept = {}

        def keep(tensor):
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in given:
                kept[storage.data_ptr()] = storage.nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            out = self.forward()  # keeps all storages alive, so that their addresses differ
        total = sum(kept.values())
        del out
        return total


class Rival(Autograd):
    """A layer of RIVALS. If it has a method quantise, its weights are quantised before a call."""

    def quantise(self):
        quantise = getattr(self.layer, "quantise", None)
        if quantise is not None:
            quantise(self.data.w_up, self.data.w_down)


def contenders(data):
    """({name: contender}, {name: reason})"""
    found = {name: Ours(data, precision) for name, precision in PRECISIONS.items()}
    left_out = {}
    for name, make in RIVALS.items():
        try:
            found[name] = Rival(data, make(data.shape, data.device))
        except Exception as error:
            left_out[name] = packages.first_line(error)
    return found, left_out


def cosines(want, out, gradients):
    """Cosine of each result with torch's."""
    names = ("dx", "dlogits", "dw_up", "dw_down")
    results = {"out": out} | dict(zip(names, gradients, strict=True))
    flat = {name: (got.detach().flatten().float(), want[name].flatten().float())
            for name, got in results.items()}  # fmt: skip
    return {name: (torch.dot(a, b) / (a.norm() * b.norm())).item() for name, (a, b) in flat.items()}


def checked(found, data, left_out):
    """Quantises the weights of all contenders. Returns {name: cosines}. A rival with wrong results
    is left out; a wrong layer of ours raises."""
    want = check.Checker(data).want
    result = {}
    for name, contender in list(found.items()):
        try:
            contender.quantise()
            got = cosines(want, *contender.results())
            if not min(got.values()) >= LEAST_COSINE[name]:
                raise SystemExit(f"{name} is wrong: cosines {got}")
        except (Exception, SystemExit) as error:
            if name not in RIVALS:
                raise
            left_out[name] = packages.first_line(error)
            del found[name]
        else:
            result[name] = {key: round(value, 5) for key, value in got.items()}
    return result


# ---- times ---------------------------------------------------------------------------------------


def host_round(runs, _milliseconds, times):
    """As timing.hot_round, on the CPU: one timed call each."""
    for name, run in runs.items():
        began = time.perf_counter()
        run()
        times.setdefault(name, []).append(1e3 * (time.perf_counter() - began))


def medians_of(runs, device, burst, rounds):
    times = {}
    for run in runs.values():
        run()
    for _ in range(rounds):
        (timing.hot_round if device.type == "cuda" else host_round)(runs, burst, times)
    return {name: statistics.median(samples) for name, samples in times.items()}


def measure_layer(config, options):
    """A row of the record."""
    shape, device = CONFIGS[config], torch.device(options.device)
    torch._dynamo.reset()
    data = Data(shape, device)
    data.sample(0)
    found, left_out = contenders(data)
    ours = {name: found[name] for name in PRECISIONS}
    bursts = {"burst_ms": options.burst, "rounds": options.rounds}
    row = {"config": config, **vars(shape), **bursts, "cosine": checked(found, data, left_out)}
    runs = {}
    for name, contender in found.items():
        runs[name, "fwd"], runs[name, "both"] = contender.forward, contender.both
    for micro in MICRO_BATCHES:
        for name in ("bf16", "fp8"):
            runs[name, micro] = lambda c=ours[name], m=micro: c.step(m)
    runs["fp8", "quantise"] = ours["fp8"].quantise
    times = medians_of(runs, device, options.burst, options.rounds)
    for name in found:
        fwd, both = times[name, "fwd"], times[name, "both"]
        row[name] = {"fwd_ms": round(fwd, 4), "bwd_ms": round(both - fwd, 4)}
    row["quantise_ms"] = round(times["fp8", "quantise"], 4)
    row["step_ms"] = {
        str(micro): {name: round(times[name, micro], 4) for name in ("bf16", "fp8")}
        for micro in MICRO_BATCHES
    }
    row["kept_mib"] = {n: round(ours[n].kept_bytes() / 2**20, 3) for n in ("bf16", "fp8")}
    return row | ({"left_out": left_out} if left_out else {})


def blocks_ms(shape, columns, depth, burst, rounds):
    """cuBLAS's time of (C, depth) x (depth, columns) in e4m3 with scales of 1 x 128 and 128 x 128.
    One matrix serves all rows: cuBLAS has no grouped form of it."""
    rows, cuda = shape.rows, {"device": "cuda"}
    a = torch.randn(rows, depth, **cuda).to(torch.float8_e4m3fn)
    b = torch.randn(columns, depth, **cuda).to(torch.float8_e4m3fn)
    of_rows = torch.ones(depth // 128, rows, **cuda).t()
    of_blocks = torch.ones(columns // 128, depth // 128, **cuda).t()

    def run():
        torch._scaled_mm(a, b.t(), of_rows, of_blocks, out_dtype=torch.bfloat16)

    return medians_of({"cublas": run}, torch.device("cuda"), burst, rounds)["cublas"]


def lines_of(text):
    """The JSON objects of fp8_bench's output."""
    return [json.loads(line) for line in text.splitlines() if line.startswith("{")]


def steps_of(lines):
    """[(config, Shape, {step: ms})] of fp8."""
    shapes = {line["config"]: Shape(*(line[k] for k in "TdnEK")) for line in lines if "T" in line}
    of_fp8 = [line for line in lines if line.get("precision") == "fp8"]
    return [(line["config"], shapes[line["config"]], line["steps_ms"]) for line in of_fp8]


def measure_products(options):
    """Rows of the record: {config, T, d, n, E, K, products: {name: ours_ms, cublas_ms, ...}}"""
    done = subprocess.run(
        [options.bench, str(options.bench_seconds), *PRODUCT_CONFIGS],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        raise RuntimeError(done.stderr.strip() or f"{options.bench} exited {done.returncode}")
    rows = []
    for config, shape, steps in steps_of(lines_of(done.stdout)):
        products = {}
        for name, size in PRODUCTS.items():
            cublas = blocks_ms(shape, *size(shape), options.burst, options.rounds)
            ours = steps[name]
            products[name] = {"ours_ms": ours, "cublas_ms": round(cublas, 4)}
            products[name]["of_cublas"] = round(cublas / ours, 3)
        rows.append({"config": config, **vars(shape), "products": products})
    return rows


# ---- figures -------------------------------------------------------------------------------------


def total(row, name):
    return row[name]["fwd_ms"] + row[name]["bwd_ms"]


def speeds_over(rival, rows):
    return (total(row, rival) / total(row, "fp8") for row in rows if rival in row)


def spread(values):
    values = list(values)
    if not values:
        return None
    return {"mean": statistics.geometric_mean(values), "least": min(values), "of": len(values)}


# title: (goal, the figure of summary() that must reach it)
GOALS = {
    "forward over bf16, d >= 2048, n >= 1024": (1.40, "mean"),
    "forward + backward over bf16, d >= 2048, n >= 1024": (1.25, "mean"),
    "forward + backward over bf16, n = 512": (1.12, "least"),
    '"auto" over bf16, all layers': (0.99, "least"),
    "over torch's scaled products": (1.0, "least"),
    "over DeepGEMM's products": (1.0, "least"),
    "bf16's bytes kept for backward over fp8's": (1 / 0.55, "least"),
    "a product over cuBLAS's": (0.95, "least"),
}


def summary(record):
    """{title of GOALS: {mean, least, of: number of values}}; None if nothing was measured."""
    rows = [row for row in record["rows"] if row["config"] not in TINY]
    wide = [row for row in rows if row["d"] >= 2048 and row["n"] >= 1024]
    narrow = [row for row in rows if row["n"] == 512]
    products = [p for row in record["products"] for p in row["products"].values()]
    values = (
        (row["bf16"]["fwd_ms"] / row["fp8"]["fwd_ms"] for row in wide),
        (total(row, "bf16") / total(row, "fp8") for row in wide),
        (total(row, "bf16") / total(row, "fp8") for row in narrow),
        (total(row, "bf16") / total(row, "auto") for row in rows),
        *(speeds_over(name, rows) for name in RIVALS),
        (row["kept_mib"]["bf16"] / row["kept_mib"]["fp8"] for row in rows),
        (product["of_cublas"] for product in products),
    )
    return {title: spread(each) for title, each in zip(GOALS, values, strict=True)}


def summary_lines(record):
    found = []
    for title, figures in summary(record).items():
        goal, which = GOALS[title]
        if figures is None:
            found.append(f"{title}: nothing measured")
            continue
        verdict = "met" if figures[which] >= goal else "MISSED"
        found.append(
            f"{title}: geometric mean {figures['mean']:.3f}, least {figures['least']:.3f}, of "
            f"{figures['of']}; goal {goal:.3g} for the {which}: {verdict}"
        )
    return found


# ---- the record ----------------------------------------------------------------------------------


def header(options):
    if options.device == "cuda":
        return h200.header() | blocks.version()
    return {"device": "cpu", "torch": torch.__version__, "commit": h200.commit()}


def opened(options):
    """The record, with the results of an earlier run on this device and commit."""
    found = header(options) | {"what": "fp8", "state": "hot", "rows": [], "products": []}
    if options.out.exists():
        earlier = json.loads(options.out.read_text())
        if any(earlier.get(key) != found[key] for key in ("device", "commit")):
            raise SystemExit(f"{options.out} is of another device or commit, must be of this one")
        found |= {"rows": earlier["rows"], "products": earlier["products"]}
    return found


def written(record, out):
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(record, indent=1) + "\n")


def run(options, record):
    """Measures what the record lacks. Returns a line for each part that it has not measured."""
    began, failed = time.perf_counter(), []
    done = {row["config"] for row in record["rows"]}
    for config in options.configs:
        if config in done:
            continue
        if time.perf_counter() - began > options.seconds:
            failed.append(f"{config}: not reached")
            continue
        try:
            record["rows"].append(measure_layer(config, options))
        except (Exception, SystemExit) as error:  # go on with the other layers
            failed.append(f"{config}: {packages.first_line(error)}")
            continue
        print(json.dumps(record["rows"][-1]), flush=True)
        written(record, options.out)
        gc.collect()
        if options.device == "cuda":
            torch.cuda.empty_cache()
    if options.bench and not record["products"]:
        try:
            record["products"] = measure_products(options)
            written(record, options.out)
        except Exception as error:
            failed.append(f"products: {packages.first_line(error)}")
    return failed


def parsed():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    standard = [name for name in CONFIGS if name not in TINY]
    parser.add_argument("--summary", type=Path, metavar="RECORD")
    parser.add_argument("--configs", nargs="+", choices=list(CONFIGS), default=standard)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--burst", type=float, default=40.0, help="milliseconds of a hot burst")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=280.0, help="start no layer later")
    parser.add_argument(
        "--bench", default=str(ROOT / "build/release/fp8_bench"), help="'': no products"
    )
    parser.add_argument("--bench-seconds", type=float, default=1.0)
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks/results/h200/fp8.json")
    options = parser.parse_args()
    if options.device == "cpu":
        options.bench = ""
    elif options.summary is None and not torch.cuda.is_available():
        parser.error("no GPU: --device cpu runs the program, but its times are meaningless")
    return options


def main():
    options = parsed()
    if options.summary is not None:
        print("\n".join(summary_lines(json.loads(options.summary.read_text()))))
        return 0
    record = opened(options)
    failed = run(options, record)
    print("\n".join((*summary_lines(record), *failed)))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
