"""Helpers for the experts of training programs, whose rows a dispatcher has grouped."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import _checks


def offsets_of(num_tokens_per_expert: Tensor, experts: int) -> Tensor:
    """Offsets (E+1,) int64 from counts (E,) of any dtype. The counts may be floats: torch.histc
    returns floats."""
    name = "num_tokens_per_expert"
    _checks.tensor(name, num_tokens_per_expert)
    _checks.shape(name, num_tokens_per_expert, "(E,)", (experts,))
    return F.pad(num_tokens_per_expert.cumsum(0, dtype=torch.int64), (1, 0))
