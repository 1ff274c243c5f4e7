"""Further measurements on one CUDA device; each writes one record.

    python benchmarks/h200_extra.py kernels skew --library build/cuda/libsonicmoe.so --out DIR

kernels    time of every kernel and of torch.bmm on gathered, balanced rows, hot, in one run
skew       time of skewed routings relative to a uniform one with as many rows
rounding   time per routed row of token rounding (nearest) relative to top-k, for several sparsities
memory     bytes kept for backward and peak workspace for several d/n, also of compiled grouped_mm
tokens     time for several T
host       host time of a call, and the first call of a new process (must be the first argument)
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import time
from pathlib import Path

import torch
from h200 import CONFIGS, SEEDS, SMALL, check_machine, header, open_libraries
from h200_bench import capi, contenders, kernels, timing
from h200_bench.layer import Data, Ours, Rounded
from shapes import Shape

CUDA = torch.device("cuda")
LARGE = [name for name in CONFIGS if name not in SMALL and name != "qwen3-235b-T4096"]
SKEWED = ("7B-n256", "30B-n512", "qwen3-next")
# Two layers with sparse routing, and one layer at several sparsities.
SPARSE = {
    "4096-n1024-E256-K8": Shape(16384, 4096, 1024, 256, 8),
    "2048-n512-E512-K10": Shape(32768, 2048, 512, 512, 10),
    **{f"2048-n1024-E{E}-K8": Shape(16384, 2048, 1024, E, 8) for E in (32, 64, 128, 256, 512)},
}
RATES = ("of_bmm", "of_copy")  # rate of a kernel over that of torch.bmm or of a copy
TOKENS = (256, 1024, 4096, 16384, 65536)
GRANULARITY = [Shape(24576, 1536, 2048 // K, 16 * K, K) for K in (2, 4, 8, 16, 32)]


def free():
    gc.collect()
    torch.cuda.empty_cache()


def medians(times):
    return {name: statistics.median(samples) for name, samples in times.items()}


def measure_kernels(arguments, library):
    rows = []
    for config in arguments.configs or LARGE:
        torch._dynamo.reset()
        data = Data(CONFIGS[config], CUDA)
        data.sample(SEEDS[0])
        bound = contenders.Bound(data)
        bound.sample()
        found = kernels.kernel_rates(Ours(library, data), bound, arguments.burst)
        rows.append({"config": config, "kernels": found})
        write(
            arguments.out, "kernels", {"state": "hot", "rows": rows}
        )  # so that an interrupted run leaves a record
        text = ", ".join(
            f"{role} {k['us']:.0f} us"
            + "".join(f" ({k[of]:.3f} {of.replace('_', ' ')})" for of in RATES if of in k)
            for role, k in found.items()
            if "us" in k
        )
        print(f"{config:<13} {text}", flush=True)
        del data, bound
        free()
    for role in ("A", "Y", "dH", "dW", "dX~"):
        ratios = [row["kernels"][role]["of_bmm"] for row in rows if role in row["kernels"]]
        print(f"{role}: {statistics.geometric_mean(ratios):.3f} of torch.bmm in the mean")
    return {"state": "hot", "rows": rows}


def hot_expert(logits, fraction):
    """Changes the logits so that about this fraction of the tokens choose expert 0, and no other
    token does."""
    chosen = torch.rand(logits.shape[0], device=logits.device) < fraction
    extreme = torch.where(chosen, logits.max(dim=1).values, logits.min(dim=1).values)
    at = torch.where(chosen, logits.argmax(dim=1), logits.argmin(dim=1))
    logits.scatter_(1, at[:, None], logits[:, :1].clone())
    logits[:, 0] = extreme


def zipf(logits):
    """Logits log(1/rank) + Gumbel noise: their top-k samples experts by Zipf's law."""
    experts = logits.shape[1]
    p = 1.0 / torch.arange(1, experts + 1, device=logits.device)
    p = (p / p.sum())[torch.randperm(experts, device=logits.device)]
    gumbel = -torch.log(-torch.log(torch.rand(logits.shape, device=logits.device)))
    logits.copy_(p.log() + gumbel)


