"""The expert layer O[t] = sum_k s_k * (W2_e act(W1_e x_t + b1_e) + b2_e) in its three forms."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from . import _checks, _ops
from ._checks import Facts
from .routing import Pairs

LAYOUTS = ("concatenated", "interleaved")


class Activation(NamedTuple):
    """An activation with its parameters; alpha and limit belong to swiglu_oai (1.702 and 7)."""

    name: str
    alpha: float | None = None
    limit: float | None = None


class _Weights(NamedTuple):
    """The weights as the operators take them, in the schema's order."""

    w_gate: Tensor | None
    w_up: Tensor
    w_down: Tensor
    b_up: Tensor | None
    b_down: Tensor | None


def _activation(value) -> Activation:
    if isinstance(value, str):
        value = Activation(value)
    if not isinstance(value, Activation):
        raise TypeError(f"activation is {type(value).__name__}, must be a name or an Activation")
    _checks.one_of("activation", value.name, _ops.GATED + _ops.UNGATED)
    for parameter in ("alpha", "limit"):
        number = getattr(value, parameter)
        if number is not None and not 0 < number < float("inf"):
            raise ValueError(f"activation.{parameter} is {number}, must be positive and finite")
    return value


def _pair(name: str, value) -> tuple[Tensor | None, Tensor]:
    """(gate, up) of a tuple, (None, tensor) of one tensor."""
    if not isinstance(value, (tuple, list)):
        return None, value
    if len(value) != 2:
        raise ValueError(f"{name} has {len(value)} tensors, must be a tensor or (gate, up)")
    return tuple(value)


def _up_shape(rows, gated: bool, separate: bool, hidden) -> tuple[str, tuple]:
    """The shape of w_up without its experts, in letters and in numbers."""
    if separate:
        return "(E, n, d)", (rows, hidden)
    return ("(E, 2*n, d)", (2 * rows, hidden)) if gated else ("(E, n, d)", (rows, hidden))


def _check_weights(hidden, weights: _Weights, gated: bool, x: Facts) -> None:
    """`weights` holds Facts; x is (T, hidden) with any T."""
    w_gate, w_up, w_down, b_up, b_down = weights
    _checks.dtype("w_down", w_down)
    _checks.same("w_down", w_down, x)
    _checks.shape("w_down", w_down, "(E, d, n)", (None, hidden, None))
    experts, hidden, width = w_down.shape
    if w_gate is not None and not gated:
        raise ValueError("w_up is a pair (gate, up), must be one tensor: no gate here")
    meaning, up_shape = _up_shape(width, gated, w_gate is not None, hidden)
    for value in (w_up,) if w_gate is None else (w_gate, w_up):
        _checks.dtype("w_up", value)
        _checks.same("w_up", value, x)
        _checks.shape("w_up", value, meaning, (experts, *up_shape))
    for name, value, meaning, size in (
        ("b_up", b_up, "(E, 2*n)" if gated else "(E, n)", (1 + gated) * width),
        ("b_down", b_down, "(E, d)", hidden),
    ):
        if value is not None:
            _checks.dtype(name, value)
            _checks.same(name, value, x)
            _checks.shape(name, value, meaning, (experts, size))


@_checks.remembered
def _check_layer(name: str, x: tuple, weights: tuple, activation, gate_layout) -> Activation:
    """Everything but the number of tokens: x and weights are keys, x's shape that of a row."""
    x = Facts(*x)
    described = _Weights(*(None if w is None else Facts(*w) for w in weights))
    _checks.dtype(name, x)
    _checks.supported(x.device)
    activation = _activation(activation)
    _checks.one_of("gate_layout", gate_layout, LAYOUTS)
    _check_weights(x.shape[0], described, activation.name in _ops.GATED, x)
    return activation


