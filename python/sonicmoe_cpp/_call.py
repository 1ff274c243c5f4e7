"""The arguments of a call of the layer, by name, in the order in which the operators take them.

_arguments.py makes a Call once from the arguments of a user's call. Everything after it passes the
Call on as a whole, or its parts.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Tensors(NamedTuple):
    x: Tensor  # (T, d)
    index: Tensor  # ids (T, K), or the tokens of pairs (C,), or the begins of groups (E,)
    second: Tensor | None  # none, or the experts of pairs (C,), or the sizes of groups (E,)
    weights: Tensor | None  # of the routing, as `index`
    w_gate: Tensor | None  # (E, n, d) if gate and up are two tensors: w_up is the up projection
    w_up: Tensor  # (E, G*n, d)
    w_down: Tensor  # (E, d, n)
    b_up: Tensor | None  # (E, G*n)
    b_down: Tensor | None  # (E, d)


class Options(NamedTuple):
    """Numbers of _names.py, and the parameters of the activation."""

    form: int
    activation: int
    alpha: float
    limit: float
    gate_layout: int
    precision: int


class MainGradients(NamedTuple):
    """Buffers to which backward adds the gradients of the weights (grad_accum)."""

    g_gate: Tensor | None = None
    g_up: Tensor | None = None
    g_down: Tensor | None = None


class Factors(NamedTuple):
    """Low-rank factors of frozen weights, and their scales (lora.py)."""

    up_a: Tensor | None  # (E, r, d)
    up_b: Tensor | None  # (E, G*n, r)
    down_a: Tensor | None  # (E, r, n)
    down_b: Tensor | None  # (E, d, r)
    up_scale: float
    down_scale: float


NO_MAIN_GRADIENTS = MainGradients()
NO_FACTORS = Factors(None, None, None, None, 1.0, 1.0)


class Fp8(NamedTuple):
    """What a call over ranks needs to compute in fp8: its Options have the precision of fp8, also
    for "auto", because the ranks choose together."""

    least: int  # "auto": the rows from which this rank's experts are faster in fp8; "fp8": 0
    weights: object  # codes of quantised weights, None, or a function that returns codes or None
    lists: int = 1  # in this number of ranks the list of pairs is the same

    def codes(self) -> Tensor | None:
        return self.weights() if callable(self.weights) else self.weights


class Call(NamedTuple):
    tensors: Tensors
    options: Options
    main_gradients: MainGradients = NO_MAIN_GRADIENTS
    factors: Factors | None = None
    fp8: Fp8 | None = None  # only over ranks


LAYER_TENSORS = Tensors._fields
OPTIONS = Options._fields
LAYER = LAYER_TENSORS + OPTIONS  # what every operator of the layer takes first
# The arguments that have a derivative, and their bits in `needs`: bit i is argument i.
DIFFERENTIABLE = tuple(name for name in LAYER_TENSORS if name not in ("index", "second"))
NEEDS = {name: 1 << LAYER.index(name) for name in DIFFERENTIABLE}
FACTORS = Factors._fields[:4]
# The same of the operators with factors, whose arguments come after LAYER.
LORA_NEEDS = {name: NEEDS[name] for name in ("x", "weights")} | {
    name: 1 << (len(LAYER) + i) for i, name in enumerate(FACTORS)
}
# The gradients that a backward adds to main gradients if there are any, and those that it returns.
ACCUMULATED = tuple(name for name in DIFFERENTIABLE if name.startswith("w_"))
FRESH = tuple(name for name in DIFFERENTIABLE if name not in ACCUMULATED)


def score_dtype(t: Tensor) -> torch.dtype:
    """The dtype of scores: fp64 for fp64 tensors, else fp32."""
    return torch.float64 if t.dtype == torch.float64 else torch.float32
