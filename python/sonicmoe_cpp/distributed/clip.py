"""Clips gradients, of which some are DTensors divided among ranks."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor


@torch.no_grad()
def clip_grad_norm_(
    parameters: Iterable[Tensor] | Tensor, max_norm: float, norm_type: float = 2.0
) -> Tensor:
    """As torch.nn.utils.clip_grad_norm_, but parameters may be DTensors and plain tensors together,
    which torch refuses. Returns the norm of all gradients, the same on every rank.

    Every rank must call it. Gradients of plain parameters must be equal on all ranks: call
    sum_replicated_gradients() first.
    """
    if isinstance(parameters, Tensor):
        parameters = [parameters]
    parameters = [p for p in parameters if p.grad is not None]
    by_mesh: dict = {}
    for p in parameters:
        mesh = p.grad.device_mesh if isinstance(p.grad, DTensor) else None
        by_mesh.setdefault(mesh, []).append(p.grad)
    norms = [torch.nn.utils.get_total_norm(part, norm_type) for part in by_mesh.values()]
    norms = [norm.full_tensor() if isinstance(norm, DTensor) else norm for norm in norms]
    total = torch.nn.utils.get_total_norm(norms, norm_type)
    torch.nn.utils.clip_grads_with_norm_(parameters, max_norm, total, foreach=False)
    return total
