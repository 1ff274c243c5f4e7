"""Cases of calls in parts, begin to finish, against calls in one piece."""

from __future__ import annotations

import gc

import pytest
import torch
from expert_parallel_base import SPLITS, TRANSPORT, D, E, K, N, T, World, case
from sonicmoe_cpp.distributed import ExpertParallelMoE, reset_exchange
from sonicmoe_cpp.distributed.begun import begin
from sonicmoe_cpp.distributed.layer import run
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

FP8_SIZES = (256, 128)  # fp8 has blocks of 128


def layer_of(world: World, sizes=(D, N), **options) -> ExpertParallelMoE:
    in_bf16 = world.device == "cuda" or "precision" in options
    dtype = torch.bfloat16 if in_bf16 else torch.float32
    where = {"device": world.device, "dtype": dtype, "lb_coef": 0.1}
    return ExpertParallelMoE(E, K, *sizes, **where, **options, **TRANSPORT)


def tokens_of(world: World, split: str, seed: int, like=None) -> torch.Tensor:
    """Of the width and dtype of a weight `like` (..., d)."""
    width = D if like is None else like.shape[-1]
    x = torch.randn(T, width, generator=torch.Generator().manual_seed(seed))
    x = x[world.tokens(split)] if split != "none" else x[:0]
    return x.to(world.device, torch.float32 if like is None else like.dtype)


def started_by(start, layer, x, **options):
    layer._started = lambda: {"start": start}
    try:
        return layer(x, **options)
    finally:
        del layer._started


def in_one_piece(layer, x, **options):
    """A call whose shared experts run before its transfers."""
    return started_by(run, layer, x, **options)


def with_shared(layer, x, **options):
    """A call whose shared experts run under its transfers, as in a CUDA graph."""
    return started_by(begin, layer, x, **options)


def in_two_parts(layer, x, **options):
    handle = layer.begin(x, **options)
    torch.full((1000,), torch.nan, device=x.device)  # takes memory that a step has freed too early
    return handle.finish()


def in_three_parts(layer, x, **options):
    handle = layer.begin(x, **options)
    torch.full((1000,), torch.nan, device=x.device)
    handle.compute()
    torch.full((1000,), torch.nan, device=x.device)
    return handle.finish()


def recomputed(layer, x, **options):
    def call(x):
        return in_three_parts(layer, x, **options)

    return checkpoint(call, x, use_reentrant=False)


WAYS = (with_shared, in_two_parts, in_three_parts, recomputed)


def step(layer, call, x, dout, **options) -> dict:
    """The results of forward and backward, by name."""
    torch.manual_seed(3)
    x = x.clone().requires_grad_()
    layer.zero_grad()
    out, aux = call(layer, x, **options)
    ((out * dout).float().sum() + aux.loss).backward()
    found = {"out": out.detach(), "loss": aux.loss.detach(), "dx": x.grad}
    for name, parameter in layer.named_parameters():
        grad = parameter.grad
        found[name] = grad.to_local() if hasattr(grad, "to_local") else grad
    return found


def check_equal(got: dict, want: dict) -> None:
    assert got.keys() == want.keys()
    for name, value in want.items():
        same = got[name] is None if value is None else torch.equal(got[name], value)
        assert same, name
        assert value is None or not value.isnan().any(), name


def check_bits(world: World, split="uneven", ways=WAYS, prepare=lambda layer: None, **options):
    layer = layer_of(world, **options)
    prepare(layer)
    x, dout = (tokens_of(world, split, seed, layer.router.weight) for seed in (1, 2))
    padding = torch.arange(len(x), device=x.device) % 4 == 1
    for masks in ({}, {"padding_mask": padding}):
        want = step(layer, in_one_piece, x, dout, **masks)
        for way in ways:
            check_equal(step(layer, way, x, dout, **masks), want)


@case
def parts_have_the_bits_of_one_piece(world):
    for split in SPLITS:
        check_bits(world, split, shared_experts=1, bias=True)
    check_bits(world)
    for routing in ("token_rounding", "expert_choice"):
        check_bits(world, routing=routing, tile=8, shared_experts=2)


@case
def parts_with_kept_rows(world):
    check_bits(world, shared_experts=1, keep_rows=True)


@case
def parts_with_low_rank_factors(world):
    def prepare(layer):
        layer.add_lora(4, 8.0)
        with torch.no_grad():
            for factor in layer.lora.parameters():
                factor.to_local().fill_(0.01)

    for keep_rows in (False, True):
        check_bits(world, shared_experts=1, prepare=prepare, keep_rows=keep_rows)


@case
def parts_in_fp8(world):
    for options in ({"shared_experts": 1}, {"keep_h": "bf16"}, {"keep_rows": True}):
        check_bits(world, sizes=FP8_SIZES, precision="fp8", **options)


@case
def parts_without_gradients(world):
    layer = layer_of(world, shared_experts=1)
    x = tokens_of(world, "last without", 1, layer.router.weight)
    with torch.no_grad():
        want, _ = in_one_piece(layer, x)
        for way in (with_shared, in_two_parts, in_three_parts):
            assert torch.equal(way(layer, x)[0], want)
    for parameter in layer.parameters():
        parameter.requires_grad_(False)
    assert torch.equal(in_three_parts(layer, x)[0], want)


