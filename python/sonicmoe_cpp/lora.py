"""Low-rank factors on frozen experts (LoRA): both projections use W + scale * B A, without
forming this sum.

The fused layer cannot use the factors of the up-projection, because they act before the activation:
H is the sum of two products. So this file composes the layer from grouped GEMMs over the routed
rows; docs/adapters.md has the formulas. Kept for backward are x, H as in the layer, and
scale * x A^T of the up-projection, which has `rank` columns. Gradients of the frozen weights are
not computed.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from . import _checks, _formulas, _ops
from .layer import LAYOUTS, Activation, _activation, _autocast, _check_ids

# Elements of a block of rows: the elementwise parts work in fp32 on one block at a time.
BLOCK = 1 << 22


class LowRank(NamedTuple):
    """The term scale * b @ a that is added to a frozen weight (E, out, in)."""

    a: Tensor  # (E, r, in)
    b: Tensor  # (E, out, r)
    scale: float = 1.0


class _Rows(NamedTuple):
    """Routed rows in the order of experts; rows past offsets[E] belong to empty slots."""

    offsets: Tensor  # (E+1,) int64
    expert: Tensor  # (C,) int64, E for empty slots
    token: Tensor  # (C,) int32
    slot: Tensor  # (C,) int64 into the flattened ids
    position: Tensor  # (T, K) int64: the row of a slot
    valid: Tensor  # (T, K) bool


class _Form(NamedTuple):
    """The options of a call."""

    activation: Activation
    gate_layout: str
    up_scale: float
    down_scale: float


def _group(ids: Tensor, experts: int) -> _Rows:
    flat = ids.flatten()
    valid = (flat >= 0) & (flat < experts)
    key, slot = torch.where(valid, flat, experts).long().sort(stable=True)
    row = torch.arange(slot.shape[0], device=ids.device)
    position = torch.empty_like(slot).scatter(0, slot, row).view(ids.shape)
    bounds = torch.arange(experts + 1, device=ids.device)
    offsets = torch.searchsorted(key, bounds)
    token = (slot // max(1, ids.shape[1])).int()
    return _Rows(offsets, key, token, slot, position, valid.view(ids.shape))


def _product(a: Tensor, weight: Tensor, rows: _Rows, gather: Tensor | None = None) -> Tensor:
    """(C, out): each row times the weight (E, out, in) of its expert. With `gather`, row p is
    a[gather[p]]."""
    return _ops.run("grouped_gemm", a, weight, rows.offsets, gather)


def _outer(a: Tensor, b: Tensor, rows: _Rows, gather: Tensor | None = None) -> Tensor:
    """(E, columns of a, columns of b): for each expert a^T b over its rows."""
    return _ops.run("grouped_gemm_k", a, b, rows.offsets, gather)


def _beside(out: Tensor, inner: Tensor | None, factor: Tensor | None, rows: _Rows) -> Tensor:
    """Adds the second product of a low-rank term, `inner` (C, r) times the `factor` of its expert,
    to `out` in place. Without factors (`inner` is None) `out` does not change."""
    return out if inner is None else out.add_(_product(inner, factor, rows))


def _biased(out: Tensor, bias: Tensor | None, rows: _Rows) -> Tensor:
    if bias is None:
        return out
    return out.add_(bias.index_select(0, rows.expert.clamp(max=bias.shape[0] - 1)))


def _halves(t: Tensor, layout: str) -> tuple[Tensor, Tensor]:
    return (t[:, 0::2], t[:, 1::2]) if layout == "interleaved" else t.chunk(2, dim=1)


def _wide(t: Tensor) -> Tensor:
    return t.to(torch.promote_types(t.dtype, torch.float32))


def _blocks(rows, columns: int):
    """Slices of rows with at most BLOCK elements. In a graph one slice of all rows, because the
    compiler fuses the operations."""
    step = rows if torch.compiler.is_compiling() else max(1, BLOCK // columns)
    return [slice(0, rows)] if step >= rows else [slice(i, i + step) for i in range(0, rows, step)]


def _act(h: Tensor, form: _Form) -> Tensor:
    name, *parameters = form.activation
    if name not in _ops.GATED:
        return _formulas.UNARY[name](_wide(h)).to(h.dtype)
    gate, up = _halves(_wide(h), form.gate_layout)
    return _formulas.gated(name, gate, up, *parameters).to(h.dtype)


def _act_backward(h: Tensor, da: Tensor, form: _Form) -> Tensor:
    """dH from `da`, which is in fp32 or fp64."""
    name, *parameters = form.activation
    if name not in _ops.GATED:
        return (_formulas.SLOPE[name](_wide(h)) * da).to(h.dtype)
    slopes = _formulas.gated_slopes(name, *_halves(_wide(h), form.gate_layout), *parameters)
    parts = [(slope * da).to(h.dtype) for slope in slopes]
    if form.gate_layout == "interleaved":
        return torch.stack(parts, dim=2).flatten(1)
    return torch.cat(parts, dim=1)


def _joined(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _combine(y: Tensor, rows: _Rows, weights: Tensor | None) -> Tensor:
    """(T, columns): the sum over a token's slots in the order of the slots, so it is
    deterministic."""
    tokens, k = rows.valid.shape
    out = _wide(y.new_zeros((tokens, y.shape[1])))
    for slot in range(k):
        part = _wide(y.index_select(0, rows.position[:, slot]))
        if weights is not None:
            part = part * weights[:, slot, None]
        out = out + torch.where(rows.valid[:, slot, None], part, 0)
    return out.to(y.dtype)


def _rank(a: Tensor, factor: Tensor | None, scale: float, rows: _Rows, gather=None):
    """`scale` times the first product of a low-rank term, (C, r); None without factors."""
    return None if factor is None else _product(a, factor, rows, gather) * scale


def _activated(h: Tensor, form: _Form) -> Tensor:
    width = h.shape[1]
    return _joined([_act(h[block], form) for block in _blocks(h.shape[0], width)])


def _differentiated(h: Tensor, da: Tensor, scores: Tensor, form: _Form) -> tuple[Tensor, ...]:
    """Returns (A, dS (C,), dH). h is H, da is dA before it is multiplied by scores (C, 1)."""
    parts = []
    for block in _blocks(h.shape[0], h.shape[1]):
        a, gradient = _act(h[block], form), _wide(da[block])
        ds = (gradient * a).sum(dim=1)
        parts.append((a, ds, _act_backward(h[block], gradient * scores[block], form)))
    return tuple(_joined(list(part)) for part in zip(*parts, strict=True))


class _Tensors(NamedTuple):
    """The tensor arguments in their order; the last four are frozen."""

    x: Tensor
    weights: Tensor
    up_a: Tensor | None
    up_b: Tensor | None
    down_a: Tensor | None
    down_b: Tensor | None
    w_up: Tensor
    w_down: Tensor
    b_up: Tensor | None
    b_down: Tensor | None


def _transposed(t: Tensor) -> Tensor:
    return t.transpose(1, 2)


def _score_gradient(dout: Tensor, ids: Tensor, ds: Tensor, rows: _Rows, b_down) -> Tensor:
    """(T, K): <dA, A>, plus <dO, b2> of the slot's expert if there is a bias; 0 in empty slots."""
    by_slot = ds[rows.position]
    if b_down is not None:
        by_expert = _wide(dout) @ _wide(b_down).t()
        by_slot = by_slot + by_expert.gather(1, ids.long().clamp(0, b_down.shape[0] - 1))
    return torch.where(rows.valid, by_slot, 0)


