"""Tests that memory that was never written shows as NaN: other tests rely on it."""

import os

import pytest
import sonicmoe_cpp
import torch

T, D, N, E, K = 40, 24, 16, 5, 2

preloaded = pytest.mark.skipif(
    "SONICMOE_POISON" not in os.environ, reason="poison.c is preloaded by tools/run_tests.sh"
)


@preloaded
def test_rows_that_no_operator_writes():
    x = torch.randn(T, D, dtype=torch.bfloat16, requires_grad=True)
    ids = torch.arange(T * K).view(T, K) % E
    ids[3, 0] = -1  # an empty slot: H has one row that is not written
    w_up = torch.randn(E, 2 * N, D, dtype=torch.bfloat16)
    w_down = torch.randn(E, D, N, dtype=torch.bfloat16)
    found = []
    with torch.autograd.graph.saved_tensors_hooks(found.append, lambda t: t):
        sonicmoe_cpp.moe(x, ids, torch.rand(T, K), w_up, w_down)
    (h,) = (t for t in found if t.dim() == 2 and t.shape[1] == 2 * N)
    assert h[:-1].isfinite().all()
    assert h[-1].isnan().all()
