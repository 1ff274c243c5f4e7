"""Low-rank factors on frozen experts (LoRA): both projections use W + scale * B A, without
forming this sum. docs/adapters.md has the formulas.

The layer computes the low-rank terms inside its own products (the operators lora_*). Kept for
backward are x, H as in the layer, and scale * x A^T of the up-projection, which has `rank` columns.
Gradients of the frozen weights are not computed.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from . import _autograd, _checks, _packed_ops, fp8
from ._arguments import call_of, grouped_index, packed_call, pairs_index
from ._call import Call, Factors
from ._weights import Activation
from .fp8 import NOTHING, Fp8Weights, Request, request_of
from .packed import PackedWeights
from .routing import Pairs


class LowRank(NamedTuple):
    """The term scale * b @ a that is added to a frozen weight (E, out, in)."""

    a: Tensor  # (E, r, in), or (1, r, in): one for all experts
    b: Tensor  # (E, out, r), or (1, out, r)
    scale: float = 1.0


_NONE = LowRank(None, None)


def _given(name: str, factors) -> LowRank:
    if factors is None:
        return _NONE
    if not isinstance(factors, LowRank):
        raise TypeError(f"{name} is {type(factors).__name__}, must be a LowRank or None")
    _checks.tensor(f"{name}.a", factors.a)
    _checks.tensor(f"{name}.b", factors.b)
    _checks.finite(f"{name}.scale", factors.scale)
    return factors


def _check_frozen(frozen: dict[str, Tensor | None]) -> None:
    for name, value in frozen.items():
        if isinstance(value, Tensor) and value.requires_grad:
            raise ValueError(
                f"{name} requires a gradient, must be frozen (requires_grad_(False)): with "
                "low-rank factors only the factors are trained"
            )


def _check_factors(x: Tensor, w_up: Tensor, w_down: Tensor, up: LowRank, down: LowRank) -> None:
    experts, hidden, width = w_down.shape
    outer = w_up.shape[1]
    meaning = "2*n" if outer == 2 * width else "n"
    for name, factors, rows, columns, letters in (
        ("up", up, outer, hidden, (meaning, "d")),
        ("down", down, hidden, width, ("d", "n")),
    ):
        if factors.a is None:
            continue
        a, b = (1 if t.dim() > 0 and t.shape[0] == 1 else experts for t in factors[:2])
        _checks.shape(f"{name}.a", factors.a, f"(E, r, {letters[1]})", (a, None, columns))
        rank = factors.a.shape[1]
        if rank < 1:
            raise ValueError(f"{name}.a has rank {rank}, must be at least 1")
        _checks.shape(f"{name}.b", factors.b, f"(E, {letters[0]}, r)", (b, rows, rank))
        for part, value in (("a", factors.a), ("b", factors.b)):
            _checks.dtype(f"{name}.{part}", value)
            _checks.on_device(f"{name}.{part}", value, x)


def _cast(factors: list, dtype: torch.dtype) -> list:
    """The factors in one dtype that the layer takes: fp32 if all are, else that of x."""
    given = [t for t in factors if t is not None]
    if dtype != torch.float64 and all(t.dtype == torch.float32 for t in given):
        return factors
    return [None if t is None else t.to(dtype) for t in factors]


def _padded(factors: list, device: torch.device) -> list:
    """The factors with zeros up to a rank that is a multiple of 8, which CUDA's products need. The
    zeros do not change the result."""
    if device.type != "cuda":
        return factors
    padded = []
    for a, b in (factors[:2], factors[2:]):
        more = 0 if a is None else -a.shape[1] % 8
        padded += [a, b] if more == 0 else [F.pad(a, (0, 0, 0, more)), F.pad(b, (0, more))]
    return padded


def with_factors(call: Call, up: LowRank | None, down: LowRank | None) -> Call:
    """The call with factors, which are checked against its other arguments."""
    up, down = _given("up", up), _given("down", down)
    x, _, _, _, _, w_up, w_down, b_up, b_down = call.tensors
    _check_frozen({"w_up": w_up, "w_down": w_down, "b_up": b_up, "b_down": b_down})
    _check_factors(x, w_up, w_down, up, down)
    factors = _padded(_cast([up.a, up.b, down.a, down.b], x.dtype), x.device)
    experts = w_down.shape[0]
    factors = [None if t is None else t.expand(experts, -1, -1) for t in factors]
    return call._replace(factors=Factors(*factors, float(up.scale), float(down.scale)))


def _run(form: str, x, routing: tuple, experts: tuple, up, down, style: tuple, request: Request):
    if isinstance(experts[0], (tuple, list)):
        raise TypeError("w_up is a pair (gate, up), must be one tensor with low-rank factors")
    if request.precision == "auto" and getattr(x, "is_cuda", False):
        request = NOTHING  # in fp8 only one layer is timed on CUDA
    arguments = (form, x, routing, experts, style, None, request)
    call, packed = packed_call(*arguments) or (call_of(*arguments), None)
    call = with_factors(call, up, down)
    if packed is not None:
        return _packed_ops.layer(call, packed)
    return _autograd.lora(call, fp8.given_weights(request, call))


def lora_moe(
    x: Tensor,
    topk_ids: Tensor,
    topk_weights: Tensor,
    w_up: Tensor | PackedWeights,
    w_down: Tensor | PackedWeights,
    *,
    up: LowRank | None = None,
    down: LowRank | None = None,
    b_up: Tensor | None = None,
    b_down: Tensor | None = None,
    activation: str | Activation = "swiglu",
    gate_layout: str = "concatenated",
    precision: str | None = None,
    keep_h: str | None = None,
    fp8_weights: Fp8Weights | None = None,
) -> Tensor:
    """As moe(), with W + scale * B A for each projection that has factors. W and biases are frozen.

    Differentiable in x, topk_weights and the factors: up.a (E, r, d), up.b (E, G*n, r), down.a
    (E, r, n), down.b (E, d, r), in x's dtype or fp32 (other float dtypes are cast to x's).
    A factor whose first size is 1 belongs to all experts. gate_layout gives the order of the rows
    of up.b. The other arguments are those of moe(), except
    that w_up must be one tensor, or PackedWeights.
    """
    routing, experts = (topk_ids, None, topk_weights), (w_up, w_down, b_up, b_down)
    request = request_of(precision, keep_h, fp8_weights)
    return _run("ids", x, routing, experts, up, down, (activation, gate_layout), request)


def lora_moe_pairs(
    x: Tensor,
    pairs: Pairs,
    w_up: Tensor | PackedWeights,
    w_down: Tensor | PackedWeights,
    *,
    up: LowRank | None = None,
    down: LowRank | None = None,
    b_up: Tensor | None = None,
    b_down: Tensor | None = None,
    activation: str | Activation = "swiglu",
    gate_layout: str = "concatenated",
    precision: str | None = None,
    keep_h: str | None = None,
    fp8_weights: Fp8Weights | None = None,
) -> Tensor:
    """As lora_moe(), routed by a list of (token, expert, weight) as moe_pairs()."""
    experts, style = (w_up, w_down, b_up, b_down), (activation, gate_layout)
    request = request_of(precision, keep_h, fp8_weights)
    return _run("pairs", x, pairs_index(pairs), experts, up, down, style, request)


def lora_moe_grouped(
    rows: Tensor,
    expert_offsets: Tensor | tuple[Tensor, Tensor],
    w_up: Tensor | PackedWeights,
    w_down: Tensor | PackedWeights,
    *,
    row_weights: Tensor | None = None,
    up: LowRank | None = None,
    down: LowRank | None = None,
    b_up: Tensor | None = None,
    b_down: Tensor | None = None,
    activation: str | Activation = "swiglu",
    gate_layout: str = "concatenated",
    precision: str | None = None,
    keep_h: str | None = None,
    fp8_weights: Fp8Weights | None = None,
) -> Tensor:
    """As lora_moe(), on rows that are already grouped by expert as in moe_grouped()."""
    experts, style = (w_up, w_down, b_up, b_down), (activation, gate_layout)
    request = request_of(precision, keep_h, fp8_weights)
    routing = (*grouped_index(rows, expert_offsets, w_down), row_weights)
    return _run("grouped", rows, routing, experts, up, down, style, request)


_APART = (
    "lora.{} is sharded apart from its layer, which would not gather it: call fully_shard(layer), "
    "not fully_shard(layer.lora) (before it fully_shard(layer.router), if the router's dtype is "
    "another)"
)


class LoRA(nn.Module):
    """Trainable factors for both projections of E experts."""

    def __init__(
        self, w_up: Tensor, w_down: Tensor, rank: int, alpha: float, dtype=None, share_outer=False
    ):
        """For w_up (E, G*n, d) and w_down (E, d, n); scale = alpha / rank. dtype: default fp32, or
        the weights' dtype if it is wider. share_outer: up_a and down_b are one for all experts."""
        super().__init__()
        _checks.integer("rank", rank)
        _checks.finite("alpha", alpha)
        if rank < 1:
            raise ValueError(f"rank is {rank}, must be at least 1")
        self.rank, self.scale = rank, alpha / rank
        dtype = dtype or torch.promote_types(w_up.dtype, torch.float32)
        for name, w in (("up", w_up), ("down", w_down)):
            experts, outer, inner = w.shape
            for factor, shape in (("a", (rank, inner)), ("b", (outer, rank))):
                shared = share_outer and name + factor in ("upa", "downb")
                size = (1 if shared else experts, *shape)
                value = torch.empty(size, device=w.device, dtype=dtype)
                setattr(self, f"{name}_{factor}", nn.Parameter(value))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """A ~ U(-1, 1) / sqrt(in). B = 0, so that the layer's result does not change."""
        for a, b in ((self.up_a, self.up_b), (self.down_a, self.down_b)):
            bound = a.shape[2] ** -0.5
            nn.init.uniform_(a, -bound, bound)
            nn.init.zeros_(b)

    def _factor(self, name: str) -> Tensor:
        value = getattr(self, name)
        if _checks.is_distributed(value):
            raise TypeError(_APART.format(name))
        return value

    def forward(self) -> dict[str, LowRank]:
        if hasattr(self, "unshard"):
            raise TypeError(_APART.format("up_a"))
        up, down = (
            LowRank(self._factor(f"{of}_a"), self._factor(f"{of}_b"), self.scale)
            for of in ("up", "down")
        )
        return {"up": up, "down": down}

    def arguments(self) -> dict[str, LowRank]:
        """The arguments `up` and `down` of lora_moe(), for the forward of the layer. A call of this
        module, unlike a read of its parameters, runs the hooks by which other packages bring
        offloaded parameters back. DeepSpeed's ZeRO-3 partitions the parameters again at the end of
        that call, but gathers those that another module's forward reads, for that module."""
        called = self()
        return self.forward() if hasattr(self.up_a, "ds_id") else called

    def extra_repr(self) -> str:
        return f"rank={self.rank}, scale={self.scale}"


def refuse_second(module: nn.Module) -> None:
    if getattr(module, "lora", None) is not None:
        raise ValueError(
            f"{type(module).__name__} has low-rank factors already, which would be lost"
        )


def new_factors(
    module: nn.Module, weights: tuple, rank: int, alpha: float, dtype, share_outer=False
) -> LoRA:
    """Factors for the weights (w_up, w_down) of a module that has none yet."""
    refuse_second(module)
    for name, parameter in module.named_parameters(recurse=False):
        if hasattr(parameter, "to_local"):
            raise ValueError(
                f"{name} of {type(module).__name__} is a DTensor: add_lora must come before "
                "fully_shard and every other distribution of the model"
            )
    return LoRA(*weights, rank, alpha, dtype, share_outer)
