"""Makes a Call from the arguments of a user's call: checked, cast, and with numbers for names."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from . import _checks, _library, _ops, fp8, packed
from ._call import NO_MAIN_GRADIENTS, Call, MainGradients, Options, Tensors, score_dtype
from ._checks import FLOATS, INDICES, Facts
from ._names import ACTIVATION, FORM, GATED, LAYOUT
from ._weights import LAYOUTS, activation_of, check_weights, gate_and_up
from .fp8 import NOTHING, Request
from .packed import PackedWeights


class _Plan(NamedTuple):
    """The parts of a call that depend only on dtypes, devices, shapes and options."""

    options: Options
    scores: torch.dtype  # routing weights are cast to it


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


_PLAIN = (None, None, 0, 0)  # the wish of calls in the tensors' dtype, which depends on nothing


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
    activation = activation_of(activation)
    _checks.one_of("gate_layout", gate_layout, LAYOUTS)
    check_weights(x.shape[1], experts, activation.name in GATED, x)
    _FORMS[form].check(x, *routing)
    number = ACTIVATION[activation.name]
    rows = fp8.capacity(form, x, routing[0])
    precision, keep_h, quantisations, _ = wish
    options = Options(
        form=FORM[form],
        activation=number,
        alpha=activation.alpha or 0.0,
        limit=activation.limit or 0.0,
        gate_layout=LAYOUT[gate_layout],
        precision=fp8.number_of(precision, keep_h, rows, experts[2], number, quantisations),
    )
    return _Plan(options, score_dtype(x))


def _main_gradients(grad_accum, w_gate, w_up, w_down) -> MainGradients:
    """Checks grad_accum."""
    if not isinstance(grad_accum, (tuple, list)) or len(grad_accum) != 2:
        raise ValueError("grad_accum must be (g_up, g_down), in the form of (w_up, w_down)")
    g_gate, g_up = gate_and_up("grad_accum[0]", grad_accum[0])
    if (g_gate is None) != (w_gate is None):
        raise ValueError("grad_accum[0] must be a tensor or (gate, up), like w_up")
    for name, g, w in (
        ("grad_accum[0]", g_gate, w_gate),
        ("grad_accum[0]", g_up, w_up),
        ("grad_accum[1]", grad_accum[1], w_down),
    ):
        if w is not None:
            _checks.tensor(name, g)
            _checks.dtype(name, g, (score_dtype(w),))
            _checks.shape(name, g, "its weight's shape", tuple(w.shape))
            _checks.on_device(name, g, w)
    return MainGradients(g_gate, g_up, grad_accum[1])


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


def call_of(
    form: str,
    x,
    routing: tuple,
    experts: tuple,
    style: tuple,
    grad_accum,
    request: Request = NOTHING,
) -> Call:
    """Checks the arguments of a call and names them; quantised weights are not among them. routing
    is (index, second, weights), experts (w_up, w_down, b_up, b_down), style (activation,
    gate_layout). This function runs in every call, so the work that depends only on dtypes, devices
    and shapes is in _plan(), whose results are cached."""
    names = _FORMS[form].names
    if type(x) is not Tensor:
        _checks.tensor(names[0], x)
    w_up, *others = experts
    gate_up = (None, w_up) if isinstance(w_up, Tensor) else gate_and_up("w_up", w_up)
    experts = (*gate_up, *others)
    if _ops.may_autocast():
        x, experts = _autocast(x, experts)
    wish = _PLAIN
    if request is not NOTHING:
        wish = (*request[:2], request.quantisations(), _library.choices())
    plan = _plan(form, *style, wish, _checks.keys(names, (x, *routing, *experts)))
    index, second, weights = routing
    if weights is not None and weights.dtype != plan.scores:
        weights = weights.to(plan.scores)
    main_gradients = NO_MAIN_GRADIENTS
    if grad_accum is not None:
        main_gradients = _main_gradients(grad_accum, *experts[:3])
    return Call(Tensors(x, index, second, weights, *experts), plan.options, main_gradients)


def packed_call(
    form: str, x, routing: tuple, experts: tuple, style: tuple, grad_accum, request: Request
) -> tuple[Call, tuple] | None:
    """The call and its packed weights, None if the weights are tensors. The arguments are those of
    call_of(). Stand-ins of the weights are checked in their place."""
    weights = packed.of_experts(*experts[:2])
    if weights is None:
        return None
    packed.refuse_unpacked_options(grad_accum, request.fp8_weights)
    _checks.tensor(_FORMS[form].names[0], x)
    stand_ins = [w.like(autocast_dtype(x) or w.dtype) for w in weights]
    experts = (*stand_ins, *experts[2:])
    return call_of(form, x, routing, experts, style, None, request), weights


def pairs_index(pairs) -> tuple:
    """The routing of call_of() of the argument `pairs` of moe_pairs()."""
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
