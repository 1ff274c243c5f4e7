"""Measures where fp8 loses accuracy: cosines with fp64, by activation and by the scale of x.

    SONICMOE_COMMIT=$(git rev-parse --short HEAD) python benchmarks/fp8_scales.py

It writes benchmarks/results/study/fp8_scales.json.

Runs on the CPU, whose fp8 results have the bits of the GPU's up to the order of fp32 sums. Weights
have standard deviation 1 / sqrt(columns), so gate and up have about the scale of x.
"""

from __future__ import annotations

import json
import os
from datetime import date
from pathlib import Path

import sonicmoe_cpp as smoe
import torch

RECORD = Path(__file__).parent / "results/study/fp8_scales.json"
T, D, N, E, K = 512, 256, 256, 8, 2
SCALES = (1, 30, 2000)
ACTIVATIONS = (
    *("swiglu", "swiglu_oai", "swiglu_clamped", "swiglu_step", "situ", "geglu", "reglu"),
    *("silu", "gelu", "relu", "relu2"),
)
GATED = ACTIVATIONS[:7]
KINDS = {"bf16": {}, "fp8": {"precision": "fp8"}, "keep_h": {"precision": "fp8", "keep_h": "bf16"}}


def inputs(activation: str, scale: float) -> tuple[torch.Tensor, ...]:
    torch.manual_seed(1)
    rows = 2 * N if activation in GATED else N
    x, dout = scale * torch.randn(T, D), torch.randn(T, D)
    w_up, w_down = torch.randn(E, rows, D) / D**0.5, torch.randn(E, D, N) / N**0.5
    return tuple(t.bfloat16() for t in (x, w_up, w_down, dout))


def gradients(tensors: tuple[torch.Tensor, ...], activation: str, **options) -> list[torch.Tensor]:
    """out, dx, dW1 and dW2."""
    *leaves, dout = tensors
    leaves = [t.clone().requires_grad_() for t in leaves]
    ids = torch.stack([torch.randperm(E)[:K] for _ in range(T)])
    weights = torch.rand(T, K).to(torch.promote_types(dout.dtype, torch.float32))
    out = smoe.moe(leaves[0], ids, weights, *leaves[1:], activation=activation, **options)
    return [out.detach(), *torch.autograd.grad(out, leaves, dout)]


def cosine(a: torch.Tensor, b: torch.Tensor) -> float:
    a, b = a.double().flatten(), b.double().flatten()
    return float(torch.dot(a, b) / (a.norm() * b.norm()))


def main() -> None:
    rows = []
    for activation in ACTIVATIONS:
        for scale in SCALES:
            given = inputs(activation, scale)

            def run(tensors, activation=activation, **options):
                torch.manual_seed(2)  # the same routing
                return gradients(tensors, activation, **options)

            exact = run(tuple(t.double() for t in given))
            row = {"activation": activation, "scale": scale}
            for kind, options in KINDS.items():
                found = zip(("out", "dx", "dw1", "dw2"), run(given, **options), exact, strict=True)
                row[kind] = {name: round(cosine(a, b), 4) for name, a, b in found}
            rows.append(row)
            print(row, flush=True)
    commit = os.environ.get("SONICMOE_COMMIT", "unknown")
    record = {"commit": commit, "date": date.today().isoformat(), "torch": torch.__version__}
    record |= dict(zip("TdnEK", (T, D, N, E, K), strict=True)) | {"rows": rows}
    RECORD.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
