"""Checks of arguments. An error is one sentence: the argument, its value, and what is allowed.

Wrong types and dtypes, and DTensors, raise TypeError. Wrong shapes, names and values, and a device
other than x's, raise ValueError. A device that cannot be computed on raises NotImplementedError.
The library itself checks the rest: ranges, options, overlapping weights.
"""

from __future__ import annotations

import functools
import math
import numbers
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from . import _library

FLOATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
INDICES = (torch.int32, torch.int64)


class Facts(NamedTuple):
    """The properties of a tensor that the checks below use."""

    dtype: torch.dtype
    device: torch.device
    shape: torch.Size


def tensor(name: str, value) -> None:
    if not isinstance(value, Tensor):
        raise TypeError(f"{name} is {type(value).__name__}, must be a torch.Tensor")
    not_distributed(name, value)


def is_distributed(value) -> bool:
    """Whether `value` is a DTensor; does not import torch.distributed."""
    return type(value).__name__ == "DTensor"


def not_distributed(name: str, value) -> None:
    if is_distributed(value):
        raise TypeError(
            f"{name} is a DTensor, must be a plain torch.Tensor: pass {name}.to_local(), or shard "
            "the module by fully_shard, which gathers its parameters before forward"
        )


def is_wrapped(value) -> bool:
    """Whether `value` is of another tensor class that keeps its data in inner tensors, for example
    torchao's quantised tensors. Its dtype is the dtype that it stands for."""
    return is_traceable_wrapper_subclass(value) and not is_distributed(value)


def plain(name: str, value) -> None:
    """Refuses DTensors and other classes of tensors; takes any other value."""
    not_distributed(name, value)
    if is_wrapped(value):
        raise TypeError(
            f"{name} is a {type(value).__name__}, must be a plain torch.Tensor: dequantise it first"
        )


def given(name: str, value) -> None:
    """Refuses None, with the message of tensor()."""
    if value is None:
        tensor(name, value)


def keys(names: tuple, values: tuple) -> tuple:
    """(dtype, device, shape) of every tensor, as plain tuples, which are much faster to make than
    Facts. None stays None; any other value is refused."""
    found = []
    for value in values:
        if value is None:  # first: isinstance() takes long for what is no Tensor
            found.append(None)
        elif isinstance(value, Tensor):
            found.append((value.dtype, value.device, value.shape))
        else:
            tensor(names[len(found)], value)
    return tuple(found)


def remembered(check):
    """Caches the results of `check`, because a layer has the same facts in every step. Errors are
    not cached. While a graph is traced nothing is cached, because sizes may be symbolic."""
    cached = functools.lru_cache(maxsize=1024, typed=True)(check)

    @functools.wraps(check)
    def run(*arguments):
        if torch.compiler.is_compiling():
            return check(*arguments)
        try:
            return cached(*arguments)
        except TypeError:  # refused, or an argument that cannot be hashed
            return check(*arguments)

    return run


def names(dtypes) -> str:
    return ", ".join(str(d).removeprefix("torch.") for d in dtypes)


def dtype(name: str, value: Facts | Tensor, dtypes=FLOATS) -> None:
    if value.dtype not in dtypes:
        raise TypeError(f"{name} has dtype {names([value.dtype])}, must be {names(dtypes)}")


def shape(name: str, value: Facts | Tensor, meaning: str, expected: tuple) -> None:
    """Refuses a shape that differs from `expected`, which has a size or None (any size) for every
    dimension. `meaning` is the expected shape in letters."""
    if len(value.shape) == len(expected):
        for have, want in zip(value.shape, expected, strict=True):
            if want is not None and have != want:
                break
        else:
            return
    sizes = ", ".join("any" if want is None else str(want) for want in expected)
    raise ValueError(f"{name} has shape {tuple(value.shape)}, must be {meaning} = ({sizes})")


def same(name: str, value: Facts, x: Facts) -> None:
    if value.dtype != x.dtype:
        raise TypeError(f"{name} has dtype {names([value.dtype])}, must be x's {names([x.dtype])}")
    on_device(name, value, x)


def on_device(name: str, value: Facts | Tensor, x: Facts | Tensor) -> None:
    if value.device != x.device:
        raise ValueError(f"{name} is on {value.device}, must be on x's device {x.device}")


def memory(name: str, value: Tensor) -> None:
    """Refuses a tensor whose storage was freed, as expect_memory() of views.h. torch's own
    indexing would read other memory."""
    steps = zip(value.shape, value.stride(), strict=True)
    end = value.storage_offset() + 1 + sum((size - 1) * stride for size, stride in steps)
    have = value.untyped_storage().nbytes()
    if value.numel() > 0 and end * value.element_size() > have:
        raise ValueError(
            f"{name} has freed memory: its storage has {have} bytes, must have at least "
            f"{end * value.element_size()}"
        )


def supported(device: torch.device) -> None:
    # While a graph is traced nothing is refused: the graph refuses a device without kernels when it
    # runs.
    if torch.compiler.is_compiling() and _library.PROBLEM is None:
        return
    reason = _library.unsupported_reason(device)
    if reason is not None:
        raise NotImplementedError(reason)


def integer(name: str, value) -> None:
    whole = isinstance(value, (torch.SymInt, numbers.Integral))
    if isinstance(value, bool) or not whole:
        raise TypeError(f"{name} is {type(value).__name__}, must be an int")


def number(name: str, value) -> None:
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"{name} is {type(value).__name__}, must be a number")


def finite(name: str, value) -> None:
    number(name, value)
    if not math.isfinite(value):
        raise ValueError(f"{name} is {value}, must be finite")


def seed(name: str, value) -> int:
    """A seed of 64 bits as the int64 with the same bits."""
    integer(name, value)
    if not 0 <= value < 2**64:
        raise ValueError(f"{name} is {value}, must be from 0 to 2^64 - 1")
    return value if value < 2**63 else value - 2**64


def one_of(name: str, value, allowed) -> None:
    if value not in tuple(allowed):  # a value that cannot be hashed is refused too
        raise ValueError(f'{name} is "{value}", must be one of: {", ".join(allowed)}')
