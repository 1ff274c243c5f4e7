"""The formulas of the activations in plain PyTorch.

The kernels have formulas of their own. The formulas here recognise the activation of a foreign
module.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

# The activations that have parameters, and the defaults of their parameters.
PARAMETERS = {
    "swiglu_oai": {"alpha": 1.702, "limit": 7.0},
    "swiglu_clamped": {"limit": 10.0},
    "situ": {"alpha": 4.0, "limit": 25.0},
    "swiglu_step": {"limit": 7.0},
}


def _gelu_tanh(u: Tensor) -> Tensor:
    return F.gelu(u, approximate="tanh")


def _relu2(u: Tensor) -> Tensor:
    return F.relu(u).square()


UNARY = {"silu": F.silu, "gelu": F.gelu, "gelu_tanh": _gelu_tanh, "relu": F.relu, "relu2": _relu2}
# The activations of the form f(gate) * up, and their f. If there is a limit, gate and up are
# clamped first. swiglu_oai, situ and swiglu_step do not have this form.
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
    if name == "situ":
        capped = alpha * torch.tanh(gate / alpha)
        return capped * torch.sigmoid(gate) * (limit * torch.tanh(up / limit))
    if name == "swiglu_step":
        return F.silu(gate).clamp(max=limit) * up.clamp(-limit, limit)
    if limit is not None:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    if name == "swiglu_oai":
        return gate * torch.sigmoid(alpha * gate) * (up + 1)
    return UNARY[GATE_OF[name]](gate) * up