def _main_gradients(grad_accum, weights: _Weights) -> tuple:
    """(g_gate, g_up, g_down), all None without grad_accum."""
    if grad_accum is None:
        return None, None, None
    if not isinstance(grad_accum, (tuple, list)) or len(grad_accum) != 2:
        raise ValueError("grad_accum must be (g_up, g_down), in the form of (w_up, w_down)")
    g_gate, g_up = _pair("grad_accum[0]", grad_accum[0])
    if (g_gate is None) != (weights.w_gate is None):
        raise ValueError("grad_accum[0] must be a tensor or (gate, up), like w_up")
    for name, g, w in (
        ("grad_accum[0]", g_gate, weights.w_gate),
        ("grad_accum[0]", g_up, weights.w_up),
        ("grad_accum[1]", grad_accum[1], weights.w_down),
    ):
        if g is not None:
            _checks.tensor(name, g)
            _checks.dtype(name, g, (_ops.score_dtype(w),))
            _checks.shape(name, g, "its weight's shape", tuple(w.shape))
            _checks.on_device(name, g, w)
    return g_gate, g_up, grad_accum[1]


def _autocast(x: Tensor, weights: _Weights) -> tuple[Tensor, _Weights]:
    """Under autocast, x, weights and biases go to its dtype (fp64 stays, as in torch's own ops)."""
    kind = x.device.type
    if kind == "meta" or not torch.is_autocast_enabled(kind):
        return x, weights
    dtype = torch.get_autocast_dtype(kind)

    def cast(t):
        keep = t is None or not isinstance(t, Tensor) or not t.is_floating_point()
        return t if keep or t.dtype == torch.float64 else t.to(dtype)

    return cast(x), _Weights(*map(cast, weights))


def _scores(name: str, weights: Tensor, x: Tensor, expected: tuple, meaning: str) -> Tensor:
    _checks.tensor(name, weights)
    _checks.dtype(name, weights)
    _checks.shape(name, weights, meaning, expected)
    _checks.on_device(name, weights, x)
    dtype = _ops.score_dtype(x)
    return weights if weights.dtype == dtype else weights.to(dtype)


def _indices(name: str, value: Tensor, x: Tensor, expected: tuple, meaning: str) -> Tensor:
    _checks.tensor(name, value)
    _checks.dtype(name, value, _checks.INDICES)
    _checks.shape(name, value, meaning, expected)
    _checks.on_device(name, value, x)
    return value


def _prepare(name: str, x, w_up, w_down, options: dict):
    """x and the options of a call, checked and cast: (x, activation, weights, main gradients)."""
    _checks.tensor(name, x)
    if x.dim() != 2:
        _checks.shape(name, x, "(T, d)", (None, None))
    given = _Weights(*_pair("w_up", w_up), w_down, options["b_up"], options["b_down"])
    x, weights = _autocast(x, given)
    keys = (
        _checks.optional_key("w_up", weights.w_gate),
        _checks.key("w_up", weights.w_up),
        _checks.key("w_down", weights.w_down),
        _checks.optional_key("b_up", weights.b_up),
        _checks.optional_key("b_down", weights.b_down),
    )
    row = (x.dtype, x.device, x.shape[1:])
    activation = _check_layer(name, row, keys, options["activation"], options["gate_layout"])
    return x, activation, weights, _main_gradients(options["grad_accum"], weights)


def _run(prepared, form: str, routing: tuple, gate_layout: str) -> Tensor:
    x, activation, weights, main_gradients = prepared
    alpha, limit = activation.alpha or 0.0, activation.limit or 0.0
    arguments = (x, *routing, *weights, form, activation.name, alpha, limit, gate_layout)
    return _ops.layer(arguments, main_gradients)


