"""Finds which of the library's activations a foreign function computes, by evaluating it.

A name is not enough: "gelu" is the erf form in one project and the tanh form in another, and a
class may clamp, scale or shift the input or output of its activation. So the function is run on a
grid of points that reaches far past any clamp, in fp64 on the CPU, and compared with every formula.
A function that matches no formula is refused.
"""

from __future__ import annotations

import ctypes
import functools
import math
import weakref
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from .. import _checks, _formulas
from ..layer import Activation

# Far points reveal a clamp, near points the formula: the two forms of gelu differ by 5e-4 around
# |u| = 2.
_ON_HOST = {"dtype": torch.float64, "device": "cpu"}  # whatever the default device is
_NEAR = torch.linspace(-9, 9, 37, **_ON_HOST)
_FAR = torch.tensor([-1e4, -300.0, -40.0, -17.0, 17.0, 40.0, 300.0, 1e4], **_ON_HOST)
_POINTS = torch.cat([_NEAR, _FAR])
_BEYOND_ANY_CLAMP = 1e12
_NO_CLAMP = 1e6


def _two_rows(values: Tensor) -> Tensor:
    """The same values in two orders, to reveal a function of whole rows, such as a norm."""
    return torch.stack([values, values.flip(0)])


def _grid() -> tuple[Tensor, Tensor]:
    gate, up = torch.meshgrid(_POINTS, _POINTS, indexing="ij")
    return _two_rows(gate.flatten()), _two_rows(up.flatten())


def _same(got: Tensor, want: Tensor) -> bool:
    """Equal up to the precision of fp32: the function may compute in fp32 internally."""
    return got.shape == want.shape and torch.allclose(got.double(), want, rtol=1e-5, atol=1e-6)


def _value(function: Callable[[Tensor, Tensor], Tensor], gate: float, up: float) -> float:
    def scalar(value):
        return torch.full((1, 1), value, **_ON_HOST)

    return function(scalar(gate), scalar(up)).double().item()


def _six_digits(value: float) -> float:
    """The constant as the source has it, from a value with rounding errors of fp32."""
    return float(f"{value:.6g}")


def _swiglu_clamped(function: Callable[[Tensor, Tensor], Tensor]) -> Iterator[Activation]:
    """silu(gate) * up, clamped at limit before or after silu. Solves for the limit at gate = -1,
    which is not clamped, and `up` beyond any clamp."""
    silu = -1 / (1 + math.e)  # silu(-1)
    limit = _six_digits(_value(function, -1.0, _BEYOND_ANY_CLAMP) / silu)
    if 0 < limit < _NO_CLAMP:
        yield Activation("swiglu_clamped", limit=limit)
        yield Activation("swiglu_step", limit=limit)


def _situ(function: Callable[[Tensor, Tensor], Tensor]) -> Iterator[Activation]:
    """alpha tanh(gate / alpha) sigmoid(gate) * limit tanh(up / limit). Gate and up beyond any cap
    give alpha * limit. Of the values with smaller ups, one where tanh is neither small nor near 1
    gives the limit."""
    product = _value(function, _BEYOND_ANY_CLAMP, _BEYOND_ANY_CLAMP)
    if not 0 < product < _NO_CLAMP**2:
        return
    for up in (10.0**power for power in range(-4, 6)):
        share = _value(function, _BEYOND_ANY_CLAMP, up) / product
        if 0.07 < share < 0.8:
            limit = up / math.atanh(share)
            yield Activation("situ", _six_digits(product / limit), _six_digits(limit))


def _swiglu_oai(function: Callable[[Tensor, Tensor], Tensor]) -> Iterator[Activation]:
    """gate * sigmoid(alpha * gate) * (up + 1), clamped at limit. Solves for the limit, then
    alpha."""
    one = _value(function, 1.0, 0.0)
    if not 0 < one < 1:
        return
    limit = _six_digits(_value(function, 1.0, _BEYOND_ANY_CLAMP) / one - 1)
    if not 0 < limit < _NO_CLAMP:
        return
    gate = min(1.0, limit)
    share = one / gate
    if 0.5 < share < 1:
        alpha = _six_digits(math.log(share / (1 - share)) / gate)
        yield Activation("swiglu_oai", alpha=alpha, limit=limit)


def _candidates(function: Callable[[Tensor, Tensor], Tensor]) -> Iterator[Activation]:
    # Activations with solved parameters come first: if the limit lies outside of the grid, only the
    # solution for the limit shows it.
    for solve in (_swiglu_clamped, _swiglu_oai, _situ):
        yield from solve(function)
    yield from (Activation(name) for name in _formulas.GATE_OF if name not in _formulas.PARAMETERS)


def _on_real_tensors(find: Callable):
    """Runs `find` without gradients, and outside of fake tensors, of tracing (torch.export) and of
    a default device such as "meta", in which tensors have no values to compare."""

    @functools.wraps(find)
    def run(function: Callable) -> Activation | None:
        with torch.no_grad(), _disable_current_modes(), torch.device("cpu"):
            return find(function)

    return run


@_on_real_tensors
def gated(function: Callable[[Tensor, Tensor], Tensor]) -> Activation | None:
    """The activation that `function(gate, up)` computes elementwise, or None."""
    gate, up = _grid()
    got = function(gate, up)
    for candidate in _candidates(function):
        name, *parameters = candidate
        if _same(got, _formulas.gated(name, gate, up, *parameters)):
            return candidate
    return None


@_on_real_tensors
def ungated(function: Callable[[Tensor], Tensor]) -> Activation | None:
    """The activation that `function(u)` computes elementwise, or None."""
    points = _two_rows(_POINTS)
    got = function(points)
    for name, formula in _formulas.UNARY.items():
        if _same(got, formula(points)):
            return Activation(name)
    return None


def once_a_module(attribute: str, facts: Callable[[nn.Module], object]):
    """Caches a function of a module until `facts(module)` changes.

    The result is stored on the module as `attribute`. Compiled code reads it there and guards its
    value, so that equal layers share one graph. If a module has not run before torch.compile traces
    it, the function is evaluated during tracing, and the module gets a graph of its own with the
    result as a constant.
    """

    def decorate(find: Callable[[nn.Module], object]):
        seen: weakref.WeakKeyDictionary[nn.Module, object] = weakref.WeakKeyDictionary()

        @torch._dynamo.assume_constant_result
        def find_at(address: int):
            # A graph cannot have a module as a constant, so it has the module's address. The caller
            # keeps the module alive.
            return find(ctypes.cast(address, ctypes.py_object).value)

        @functools.wraps(find)
        def ask(module: nn.Module):
            if torch.compiler.is_compiling():
                known = getattr(module, attribute, None)
                return find_at(id(module)) if known is None else known
            now = facts(module)
            if module not in seen or seen[module] != now:
                module.__dict__[attribute] = find(module)
                seen[module] = now
            return module.__dict__[attribute]

        return ask

    return decorate


def local(tensor: Tensor | None) -> Tensor | None:
    """This rank's part of a DTensor; a plain tensor unchanged. The test is by type, because
    hasattr(tensor, "to_local") is false for a DTensor while torch.compile traces."""
    return tensor.to_local() if _checks.is_distributed(tensor) else tensor
