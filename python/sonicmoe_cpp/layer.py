"""The expert layer O[t] = sum_k s_k * (W2_e act(W1_e x_t + b1_e) + b2_e) in its three forms."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from . import _checks, _library, _ops, _packed_ops, fp8, packed
from ._checks import FLOATS, INDICES, Facts
from ._formulas import PARAMETERS
from ._names import ACTIVATION, FORM, GATED, LAYOUT
from .fp8 import NOTHING, Fp8Weights, Request
from .packed import PackedWeights
from .routing import Pairs

LAYOUTS = tuple(LAYOUT)


class Activation(NamedTuple):
    """An activation and its parameters:

    swiglu_oai: alpha (default 1.702), limit (7). swiglu_clamped: limit (10). swiglu_step: limit
    (7). situ: alpha, the cap of the gate (4), and limit, the cap of up (25), each 1e-9 to 1e9. The
    others have none."""

    name: str
    alpha: float | None = None
    limit: float | None = None


class _Plan(NamedTuple):
    """The parts of a call that depend only on dtypes, devices, shapes and options."""

    options: tuple  # the values of _ops.OPTIONS
    scores: torch.dtype  # routing weights are cast to it


def _activation(value) -> Activation:
    if isinstance(value, str):
        value = Activation(value)
    if not isinstance(value, Activation):
        raise TypeError(f"activation is {type(value).__name__}, must be a name or an Activation")
    _checks.one_of("activation", value.name, ACTIVATION)
    for parameter in ("alpha", "limit"):
        number = getattr(value, parameter)
        if number is not None and not 0 < number < float("inf"):
            raise ValueError(f"activation.{parameter} is {number}, must be positive and finite")
        owners = [name for name, has in PARAMETERS.items() if parameter in has]
        if number is not None and value.name not in owners:
            raise ValueError(
                f"activation.{parameter} is {number} for {value.name}, must be None: only "
                f"{' or '.join(owners)} has it"
            )
    return value


def _pair(name: str, value) -> tuple[Tensor | None, Tensor]:
    """Returns (gate, up) if `value` is such a tuple, (None, value) if it is one tensor."""
    if not isinstance(value, (tuple, list)):
        return None, value
    if len(value) != 2:
        raise ValueError(f"{name} has {len(value)} tensors, must be a tensor or (gate, up)")
    return tuple(value)


def _up_shape(rows, gated: bool, separate: bool, hidden) -> tuple[str, tuple]:
    """The shape of w_up in letters, and in numbers without the dimension of the experts."""
    if separate:
        return "(E, n, d)", (rows, hidden)
    return ("(E, 2*n, d)", (2 * rows, hidden)) if gated else ("(E, n, d)", (rows, hidden))


def _check_weights(hidden, weights: list, gated: bool, x: Facts) -> None:
    """`weights` holds Facts; x is (T, hidden) with any T."""
    w_gate, w_up, w_down, b_up, b_down = weights
    _checks.given("w_up", w_up)
    _checks.given("w_down", w_down)
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


def _check_routing(name: str, value, x, expected: tuple, meaning: str, dtypes) -> None:
    """`value` and `x` are Facts or tensors; `dtypes` is FLOATS for weights, else INDICES."""
    _checks.given(name, value)
    _checks.dtype(name, value, dtypes)
    _checks.shape(name, value, meaning, expected)
    _checks.on_device(name, value, x)


def _check_ids(x: Facts, ids: Facts, _, weights: Facts) -> None:
    _check_routing("topk_ids", ids, x, (x.shape[0], None), "(T, K)", INDICES)
    meaning = "topk_ids' shape (T, K)"
    _check_routing("topk_weights", weights, x, tuple(ids.shape), meaning, FLOATS)


def _check_pairs(x: Facts, token: Facts, expert: Facts, weight: Facts) -> None:
    _check_routing("pairs.token", token, x, (None,), "(C,)", INDICES)
    _check_routing("pairs.expert", expert, x, tuple(token.shape), "(C,)", INDICES)
    _check_routing("pairs.weight", weight, x, tuple(token.shape), "(C,)", FLOATS)


def _check_grouped(rows: Facts, begin: Facts, count: Facts, row_weights: Facts | None) -> None:
    if row_weights is not None:  # moe_grouped has checked begin and count
        _check_routing("row_weights", row_weights, rows, (rows.shape[0],), "(R,)", FLOATS)


class _Form(NamedTuple):
    """A form of input: the names of its tensors in the order of the operators' arguments, and the
    check of its routing."""

    names: tuple
    check: Callable


_EXPERTS = ("w_up", "w_up", "w_down", "b_up", "b_down")
_FORMS = {
    "ids": _Form(("x", "topk_ids", "", "topk_weights", *_EXPERTS), _check_ids),
    "pairs": _Form(("x", "pairs.token", "pairs.expert", "pairs.weight", *_EXPERTS), _check_pairs),
    "grouped": _Form(("rows", "begin", "count", "row_weights", *_EXPERTS), _check_grouped),
}


@_checks.remembered
def _plan(form: str, activation, gate_layout, wish: tuple, facts: tuple) -> _Plan:
    """Checks all arguments except main gradients and quantised weights. `facts` are the
    _checks.keys() of all tensors. `wish` is (precision, keep_h, Request.quantisations(),
    _library.choices()): the choice of "auto" depends on all of them."""
    x, *routing = (None if f is None else Facts(*f) for f in facts)
    routing, experts = routing[:3], routing[3:]
    name = _FORMS[form].names[0]
    _checks.dtype(name, x)
    _checks.shape(name, x, "(T, d)", (None, None))
    _checks.supported(x.device)
    activation = _activation(activation)
    _checks.one_of("gate_layout", gate_layout, LAYOUTS)
    _check_weights(x.shape[1], experts, activation.name in GATED, x)
    _FORMS[form].check(x, *routing)
    options = {
        "form": FORM[form],
        "activation": ACTIVATION[activation.name],
        "alpha": activation.alpha or 0.0,
        "limit": activation.limit or 0.0,
        "gate_layout": LAYOUT[gate_layout],
    }
    rows = fp8.capacity(form, x, routing[0])
    precision, keep_h, quantisations, _ = wish
    options["precision"] = fp8.number_of(
        precision, keep_h, rows, experts[2], options["activation"], quantisations
    )
    return _Plan(tuple([options[option] for option in _ops.OPTIONS]), _ops.score_dtype(x))


def _main_gradients(grad_accum, w_gate, w_up, w_down) -> tuple:
    """Checks grad_accum and returns it as (g_gate, g_up, g_down)."""
    if not isinstance(grad_accum, (tuple, list)) or len(grad_accum) != 2:
        raise ValueError("grad_accum must be (g_up, g_down), in the form of (w_up, w_down)")
    g_gate, g_up = _pair("grad_accum[0]", grad_accum[0])
    if (g_gate is None) != (w_gate is None):
        raise ValueError("grad_accum[0] must be a tensor or (gate, up), like w_up")
    for name, g, w in (
        ("grad_accum[0]", g_gate, w_gate),
        ("grad_accum[0]", g_up, w_up),
        ("grad_accum[1]", grad_accum[1], w_down),
    ):
        if w is not None:
            _checks.tensor(name, g)
            _checks.dtype(name, g, (_ops.score_dtype(w),))
            _checks.shape(name, g, "its weight's shape", tuple(w.shape))
            _checks.on_device(name, g, w)
    return g_gate, g_up, grad_accum[1]


def autocast_dtype(x: Tensor) -> torch.dtype | None:
    """The dtype that autocast casts to; None if autocast is not enabled for the device of x."""
    kind = x.device.type
    if kind == "meta" or not torch.is_autocast_enabled(kind):
        return None
    return torch.get_autocast_dtype(kind)


def _autocast(x: Tensor, experts: tuple) -> tuple[Tensor, tuple]:
    """Under autocast, casts x, weights and biases to its dtype. fp64 is not cast, as in torch's own
    operators."""
    dtype = autocast_dtype(x)
    if dtype is None:
        return x, experts

    def cast(t):
        keep = t is None or not isinstance(t, Tensor) or not t.is_floating_point()
        return t if keep or t.dtype == torch.float64 else t.to(dtype)

    return cast(x), tuple(map(cast, experts))


def arguments(
    form: str,
    x,
    routing: tuple,
    experts: tuple,
    style: tuple,
    grad_accum,
    request: Request = NOTHING,
) -> tuple:
    """The arguments of _ops.layer(), checked, without quantised weights. routing is (index, second,
    weights), experts (w_up, w_down, b_up, b_down), style (activation, gate_layout). This function
    runs in every call, so the work that depends only on dtypes, devices and shapes is in _plan(),
    whose results are cached."""
    names = _FORMS[form].names
    _checks.tensor(names[0], x)
    w_up, w_down, b_up, b_down = experts
    experts = (*_pair("w_up", w_up), w_down, b_up, b_down)
    if _ops.may_autocast():
        x, experts = _autocast(x, experts)
    wish = (*request[:2], request.quantisations(), _library.choices())
    plan = _plan(form, *style, wish, _checks.keys(names, (x, *routing, *experts)))
    index, second, weights = routing
    if weights is not None and weights.dtype != plan.scores:
        weights = weights.to(plan.scores)
    main_gradients = (None, None, None)
    if grad_accum is not None:
        main_gradients = _main_gradients(grad_accum, *experts[:3])
    return (x, index, second, weights, *experts), plan.options, main_gradients


def packed_arguments(
    form: str, x, routing: tuple, experts: tuple, style: tuple, grad_accum, request: Request
) -> tuple[tuple, tuple] | None:
    """(weights, the arguments of _ops.layer() without main gradients) of a call whose weights are
    packed, None of another call. Stand-ins of the weights are checked in their place."""
    weights = packed.of_experts(*experts[:2])
    if weights is None:
        return None
    packed.refuse_unpacked_options(grad_accum, request.fp8_weights)
    _checks.tensor(_FORMS[form].names[0], x)
    stand_ins = [w.like(autocast_dtype(x) or w.dtype) for w in weights]
    experts = (*stand_ins, *experts[2:])
    return weights, arguments(form, x, routing, experts, style, None, request)[:2]


def _run(*form_and_tensors, request: Request) -> Tensor:
    """Runs the layer on the arguments of arguments()."""
    of_packed = packed_arguments(*form_and_tensors, request)
    if of_packed is not None:
        weights, (tensors, options) = of_packed
        return _packed_ops.layer(tensors, options, weights, _packed_ops.NO_FACTORS)
    tensors, options, main_gradients = arguments(*form_and_tensors, request)
    if request.precision is None and request.fp8_weights is None:
        return _ops.layer(tensors, options, main_gradients)
    quantised = fp8.given_weights(request, tensors, options)
    return _ops.layer(tensors, options, main_gradients, quantised)


def _request(precision, keep_h, fp8_weights) -> Request:
    if precision is None and keep_h is None and fp8_weights is None:
        return NOTHING
    return Request(precision, keep_h, fp8_weights)


def pairs_index(pairs) -> tuple:
    """The routing of arguments() of the argument `pairs` of moe_pairs()."""
    if not isinstance(pairs, (tuple, list)) or len(pairs) < 3:
        raise TypeError("pairs must be Pairs, or a tuple (token, expert, weight)")
    return tuple(pairs[:3])


def grouped_index(rows, expert_offsets, w_down) -> tuple:
    """(begin, count) of the argument `expert_offsets` of moe_grouped()."""
    _checks.tensor("rows", rows)
    if not isinstance(w_down, PackedWeights):
        _checks.tensor("w_down", w_down)
    _checks.shape("w_down", w_down, "(E, d, n)", (None, None, None))
    number = w_down.shape[0]
    if isinstance(expert_offsets, (tuple, list)):
        if len(expert_offsets) != 2:
            raise ValueError("expert_offsets must be a tensor (E+1,) or a tuple (begin, count)")
        begin, count = expert_offsets
        for name, value in (("begin", begin), ("count", count)):
            _checks.tensor(name, value)
            _check_routing(name, value, rows, (number,), "(E,)", INDICES)
        return begin, count
    _checks.tensor("expert_offsets", expert_offsets)
    _check_routing("expert_offsets", expert_offsets, rows, (number + 1,), "(E+1,)", INDICES)
    return expert_offsets[:-1], expert_offsets.diff()


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

    precision: "fp8" multiplies in e4m3 with block scales (bf16 tensors, d and n multiples of 128).
    "auto" does so if that is expected to be faster. None multiplies in the tensors' dtype.
    fp8_weights: the result of quantize_weights() for w_up and w_down. Without it the call quantises
    them, and its backward quantises them again.
    keep_h: "bf16" keeps H for backward in bf16 instead of fp8.

    Raises TypeError for wrong types and dtypes, ValueError for wrong shapes, names and values, and
    NotImplementedError for a call that the device or the precision does not support.
    """
    routing, experts = (topk_ids, None, topk_weights), (w_up, w_down, b_up, b_down)
    request = _request(precision, keep_h, fp8_weights)
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
    request = _request(precision, keep_h, fp8_weights)
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
    request = _request(precision, keep_h, fp8_weights)
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
    w_gate, w_up = _pair("w_up", w_up)
    for name, value in (("h", h), ("w_up", w_up)):
        _checks.tensor(name, value)
    _checks.supported(h.device)
    name = _activation(activation).name
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
