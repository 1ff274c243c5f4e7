"""How often each expert occurs."""

from __future__ import annotations

import torch
from torch import Tensor

from ... import _checks


def frequency(experts: Tensor, num_experts: int) -> Tensor:
    """(E,) int32: how often each expert occurs in ids of any shape. Ids outside of [0, E) are empty
    slots."""
    flat = experts.flatten().long()
    counted = torch.where((flat >= 0) & (flat < num_experts), flat, num_experts)
    counts = torch.zeros(num_experts + 1, dtype=torch.int32, device=experts.device)
    return counts.scatter_add(0, counted, torch.ones_like(counted, dtype=torch.int32))[:-1]


@torch.no_grad()
def count_cumsum(x: Tensor, E: int, do_cumsum: bool = True) -> Tensor | tuple[Tensor, Tensor]:
    """The counts (E,) int32 of ids x (N,), int32 or int64. With do_cumsum also the inclusive sums
    (E,) int32 of the counts."""
    _checks.tensor("x", x)
    _checks.dtype("x", x, _checks.INDICES)
    _checks.shape("x", x, "(N,)", (None,))
    _checks.integer("E", E)
    counts = frequency(x, E)
    return (counts, counts.cumsum(0, dtype=torch.int32)) if do_cumsum else counts