class _Layer(torch.autograd.Function):
    @staticmethod
    def forward(ctx, form: _Form, ids: Tensor, *tensors) -> Tensor:
        t = _Tensors(*tensors)
        rows = _group(ids, t.w_down.shape[0])
        low = _rank(t.x, t.up_a, form.up_scale, rows, rows.token)
        h = _beside(_product(t.x, t.w_up, rows, rows.token), low, t.up_b, rows)
        h = _biased(h, t.b_up, rows)
        a = _activated(h, form)
        y = _product(a, t.w_down, rows)
        y = _beside(y, _rank(a, t.down_a, form.down_scale, rows), t.down_b, rows)
        out = _combine(_biased(y, t.b_down, rows), rows, t.weights)
        ctx.form = form
        ctx.save_for_backward(ids, *tensors, h, low, *rows)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, dout: Tensor):
        ids, *rest = ctx.saved_tensors
        count = len(_Tensors._fields)
        t, (h, low, *rows) = _Tensors(*rest[:count]), rest[count:]
        rows, form = _Rows(*rows), ctx.form
        needs = _Tensors(*ctx.needs_input_grad[2:])
        has_up, has_down = t.up_a is not None, t.down_a is not None
        scores = t.weights.flatten()[rows.slot, None]
        grads = dict.fromkeys(_Tensors._fields)

        back = None
        da = _product(dout, _transposed(t.w_down), rows, rows.token)
        if has_down:
            back = _rank(dout, _transposed(t.down_b), form.down_scale, rows, rows.token)
            da = _beside(da, back, _transposed(t.down_a), rows)
        a, ds, dh = _differentiated(h, da, scores, form)
        del da
        if needs.weights:
            grads["weights"] = _score_gradient(dout, ids, ds, rows, t.b_down)
        if has_down:
            if needs.down_a:
                grads["down_a"] = _outer((back * scores).to(a.dtype), a, rows)
            if needs.down_b:
                inner = _rank(a, t.down_a, form.down_scale, rows) * scores
                grads["down_b"] = _outer(dout, inner.to(a.dtype), rows, rows.token)
        del a

        back = None
        if has_up and (needs.up_a or needs.x):
            back = _rank(dh, _transposed(t.up_b), form.up_scale, rows)
        if needs.up_a:
            grads["up_a"] = _transposed(_outer(t.x, back, rows, rows.token))
        if needs.up_b:
            grads["up_b"] = _outer(dh, low, rows)
        if needs.x:
            dx = _product(dh, _transposed(t.w_up), rows)
            up_a = None if back is None else _transposed(t.up_a)
            grads["x"] = _combine(_beside(dx, back, up_a, rows), rows, None)
        return None, None, *grads.values()


