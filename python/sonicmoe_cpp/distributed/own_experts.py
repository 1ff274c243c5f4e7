"""How a rank computes its own experts: by the operators of one process, with or without low-rank
factors."""

from __future__ import annotations

import torch
from torch import Tensor

from .. import _autograd, _library, _ops
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
from .._names import FORM

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


def inference(call: Call, codes: Tensor | None) -> Tensor:
    """`codes` are quantised weights, or None (docs/fp8.md)."""
    layer = (*call.tensors, *call.options)
    if call.factors is None:
        return _ops.run("moe_inference", *layer, codes)
    return _ops.run("lora_inference", *layer, *call.factors, codes)


def forward(call: Call, codes: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """(out, H, metadata)."""
    layer = (*call.tensors, *call.options)
    if call.factors is None:
        return _ops.run("moe_forward", *layer, *call.main_gradients, codes)
    return _ops.run("lora_forward", *layer, *call.factors, codes)


def backward(
    dout: Tensor, call: Call, needs: int, kept: tuple, codes: Tensor | None
) -> dict[str, Tensor | None]:
    """The gradients that `needs` asks for, by name; `kept` are H and metadata."""
    arguments = (dout, *call.tensors, *call.options, *kept)
    if call.factors is None:
        found = _autograd.layer_gradients("moe", arguments, needs, call.main_gradients, (codes,))
        return dict(zip(DIFFERENTIABLE, found, strict=True))
    needs &= sum(LORA_NEEDS.values())
    found = _ops.run("lora_backward", *arguments, needs, *call.factors, codes)
    each = zip(LORA_NEEDS.items(), found, strict=True)
    return {name: gradient for (name, bit), gradient in each if needs & bit}


_served: set[tuple] = set()  # calls that refuse_fp8() has tried


def refuse_fp8(call: Call) -> None:
    """Raises, as the layer of one process does, if this device does not serve the call's
    precision. A refusal after the ranks have begun to exchange rows would break the group. So a
    call with one expert and no tokens is tried before, once for each kind of call."""
    if call.fp8 is None or call.fp8.least > 0:  # "auto" takes fp8 only where it is served
        return
    tensors = [t for t in (call.tensors.x, *call.tensors[4:]) if t is not None]
    given = [(t.dtype, t.device, t.shape[1:], t.stride()) for t in tensors]
    key = (_library.choices(), call.options, call.factors is None, *given)
    if key in _served:
        return
    x = call.tensors.x[:0]
    experts = [None if t is None else t.detach()[:1] for t in call.tensors[4:]]
    factors = call.factors and [t[:1] if isinstance(t, Tensor) else t for t in call.factors]
    index = torch.empty((0, 1), dtype=torch.int64, device=x.device)
    routing = index, None, index.float()
    options = call.options._replace(form=FORM["ids"])
    trial = Call(Tensors(x, *routing, *experts), options)
    inference(trial if factors is None else trial._replace(factors=Factors(*factors)), None)
    _served.add(key)
