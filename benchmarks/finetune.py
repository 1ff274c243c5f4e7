"""Times a fine-tuned layer on one CUDA device: frozen weights, with low-rank factors, the same in
compiled PyTorch in two ways, and axolotl's layer if its package is installed.

    python benchmarks/finetune.py --out records
    python benchmarks/finetune.py --configs qwen3-30b --tokens 4096 --ranks 16

frozen is moe() with gradients of x and of the routing weights, lora is lora_moe(), torch is the
layer of torch_layer() with grouped_mm for weights and factors, and merged is the same layer with
grouped_mm of W + s B A, which PEFT 0.21's target_parameters compute. axolotl is the layer of its
package on ScatterMoE's kernels, whose first calls choose tiles for a minute or more. All are hot,
interleaved in one process. Before the timing the results of each are compared with those of a loop
over experts in fp32; a package that is absent or wrong is left out, and the record says why. The
record finetune.json is written after each row; rows that an earlier run of the same commit on the
same device measured are kept. At last come rows of packed weights: the rate of unpacking beside
that of a copy, and moe() on them beside moe() on the unpacked weights.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import axolotl_lora
import torch
import torch.nn.functional as F
from h200 import header
from h200_bench import timing
from h200_bench.packages import first_line
from h200_extra import free, medians
from shapes import NAMED, Shape
from sonicmoe_cpp import LowRank, lora_moe, moe, packed

CUDA = torch.device("cuda")
BF = torch.bfloat16
ROUNDS = 3
LEAST_LIMIT = 2**-8  # an error that is always allowed: one ulp of bf16


class Contender(NamedTuple):
    """`layer` is a function of `leaves`; restored() gives gradients the shapes of Data.leaves."""

    layer: Callable
    leaves: list
    restored: Callable = list


class Config(NamedTuple):
    shape: Shape  # its T is not used
    activation: str
    bias: bool


CONFIGS = {
    "qwen3-30b": Config(NAMED["qwen3-30b"], "swiglu", False),
    "gpt-oss-20b": Config(NAMED["gpt-oss-20b"], "swiglu_oai", True),
}


class Data:
    """The tensors of a layer. `leaves` get gradients: x, routing weights, then the factors."""

    def __init__(self, config, tokens, rank):
        self.config, self.rank, self.scale = config, rank, 2.0
        shape, self.activation, bias = config
        d, n, experts, top_k = shape.d, shape.n, shape.E, shape.K
        generator = torch.Generator(CUDA).manual_seed(7)

        def random(*shape, fan_in=1):
            t = torch.empty(*shape, dtype=BF, device=CUDA)
            return t.normal_(generator=generator).mul_(fan_in**-0.5)

        self.w_up, self.w_down = (
            random(experts, 2 * n, d, fan_in=d),
            random(experts, d, n, fan_in=n),
        )
        self.b_up = random(experts, 2 * n) if bias else None
        self.b_down = random(experts, d) if bias else None
        logits = torch.empty(tokens, experts, device=CUDA).normal_(generator=generator)
        weights, ids = logits.softmax(1).topk(top_k)
        self.ids = ids.int()
        factors = (
            random(experts, rank, d, fan_in=d),
            random(experts, 2 * n, rank, fan_in=rank),
            random(experts, rank, n, fan_in=n),
            random(experts, d, rank, fan_in=rank),
        )
        leaves = (random(tokens, d), weights / weights.sum(1, keepdim=True), *factors)
        self.leaves = [t.requires_grad_() for t in leaves]
        self.dout = random(tokens, d)

    def options(self):
        return {"b_up": self.b_up, "b_down": self.b_down, "activation": self.activation}


def act(name, h):
    gate, up = h.chunk(2, dim=-1)
    if name == "swiglu":
        return F.silu(gate) * up
    gate, up = gate.clamp(max=7.0), up.clamp(-7.0, 7.0)
    return gate * torch.sigmoid(1.702 * gate) * (up + 1)


def beside(rows, offsets, w, a, b, s):
    """Products of their own for the factors."""
    low = torch._grouped_mm(rows, a.mT, offs=offsets) * s
    out = torch._grouped_mm(rows, w.mT, offs=offsets)
    return out + torch._grouped_mm(low, b.mT, offs=offsets)


def merged(rows, offsets, w, a, b, s):
    """One product with W + s B A."""
    return torch._grouped_mm(rows, torch.baddbmm(w, b, a, alpha=s).mT, offs=offsets)


def torch_layer(data, product):
    """LoRA as written in PyTorch: rows sorted by expert, two products beside() or merged(), a sum
    by index_add."""
    top_k, experts, s = data.config.shape.K, data.config.shape.E, data.scale

    @torch.compile(dynamic=False)
    def layer(x, weights, up_a, up_b, down_a, down_b):
        order = data.ids.flatten().argsort(stable=True)
        expert, token = data.ids.flatten()[order], order // top_k
        ends = torch.arange(1, experts + 1, device=x.device, dtype=torch.int32)
        offsets = torch.searchsorted(expert, ends).int()

        def project(rows, w, a, b, bias):
            out = product(rows, offsets, w, a, b, s)
            return out if bias is None else out + bias[expert]

        a = act(data.activation, project(x[token], data.w_up, up_a, up_b, data.b_up))
        y = project(a, data.w_down, down_a, down_b, data.b_down)
        y = y * weights.flatten()[order, None].to(y.dtype)
        return torch.zeros_like(x).index_add(0, token, y)

    return layer


def lora_layer(data):
    def layer(x, weights, up_a, up_b, down_a, down_b):
        up, down = LowRank(up_a, up_b, data.scale), LowRank(down_a, down_b, data.scale)
        options = data.options() | {"up": up, "down": down}
        return lora_moe(x, data.ids, weights, data.w_up, data.w_down, **options)

    return layer


def axolotl_contender(data):
    """Raises ImportError if the package is absent."""
    experts = data.config.shape.E
    up, down = (axolotl_lora.as_taken(*data.leaves[i : i + 2]) for i in (2, 4))
    own = [t.detach().requires_grad_() for t in (*up, *down)]

    def restored(grads):
        pairs = (axolotl_lora.Factors(*grads[i : i + 2]) for i in (2, 4))
        ours = (axolotl_lora.as_ours(pair, experts) for pair in pairs)
        return [*grads[:2], *(t for pair in ours for t in pair)]

    return Contender(axolotl_lora.layer(data, act), [*data.leaves[:2], *own], restored)


PACKAGES = {"axolotl": axolotl_contender}


def frozen_layer(data):
    def layer(x, weights):
        return moe(x, data.ids, weights, data.w_up, data.w_down, **data.options())

    return layer


def reference(data):
    """The layer in fp32, expert by expert: the output and the gradients of the leaves."""
    leaves = [t.detach().float().requires_grad_() for t in data.leaves]
    x, weights, up_a, up_b, down_a, down_b = leaves
    out = torch.zeros_like(x, requires_grad=False)
    for e in range(data.config.shape.E):
        token, slot = (data.ids == e).nonzero(as_tuple=True)

        def project(rows, w, a, b, bias, e=e):
            out = rows @ (w[e].float() + data.scale * b[e] @ a[e]).T
            return out if bias is None else out + bias[e].float()

        a = act(data.activation, project(x[token], data.w_up, up_a, up_b, data.b_up))
        y = project(a, data.w_down, down_a, down_b, data.b_down)
        out = out.index_add(0, token, y * weights[token, slot, None])
    return out.detach(), torch.autograd.grad(out, leaves, data.dout.float())


def both(layer, leaves, dout):
    out = layer(*leaves)
    return out, torch.autograd.grad(out, leaves, dout)


def errors_of(contender, data, want):
    """The relative errors of the output and of each gradient."""
    out, grads = both(contender.layer, contender.leaves, data.dout)
    return [
        ((got.float() - exact).norm() / exact.norm()).item()
        for got, exact in zip((out, *contender.restored(grads)), want, strict=True)
    ]


NAMES = ("out", "dx", "dweights", "dA_u", "dB_u", "dA_d", "dB_d")


def check(data, contenders):
    """The largest error of each. Exits with a message if an error of lora is more than twice that
    of torch."""
    out, grads = reference(data)
    want = (out, *grads)
    errors = {name: errors_of(c, data, want) for name, c in contenders.items()}
    for what, ours, torchs in zip(NAMES, errors["lora"], errors["torch"], strict=True):
        if not ours <= max(2 * torchs, LEAST_LIMIT):
            raise SystemExit(f"{what} of lora has an error of {ours:.2e}, torch {torchs:.2e}")
    found = {name: round(max(values), 5) for name, values in errors.items()}
    return found, want


def installed(data, want, errors):
    """The contenders of PACKAGES whose errors are at most four times those of torch, and why the
    others are left out. `errors` gets theirs."""
    limit = max(4 * errors["torch"], LEAST_LIMIT)
    contenders, left_out = {}, {}
    for name, make in PACKAGES.items():
        try:
            contender = make(data)
            error = max(errors_of(contender, data, want))
        except Exception as problem:  # an unexpected version of a package may raise anything
            absent = isinstance(problem, ImportError) and str(problem) == "absent"
            left_out[name] = "absent" if absent else first_line(problem)
            continue
        errors[name] = round(error, 5)
        if error <= limit:
            contenders[name] = contender
        else:
            left_out[name] = f"an error of {error:.2e}, more than {limit:.2e}"
    return contenders, left_out


def memory(layer, leaves, dout):
    """MiB that forward keeps for backward besides its output, and the peak of both."""
    both(layer, leaves, dout)
    free()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    out = layer(*leaves)
    kept = torch.cuda.memory_allocated() - before - out.numel() * out.element_size()
    grads = torch.autograd.grad(out, leaves, dout)
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated() - before
    del grads
    return {"kept_mib": round(kept / 2**20, 1), "peak_mib": round(peak / 2**20, 1)}


def measure(name, tokens, rank, burst):
    config = CONFIGS[name]
    data = Data(config, tokens, rank)
    contenders = {
        "lora": Contender(lora_layer(data), data.leaves),
        "torch": Contender(torch_layer(data, beside), data.leaves),
        "merged": Contender(torch_layer(data, merged), data.leaves),
    }
    errors, want = check(data, contenders)
    others, left_out = installed(data, want, errors)
    del want
    contenders = {"frozen": Contender(frozen_layer(data), data.leaves[:2]), **contenders, **others}
    free()
    runs = {}
    row = {"config": name, **vars(config.shape), "T": tokens,
           "r": rank, "errors": errors, "left_out": left_out}  # fmt: skip
    for key, (layer, leaves, _) in contenders.items():
        row[key] = memory(layer, leaves, data.dout)
        runs[key, "fwd"] = lambda layer=layer, leaves=leaves: layer(*leaves)
        runs[key, "both"] = lambda layer=layer, leaves=leaves: both(layer, leaves, data.dout)
    times = {}
    for _ in range(ROUNDS):
        timing.hot_round(runs, burst, times)
    ms = medians(times)
    for key in contenders:
        row[key]["fwd_ms"] = round(ms[key, "fwd"], 4)
        row[key]["bwd_ms"] = round(ms[key, "both"] - ms[key, "fwd"], 4)
    return row


def packings(config):
    """Both weights of a layer in each packed format."""
    data = Data(config, 1, 1)
    pair = data.w_up, data.w_down

    def fp8(w):
        grid = torch.ones(w.shape[0], *(-(-size // 128) for size in w.shape[1:]), device=CUDA)
        return packed.from_fp8_blocks(w.to(torch.float8_e4m3fn), grid)

    yield "nf4", [packed.pack_nf4(w) for w in pair]
    yield "nf4 nested", [packed.pack_nf4(w, nested=True) for w in pair]
    yield "mxfp4", [packed.pack_mxfp4(w) for w in pair]
    yield "fp8_blocks", [fp8(w) for w in pair]


def measure_packed(name, tokens, burst):
    """Rows of packed weights; their results must be those of the unpacked weights."""
    config = CONFIGS[name]
    data = Data(config, tokens, 1)
    leaves = data.leaves[:2]
    for kind, (up, down) in packings(config):
        data.w_up, data.w_down = plain = up.unpack(), down.unpack()
        bits = both(frozen_layer(data), leaves, data.dout)
        data.w_up, data.w_down = up, down
        layer = frozen_layer(data)
        again = both(layer, leaves, data.dout)
        same = torch.equal(bits[0], again[0]) and all(map(torch.equal, bits[1], again[1]))
        if not same:
            raise SystemExit(f"{kind} differs from its unpacked weights")
        del bits, again

        def unpack(up=up, down=down, plain=plain):
            up.unpack(plain[0])
            down.unpack(plain[1])

        def frozen(plain=plain):
            data.w_up, data.w_down = plain
            both(frozen_layer(data), leaves, data.dout)

        def on_packed(up=up, down=down):
            data.w_up, data.w_down = up, down
            both(frozen_layer(data), leaves, data.dout)

        copied = [torch.empty_like(w) for w in plain]
        runs = {
            "unpack": unpack,
            "copy": lambda plain=plain, copied=copied: torch._foreach_copy_(copied, plain),
            "frozen": frozen,
            "packed": on_packed,
        }
        times = {}
        for _ in range(ROUNDS):
            timing.hot_round(runs, burst, times)
        ms = medians(times)
        elements = sum(w.numel() for w in plain)
        read = up.nbytes() + down.nbytes()
        yield {
            "config": name,
            "T": tokens,
            "format": kind,
            "bytes_a_weight": round(read / elements, 4),
            "unpack_gbs": round((read + 2 * elements) / ms["unpack"] / 1e6),
            "copy_gbs": round(4 * elements / ms["copy"] / 1e6),
            **{f"{key}_ms": round(ms[key], 4) for key in ("unpack", "frozen", "packed")},
        }
        del plain, copied, runs
        packed.release_buffers()
        free()


def total(row, key):
    return row[key]["fwd_ms"] + row[key]["bwd_ms"]


def summary(row):
    lora = total(row, "lora")
    rivals = ", ".join(
        f"{name} {total(row, name) / lora:.2f}"
        for name in ("torch", "merged", *PACKAGES)
        if name in row
    )
    left_out = "".join(f"; {name} is left out: {why}" for name, why in row["left_out"].items())
    return (
        f"{row['config']} T {row['T']} r {row['r']}: frozen {total(row, 'frozen'):.3f} ms, lora "
        f"{lora:.3f} ({lora / total(row, 'frozen'):.3f}); times lora: {rivals}{left_out}"
    )


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--configs", default=",".join(CONFIGS))
    parser.add_argument("--tokens", default="4096,8192,16384")
    parser.add_argument("--ranks", default="16,64")
    parser.add_argument("--burst", type=float, default=60.0, help="milliseconds of a hot burst")
    parser.add_argument("--out", default="", help="folder of the record")
    arguments = parser.parse_args()
    record = header() | {"what": "finetune", "state": "hot", "rows": []}
    path = Path(arguments.out or ".") / "finetune.json"
    if arguments.out and path.exists():
        earlier = json.loads(path.read_text())
        if all(earlier.get(key) == record[key] for key in ("device", "commit")):
            record["rows"] = earlier["rows"]

    def write():
        if arguments.out:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(record, indent=1) + "\n")

    names, tokens_of, ranks = (
        value.split(",") for value in (arguments.configs, arguments.tokens, arguments.ranks)
    )
    done = {(row["config"], row["T"], row["r"]) for row in record["rows"]}
    for name, tokens, rank in itertools.product(names, map(int, tokens_of), map(int, ranks)):
        if (name, tokens, rank) in done:
            continue
        began = time.perf_counter()
        torch._dynamo.reset()
        row = measure(name, tokens, rank, arguments.burst)
        record["rows"].append(row)
        print(f"{summary(row)} [{time.perf_counter() - began:.0f} s]", flush=True)
        write()
        free()
    record["packed"] = []
    for name in names:
        for row in measure_packed(name, int(tokens_of[0]), arguments.burst):
            record["packed"].append(row)
            print(json.dumps(row), flush=True)
            write()
    return 0


if __name__ == "__main__":
    sys.exit(main())