def measure_skew(arguments, library):
    rows = []
    for config in SKEWED:
        shape = CONFIGS[config]
        layers = {}
        for name in ("uniform", "one hot expert", "zipf"):
            data = Data(shape, CUDA)
            data.sample(SEEDS[0])
            if name == "one hot expert":
                hot_expert(data.logits, 10 * shape.K / shape.E)
            elif name == "zipf":
                zipf(data.logits)
            layers[name] = Ours(library, data)
        runs = {}
        for name, ours in layers.items():
            runs[name, "fwd"], runs[name, "bwd"] = ours.forward, ours.backward
        times = {}
        for run in runs.values():
            run()
        for _ in SEEDS:
            timing.hot_round(runs, arguments.burst, times)
        ms = medians(times)
        row = {"config": config, "uniform": {w: ms["uniform", w] for w in ("fwd", "bwd")}}
        for name, ours in layers.items():
            if name == "uniform":
                continue
            most = ours.data.ids.flatten().bincount(minlength=shape.E).max().item()
            row[name] = {"most_rows_over_mean": round(most * shape.E / shape.rows, 2)}
            for which in ("fwd", "bwd"):
                ratio = ms[name, which] / ms["uniform", which]
                row[name] |= {which: ms[name, which], f"{which}_over_uniform": round(ratio, 3)}
        rows.append(row)
        print(json.dumps(row), flush=True)
        del layers, runs
        free()
    return {"state": "hot", "rows": rows}


def measure_rounding(arguments, library):
    rows = []
    for config, shape in SPARSE.items():
        data = Data(shape, CUDA)
        data.sample(SEEDS[0])
        plain, rounded = Ours(library, data), Rounded(library, data, "nearest")
        runs = {
            ("topk", "fwd"): plain.forward,
            ("topk", "bwd"): plain.backward,
            ("rounded", "fwd"): rounded.forward,
            ("rounded", "bwd"): rounded.backward,
        }
        for run in runs.values():
            run()
        times = {}
        for _ in SEEDS:
            timing.hot_round(runs, arguments.burst, times)
        ms = medians(times)
        routed = {"topk": shape.rows, "rounded": int(rounded.offsets[-1])}
        row = {"config": config, **vars(shape), "rows": routed}
        for which in ("fwd", "bwd"):
            ns = {name: 1e6 * ms[name, which] / routed[name] for name in routed}
            row[which] = {
                "topk_ms": ms["topk", which],
                "rounded_ms": ms["rounded", which],
                "rounded_over_topk_a_row": round(ns["rounded"] / ns["topk"], 4),
            }
        rows.append(row)
        print(json.dumps(row), flush=True)
        del data, plain, rounded, runs
        free()
    return {"state": "hot", "rows": rows}


def kept_by(layer, data):
    """MiB that an autograd layer keeps after its forward (without the output), and the peak during
    the forward."""
    contender = contenders.contender(data, layer)
    contender.forward()
    free()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    out = contender.forward()
    torch.cuda.synchronize()
    kept = torch.cuda.memory_allocated() - before - out.numel() * 2
    return {"kept_MiB": round(kept / 2**20, 2),
            "peak_MiB": round((torch.cuda.max_memory_allocated() - before) / 2**20, 2)}  # fmt: skip


def requested():
    """Bytes requested from the allocator; its blocks may be up to 1 MiB larger."""
    return torch.cuda.memory_stats()["requested_bytes.all.current"]


def check_allocates_nothing(run):
    """Exits with a message if a call allocates device memory of its own."""
    run()  # loads kernels
    torch.cuda.synchronize()
    free_before = torch.cuda.mem_get_info()[0]
    run()
    torch.cuda.synchronize()
    taken = free_before - torch.cuda.mem_get_info()[0]
    if taken > 0:
        raise SystemExit(f"forward and backward took {taken} bytes, must be none")


def measure_memory(arguments, library):
    rows = []
    for shape in GRANULARITY:
        torch._dynamo.reset()
        data = Data(shape, CUDA)
        data.sample(SEEDS[0])
        free()
        before = requested()
        ours = Ours(library, data)
        allocated = requested() - before
        sizes = library.sizes(ours.problem, capi.FORWARD)
        backward = library.sizes(ours.problem, capi.BACKWARD)
        kept = sizes.h_bytes + sizes.saved_bytes
        scratch = max(sizes.scratch_bytes, backward.scratch_bytes)
        if allocated != kept + scratch:
            raise SystemExit(
                f"{allocated} bytes were allocated, the library asked for {kept + scratch}"
            )
        check_allocates_nothing(capi.in_turn(ours.forward, ours.backward))
        least = 4 * shape.rows * shape.n
        most = least + 20 * shape.rows + 16 * shape.T + 1024 * shape.E
        row = {**vars(shape), "formula_MiB": round(least / 2**20, 2)}
        row["promised_MiB"] = round(most / 2**20, 2)
        row["ours_cpp"] = {
            "kept_MiB": round(kept / 2**20, 2),
            "workspace_MiB": round(scratch / 2**20, 2),
        }
        del ours
        free()
        row["torch"] = kept_by(contenders.grouped_mm_layer(shape), data)
        try:
            row["ours_torch"] = kept_by(contenders.torch_front_end(shape), data)
        except ImportError as absent:
            print(f"ours_torch is absent: {absent}", file=sys.stderr)
        # ScatterMoE keeps Y, H, A and the factors of the activation, according to its source.
        scatter = 2 * shape.rows * (shape.d + 4 * shape.n)
        row["scattermoe_formula_MiB"] = round(scatter / 2**20, 2)
        rows.append(row)
        print(json.dumps(row), flush=True)
        write(arguments.out, "memory", {"rows": rows})
        del data
        free()
    return {"rows": rows}


