"""The layer on CUDA: every activation, awkward sizes and edges, against the CPU and float64; forms
are in test_forms.py."""

import pytest
import reference
import sonicmoe_cpp
import torch
from cuda_support import DTYPES, awkward_layer, compare, compare_moe, needs_cuda
from reference import ACTIVATIONS, Layer

pytestmark = [needs_cuda, pytest.mark.usefixtures("poisoned", "each_engine")]


@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_top_k(dtype, activation, bias):
    compare_moe(Layer(150, 72, 56, 6, 3, dtype, activation=activation, bias=bias))


@pytest.mark.parametrize("hidden, width", [(8, 8), (24, 200), (200, 72), (264, 264)])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_awkward_numbers_of_rows(dtype, hidden, width):
    got = compare_moe(awkward_layer(hidden, width, dtype, bias=True))
    for name in ("w_up", "w_down", "b_up", "b_down"):
        assert (got[name][0] == 0).all(), name  # the expert without rows


@pytest.mark.parametrize("mode", ["nearest", "up", "down"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rounded_pairs(dtype, mode):
    layer = Layer(500, 72, 56, 6, 2, dtype)
    logits = torch.randn(500, 6, generator=torch.Generator().manual_seed(1))
    logits[:, 2] += 1
    pairs = sonicmoe_cpp.token_round(logits, 2, mode=mode)
    used = pairs.trimmed()
    capacity = pairs.token.shape[0]
    layer.weights = pairs.weight.clone().requires_grad_()
    layer.ids = torch.stack([pairs.token, pairs.expert])  # the routing, carried along

    def ours(x, ids, weights, w_up, w_down, **options):
        return sonicmoe_cpp.moe_pairs(x, (*ids, weights), w_up, w_down, **options)

    def plain(x, ids, weights, w_up, w_down, **options):
        return reference.experts(x, *ids, weights, w_up, w_down, **options)

    assert used.token.shape[0] % 128 == 0 and used.token.shape[0] <= capacity
    got = compare(layer, ours, plain)
    assert (got["weights"][used.token.shape[0] :] == 0).all()


@pytest.mark.parametrize("frozen", [("w_up", "w_down"), ("x",), ("w_down", "weights"), ("b_up",)])
def test_what_is_frozen_gets_no_gradient(frozen):
    layer = Layer(140, 72, 56, 5, 2, torch.bfloat16, bias=True).to(torch.bfloat16, "cuda")
    want = layer.step(sonicmoe_cpp.moe)
    for name in frozen:
        getattr(layer, name).requires_grad_(False)
    layer.call(sonicmoe_cpp.moe).backward(layer.dout)
    for name, leaf in layer.leaves().items():
        if name in frozen:
            assert leaf.grad is None
        else:
            assert torch.equal(leaf.grad, want[name]), name


def test_equal_inputs_give_equal_bits():
    layer = Layer(700, 72, 56, 6, 3, torch.bfloat16, bias=True).to(torch.bfloat16, "cuda")
    first, again = layer.step(sonicmoe_cpp.moe), layer.step(sonicmoe_cpp.moe)
    assert all(torch.equal(first[name], again[name]) for name in first)
    with torch.no_grad():
        assert torch.equal(layer.call(sonicmoe_cpp.moe), first["out"])


def refused(message, error, **changes):
    layer = Layer(20, 16, 8, 4, 2, torch.bfloat16).to(torch.bfloat16, "cuda")
    for name, change in changes.items():
        setattr(layer, name, change(getattr(layer, name).detach()))
    with pytest.raises(error, match=message):
        layer.call(sonicmoe_cpp.moe)


def test_refusals():
    refused("w_up has dtype float16, must be x's bfloat16", TypeError, w_up=torch.Tensor.half)
    refused("w_down is on cpu, must be on x's device cuda:0", ValueError, w_down=torch.Tensor.cpu)
    refused("topk_ids is on cpu", ValueError, ids=torch.Tensor.cpu)
    refused("w_down has shape", ValueError, w_down=lambda w: w[:, :8])
    single = dict.fromkeys(("x", "w_up", "w_down"), torch.Tensor.float)
    refused("dtype is f32", NotImplementedError, **single)
    odd = {"x": lambda x: x[:, :12], "w_up": lambda w: w[:, :, :12], "w_down": lambda w: w[:, :12]}
    refused("multiples of 8", NotImplementedError, **odd)
    refused("strides", NotImplementedError, w_down=lambda w: torch.cat([w, w[..., :3]], 2)[..., :8])
