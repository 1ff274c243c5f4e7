"""The layers that are timed, and a rank's tensors."""

from __future__ import annotations

from typing import NamedTuple

import torch


class Shape(NamedTuple):
    T: int  # of one rank
    d: int
    n: int
    E: int
    K: int


CONFIGS = {
    "7B-n256": Shape(24576, 1536, 256, 128, 8),
    "30B-n256": Shape(16384, 4096, 256, 256, 16),
    "qwen3-30b": Shape(16384, 2048, 768, 128, 8),
    "qwen3-235b": Shape(16384, 4096, 1536, 128, 8),
    "tiny": Shape(96, 64, 32, 8, 2),  # for a trial without GPUs
}


class Data:
    """x, routing and gradient of one rank, and the weights of its experts; equal parts of all
    experts are chosen, which `share` changes: the part of the choices that falls on rank 0."""

    def __init__(self, shape: Shape, rank: int, ranks: int, device, share: float | None = None):
        self.shape, self.rank, self.ranks = shape, rank, ranks
        self.random = torch.Generator(device).manual_seed(100 + rank)
        held = shape.E // ranks

        def normal(*size, scale=1.0):
            kind = {"device": device, "dtype": torch.bfloat16, "generator": self.random}
            return torch.randn(*size, **kind).mul_(scale).requires_grad_()

        self.x = normal(shape.T, shape.d)
        self.dout = normal(shape.T, shape.d).detach()
        self.w_up = normal(held, 2 * shape.n, shape.d, scale=shape.d**-0.5)
        self.w_down = normal(held, shape.d, shape.n, scale=shape.n**-0.5)
        logits = self.logits(shape.E, device)
        if share is not None:
            logits[:, :held] += _advantage(share)
        top, self.ids = logits.topk(shape.K, dim=1)
        self.weights = top.softmax(1).requires_grad_()
        self.local_ids = self.logits(held, device).topk(shape.K, dim=1).indices

    def logits(self, experts: int, device) -> torch.Tensor:
        size = (self.shape.T, experts)
        return torch.randn(size, device=device, generator=self.random)

    def leaves(self) -> tuple:
        return self.x, self.weights, self.w_up, self.w_down


def _advantage(share: float) -> float:
    """What is added to rank 0's logits, so that about this part of the choices falls on it. Found
    by trial with K = 8 of E = 128; other shapes come near it."""
    return {0.5: 0.0, 0.55: 0.1, 0.6: 0.2, 0.4: -0.2, 0.45: -0.1}[share]
