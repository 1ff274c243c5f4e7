"""One MoE layer on the CPU, forward and backward: sonicmoe_cpp and PyTorch implementations.

    python benchmarks/cpu_layer.py                          the target's run: 4096,512,256,64,8
    python benchmarks/cpu_layer.py --shape 512,256,128,16,4 --threads 1 --rounds 3 --out ''

All implementations get the same x, ids, weights and output gradient. They compute the gradients of
x, of the routing weights and of both expert weights. The time includes sorting or grouping by
expert, not the choice of experts. First, all implementations must agree with an fp64 loop. The time
is the median of interleaved rounds.

Peak memory is measured in one process for each implementation. After a warm-up step, Linux's
high-water mark of resident memory is reset; its increase during a second step is the peak memory.
It includes results and gradients, which have the same size in all implementations.
MALLOC_MMAP_THRESHOLD_ makes glibc return large blocks to the system at once. Otherwise the second
step would reuse memory of the warm-up step, which does not count.

Target, on one thread: at least 1.5 times as fast as the fastest other implementation, and less
memory than each of them. The target does not apply to bf16 on processors with AMX.
"""

from __future__ import annotations

import argparse
import ctypes
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
import torch.nn.functional as F

ROOT = Path(__file__).resolve().parent.parent
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
# Limit of the relative error (Frobenius norm) against the fp64 loop.
TOLERANCE = {"fp32": 1e-5, "bf16": 2e-2}
BAR = 1.5  # the target: speed over the fastest other implementation
OURS = "sonicmoe_cpp"


def swiglu(h):
    gate, up = h.chunk(2, dim=-1)
    return F.silu(gate) * up


def ours(x, ids, weights, w_up, w_down):
    import sonicmoe_cpp

    return sonicmoe_cpp.moe(x, ids, weights, w_up, w_down)


def expert_loop(x, ids, weights, w_up, w_down):
    """The usual loop of model code: for each expert a gather, two linears and an index_add."""
    out = torch.zeros_like(x)
    # The backward of w_up[expert] would fill a gradient of the size of all experts, once for each
    # expert; the backward of unbind fills one.
    for expert, (up, down) in enumerate(zip(w_up.unbind(), w_down.unbind(), strict=True)):
        token, slot = torch.where(ids == expert)
        h = F.linear(x[token], up)
        y = F.linear(swiglu(h), down)
        out.index_add_(0, token, y * weights[token, slot, None].to(y.dtype))
    return out


def unsort(y, order, weights):
    """Rows in expert order to (T, K, d), weighted and summed over K."""
    inverse = torch.empty_like(order).scatter_(0, order, torch.arange(order.numel()))
    y = y[inverse].view(*weights.shape, -1)
    return (y * weights[..., None].to(y.dtype)).sum(1)


# torch 2.13 computes grouped_mm in fp32 on the CPU but cannot trace it, so it runs uncompiled.
grouped_mm_outside = torch.compiler.disable(F.grouped_mm)


