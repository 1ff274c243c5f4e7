"""Checks of a layer's activation and weights."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from . import _checks
from ._checks import Facts
from ._formulas import PARAMETERS
from ._names import ACTIVATION, LAYOUT

LAYOUTS = tuple(LAYOUT)


class Activation(NamedTuple):
    """An activation and its parameters:

    swiglu_oai: alpha (default 1.702), limit (7). swiglu_clamped: limit (10). swiglu_step: limit
    (7). situ: alpha, the cap of the gate (4), and limit, the cap of up (25), each 1e-9 to 1e9. The
    others have none."""

    name: str
    alpha: float | None = None
    limit: float | None = None


def activation_of(value) -> Activation:
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


def gate_and_up(name: str, value) -> tuple[Tensor | None, Tensor]:
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


def check_weights(hidden, weights: list, gated: bool, x: Facts) -> None:
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
