"""The expert layer O[t] = sum_k s_k * (W2_e act(W1_e x_t + b1_e) + b2_e) in its three forms."""

from __future__ import annotations

from torch import Tensor

from . import _autograd, _checks, _ops, _packed_ops, fp8
from ._arguments import call_of, grouped_index, packed_call, pairs_index
from ._names import ACTIVATION, GATED, LAYOUT
from ._weights import Activation, activation_of, gate_and_up
from .fp8 import NOTHING, Fp8Weights, Request, request_of
from .packed import PackedWeights
from .routing import Pairs


def _run(
    form: str, x, routing: tuple, experts: tuple, style: tuple, grad_accum, *, request: Request
) -> Tensor:
    """Runs the layer on the arguments of call_of()."""
    if not isinstance(experts[1], Tensor) or not isinstance(experts[0], Tensor):
        of_packed = packed_call(form, x, routing, experts, style, grad_accum, request)
        if of_packed is not None:
            return _packed_ops.layer(*of_packed)
    call = call_of(form, x, routing, experts, style, grad_accum, request)
    if request is NOTHING:
        return _autograd.layer(call)
    return _autograd.layer(call, fp8.given_weights(request, call))


def moe(
    x: Tensor,
    topk_ids: Tensor,
    topk_weights: Tensor,
    w_up: Tensor | tuple[Tensor, Tensor] | PackedWeights,
    w_down: Tensor | PackedWeights,
    *,
    b_up: Tensor | None = None,
    b_down: Tensor | None = None,
    activation: str | Activation = "swiglu",
    gate_layout: str = "concatenated",
    grad_accum: tuple | None = None,
    precision: str | None = None,
    keep_h: str | None = None,
    fp8_weights: Fp8Weights | None = None,
) -> Tensor:
    """The layer, routed by top-k ids. Returns (T, d). Differentiable in x, topk_weights, weights
    and biases.

    x (T, d); topk_ids (T, K) int32 or int64, where an id < 0 or >= E is an empty slot;
    topk_weights (T, K) of any float dtype, cast to fp32 (fp64 if x is fp64); w_up (E, G*n, d), or a
    tuple (gate, up) of (E, n, d); w_down (E, d, n); b_up (E, G*n); b_down (E, d). Weights are never
    copied. Their elements must not overlap. The CPU takes all other strides; for CUDA,
    docs/pytorch.md gives the strides and sizes. Or both weights are PackedWeights: then they are
    frozen, and grad_accum and fp8_weights must be None.

    grad_accum=(g_up, g_down): buffers of the weights' shapes, fp32 (fp64 if the weights are fp64).
    Backward adds the weights' gradients to them, except those of frozen weights, and gives the
    weights None.

    precision: "fp8" multiplies in e4m3 with block scales (bf16 tensors, d and n multiples of 64).
    "auto" does so if that is expected to be faster. None multiplies in the tensors' dtype.
    fp8_weights: the result of quantize_weights() for w_up and w_down. Without it the call quantises
    them, and its backward quantises them again.
    keep_h: "bf16" keeps H for backward in bf16 instead of fp8.

    Raises TypeError for wrong types and dtypes, ValueError for wrong shapes, names and values, and
    NotImplementedError for a call that the device or the precision does not support.
    """
    routing, experts = (topk_ids, None, topk_weights), (w_up, w_down, b_up, b_down)
    request = request_of(precision, keep_h, fp8_weights)
    style = (activation, gate_layout)
    return _run("ids", x, routing, experts, style, grad_accum, request=request)


def moe_pairs(
    x: Tensor,
    pairs: Pairs,
    w_up: Tensor | tuple[Tensor, Tensor] | PackedWeights,
    w_down: Tensor | PackedWeights,
    *,
    b_up: Tensor | None = None,
    b_down: Tensor | None = None,
    activation: str | Activation = "swiglu",
    gate_layout: str = "concatenated",
    grad_accum: tuple | None = None,
    precision: str | None = None,
    keep_h: str | None = None,
    fp8_weights: Fp8Weights | None = None,
) -> Tensor:
    """The layer, routed by a list of (token, expert, weight); otherwise as moe().

    `pairs` is a Pairs, or a tuple (token (C,), expert (C,), weight (C,), ...) of tensors. The list
    may have any order and any number of pairs for a token. A pair whose token is outside [0, T) or
    whose expert is outside [0, E) is empty.
    """
    routing, experts = pairs_index(pairs), (w_up, w_down, b_up, b_down)
    request = request_of(precision, keep_h, fp8_weights)
    style = (activation, gate_layout)
    return _run("pairs", x, routing, experts, style, grad_accum, request=request)


def moe_grouped(
    rows: Tensor,
    expert_offsets: Tensor | tuple[Tensor, Tensor],
    w_up: Tensor | tuple[Tensor, Tensor] | PackedWeights,
    w_down: Tensor | PackedWeights,
    *,
    row_weights: Tensor | None = None,
    b_up: Tensor | None = None,
    b_down: Tensor | None = None,
    activation: str | Activation = "swiglu",
    gate_layout: str = "concatenated",
    grad_accum: tuple | None = None,
    precision: str | None = None,
    keep_h: str | None = None,
    fp8_weights: Fp8Weights | None = None,
) -> Tensor:
    """The layer on rows (R, d) that are already grouped by expert; otherwise as moe().

    `expert_offsets` is (E+1,): the rows of expert e are offsets[e]:offsets[e+1]. Or it is a tuple
    (begin (E,), count (E,)). Row p of the result is row_weights[p] (1 without row_weights) times
    the expert's output for row p. Rows that belong to no expert are not read; their result is 0.
    """
    routing = (*grouped_index(rows, expert_offsets, w_down), row_weights)
    experts = (w_up, w_down, b_up, b_down)
    request = request_of(precision, keep_h, fp8_weights)
    style = (activation, gate_layout)
    return _run("grouped", rows, routing, experts, style, grad_accum, request=request)


def h_views(
    h: Tensor,
    w_up: Tensor | tuple[Tensor, Tensor],
    *,
    activation: str | Activation = "swiglu",
    gate_layout: str = "concatenated",
) -> tuple[Tensor | None, Tensor]:
    """Views (C, n) of gate and up before the activation, with biases added. `h` is the H (C, G*n)
    that a forward with these weights kept. Without a gate the result is (None, up).

    Rows are in the order of the experts. Within an expert, rows of top-k ids are in the order
    (token, slot), rows of a list of pairs in the order (token, position in the list), and grouped
    rows in the order of the input. For grouped rows, row p of H belongs to row p of the input on
    CUDA, while on the CPU the rows of H have no gaps. Rows after the last routed row, and rows of
    no group, are not written.
    """
    w_gate, w_up = gate_and_up("w_up", w_up)
    for name, value in (("h", h), ("w_up", w_up)):
        _checks.tensor(name, value)
    _checks.supported(h.device)
    name = activation_of(activation).name
    _checks.one_of("gate_layout", gate_layout, LAYOUT)
    gated = name in GATED
    width = w_up.shape[1] * (2 if w_gate is not None else 1)
    _checks.shape("h", h, "(C, 2*n)" if gated else "(C, n)", (None, width))
    if not h.is_contiguous():
        raise ValueError(f"h has strides {h.stride()}, must be contiguous, as forward made it")
    style = ACTIVATION[name], LAYOUT[gate_layout]
    begin, row, column = _ops.run("h_views", h, w_gate, w_up, *style)
    size = (h.shape[0], width // (2 if gated else 1))
    up = h.as_strided(size, (row, column), h.storage_offset() + begin)
    return h.as_strided(size, (row, column)) if gated else None, up
