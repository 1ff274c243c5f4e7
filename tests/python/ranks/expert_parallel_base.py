"""Shared by the cases of expert parallelism: sizes, and how tokens and experts are divided."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import torch

E, K, D, N, T = 12, 3, 24, 16, 60
SPLITS = {
    "even": lambda w: [T // w] * w,
    # With few tokens on a rank torch's error of their rows would be a matter of chance.
    "uneven": lambda w: [T - 13 * (w - 1)] + [13] * (w - 1),
    "last without": lambda w: [T // max(1, w - 1)] * (w - 1) + [0 if w > 1 else T],
    "first without": lambda w: [0 if w > 1 else T] + [T // max(1, w - 1)] * (w - 1),
    "none": lambda w: [0] * w,
}


# Arguments of every layer in the cases; runs add transport, max_tokens and capacity.
TRANSPORT = {"timeout": 60.0}


class World(NamedTuple):
    rank: int
    size: int
    device: str
    folder: Path
    saves: bool  # whether this world saves the checkpoint that other worlds load

    @property
    def experts(self) -> slice:
        each = E // self.size
        return slice(self.rank * each, (self.rank + 1) * each)

    def tokens(self, split: str) -> slice:
        sizes = SPLITS[split](self.size)
        begin = sum(sizes[: self.rank])
        return slice(begin, begin + sizes[self.rank])

    def mean_dtypes(self) -> tuple:
        """The dtypes that the layer supports on this device."""
        return (torch.bfloat16,) if self.device == "cuda" else (torch.float32, torch.bfloat16)


CASES = {}


def case(function):
    CASES[function.__name__] = function
    return function
