"""How a rank computes its own experts: by the operators of one process, with or without low-rank
factors. With factors, `tensors` are TENSORS and `options` are OPTIONS and the factors' two scales;
without, they are LAYER_TENSORS and OPTIONS."""

from __future__ import annotations

from torch import Tensor

from .. import _lora_ops, _ops

TENSORS = (*_ops.LAYER_TENSORS, *_lora_ops.FACTORS)
# The bit of each gradient in `needs`, in the order of the tensors.
NEEDS = _ops.NEEDS | _lora_ops.LORA_NEEDS
# The gradients that are computed from rows of x, which backward sends again.
OF_X = sum(NEEDS[name] for name in ("w_gate", "w_up", "up_a") if NEEDS)
_COUNT = len(_ops.LAYER_TENSORS)


def has_factors(tensors: tuple) -> bool:
    return len(tensors) > _COUNT


def differentiable(tensors: tuple) -> dict[str, int]:
    """Names and bits of the gradients of `tensors`."""
    return NEEDS if has_factors(tensors) else _ops.NEEDS


def _lora(tensors: tuple, options: tuple) -> tuple[tuple, tuple]:
    """The arguments of the layer, and those of the factors."""
    layer = (*tensors[:_COUNT], *options[: len(_ops.OPTIONS)])
    return layer, (*tensors[_COUNT:], *options[len(_ops.OPTIONS) :])


def inference(tensors: tuple, options: tuple) -> Tensor:
    if not has_factors(tensors):
        return _ops.run("moe_inference", *tensors, *options)
    layer, factors = _lora(tensors, options)
    return _ops.run("lora_inference", *layer, *factors, None)


def forward(tensors: tuple, options: tuple, main_gradients: tuple) -> tuple[Tensor, Tensor, Tensor]:
    """(out, H, metadata)."""
    if not has_factors(tensors):
        return _ops.run("moe_forward", *tensors, *options, *main_gradients)
    layer, factors = _lora(tensors, options)
    return _ops.run("lora_forward", *layer, *factors, None)


def backward(
    dout: Tensor, tensors: tuple, options: tuple, needs: int, kept: tuple, main_gradients: tuple
) -> dict[str, Tensor | None]:
    """The gradients that `needs` asks for, by name; `kept` are H and metadata."""
    if not has_factors(tensors):
        wanted = tuple(bool(needs & bit) for bit in _ops.NEEDS.values())
        found = _ops.gradients(dout, (*tensors, *options), wanted, *kept, main_gradients)
        return dict(zip(_ops.NEEDS, found, strict=True))
    layer, factors = _lora(tensors, options)
    needs &= sum(_lora_ops.LORA_NEEDS.values())
    found = _ops.run("lora_backward", dout, *layer, *kept, needs, *factors, None)
    each = zip(_lora_ops.LORA_NEEDS.items(), found, strict=True)
    return {name: gradient for (name, bit), gradient in each if needs & bit}
