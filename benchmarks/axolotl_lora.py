"""axolotl's layer with low-rank factors (scattermoe_lora), for benchmarks/finetune.py.

Only the package's Triton products are imported. The packages above them import a whole trainer with
versions of its own, so they are replaced by empty ones.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
import types
from pathlib import Path
from typing import NamedTuple

import torch

PRODUCTS = "axolotl.integrations.kernels.libs.scattermoe_lora"


def products():
    """The module of the products; ImportError if the package is absent."""
    if PRODUCTS in sys.modules:
        return sys.modules[PRODUCTS]
    found = importlib.util.find_spec("axolotl")
    if found is None:
        raise ImportError("absent")
    root = Path(found.submodule_search_locations[0])
    above = PRODUCTS.split(".")[:-1]
    for i in range(1, len(above) + 1):
        package = types.ModuleType(".".join(above[:i]))
        package.__path__ = [str(root.joinpath(*above[1:i]))]
        sys.modules[package.__name__] = package
    return importlib.import_module(PRODUCTS)


class Factors(NamedTuple):
    """A (E, r, in) and B (E, out, r) as the products take them: (E r, in) and (out, E r)."""

    a: torch.Tensor
    b: torch.Tensor


def as_taken(a, b) -> Factors:
    return Factors(a.flatten(0, 1), b.permute(1, 0, 2).flatten(1).contiguous())


def as_ours(factors: Factors, experts):
    a = factors.a.unflatten(0, (experts, -1))
    return a, factors.b.unflatten(1, (experts, -1)).permute(1, 0, 2)


def layer(data, act):
    """The function of x, routing weights and the factors of as_taken(), as axolotl composes it: the
    activation is not compiled, gate and up are halves, and weights are read transposed."""
    found, experts, top_k = products(), data.config.shape.E, data.config.shape.K
    up, down = data.w_up.transpose(1, 2), data.w_down.transpose(1, 2)

    def run(x, weights, up_a, up_b, down_a, down_b):
        order = found.flatten_sort_count(data.ids, num_experts=experts)
        h = found.parallel_linear_lora(
            x, up, top_k, *order, up_a, up_b, data.scale, data.b_up, grouped_out=True
        )
        return found.parallel_linear_lora(
            act(data.activation, h),
            down,
            1,
            *order,
            down_a,
            down_b,
            data.scale,
            data.b_down,
            weights.to(x.dtype),
            grouped_in=True,
        )

    return run
