"""The layers that are timed, and the tensors of a rank."""

from __future__ import annotations

import torch
from shapes import Shape, named

TINY = {"tiny": Shape(96, 128, 128, 8, 2)}  # for a test without GPUs


def shape_of(config: str) -> Shape:
    """A named layer with the tokens of one rank, or a tiny one."""
    return TINY[config] if config in TINY else named(config)


CAPACITY = 1.05  # enough: an even routing has at most 1 % more rows than the mean
MOST_OF_VDEV = 16  # experts on a rank: a limit of torch 2.11's all_to_all_vdev_2d


def refused_by_vdev(experts: int, ranks: int) -> str | None:
    """The reason why all_to_all_vdev_2d cannot serve a layer, or None."""
    held = experts // ranks
    if held <= MOST_OF_VDEV:
        return None
    return f"it takes at most {MOST_OF_VDEV} experts a rank, the layer has {held}"


class Data:
    """x, routing and output gradient of one rank, and the weights of its experts. Without `share`
    every expert is chosen equally often on average. `share` is the part of all choices that falls
    on rank 0's experts."""

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
    """The constant that is added to the logits of rank 0's experts, so that about `share` of the
    choices falls on them. Found by trial with K = 8 and E = 128; approximate for other shapes."""
    return {0.5: 0.0, 0.55: 0.1, 0.6: 0.2, 0.4: -0.2, 0.45: -0.1}[share]