def _check(name: str, value: Tensor | None, x: Tensor, shape: tuple, meaning: str) -> None:
    if value is None:
        return
    _checks.tensor(name, value)
    _checks.dtype(name, value)
    _checks.shape(name, value, meaning, shape)
    _checks.on_device(name, value, x)


def _check_frozen(frozen: dict[str, Tensor | None]) -> None:
    for name, value in frozen.items():
        if value is None:
            continue
        _checks.tensor(name, value)
        if value.requires_grad:
            raise ValueError(
                f"{name} requires a gradient, must be frozen (requires_grad_(False)): with "
                "low-rank factors only the factors are trained"
            )


def _check_shapes(x: Tensor, t: _Tensors, gated: bool) -> None:
    _checks.shape("x", x, "(T, d)", (None, None))
    _check("w_down", t.w_down, x, (None, x.shape[1], None), "(E, d, n)")
    experts, hidden, width = t.w_down.shape
    both = (1 + gated) * width
    meaning = "2*n" if gated else "n"
    _check("w_up", t.w_up, x, (experts, both, hidden), f"(E, {meaning}, d)")
    _check("b_up", t.b_up, x, (experts, both), f"(E, {meaning})")
    _check("b_down", t.b_down, x, (experts, hidden), "(E, d)")
    for name, a, b, outer, inner, sizes in (
        ("up", t.up_a, t.up_b, both, hidden, (meaning, "d")),
        ("down", t.down_a, t.down_b, hidden, width, ("d", "n")),
    ):
        if a is not None:
            _check(f"{name}.a", a, x, (experts, None, inner), f"(E, r, {sizes[1]})")
            _check(f"{name}.b", b, x, (experts, outer, a.shape[1]), f"(E, {sizes[0]}, r)")


