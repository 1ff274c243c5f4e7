"""The operators of the layer with low-rank factors: fake implementations, derivatives, calls."""

from __future__ import annotations

from torch import Tensor

from . import _library, _ops
from ._names import FORM

# The arguments of lora_inference and lora_forward after those of the layer: factors, their scales,
# fp8_weights. Bit i of `needs` of lora_backward asks for the gradient of argument i.
FACTORS = ["up_a", "up_b", "down_a", "down_b"]
LORA_NEEDS = {n: _ops.NEEDS[n] for n in ("x", "weights") if _ops.NEEDS} | {
    name: 1 << (len(_ops.LAYER) + i) for i, name in enumerate(FACTORS)
}


def fake_lora_forward(a):
    out, h, saved = _ops.fake_forward(a)
    p = 0
    if a.up_a is not None:
        rows = a.x.shape[0] if a.form == FORM["grouped"] else a.index.numel()
        p = rows * a.up_a.shape[1] * a.x.element_size()
    return out, h, saved.new_empty((saved.shape[0] + p,))


def _fake_lora_backward(a):
    return tuple(_ops.fake_gradient(a, name, bit) for name, bit in LORA_NEEDS.items())


def _setup_lora(ctx, inputs, output):
    count, end = len(_ops.LAYER_TENSORS), len(_ops.LAYER) + len(FACTORS)
    ctx.options, ctx.scales = inputs[count : len(_ops.LAYER)], inputs[end:-1]
    factors = inputs[len(_ops.LAYER) : end]
    ctx.save_for_backward(*inputs[:count], *factors, *output[1:], inputs[-1])


def _lora_backward(ctx, dout):
    count, end = len(_ops.LAYER_TENSORS), len(_ops.LAYER_TENSORS) + len(FACTORS)
    saved = ctx.saved_tensors
    tensors, factors, (h, kept, fp8_weights) = saved[:count], saved[count:end], saved[end:]
    at = [bit.bit_length() - 1 for bit in LORA_NEEDS.values()]
    wanted = [ctx.needs_input_grad[i] for i in at]
    needs = sum(bit for bit, want in zip(LORA_NEEDS.values(), wanted, strict=True) if want)
    layer = (dout, *tensors, *ctx.options, h, kept, needs)
    found = _ops.call("lora_backward", *layer, *factors, *ctx.scales, fp8_weights)
    of_inputs = [None] * ctx.inputs
    for i, want, gradient in zip(at, wanted, found, strict=True):
        of_inputs[i] = gradient if want else None
    return tuple(of_inputs)


def lora(tensors: tuple, options: tuple, factors: tuple, fp8_weights: Tensor | None) -> Tensor:
    """As _ops.layer(), with low-rank factors: `factors` are FACTORS and their two scales."""
    arguments = (*tensors, *options, *factors, fp8_weights)
    if not _ops.records(*arguments):
        _ops.refuse_transforms("lora_forward", *arguments)
        return _ops.run("lora_inference", *arguments)
    return _ops.call("lora_forward", *arguments)[0]


if _library.PROBLEM is None:
    _ops.register(
        {
            "lora_inference": _ops.fake_inference,
            "lora_forward": fake_lora_forward,
            "lora_backward": _fake_lora_backward,
        },
        {
            "lora_forward": _ops.of_first_output(_setup_lora, _lora_backward),
            "lora_backward": _ops.once("lora_backward"),
        },
    )
