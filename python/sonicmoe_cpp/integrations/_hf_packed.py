"""Packed weights in transformers' experts: a parameter with the shape and dtype of the unpacked
weights, whose data are codes and scales (docs/huggingface.md)."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor, nn

from .. import packed
from ..packed import PackedWeights

FP8_BLOCK = (128, 128)


class PackedTensor(Tensor):
    """A stand-in for unpacked weights, so that programs find the parameter that they expect. Moves
    and casts keep it packed; any other operation unpacks it first. It cannot be written to."""

    @staticmethod
    def __new__(cls, weights: PackedWeights):
        options = {"dtype": weights.dtype, "device": weights.device}
        return Tensor._make_wrapper_subclass(cls, weights.shape, **options)

    def __init__(self, weights: PackedWeights):
        self.packed = weights

    # With these two a move of a module replaces the parameter instead of its storage, which it does
    # not have.
    def __tensor_flatten__(self):
        parts = self.packed.tensors()
        for name, tensor in parts.items():
            setattr(self, name, tensor)
        w = self.packed
        return list(parts), (w.format, w.shape, w.dtype, w.block, w.transposed)

    @staticmethod
    def __tensor_unflatten__(parts, numbers, size, stride):
        format, shape, dtype, block, transposed = numbers
        options = {"block": block, "transposed": transposed}
        return PackedTensor(PackedWeights(format, shape, dtype, **parts, **options))

    def __repr__(self, *, tensor_contents=None):
        return repr(self.packed)

    def __deepcopy__(self, memo):
        copies = {name: t.clone() for name, t in self.packed.tensors().items()}
        memo[id(self)] = copied = parameter_of(dataclasses.replace(self.packed, **copies))
        return copied

    @classmethod
    def __torch_dispatch__(cls, function, types, arguments=(), options=None):
        options = options or {}
        aten = torch.ops.aten
        if function in (aten.detach.default, aten.alias.default):
            return cls(arguments[0].packed)
        if function is aten._to_copy.default:
            device, dtype = options.get("device"), options.get("dtype")
            return cls(arguments[0].packed.to(device=device, dtype=dtype))
        for argument, value in zip(function._schema.arguments, arguments, strict=False):
            info = argument.alias_info
            if isinstance(value, cls) and info is not None and info.is_write:
                raise TypeError(
                    "packed weights cannot be written to: unpack them first (hf.unpack_experts)"
                )

        def unpacked(value):
            return value.packed.unpack() if isinstance(value, cls) else value

        tree = torch.utils._pytree.tree_map(unpacked, (arguments, options))
        return function(*tree[0], **tree[1])


def parameter_of(weights: PackedWeights) -> nn.Parameter:
    return nn.Parameter(PackedTensor(weights), requires_grad=False)


def _fp8_blocks(module: nn.Module, name: str) -> PackedWeights | None:
    """The parameter `name` of transformers' FP8 experts as packed weights, without a copy; None if
    it is not in FP8 with scales of 128 x 128."""
    codes, scales = getattr(module, name), getattr(module, f"{name}_scale_inv", None)
    if codes.dtype is not torch.float8_e4m3fn or scales is None or scales.dtype != torch.float32:
        return None
    grid = tuple(-(-size // 128) for size in codes.shape[1:])
    rows = getattr(module, "intermediate_dim", 128)  # gate and up have blocks of their own
    if tuple(module.block_size or ()) != FP8_BLOCK or scales.shape[1:] != grid or rows % 128:
        return None
    dtype = getattr(module.config, "dtype", None)
    dtype = dtype if dtype in packed.DTYPES else torch.bfloat16
    parts = codes.detach(), scales.detach()
    return PackedWeights("fp8_blocks", codes.shape, dtype, *parts)


def packed_of(module: nn.Module, name: str) -> PackedWeights | None:
    """The parameter `name` of an experts module if it is packed, as it is stored."""
    value = getattr(module, name)
    if not isinstance(value, PackedTensor):
        return _fp8_blocks(module, name)
    if value.requires_grad:
        raise ValueError(
            f"{name} of {type(module).__name__} is packed, so it cannot be trained: set "
            "requires_grad to False, or call hf.unpack_experts(model)"
        )
    return value.packed


def keep_packed(module: nn.Module, names: tuple[str, ...]) -> None:
    """Makes parameters in FP8 with scales packed ones, whose dtype is not FP8: PEFT gives factors
    the dtype of their parameter. No memory is copied."""
    for name in names:
        weights = _fp8_blocks(module, name)
        if weights is not None:
            setattr(module, name, parameter_of(weights))


def unpack_parameter(module: nn.Module, name: str) -> None:
    value = getattr(module, name)
    if isinstance(value, PackedTensor):
        plain = value.packed.unpack()
        setattr(module, name, nn.Parameter(plain, requires_grad=False))


def has_packed(model: nn.Module) -> bool:
    return any(isinstance(p, PackedTensor) for p in model.parameters())