def _padded(a: Tensor | None, b: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    """The factors padded with zeros to a rank that is a multiple of 8, which the products on CUDA
    need. The zeros do not change the result."""
    if a is None or a.shape[1] % 8 == 0:
        return a, b
    more = -a.shape[1] % 8
    return F.pad(a, (0, 0, 0, more)), F.pad(b, (0, more))


def lora_moe(
    x: Tensor,
    topk_ids: Tensor,
    topk_weights: Tensor,
    w_up: Tensor,
    w_down: Tensor,
    *,
    up: LowRank | None = None,
    down: LowRank | None = None,
    b_up: Tensor | None = None,
    b_down: Tensor | None = None,
    activation: str | Activation = "swiglu",
    gate_layout: str = "concatenated",
) -> Tensor:
    """As moe(), with W + scale * B A for each projection that has factors. W and biases are frozen.

    Differentiable in x, topk_weights and the factors: up.a (E, r, d), up.b (E, G*n, r), down.a
    (E, r, n), down.b (E, d, r), in any float dtype. gate_layout gives the order of the rows of
    up.b. The other arguments are those of moe(), except that w_up must be one tensor. If the rank
    is not a multiple of 8, the factors are padded with zeros.
    """
    _checks.tensor("x", x)
    _checks.dtype("x", x)
    _checks.supported(x.device)
    activation = _activation(activation)
    _checks.one_of("gate_layout", gate_layout, LAYOUTS)
    if not isinstance(w_up, Tensor):
        raise TypeError("w_up is a pair (gate, up), must be one tensor with low-rank factors")
    for name, factors in (("up", up), ("down", down)):
        if not (factors is None or isinstance(factors, LowRank)):
            raise TypeError(f"{name} is {type(factors).__name__}, must be a LowRank or None")
        for part in ("a", "b") if factors is not None else ():
            _checks.tensor(f"{name}.{part}", getattr(factors, part))
    none = LowRank(None, None)
    (up_a, up_b, up_scale), (down_a, down_b, down_scale) = up or none, down or none
    _checks.tensor("topk_ids", topk_ids)
    _checks.tensor("topk_weights", topk_weights)
    _check_ids(x, topk_ids, None, topk_weights)
    weights = topk_weights.to(_ops.score_dtype(x))
    _check_frozen({"w_up": w_up, "w_down": w_down, "b_up": b_up, "b_down": b_down})
    frozen = w_up, w_down, b_up, b_down
    if _ops.may_autocast():
        x, frozen = _autocast(x, frozen)
    t = _Tensors(x, weights, up_a, up_b, down_a, down_b, *frozen)
    _check_shapes(x, t, activation.name in _ops.GATED)
    _checks.same("w_up", t.w_up, x)
    _checks.same("w_down", t.w_down, x)
    up_a, up_b = _padded(up_a, up_b)
    down_a, down_b = _padded(down_a, down_b)
    t = t._replace(up_a=up_a, up_b=up_b, down_a=down_a, down_b=down_b)
    cast = [v if n == "weights" or v is None else v.to(x.dtype) for n, v in t._asdict().items()]
    form = _Form(activation, gate_layout, up_scale, down_scale)
    _ops.refuse_transforms("lora_moe", *cast)
    return _Layer.apply(form, topk_ids, *cast)


class LoRA(nn.Module):
    """Trainable factors for both projections of E experts. Calling it returns the arguments `up`
    and `down` of lora_moe(): a call, unlike a read of its parameters, runs the hooks by which other
    packages bring offloaded parameters back."""

    def __init__(self, w_up: Tensor, w_down: Tensor, rank: int, alpha: float, dtype=None):
        """For w_up (E, G*n, d) and w_down (E, d, n); scale = alpha / rank. dtype: default fp32, or
        the weights' dtype if it is wider."""
        super().__init__()
        _checks.integer("rank", rank)
        _checks.finite("alpha", alpha)
        if rank < 1:
            raise ValueError(f"rank is {rank}, must be at least 1")
        self.scale = alpha / rank
        dtype = dtype or torch.promote_types(w_up.dtype, torch.float32)
        for name, w in (("up", w_up), ("down", w_down)):
            experts, outer, inner = w.shape
            for factor, shape in (("a", (experts, rank, inner)), ("b", (experts, outer, rank))):
                value = torch.empty(shape, device=w.device, dtype=dtype)
                setattr(self, f"{name}_{factor}", nn.Parameter(value))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """A ~ U(-1, 1) / sqrt(in). B = 0, so that the layer's result does not change."""
        for a, b in ((self.up_a, self.up_b), (self.down_a, self.down_b)):
            bound = a.shape[2] ** -0.5
            nn.init.uniform_(a, -bound, bound)
            nn.init.zeros_(b)

    def forward(self) -> dict[str, LowRank]:
        for name, value in self.named_parameters():
            if hasattr(self, "unshard") or _checks.is_distributed(value):
                raise TypeError(
                    f"lora.{name} is sharded apart from its layer, which would not gather it: call "
                    "fully_shard(layer), not fully_shard(layer.lora) (before it "
                    "fully_shard(layer.router), if the router's dtype is another)"
                )
        return {
            "up": LowRank(self.up_a, self.up_b, self.scale),
            "down": LowRank(self.down_a, self.down_b, self.scale),
        }

    def extra_repr(self) -> str:
        return f"rank={self.up_a.shape[1]}, scale={self.scale}"


def new_factors(module: nn.Module, weights: tuple, rank: int, alpha: float, dtype) -> LoRA:
    """Factors for the weights (w_up, w_down) of a module that has none yet."""
    if getattr(module, "lora", None) is not None:
        raise ValueError(
            f"{type(module).__name__} has low-rank factors already, which would be lost"
        )
    for name, parameter in module.named_parameters(recurse=False):
        if hasattr(parameter, "to_local"):
            raise ValueError(
                f"{name} of {type(module).__name__} is a DTensor: add_lora must come before "
                "fully_shard and every other distribution of the model"
            )
    return LoRA(*weights, rank, alpha, dtype)
