"""Fake quantisation: weights rounded to the values of a format of 4 or 8 bits, in their own dtype.
Backward takes the gradient of the rounded weights for that of the weights (straight through)."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from . import _checks

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_E4M3_MAX = 448.0
_E4M3_MIN = 2.0**-9  # the smallest positive value
_E2M1_MAX = 6.0
# Experts are rounded in groups of at most this many elements, to bound the fp32 copies.
_ELEMENTS = 1 << 26


def _e2m1(scaled: Tensor) -> Tensor:
    """The nearest of 0, 0.5, 1, 1.5, 2, 3, 4, 6, ties to the even mantissa; larger values to 6."""
    a = scaled.abs()
    steps = torch.where(
        a < 2, (a * 2).round() / 2, torch.where(a < 4, a.round(), (a / 2).round() * 2)
    )
    return steps.clamp(max=_E2M1_MAX).copysign(scaled)


def _e4m3(scaled: Tensor) -> Tensor:
    """The nearest e4m3 value, ties to the even mantissa; larger values to 448."""
    return scaled.clamp(-_E4M3_MAX, _E4M3_MAX).to(torch.float8_e4m3fn).to(torch.float32)


def _or_one(scale: Tensor) -> Tensor:
    """Without zeros, by which nothing can be divided: their blocks are zeros."""
    return torch.where(scale == 0, 1, scale)


def _or_nan(values: Tensor, largest: Tensor) -> Tensor:
    """A block with a NaN or an infinite value becomes NaN, so that it is seen."""
    return torch.where(largest.isfinite(), values, torch.nan)


def _fp8_blocks(v: Tensor) -> Tensor:
    rows, columns = v.shape[-2:]
    padded = F.pad(v, (0, -columns % 128, 0, -rows % 128))
    blocks = padded.unflatten(-1, (-1, 128)).unflatten(-3, (-1, 128))  # (E, R, 128, C, 128)
    largest = blocks.abs().amax((-3, -1), keepdim=True)
    scale = _or_one(largest / _E4M3_MAX)
    values = _or_nan(_e4m3(blocks / scale) * scale, largest)
    return values.flatten(-4, -3).flatten(-2)[:, :rows, :columns]


def _mxfp4(v: Tensor) -> Tensor:
    blocks = v.unflatten(-1, (-1, 32))
    largest = blocks.abs().amax(-1, keepdim=True)
    exponent = (torch.frexp(largest).exponent - 3).clamp(-127, 127)
    values = torch.ldexp(_e2m1(torch.ldexp(blocks, -exponent)), exponent)
    return _or_nan(values, largest).flatten(-2)


def _nvfp4(v: Tensor) -> Tensor:
    blocks = v.unflatten(-1, (-1, 16))
    largest = blocks.abs().amax(-1, keepdim=True)
    of_expert = largest.amax((-3, -2), keepdim=True)
    outer = _or_one(of_expert / (_E2M1_MAX * _E4M3_MAX))
    scale = _e4m3((largest / (_E2M1_MAX * outer)).clamp(min=_E4M3_MIN)) * outer
    return _or_nan(_e2m1(blocks / scale) * scale, of_expert).flatten(-2)


# By name: the function on fp32 (E, out, in), and the block along `in` that must divide it.
_FORMATS: dict[str, tuple[Callable[[Tensor], Tensor], int]] = {
    "fp8_blocks": (_fp8_blocks, 1),
    "mxfp4": (_mxfp4, 32),
    "nvfp4": (_nvfp4, 16),
}
FORMATS = tuple(_FORMATS)


class _StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(ctx, weights: Tensor, format: str) -> Tensor:
        ctx.set_materialize_grads(False)  # moe() with grad_accum gives no gradient
        rounded, (function, _) = torch.empty_like(weights), _FORMATS[format]
        group = max(1, _ELEMENTS // max(1, weights[0].numel())) if len(weights) else 1
        for first in range(0, len(weights), group):
            part = weights[first : first + group].to(torch.float32)
            rounded[first : first + group] = function(part).to(weights.dtype)
        return rounded

    @staticmethod
    def backward(ctx, gradient: Tensor | None) -> tuple[Tensor | None, None]:
        return gradient, None


def check_format(format: str | None, precision: str | None = None) -> str | None:
    """Refuses a name that is no format, and one beside a `precision`."""
    if format is not None:
        _checks.one_of("fake_quantize", format, FORMATS)
        if precision is not None:
            raise ValueError(
                f'fake_quantize is "{format}" and precision is "{precision}": one of them must be '
                "None"
            )
    return format


def fake_quantize(weights: Tensor, format: str) -> Tensor:
    """Weights (E, out, in) in bf16, fp16 or fp32, rounded to values of a format, in their own
    dtype; the gradient of the result is the gradient of `weights`, unchanged. moe() with the result
    trains experts for a checkpoint in this format.

    - "mxfp4": e2m1 values times a power of two for each 32 elements along `in`; the bits of
      packed.pack_mxfp4(weights).unpack().
    - "nvfp4": e2m1 values times an e4m3 scale for each 16 elements along `in` times an fp32 scale
      of the expert. The expert's is its largest magnitude / (6 * 448), a block's its largest
      magnitude / (6 * the expert's), at least 2^-9.
    - "fp8_blocks": e4m3 values times an fp32 scale for each 128 x 128 elements, the largest
      magnitude / 448; the bits of packed.from_fp8_blocks(codes, scales).unpack().

    Values are rounded to nearest, ties to even; value times scale is computed in fp32 and rounded
    once. A block with NaN or infinite elements becomes NaN (in "nvfp4" the expert). The host does
    not wait. Raises ValueError if `in` is not a multiple of the block (32 or 16).
    """
    _checks.tensor("weights", weights)
    _checks.not_distributed("weights", weights)
    _checks.dtype("weights", weights, _DTYPES)
    _checks.one_of("format", format, FORMATS)
    _checks.shape("weights", weights, "(E, out, in)", (None, None, None))
    block = _FORMATS[format][1]
    if weights.shape[2] % block:
        raise ValueError(
            f"weights has shape {tuple(weights.shape)}, `in` must be a multiple of {block} for "
            f'"{format}"'
        )
    return _StraightThrough.apply(weights, format)
