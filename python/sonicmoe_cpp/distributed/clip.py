"""Clips gradients, of which some are DTensors divided among ranks."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate

from .._call import score_dtype
from ._group import group_of
from .layer import TIMEOUT


@torch.no_grad()
def clip_grad_norm_(
    parameters: Iterable[Tensor] | Tensor,
    max_norm: float,
    norm_type: float = 2.0,
    *,
    timeout: float = TIMEOUT,
) -> Tensor:
    """As torch.nn.utils.clip_grad_norm_, but parameters may be DTensors and plain tensors together,
    which torch refuses. Returns the norm of all gradients, the same on every rank. It is summed in
    fp32, or in fp64 if a gradient is fp64; torch rounds norms of bf16 gradients to bf16.

    Every rank must call it; after `timeout` seconds the ranks that wait raise ExpertParallelError.
    A part of a DTensor whose gradient is None on its rank counts as 0. Gradients of plain
    parameters must be equal on all ranks: call sum_replicated_gradients() first.
    """
    parameters = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    parts: dict = {}  # norms of local gradients by the mesh and placements of their parameters
    dtype = torch.float32
    for p in parameters:
        place = (p.device_mesh, p.placements) if isinstance(p, DTensor) else None
        local = p.detach() if place is None else p.to_local()
        part = parts.setdefault(place, [local.new_zeros((), dtype=score_dtype(local))])
        dtype = torch.promote_types(dtype, score_dtype(local))
        if p.grad is not None and local.numel() > 0:
            grad = p.grad if place is None else p.grad.redistribute(*place).to_local()
            norm = torch.linalg.vector_norm(grad, norm_type, dtype=score_dtype(grad))
            part.append(norm.to(part[0].device))
    norms = []
    for place, part in parts.items():
        norm = torch.linalg.vector_norm(torch.stack(part), norm_type).double()
        for dimension, placement in enumerate(() if place is None else place[1]):
            if not isinstance(placement, Replicate):
                group = group_of(place[0].get_group(dimension))
                with group.call():
                    norms_of_ranks = group.all_gather(norm, timeout)
                norm = torch.linalg.vector_norm(norms_of_ranks, norm_type)
        norms.append(norm)
    if not norms:
        return torch.tensor(0.0)
    total = torch.linalg.vector_norm(torch.stack(norms), norm_type).to(dtype)
    with_gradient = [p for p in parameters if p.grad is not None]
    torch.nn.utils.clip_grads_with_norm_(with_gradient, max_norm, total, foreach=False)
    return total
