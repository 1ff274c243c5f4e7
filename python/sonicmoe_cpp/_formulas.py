"""The formulas of the activations in plain PyTorch, with derivatives.

The kernels have formulas of their own. The formulas here have two uses: to recognise the activation
of a foreign module, and to compute activations on the low-rank path, which calls separate products.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

# The activations that have parameters, and the defaults of their parameters.
PARAMETERS = {"swiglu_oai": {"alpha": 1.702, "limit": 7.0}, "swiglu_clamped": {"limit": 10.0}}


def _gelu_tanh(u: Tensor) -> Tensor:
    return F.gelu(u, approximate="tanh")


def _relu2(u: Tensor) -> Tensor:
    return F.relu(u).square()


UNARY = {"silu": F.silu, "gelu": F.gelu, "gelu_tanh": _gelu_tanh, "relu": F.relu, "relu2": _relu2}
# The activations of the form f(gate) * up, and their f. If there is a limit, gate and up are
# clamped first. swiglu_oai does not have this form.
GATE_OF = {
    "swiglu": "silu",
    "geglu": "gelu",
    "geglu_tanh": "gelu_tanh",
    "reglu": "relu",
    "swiglu_clamped": "silu",
}


def _with_defaults(name: str, alpha: float | None, limit: float | None):
    """(alpha, limit); None for a parameter that the activation does not have."""
    default = PARAMETERS.get(name, {})
    return alpha or default.get("alpha"), limit or default.get("limit")


def gated(
    name: str, gate: Tensor, up: Tensor, alpha: float | None = None, limit: float | None = None
) -> Tensor:
    """The gated activation `name`, elementwise. Parameters that are None have their defaults."""
    alpha, limit = _with_defaults(name, alpha, limit)
    if limit is not None:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    if name == "swiglu_oai":
        return gate * torch.sigmoid(alpha * gate) * (up + 1)
    return UNARY[GATE_OF[name]](gate) * up


def _silu_slope(u: Tensor, alpha: float = 1.0) -> Tensor:
    s = torch.sigmoid(alpha * u)
    return s * (1 + alpha * u * (1 - s))


def _gelu_slope(u: Tensor) -> Tensor:
    density = torch.exp(-0.5 * u * u) / math.sqrt(2 * math.pi)
    return 0.5 * (1 + torch.erf(u / math.sqrt(2))) + u * density


def _gelu_tanh_slope(u: Tensor) -> Tensor:
    c, cubic = math.sqrt(2 / math.pi), 0.044715
    t = torch.tanh(c * (u + cubic * u * u * u))
    return 0.5 * (1 + t) + 0.5 * u * (1 - t * t) * c * (1 + 3 * cubic * u * u)


def _relu_slope(u: Tensor) -> Tensor:
    return (u > 0).to(u.dtype)


SLOPE = {
    "silu": _silu_slope,
    "gelu": _gelu_slope,
    "gelu_tanh": _gelu_tanh_slope,
    "relu": _relu_slope,
    "relu2": lambda u: 2 * F.relu(u),
}


def gated_slopes(
    name: str, gate: Tensor, up: Tensor, alpha: float | None = None, limit: float | None = None
) -> tuple[Tensor, Tensor]:
    """(d act / d gate, d act / d up). At the limit itself a clamp passes its gradient, as in
    torch."""
    alpha, limit = _with_defaults(name, alpha, limit)
    if limit is None:
        unary = GATE_OF[name]
        return SLOPE[unary](gate) * up, UNARY[unary](gate)
    inside_gate, inside_up = gate <= limit, up.abs() <= limit
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    if name == "swiglu_oai":
        by_gate = _silu_slope(gate, alpha) * (up + 1) * inside_gate
        return by_gate, gate * torch.sigmoid(alpha * gate) * inside_up
    unary = GATE_OF[name]
    return SLOPE[unary](gate) * up * inside_gate, UNARY[unary](gate) * inside_up