def grouped(x, ids, weights, w_up, w_down):
    """Sort by expert, then torch's grouped GEMM."""
    grouped_mm = F.grouped_mm if x.dtype == torch.bfloat16 else grouped_mm_outside
    experts, k = w_up.shape[0], ids.shape[1]
    flat = ids.flatten()
    order = flat.argsort(stable=True)
    counts = torch.zeros(experts, dtype=torch.int64).scatter_add(0, flat, torch.ones_like(flat))
    offsets = counts.cumsum(0).to(torch.int32)
    h = grouped_mm(x[order // k], w_up.transpose(1, 2), offs=offsets)
    y = grouped_mm(swiglu(h), w_down.transpose(1, 2), offs=offsets)
    return unsort(y, order, weights)


def compiled(function):
    """Compiles at the first call, so that a process that never calls it does not compile."""
    cache = []

    def call(*args):
        if not cache:
            cache.append(torch.compile(function))
        return cache[0](*args)

    return call


WAYS = {
    OURS: ours,
    "expert loop": expert_loop,
    "sort + grouped_mm": grouped,
    "sort + grouped_mm, compiled": compiled(grouped),
}


# "cpu" is the time of this process's threads: use it on a busy machine.
CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}


class Layer:
    """The inputs of one measurement; leaves() need gradients, ids and dout do not."""

    def __init__(self, shape, dtype, seed=0):
        tokens, hidden, width, experts, k = shape
        g = torch.Generator().manual_seed(seed)

        def normal(*size, scale=1.0):
            return torch.randn(*size, generator=g).mul_(scale)

        logits = normal(tokens, experts).to(torch.bfloat16)
        best, self.ids = logits.float().topk(k)
        self.x = normal(tokens, hidden).to(dtype).requires_grad_()
        self.weights = best.softmax(-1).requires_grad_()
        self.w_up = normal(experts, 2 * width, hidden, scale=hidden**-0.5).to(dtype)
        self.w_down = normal(experts, hidden, width, scale=width**-0.5).to(dtype)
        self.w_up.requires_grad_()
        self.w_down.requires_grad_()
        self.dout = normal(tokens, hidden).to(dtype)

    def leaves(self):
        return [self.x, self.weights, self.w_up, self.w_down]

    def to(self, dtype):
        """The same values in another dtype."""
        other = object.__new__(Layer)
        other.ids, other.dout = self.ids, self.dout.to(dtype)
        for name in ("x", "weights", "w_up", "w_down"):
            value = getattr(self, name).detach()
            setattr(other, name, value.to(dtype).requires_grad_())
        return other

    def step(self, way):
        """Forward and backward; (out, gradients of leaves())."""
        out = way(self.x, self.ids, self.weights, self.w_up, self.w_down)
        return out, torch.autograd.grad(out, self.leaves(), self.dout)


def relative_error(got, want):
    return ((got.double() - want).norm() / want.norm()).item()


def check(layer, names, dtype_name):
    """Largest relative error of each implementation to the fp64 loop; exits above the limit."""
    exact_out, exact_grads = layer.to(torch.float64).step(expert_loop)
    errors = {}
    for name in names:
        out, grads = layer.step(WAYS[name])
        pairs = zip((out, *grads), (exact_out, *exact_grads), strict=True)
        errors[name] = max(relative_error(got, want) for got, want in pairs)
        if not errors[name] <= TOLERANCE[dtype_name]:
            raise SystemExit(f"{name} does not agree in {dtype_name}: error {errors[name]:.1e}")
    return errors


def measure_time(layer, names, rounds, clock):
    """Milliseconds of every round, interleaved."""
    times = {name: [] for name in names}
    for _ in range(rounds):
        for name in names:
            start = clock()
            layer.step(WAYS[name])
            times[name].append(1e3 * (clock() - start))
    return times


def resident(field):
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise SystemExit(f"/proc/self/status has no {field}: peak memory needs Linux")


def measure_memory_here(shape, dtype_name, name):
    """Peak increase of this process's resident memory during one step, in bytes."""
    layer = Layer(shape, DTYPES[dtype_name])
    layer.step(WAYS[name])
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    before = resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")
    layer.step(WAYS[name])
    return resident("VmHWM") - before


def measure_memory(shape, dtype_name, name, threads):
    arguments = ["--memory-of", name, "--dtypes", dtype_name, "--threads", str(threads)]
    arguments += ["--shape", ",".join(map(str, shape))]
    environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": "131072"}
    result = subprocess.run(
        [sys.executable, __file__, *arguments],
        env=environment,
        check=True,
        capture_output=True,
        text=True,
    )
    return int(result.stdout.split()[-1])


def processor():
    name, flags = "unknown", ""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            name = line.split(":", 1)[1].strip()
        elif line.startswith("flags"):
            flags = line
    wanted = ("avx2", "avx512f", "avx512_bf16", "amx_bf16")
    return name, [flag for flag in wanted if f" {flag}" in flags]


def commit():
    command = ["git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    return result.stdout.strip() or "unknown"


def measure_row(arguments, names, dtype_name, threads):
    torch.set_num_threads(threads)
    layer = Layer(arguments.shape, DTYPES[dtype_name])
    errors = check(layer, names, dtype_name)
    times = measure_time(layer, names, arguments.rounds, CLOCKS[arguments.clock])
    row = {"dtype": dtype_name, "threads": threads, "rounds": arguments.rounds, "ways": {}}
    for name in names:
        way = {"ms": statistics.median(times[name]), "all_ms": times[name], "error": errors[name]}
        if arguments.memory:
            way["peak_bytes"] = measure_memory(arguments.shape, dtype_name, name, threads)
        row["ways"][name] = way
    others = [way for name, way in row["ways"].items() if name != OURS]
    if OURS in row["ways"] and others:
        mine = row["ways"][OURS]
        row["speedup"] = min(way["ms"] for way in others) / mine["ms"]
        if arguments.memory:
            row["less_memory"] = all(mine["peak_bytes"] < way["peak_bytes"] for way in others)
    return row


def holds(row, amx):
    """Whether the target is met; None if the target does not apply to the row."""
    if row["threads"] != 1 or "speedup" not in row or (amx and row["dtype"] == "bf16"):
        return None
    return row["speedup"] >= BAR and row.get("less_memory", True)


def table(record):
    tokens, hidden, width, experts, k = record["shape"]
    lines = [
        f"T,d,n,E,K = {tokens},{hidden},{width},{experts},{k}, swiglu, forward + backward, "
        f"median {record['clock']} time of {record['rows'][0]['rounds']} interleaved rounds, "
        f"{record['device']}, torch {record['torch']}, {record['date'][:10]}. "
        "Peak MiB: the increase of resident memory during one step.",
        "",
        "| dtype | threads | implementation | ms | times ours | peak MiB |",
        "|---|---:|---|---:|---:|---:|",
    ]
    for row in record["rows"]:
        mine = row["ways"].get(OURS, {}).get("ms")
        for name, way in row["ways"].items():
            ratio = f"{way['ms'] / mine:.2f}" if mine else "-"
            peak = f"{way['peak_bytes'] / 2**20:.0f}" if "peak_bytes" in way else "-"
            cells = [row["dtype"], str(row["threads"]), name, f"{way['ms']:.0f}", ratio, peak]
            lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def parse():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", default="4096,512,256,64,8", help="T,d,n,E,K")
    parser.add_argument("--dtypes", default="fp32,bf16")
    parser.add_argument("--threads", default="1,2", help="one row for each number of threads")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--ways", default=",".join(WAYS).replace(", ", "; "), help="a;b or a,b")
    parser.add_argument(
        "--clock", choices=CLOCKS, default="wall", help="the target applies to wall time"
    )
    parser.add_argument("--no-memory", dest="memory", action="store_false")
    parser.add_argument("--out", default=str(ROOT / "benchmarks/results/cpu/layer.json"))
    parser.add_argument("--memory-of", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    arguments.shape = [int(size) for size in arguments.shape.split(",")]
    return arguments


def main():
    arguments = parse()
    dtypes = arguments.dtypes.split(",")
    if arguments.memory_of:
        torch.set_num_threads(int(arguments.threads))
        print(measure_memory_here(arguments.shape, dtypes[0], arguments.memory_of))
        return 0
    names = [name for name in WAYS if name.replace(", ", "; ") in arguments.ways.split(",")]
    device, features = processor()
    record = {
        "device": device,
        "features": features,
        "torch": torch.__version__,
        "commit": commit(),
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "clock": arguments.clock,
        "shape": arguments.shape,
        "rows": [],
    }
    amx = "amx_bf16" in features
    for threads in map(int, arguments.threads.split(",")):
        for dtype_name in dtypes:
            row = measure_row(arguments, names, dtype_name, threads)
            row["bar_holds"] = holds(row, amx)
            record["rows"].append(row)
            print(f"{dtype_name}, {threads} thread(s): done", file=sys.stderr)
    print(table(record), "\n")
    for row in record["rows"]:
        if row["bar_holds"] is not None:
            verdict = "holds" if row["bar_holds"] else "MISSED"
            print(
                f"bar, {row['dtype']}: {row['speedup']:.2f}x the fastest other way (at least "
                f"{BAR}), less memory than each: {row.get('less_memory', 'unknown')}: {verdict}"
            )
    if arguments.out:
        Path(arguments.out).parent.mkdir(parents=True, exist_ok=True)
        Path(arguments.out).write_text(json.dumps(record, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
