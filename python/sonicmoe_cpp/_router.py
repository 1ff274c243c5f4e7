"""The router's product."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from . import _checks
from ._arguments import autocast_dtype


class Router(nn.Linear):
    """A Linear without bias. If compute_dtype is given, it computes in this dtype, also under
    autocast, and also if its weight has another dtype (after module.bfloat16(), or because FSDP2
    gathers it in another dtype)."""

    def __init__(self, hidden_size: int, num_experts: int, compute_dtype=None, **where):
        super().__init__(hidden_size, num_experts, bias=False, **where)
        self.compute_dtype = compute_dtype

    def forward(self, x: Tensor) -> Tensor:
        if not _checks.is_distributed(x):
            _checks.not_distributed("router.weight", self.weight)
        if self.compute_dtype is None:
            return F.linear(x, self.weight)
        x, weight = x.to(self.compute_dtype), self.weight.to(self.compute_dtype)
        if autocast_dtype(x) is None:
            return F.linear(x, weight)
        with torch.autocast(x.device.type, enabled=False):
            return F.linear(x, weight)