def moe(
    x: Tensor,
    topk_ids: Tensor,
    topk_weights: Tensor,
    w_up: Tensor | tuple[Tensor, Tensor],
    w_down: Tensor,
    *,
    b_up: Tensor | None = None,
    b_down: Tensor | None = None,
    activation: str | Activation = "swiglu",
    gate_layout: str = "concatenated",
    grad_accum: tuple | None = None,
) -> Tensor:
    """The layer over top-k ids. Differentiable in x, topk_weights, weights and biases.

    x (T, d); topk_ids (T, K) int32 or int64, an id < 0 or >= E is an empty slot; topk_weights
    (T, K); w_up (E, G*n, d), or a tuple (gate, up) of (E, n, d); w_down (E, d, n); b_up (E, G*n);
    b_down (E, d). Weights may have any non-overlapping strides and are never copied.
    grad_accum=(g_up, g_down) are fp32 buffers (fp64 beside fp64) of the weights' shapes: backward
    adds the weights' gradients to them and gives None to the weights. Returns (T, d).
    """
    options = {"b_up": b_up, "b_down": b_down, "activation": activation}
    options |= {"gate_layout": gate_layout, "grad_accum": grad_accum}
    prepared = _prepare("x", x, w_up, w_down, options)
    x = prepared[0]
    ids = _indices("topk_ids", topk_ids, x, (x.shape[0], None), "(T, K)")
    weights = _scores("topk_weights", topk_weights, x, tuple(ids.shape), "topk_ids' shape (T, K)")
    return _run(prepared, "ids", (ids, None, weights), gate_layout)


def moe_pairs(
    x: Tensor,
    pairs: Pairs,
    w_up: Tensor | tuple[Tensor, Tensor],
    w_down: Tensor,
    *,
    b_up: Tensor | None = None,
    b_down: Tensor | None = None,
    activation: str | Activation = "swiglu",
    gate_layout: str = "concatenated",
    grad_accum: tuple | None = None,
) -> Tensor:
    """The layer over pairs in any order, any number a token; otherwise as moe().

    `pairs` is a Pairs, or any (token (C,), expert (C,), weight (C,), ...) of tensors. A pair whose
    token is outside [0, T) or whose expert is outside [0, E) is empty.
    """
    options = {"b_up": b_up, "b_down": b_down, "activation": activation}
    options |= {"gate_layout": gate_layout, "grad_accum": grad_accum}
    prepared = _prepare("x", x, w_up, w_down, options)
    x = prepared[0]
    if not isinstance(pairs, (tuple, list)) or len(pairs) < 3:
        raise TypeError("pairs must be Pairs, or a tuple (token, expert, weight)")
    token = _indices("pairs.token", pairs[0], x, (None,), "(C,)")
    expert = _indices("pairs.expert", pairs[1], x, (token.shape[0],), "(C,)")
    weight = _scores("pairs.weight", pairs[2], x, (token.shape[0],), "(C,)")
    return _run(prepared, "pairs", (token, expert, weight), gate_layout)


def moe_grouped(
    rows: Tensor,
    expert_offsets: Tensor | tuple[Tensor, Tensor],
    w_up: Tensor | tuple[Tensor, Tensor],
    w_down: Tensor,
    *,
    row_weights: Tensor | None = None,
    b_up: Tensor | None = None,
    b_down: Tensor | None = None,
    activation: str | Activation = "swiglu",
    gate_layout: str = "concatenated",
    grad_accum: tuple | None = None,
) -> Tensor:
    """The layer over rows (R, d) that are grouped by expert already; otherwise as moe().

    `expert_offsets` (E+1,): the rows of expert e are offsets[e]:offsets[e+1]; or a tuple
    (begin (E,), count (E,)). Row p of the result is row_weights[p] (none: 1) times the expert's
    output for row p; rows of no expert give zero and are never read.
    """
    options = {"b_up": b_up, "b_down": b_down, "activation": activation}
    options |= {"gate_layout": gate_layout, "grad_accum": grad_accum}
    prepared = _prepare("rows", rows, w_up, w_down, options)
    rows = prepared[0]
    experts = w_down.shape[0]
    if isinstance(expert_offsets, (tuple, list)):
        if len(expert_offsets) != 2:
            raise ValueError("expert_offsets must be a tensor (E+1,) or a tuple (begin, count)")
        begin, count = (
            _indices(name, value, rows, (experts,), "(E,)")
            for name, value in zip(("begin", "count"), expert_offsets, strict=True)
        )
    else:
        offsets = _indices("expert_offsets", expert_offsets, rows, (experts + 1,), "(E+1,)")
        begin, count = offsets[:-1], offsets.diff()
    if row_weights is not None:
        row_weights = _scores("row_weights", row_weights, rows, (rows.shape[0],), "(R,)")
    return _run(prepared, "grouped", (begin, count, row_weights), gate_layout)
