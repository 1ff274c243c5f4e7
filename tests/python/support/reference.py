"""The layer in plain PyTorch, one expert after the other, and how errors are measured."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

GATED = {
    "swiglu": F.silu,
    "geglu": F.gelu,
    "geglu_tanh": lambda g: F.gelu(g, approximate="tanh"),
    "reglu": F.relu,
}
UNGATED = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda u: F.gelu(u, approximate="tanh"),
    "relu": F.relu,
    "relu2": lambda u: F.relu(u).square(),
}
LIMITS = {"swiglu_oai": 7.0, "swiglu_clamped": 10.0, "situ": 25.0, "swiglu_step": 7.0}
ACTIVATIONS = (*GATED, *LIMITS, *UNGATED)


def is_gated(name: str) -> bool:
    return name in GATED or name in LIMITS


def clamped(t: Tensor, least: float, most: float) -> Tensor:
    """torch.clamp, whose gradient is 0 at equality since torch 2.14. Here it passes, as before."""
    t = torch.where(t > most, most, t)
    return torch.where(t < least, least, t)


def activate(name: str, gate: Tensor | None, up: Tensor, alpha=None, limit=None) -> Tensor:
    limit = limit or LIMITS.get(name)
    if name == "situ":
        cap = alpha or 4.0
        soft = cap * torch.tanh(gate / cap) * torch.sigmoid(gate)
        return soft * limit * torch.tanh(up / limit)
    if name == "swiglu_step":
        return clamped(F.silu(gate), -float("inf"), limit) * clamped(up, -limit, limit)
    if name in LIMITS:
        gate, up = clamped(gate, -float("inf"), limit), clamped(up, -limit, limit)
    if name == "swiglu_oai":
        return gate * torch.sigmoid((alpha or 1.702) * gate) * (up + 1)
    if name == "swiglu_clamped":
        return F.silu(gate) * up
    return GATED[name](gate) * up if name in GATED else UNGATED[name](up)


def split(t: Tensor, layout: str) -> tuple[Tensor, Tensor]:
    """(gate, up) of dimension 1."""
    return (t[:, 0::2], t[:, 1::2]) if layout == "interleaved" else t.chunk(2, dim=1)


# With fewer rows, torch adds the terms of a product in another order on some processors and has a
# smaller error.
ROWS_OF_A_PRODUCT = 4


def product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x W^T + b, a row's sums in the same order for any number of rows."""
    rows = x.shape[0]
    padded = F.pad(x, (0, 0, 0, max(0, ROWS_OF_A_PRODUCT - rows)))
    return F.linear(padded, weight, bias)[:rows]


def experts(x, token, expert, weight, w_up, w_down, **options) -> Tensor:
    """O over a list of (token, expert, weight); w_up may be a tuple (gate, up)."""
    name = options.get("activation", "swiglu")
    layout = options.get("gate_layout", "concatenated")
    b_up, b_down = options.get("b_up"), options.get("b_down")
    gate = b_gate = None
    up = w_up
    if isinstance(w_up, tuple):
        gate, up = w_up
    elif is_gated(name):
        gate, up = split(w_up, layout)
    if is_gated(name) and b_up is not None:
        b_gate, b_up = split(b_up, layout)
    out = torch.zeros_like(x)
    for e in range(w_down.shape[0]):
        (rows,) = torch.where((expert == e) & (token >= 0) & (token < x.shape[0]))
        xe = x[token[rows].long()]
        he = product(xe, up[e], None if b_up is None else b_up[e])
        ge = None if gate is None else product(xe, gate[e], None if b_gate is None else b_gate[e])
        a = activate(name, ge, he, options.get("alpha"), options.get("limit"))
        y = product(a, w_down[e], None if b_down is None else b_down[e])
        out = out.index_add(0, token[rows].long(), y * weight[rows, None].to(y.dtype))
    return out


def moe(x, ids, weights, w_up, w_down, **options) -> Tensor:
    """O over top-k ids."""
    token = torch.arange(x.shape[0], device=x.device).repeat_interleave(ids.shape[1])
    return experts(x, token, ids.flatten(), weights.flatten(), w_up, w_down, **options)


def error(got: Tensor, exact: Tensor) -> float:
    """||got - exact|| over ||exact||."""
    got, exact = got.detach().double(), exact.detach().double()
    scale = exact.norm()
    return ((got - exact).norm() / scale if scale > 0 else (got - exact).norm()).item()


# If torch's own error is larger than this, it is no measure: some input was never set.
MOST_OF_PLAIN = 0.5


def assert_twice(name: str, got: Tensor, plain: Tensor, exact: Tensor, dtype) -> None:
    """Our error is at most twice that of the same formula in torch, or one rounding of `dtype`."""
    assert got.dtype == plain.dtype and got.shape == exact.shape, name
    of_plain = error(plain, exact)
    assert of_plain < MOST_OF_PLAIN, (name, of_plain)
    allowed = max(2 * of_plain, torch.finfo(dtype).eps)
    assert error(got, exact) <= allowed, (name, error(got, exact), allowed)


class Layer:
    """Random inputs of one layer; every float tensor is a leaf of the autograd graph."""

    def __init__(self, tokens, hidden, width, experts, k, dtype=torch.float64, **options):
        self.options = {"activation": "swiglu", "gate_layout": "concatenated"} | options
        bias = self.options.pop("bias", False)
        seed = self.options.pop("seed", 0)
        g = torch.Generator().manual_seed(seed)
        rows = width * (2 if is_gated(self.options["activation"]) else 1)

        def leaf(*size, scale=1.0, of=dtype):
            t = torch.randn(*size, generator=g, dtype=torch.float64) * scale
            return t.to(of).requires_grad_()

        self.ids = torch.stack([torch.randperm(experts, generator=g)[:k] for _ in range(tokens)])
        score = torch.float64 if dtype == torch.float64 else torch.float32
        self.x = leaf(tokens, hidden)
        self.weights = leaf(tokens, k, of=score)
        self.w_up = leaf(experts, rows, hidden, scale=hidden**-0.5)
        self.w_down = leaf(experts, hidden, width, scale=width**-0.5)
        self.b_up = leaf(experts, rows) if bias else None
        self.b_down = leaf(experts, hidden) if bias else None
        self.dout = leaf(tokens, hidden).detach()

    NAMES = ("x", "weights", "w_up", "w_down", "b_up", "b_down")

    def leaves(self) -> dict[str, Tensor]:
        values = {name: getattr(self, name) for name in self.NAMES}
        return {name: value for name, value in values.items() if value is not None}

    def to(self, dtype, device="cpu") -> Layer:
        """The same values in another dtype (weights in the score dtype that belongs to it)."""
        other = object.__new__(Layer)
        other.options, other.ids = self.options, self.ids.to(device)
        other.dout = self.dout.to(device, dtype)
        for name in self.NAMES:
            value = getattr(self, name)
            if value is not None:
                score = torch.float64 if dtype == torch.float64 else torch.float32
                of = score if name == "weights" else dtype
                value = value.detach().to(device, of).requires_grad_()
            setattr(other, name, value)
        return other

    def call(self, function) -> Tensor:
        options = {"b_up": self.b_up, "b_down": self.b_down} | self.options
        return function(self.x, self.ids, self.weights, self.w_up, self.w_down, **options)

    def step(self, function) -> dict[str, Tensor]:
        """The output and every gradient, by name."""
        out = self.call(function)
        leaves = self.leaves()
        grads = torch.autograd.grad(out, list(leaves.values()), self.dout)
        return {"out": out.detach()} | dict(zip(leaves, grads, strict=True))
