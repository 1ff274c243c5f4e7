"""Every derivative against finite differences in fp64."""

import pytest
import reference
import sonicmoe_cpp
import torch
from reference import Layer
from sonicmoe_cpp.routing import SCORES
from torch.autograd import gradcheck

MODES = ("nearest", "up", "down", "score", "stochastic", "balanced")


def check(layer: Layer, function) -> None:
    names = list(layer.leaves())

    def of_leaves(*values):
        other = layer.to(torch.float64)
        for name, value in zip(names, values, strict=True):
            setattr(other, name, value)
        return other.call(function)

    assert gradcheck(of_leaves, tuple(layer.leaves().values()))


@pytest.mark.parametrize("activation", reference.ACTIVATIONS)
def test_moe(activation):
    check(Layer(5, 4, 3, 3, 2, activation=activation, bias=True), sonicmoe_cpp.moe)


@pytest.mark.parametrize("layout", ["concatenated", "interleaved"])
def test_layouts(layout):
    check(Layer(5, 4, 3, 3, 2, gate_layout=layout, bias=True), sonicmoe_cpp.moe)


def test_moe_pairs():
    def pairs(x, ids, weights, *experts, **options):
        g = torch.Generator().manual_seed(1)
        shuffle = torch.randperm(ids.numel(), generator=g)
        token = torch.arange(x.shape[0]).repeat_interleave(ids.shape[1])[shuffle]
        expert = ids.flatten()[shuffle].clone()
        expert[1], token = 7, token.clone()
        token[2] = -1
        weight = weights.flatten()[shuffle]
        return sonicmoe_cpp.moe_pairs(x, (token, expert, weight), *experts, **options)

    check(Layer(5, 4, 3, 3, 2, bias=True), pairs)


@pytest.mark.parametrize("weighted", [False, True])
def test_moe_grouped(weighted):
    def grouped(rows, ids, weights, *experts, **options):
        offsets = torch.tensor([0, 3, 3, 6])
        row_weights = weights.flatten()[: rows.shape[0]] if weighted else None
        out = sonicmoe_cpp.moe_grouped(rows, offsets, *experts, row_weights=row_weights, **options)
        return out + 0 * weights.sum()

    check(Layer(7, 4, 3, 3, 2, bias=True), grouped)


def logits(tokens=6, experts=5):
    g = torch.Generator().manual_seed(0)
    return torch.randn(tokens, experts, generator=g, dtype=torch.float64).requires_grad_()


@pytest.mark.parametrize("renormalize", [False, True])
@pytest.mark.parametrize("score", SCORES)
def test_route(score, renormalize):
    def weights(values):
        options = {"score": score, "renormalize": renormalize, "scale": 2.5}
        return sonicmoe_cpp.route(values, 2, **options)[1]

    assert gradcheck(weights, (logits(),))


@pytest.mark.parametrize("score", ["sigmoid", "sqrt_softplus"])
def test_route_with_groups_and_bias(score):
    bias = torch.linspace(-0.3, 0.3, 6)

    def weights(values):
        options = {"score": score, "bias": bias, "n_group": 3, "topk_group": 2}
        return sonicmoe_cpp.route(values, 2, renormalize=True, **options)[1]

    assert gradcheck(weights, (logits(6, 6),))


@pytest.mark.parametrize("score", SCORES)
@pytest.mark.parametrize("mode", MODES)
def test_token_round(mode, score):
    def weight(values):
        return sonicmoe_cpp.token_round(values, 2, tile=3, mode=mode, seed=5, score=score).weight

    assert gradcheck(weight, (logits(11),))


def test_expert_choice():
    assert gradcheck(lambda v: sonicmoe_cpp.expert_choice(v, 3).weight, (logits(),))


def test_router_losses():
    from sonicmoe_cpp.routing import router_losses

    for score in SCORES:
        ids, _ = sonicmoe_cpp.route(logits(), 2, score=score)
        assert gradcheck(lambda v, s=score, i=ids: router_losses(v, i, score=s)[:2], (logits(),))