@case
def parts_add_to_main_gradients(world):
    layer = layer_of(world, bias=True)
    for parameter in (layer.w_up, layer.w_down):
        parameter.requires_grad_(True)
    x, dout = (tokens_of(world, "uneven", seed, layer.router.weight) for seed in (1, 2))
    found = []
    for way in (in_one_piece, in_two_parts, in_three_parts):
        sums = tuple(
            torch.ones_like(w.to_local(), dtype=torch.float32) for w in (layer.w_up, layer.w_down)
        )
        results = step(layer, way, x, dout, grad_accum=sums)
        assert results["w_up"] is None and results["w_down"] is None
        found.append(results | {"g_up": sums[0], "g_down": sums[1]})
    for each in found[1:]:
        check_equal(each, found[0])


class Attention(torch.nn.Module):
    """One head over all tokens of a rank. By products and a softmax, because the other kinds of
    attention do not repeat the bits of their gradients on GPUs."""

    def __init__(self, **where):
        super().__init__()
        self.qkv = torch.nn.Linear(D, 3 * D, **where)

    def forward(self, x):
        q, k, v = self.qkv(x)[None].chunk(3, -1)
        with sdpa_kernel(SDPBackend.MATH):
            out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + out[0]


@case
def parts_of_two_micro_batches(world):
    """Attention of one micro-batch between the parts of the other one, through two layers."""
    layers = [layer_of(world, shared_experts=1), layer_of(world)]
    where = {"device": world.device, "dtype": layers[0].router.weight.dtype}
    attention = [Attention(**where) for _ in layers]
    parameters = [p for module in (*layers, *attention) for p in module.parameters()]
    like = layers[0].router.weight
    inputs = [tokens_of(world, split, i, like) for i, split in enumerate(("uneven", "even"))]

    def sequential(a, b):
        outs = [a, b]
        for before, layer in zip(attention, layers, strict=True):
            outs = [layer(before(x))[0] for x in outs]
        return outs

    def interleaved(a, b):
        a = attention[0](a)
        for at, layer in enumerate(layers):
            first = layer.begin(a)
            b = attention[at](b)
            first.compute()
            a, _ = first.finish()
            second = layer.begin(b)
            second.compute()
            if at + 1 < len(layers):
                a = attention[at + 1](a)
            b, _ = second.finish()
        return a, b

    found = []
    for way in (sequential, interleaved):
        for parameter in parameters:
            parameter.grad = None
        a, b = (x.clone().requires_grad_() for x in inputs)
        outs = way(a, b)
        sum(out.float().square().sum() for out in outs).backward()
        grads = [getattr(p.grad, "to_local", lambda p=p: p.grad)() for p in parameters]
        found.append([*outs, a.grad, b.grad, *grads])
    for i, (got, want) in enumerate(zip(*reversed(found), strict=True)):
        assert torch.equal(got, want), i


@case
def parts_out_of_order(world):
    """Every rank makes the same mistakes, so the group goes on."""
    layer = layer_of(world)
    x, dout = (tokens_of(world, "uneven", seed, layer.router.weight) for seed in (1, 2))
    want = step(layer, in_one_piece, x, dout)
    handle = layer.begin(x)
    for wrong in (layer, layer.begin, lambda _: layer.sum_replicated_gradients()):
        with pytest.raises(RuntimeError, match="has begun and is not finished: call finish"):
            wrong(x)
    handle.compute()
    with pytest.raises(RuntimeError, match=r"compute\(\) is called twice"):
        handle.compute()
    handle.finish()
    with pytest.raises(RuntimeError, match=r"finish\(\) is called twice"):
        handle.finish()
    with pytest.raises(RuntimeError, match=r"compute\(\) is called twice, or after finish"):
        handle.compute()
    changed = x.clone()
    handle = layer.begin(changed)
    changed.add_(1)
    with pytest.raises(RuntimeError, match="changed in place between begin"):
        handle.finish()
    reset_exchange(layer.group.process_group())
    with pytest.raises(RuntimeError, match="given up by reset_exchange"):
        handle.finish()
    layer.begin(x)  # what it returns is lost
    gc.collect()
    with pytest.raises(RuntimeError, match=r"reset_exchange\(\) on all ranks"):
        layer(x)
    reset_exchange(layer.group.process_group())
    check_equal(step(layer, in_three_parts, x, dout), want)


@case
def parts_of_a_backward_that_is_left(world):
    """An error between the parts of a backward, on all ranks."""
    layer = layer_of(world)
    x, dout = (tokens_of(world, "uneven", seed, layer.router.weight) for seed in (1, 2))
    want = step(layer, in_one_piece, x, dout)

    class Left(torch.autograd.Function):
        @staticmethod
        def forward(ctx, t):
            return t.clone()

        @staticmethod
        def backward(ctx, _):
            raise KeyError("left")

    leaf = torch.ones(1, device=x.device, requires_grad=True)
    handle = layer.begin(x)
    beside = Left.apply(leaf)
    out, _ = handle.finish()
    with pytest.raises(KeyError, match="left"):
        (out.float().sum() + beside.sum()).backward()
    with pytest.raises(RuntimeError, match="has begun and is not finished"):
        layer(x)
    reset_exchange(layer.group.process_group())
    check_equal(step(layer, in_two_parts, x, dout), want)
