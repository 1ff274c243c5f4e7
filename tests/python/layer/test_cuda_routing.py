"""Routing on CUDA against the CPU: ids and pairs are equal bit for bit, weights and gradients are
close."""

import pytest
import sonicmoe_cpp
import torch
from cuda_support import needs_cuda
from sonicmoe_cpp.routing import MODES, SCORES, router_losses

pytestmark = [needs_cuda, pytest.mark.usefixtures("poisoned")]
SHAPES = [(1, 8, 2), (130, 6, 3), (513, 64, 8), (300, 128, 6), (65, 256, 1)]


def logits_of(tokens, experts, dtype=torch.float32):
    """Logits with ties, with tokens that can choose one expert only, and with tokens of NaN."""
    g = torch.Generator().manual_seed(tokens + experts)
    logits = (4 * torch.randn(tokens, experts, generator=g)).round() / 4
    logits[::7, 1:] = float("-inf")
    logits[3::11] = float("nan")
    return logits.to(dtype)


def both(call, logits, results):
    """call on the CPU and on CUDA with its gradient for the weights, index `results` of them."""
    found = []
    for device in ("cpu", "cuda"):
        leaf = logits.detach().to(device).requires_grad_()
        values = call(leaf)
        g = torch.Generator().manual_seed(2)
        upstream = torch.randn(values[results].shape, generator=g).to(device)
        (gradient,) = torch.autograd.grad(values[results], leaf, upstream)
        found.append([v.detach().cpu() for v in (*values, gradient)])
    return found


def assert_same(cpu, cuda):
    for want, got in zip(cpu, cuda, strict=True):
        assert got.dtype == want.dtype and got.shape == want.shape
        if want.is_floating_point():
            # Both are rounded from fp32, so they may differ by a unit in the last place of 16 bits.
            rtol, atol = (1e-5, 1e-5) if want.dtype == torch.float32 else (1e-2, 1e-4)
            torch.testing.assert_close(got, want, rtol=rtol, atol=atol)
        else:
            assert torch.equal(got, want)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("score", SCORES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_route(shape, score, dtype):
    tokens, experts, k = shape
    options = {"score": score, "renormalize": score == "sigmoid", "scale": 1.5}
    assert_same(
        *both(
            lambda logits: sonicmoe_cpp.route(logits, k, **options),
            logits_of(tokens, experts, dtype),
            results=1,
        )
    )


@pytest.mark.parametrize("score", ["sigmoid", "sqrt_softplus"])
def test_groups_and_bias(score):
    bias = torch.randn(64, generator=torch.Generator().manual_seed(4))
    options = {"score": score, "renormalize": True, "n_group": 8, "topk_group": 3}

    def call(logits):
        return sonicmoe_cpp.route(logits, 6, bias=bias.to(logits.device), **options)

    assert_same(*both(call, logits_of(200, 64), results=1))


@pytest.mark.parametrize("score", SCORES)
@pytest.mark.parametrize("mode", MODES)
def test_token_round(mode, score):
    def call(logits):
        return sonicmoe_cpp.token_round(logits, 4, tile=64, mode=mode, seed=9, score=score)

    assert_same(*both(call, logits_of(700, 16, torch.bfloat16), results=2))


@pytest.mark.parametrize("capacity", [1, 50, 2000])
def test_expert_choice(capacity):
    finite = torch.randn(700, 16, generator=torch.Generator().manual_seed(3))
    assert_same(
        *both(lambda logits: sonicmoe_cpp.expert_choice(logits, capacity), finite, results=2)
    )


@pytest.mark.parametrize("score", SCORES)
@pytest.mark.parametrize("tokens", [0, 1, 500])
def test_losses(tokens, score):
    finite = torch.randn(tokens, 16, generator=torch.Generator().manual_seed(1))
    ids, _ = sonicmoe_cpp.route(finite, 4, score=score)
    if tokens:
        ids[0, 3] = -1
    found = []
    for device in ("cpu", "cuda"):
        leaf = finite.to(device).requires_grad_()
        load_balancing, z, counts = router_losses(leaf, ids.to(device), score=score)
        (gradient,) = torch.autograd.grad(load_balancing + 0.1 * z, leaf)
        found.append([t.detach().cpu() for t in (load_balancing, z, counts, gradient)])
    assert_same(*found)


def test_no_tokens():
    logits = torch.empty(0, 8, device="cuda", requires_grad=True)
    ids, weights = sonicmoe_cpp.route(logits, 2)
    pairs = sonicmoe_cpp.token_round(logits, 2, tile=16)
    assert ids.shape == weights.shape == (0, 2)
    assert (pairs.offsets == 0).all() and (pairs.token == -1).all() and (pairs.weight == 0).all()
    (weights.sum() + pairs.weight.sum()).backward()
    assert logits.grad.shape == (0, 8)
