"""Refusals of what Python sees: one sentence naming the argument, what it got, what is allowed.

Types, dtypes and devices raise TypeError or NotImplementedError, shapes and names ValueError. The
library checks the rest (ranges, options, overlapping weights) with sentences of its own.
"""

from __future__ import annotations

import torch
from torch import Tensor

from . import _library

FLOATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
INDICES = (torch.int32, torch.int64)


def _names(dtypes) -> str:
    return ", ".join(str(d).removeprefix("torch.") for d in dtypes)


def tensor(name: str, value, dtypes=FLOATS) -> None:
    if not isinstance(value, Tensor):
        raise TypeError(f"{name} is {type(value).__name__}, must be a torch.Tensor")
    if value.dtype not in dtypes:
        raise TypeError(f"{name} has dtype {_names([value.dtype])}, must be {_names(dtypes)}")


def shape(name: str, value: Tensor, meaning: str, expected: tuple) -> None:
    """`expected` holds a size for every dimension, None where any size will do."""
    good = value.dim() == len(expected) and all(
        want is None or have == want for have, want in zip(value.shape, expected, strict=True)
    )
    if not good:
        sizes = ", ".join("any" if want is None else str(want) for want in expected)
        raise ValueError(f"{name} has shape {tuple(value.shape)}, must be {meaning} = ({sizes})")


def same(name: str, value: Tensor, x: Tensor) -> None:
    if value.dtype != x.dtype:
        raise TypeError(
            f"{name} has dtype {_names([value.dtype])}, must be x's {_names([x.dtype])}"
        )
    on_device(name, value, x)


def on_device(name: str, value: Tensor, x: Tensor) -> None:
    if value.device != x.device:
        raise ValueError(f"{name} is on {value.device}, must be on x's device {x.device}")


def supported(t: Tensor) -> None:
    reason = _library.unsupported_reason(t.device)
    if reason is not None:
        raise NotImplementedError(reason)


def one_of(name: str, value, allowed) -> None:
    if value not in allowed:
        raise ValueError(f'{name} is "{value}", must be one of: {", ".join(allowed)}')