def token_runs(shape, library):
    """(contender, pass) -> call, for every installed contender."""
    data = Data(shape, CUDA)
    data.sample(SEEDS[0])
    ours, bound = Ours(library, data), contenders.Bound(data)
    bound.sample()
    runs = {}
    for name, contender in (("ours_cpp", ours), ("bound", bound)):
        runs[name, "fwd"], runs[name, "bwd"] = contender.forward, contender.backward
    for name in ("ours_torch", "torch"):
        try:
            layer = contenders.Autograd(data, contenders.LAYERS[name](shape))
        except ImportError as absent:
            print(f"{name} is absent: {absent}", file=sys.stderr)
        else:
            runs[name, "fwd"], runs[name, "both"] = layer.forward, layer.both
    return runs


def measure_tokens(arguments, library):
    base = CONFIGS["7B-n256"]
    rows = []
    record = {"state": "flushed", "rows": rows}
    record |= {k: v for k, v in vars(base).items() if k != "T"}
    for tokens in TOKENS:
        torch._dynamo.reset()
        runs = token_runs(Shape(tokens, base.d, base.n, base.E, base.K), library)
        for run in runs.values():
            run()
        times = {}
        timing.flushed_round(runs, 50, timing.Flusher(CUDA), times)
        row = {"T": tokens}
        for (name, which), ms in medians(times).items():
            row.setdefault(name, {})[f"{which}_ms"] = round(ms, 5)
        for part in row.values():
            if isinstance(part, dict) and "both_ms" in part:
                part["bwd_ms"] = round(part.pop("both_ms") - part["fwd_ms"], 5)
        rows.append(row)
        print(json.dumps(row), flush=True)
        write(arguments.out, "tokens", record)
        del runs
        free()
    return record


def measure_host(arguments):
    """The host time of each call, and the time of the first calls. The layer is small, so that the
    host never waits for the device."""
    torch.empty(1, device=CUDA)
    torch.cuda.synchronize()
    data = Data(CONFIGS["olmoe-T64"], CUDA)
    data.sample(SEEDS[0])
    torch.cuda.synchronize()
    began = time.perf_counter()
    library = open_libraries([arguments.library])["ours_cpp"]
    ours = Ours(library, data)
    ours.forward()
    torch.cuda.synchronize()
    forward = time.perf_counter() - began
    ours.backward()
    torch.cuda.synchronize()
    both = time.perf_counter() - began
    calls = {
        "route": ours.route,
        "layer forward": ours.layer,
        "layer backward": ours.layer_backward,
        "route backward": ours.route_backward,
    }
    result = {
        "first_call_s": {"forward": round(forward, 4), "forward_backward": round(both, 4)},
        "host_us": {name: round(timing.host_microseconds(run), 2) for name, run in calls.items()},
    }
    print(json.dumps(result), flush=True)
    return result


MEASURES = {
    "kernels": measure_kernels,
    "skew": measure_skew,
    "rounding": measure_rounding,
    "memory": measure_memory,
    "tokens": measure_tokens,
}


def write(folder, what, result):
    if folder:
        path = Path(folder) / f"{what}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(header() | {"what": what} | result, indent=1) + "\n")


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", nargs="+", choices=["host", *MEASURES])
    parser.add_argument("--library", required=True)
    parser.add_argument("--configs", default="", help="layers of kernels")
    parser.add_argument("--burst", type=float, default=60.0, help="milliseconds of a hot burst")
    parser.add_argument("--out", default="")
    arguments = parser.parse_args()
    if "host" in arguments.what[1:]:
        parser.error("host is not the first, must be: it times the first call of the process")
    arguments.configs = [v for v in arguments.configs.split(",") if v]
    check_machine(parser, [arguments.library], arguments.configs)
    library = None
    for what in arguments.what:
        if what == "host":
            write(arguments.out, what, measure_host(arguments))
            continue
        library = library or open_libraries([arguments.library])["ours_cpp"]
        write(arguments.out, what, MEASURES[what](arguments, library))
    return 0


if __name__ == "__main__":
    sys.exit(main())
