"""How a rank computes its own experts: by the operators of one process, with or without low-rank
factors."""

from __future__ import annotations

from torch import Tensor

from .. import _autograd, _ops
from .._call import (
    DIFFERENTIABLE,
    FACTORS,
    LAYER_TENSORS,
    LORA_NEEDS,
    NEEDS,
    Call,
    Factors,
    Tensors,
)

TENSORS = (*LAYER_TENSORS, *FACTORS)
# The arguments that have a derivative, with their bits in `needs`.
ALL_NEEDS = NEEDS | LORA_NEEDS
# The gradients that are computed from rows of x, which backward sends again.
OF_X = sum(ALL_NEEDS[name] for name in ("w_gate", "w_up", "up_a"))
_NO_FACTORS = (None,) * len(FACTORS)


def tensors_of(call: Call) -> tuple:
    """The values of TENSORS; None for the factors of a call without factors."""
    return (*call.tensors, *(_NO_FACTORS if call.factors is None else call.factors[:4]))


def call_of(tensors: tuple, options, main_gradients, scales: tuple | None) -> Call:
    """The call of the values of TENSORS. `scales` are the scales of the factors, if it has any."""
    layer, factors = tensors[: len(LAYER_TENSORS)], tensors[len(LAYER_TENSORS) :]
    factors = None if scales is None else Factors(*factors, *scales)
    return Call(Tensors(*layer), options, main_gradients, factors)


def inference(call: Call) -> Tensor:
    layer = (*call.tensors, *call.options)
    if call.factors is None:
        return _ops.run("moe_inference", *layer)
    return _ops.run("lora_inference", *layer, *call.factors, None)


def forward(call: Call) -> tuple[Tensor, Tensor, Tensor]:
    """(out, H, metadata)."""
    layer = (*call.tensors, *call.options)
    if call.factors is None:
        return _ops.run("moe_forward", *layer, *call.main_gradients)
    return _ops.run("lora_forward", *layer, *call.factors, None)


def backward(dout: Tensor, call: Call, needs: int, kept: tuple) -> dict[str, Tensor | None]:
    """The gradients that `needs` asks for, by name; `kept` are H and metadata."""
    arguments = (dout, *call.tensors, *call.options, *kept)
    if call.factors is None:
        found = _autograd.layer_gradients("moe", arguments, needs, call.main_gradients)
        return dict(zip(DIFFERENTIABLE, found, strict=True))
    needs &= sum(LORA_NEEDS.values())
    found = _ops.run("lora_backward", *arguments, needs, *call.factors, None)
    each = zip(LORA_NEEDS.items(), found, strict=True)
    return {name: gradient for (name, bit), gradient in each if needs & bit}
