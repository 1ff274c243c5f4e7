"""Shared by the tests on CUDA: when they run, and how errors are judged."""

from __future__ import annotations

import pytest
import reference
import sonicmoe_cpp
import torch
from reference import Layer
from torch import Tensor

REASON = sonicmoe_cpp.unsupported_reason("cuda")
needs_cuda = pytest.mark.skipif(REASON is not None, reason=str(REASON))
DTYPES = (torch.bfloat16, torch.float16)
# Rows of the experts: none, one, and numbers around 64 (a row block) and 128 (a tile).
AWKWARD = (0, 1, 63, 64, 65, 127, 128, 129)


def awkward_layer(hidden, width, dtype, **options) -> Layer:
    """A layer in float64 on the CPU whose experts have the AWKWARD numbers of rows."""
    counts = torch.tensor(AWKWARD)
    layer = Layer(int(counts.sum()), hidden, width, len(AWKWARD), 1, torch.float64, **options)
    order = torch.randperm(layer.ids.numel(), generator=torch.Generator().manual_seed(5))
    layer.ids = torch.arange(len(AWKWARD)).repeat_interleave(counts)[order][:, None]
    return layer.to(dtype)


def row_errors(got: Tensor, exact: Tensor) -> Tensor:
    """||got - exact|| of every row over the rms norm of exact's rows."""
    width = exact.shape[-1] if exact.dim() > 1 else 1
    got, exact = (t.detach().cpu().double().reshape(-1, width) for t in (got, exact))
    scale = exact.norm(dim=1).square().mean().sqrt()
    return (got - exact).norm(dim=1) / (scale if scale > 0 else 1.0)


def assert_twice(name: str, got: Tensor, peer: Tensor, exact: Tensor, dtype) -> None:
    """Checks the maximum and the mean of the rows' errors: ours may be at most twice the error of
    the same formula in the same precision (`peer`), or one rounding of `dtype`."""
    assert got.dtype == peer.dtype and got.shape == exact.shape, name
    assert got.isfinite().all(), name
    if exact.numel() == 0:
        return
    ours, theirs = row_errors(got, exact), row_errors(peer, exact)
    floor = torch.finfo(dtype).eps
    for measure in (torch.max, torch.mean):
        have, allowed = measure(ours).item(), max(2 * measure(theirs).item(), floor)
        assert have <= allowed, (name, measure.__name__, have, allowed)


def compare(layer: Layer, ours, plain) -> dict[str, Tensor]:
    """Compares ours() on CUDA with ours() on the CPU; plain() in float64 is the exact result."""
    dtype = layer.x.dtype
    exact = layer.to(torch.float64, "cuda").step(plain)
    peer, got = layer.step(ours), layer.to(dtype, "cuda").step(ours)
    for name in exact:
        assert_twice(name, got[name], peer[name], exact[name], dtype)
    return got


def compare_moe(layer: Layer) -> dict[str, Tensor]:
    return compare(layer, sonicmoe_cpp.moe, reference.moe)
