"""Cases of precision="fp8" and "auto" with experts divided among ranks, against the layer of one
process with the same weights and all ranks' tokens."""

from __future__ import annotations

import contextlib
from typing import NamedTuple

import pytest
import sonicmoe_cpp as smoe
import torch
import torch.distributed as dist
from expert_parallel_base import TRANSPORT, E, K, T, World, case
from expert_parallel_modules import close
from sonicmoe_cpp.distributed import ExpertParallelMoE, moe_expert_parallel
from torch.utils.checkpoint import checkpoint

BF16 = torch.bfloat16
D, N = 256, 128  # fp8 has blocks of 128
ROUNDINGS = 8


def local(value):
    return value.to_local() if hasattr(value, "to_local") else value


def pair(world, group=None, limits=None, **options) -> tuple[ExpertParallelMoE, smoe.MoE]:
    """Two modules with equal weights. `limits` replaces those of TRANSPORT."""
    torch.manual_seed(0)
    options = {"precision": "fp8", "device": world.device, "dtype": BF16} | options
    parallel = ExpertParallelMoE(E, K, D, N, group=group, **options, **TRANSPORT | (limits or {}))
    one = smoe.MoE(E, K, D, N, **options)
    state = parallel.state_dict()
    one.load_state_dict(
        {n: v.full_tensor() if hasattr(v, "full_tensor") else v for n, v in state.items()}
    )
    return parallel, one


def inputs(world: World, split="even", seed=1) -> torch.Tensor:
    x = torch.randn(T, D, generator=torch.Generator().manual_seed(seed))
    return (x[:0] if split == "none" else x).to(world.device, BF16)


def near(name: str, got, want) -> None:
    """Equal up to a few roundings of bf16: partial sums of ranks are rounded."""
    close(NEAR, name, got, want, ROUNDINGS)


NEAR = World(0, 1, "cuda", None, False)  # for close(): modules are in bf16


def compare(world: World, parallel, one, split="uneven", call=None) -> None:
    """Output, dx and the gradients of all parameters."""
    x, tokens = inputs(world, split).requires_grad_(), world.tokens(split)
    part = x.detach()[tokens].clone().requires_grad_()
    out, _ = (call or parallel)(part)
    want, _ = one(x)
    out.float().square().sum().backward()
    want.float().square().sum().backward()
    parallel.sum_replicated_gradients()
    near("out", out, want[tokens])
    near("dx", part.grad, x.grad[tokens])
    for name, parameter in one.named_parameters():
        got, expected = parallel.get_parameter(name).grad, parameter.grad
        if hasattr(got, "to_local"):
            got, expected = got.to_local(), expected[world.experts]
        near(name, got, expected)


@case
def fp8_routings(world):
    for options in (
        {"bias": True, "gate_layout": "interleaved"},
        {"routing": "token_rounding", "tile": 8, "keep_h": "bf16"},
        {"routing": "expert_choice", "activation": "relu2"},
        {"score": "sigmoid", "shared_experts": 1},
    ):
        compare(world, *pair(world, **options))


@case
def fp8_of_ranks_without_tokens(world):
    for split in ("last without", "first without", "none"):
        compare(world, *pair(world), split)


class Step(NamedTuple):
    x: torch.Tensor
    ids: torch.Tensor
    weights: torch.Tensor
    w_up: torch.Tensor
    w_down: torch.Tensor
    dout: torch.Tensor

    def run(self, function, **options) -> list[torch.Tensor]:
        """The output and the gradients of x, routing weights and experts."""
        leaves = [getattr(self, n).detach().requires_grad_() for n in ("x", *self._fields[2:5])]
        x, weights, *experts = leaves
        out = function(x, self.ids, weights, *experts, **options)
        return [out.detach(), *torch.autograd.grad(out, leaves, self.dout)]


def steps(world: World, top_k: int, used: int = E) -> tuple[Step, Step]:
    """A step of all tokens and experts, and this rank's part; `used` experts have tokens."""
    g = torch.Generator().manual_seed(3)
    ids = torch.stack([torch.randperm(E, generator=g)[:top_k] % used for _ in range(T)])
    sizes = (T, D), (E, 2 * N, D), (E, D, N), (T, D)
    x, w_up, w_down, dout = (
        torch.randn(s, generator=g).mul(s[-1] ** -0.5 if i in (1, 2) else 1).to(world.device, BF16)
        for i, s in enumerate(sizes)
    )
    scores = torch.rand((T, top_k), generator=g).to(world.device)
    one = Step(x, ids.to(world.device), scores, w_up, w_down, dout)
    tokens = world.tokens("uneven")
    of_rank = [t[world.experts if n.startswith("w_") else tokens] for n, t in one._asdict().items()]
    return one, Step(*of_rank)


@case
def fp8_has_the_bits_of_one_process(world):
    """With one expert a token no partial sum is rounded, so over ranks nothing else is either: not
    in the output, not in dx, not in the gradients of experts, whose rows come in the same order.
    (CUDA sums dO of one row and b_down in another order, and may have other tiles.)"""
    for used in (E, E // 4):  # the second: all tokens go to the first rank or ranks
        one, mine = steps(world, 1, used)
        tokens = world.tokens("uneven")
        want = one.run(smoe.moe, precision="fp8")
        for more in ({}, {"keep_rows": True}):
            got = mine.run(moe_expert_parallel, precision="fp8", **TRANSPORT | more)
            for i, (have, expected) in enumerate(zip(got, want, strict=True)):
                expected = expected[tokens if i < 3 else world.experts]
                if world.device == "cpu":
                    assert torch.equal(have, expected), (used, more, i)
                else:
                    near(str(i), have, expected)


@case
def fp8_of_one_rank_has_the_bits_of_moe(world):
    alone = dist.new_group([world.rank], use_local_synchronization=True)
    for options in ({}, {"keep_h": "bf16", "shared_experts": 1}, {"precision": "auto"}):
        parallel, one = pair(world, group=alone, bias=True, **options)
        x = inputs(world)
        found = []
        for module in (parallel, one):
            out, _ = module(x)
            values = list(module.parameters())
            found.append([out, *torch.autograd.grad(out.float().square().sum(), values)])
            with torch.no_grad():
                found[-1].append(module(x)[0])
        for got, want in zip(*found, strict=True):
            if world.device == "cpu":
                assert torch.equal(local(got), want)
            else:
                near("", local(got), want)


@case
def fp8_micro_batches_share_quantised_weights(world):
    """Micro-batches of a step quantise once, into main gradients too; changed weights are quantised
    again. What is shared does not change a bit."""
    parallel, _ = pair(world, shared_experts=1)
    times = [0]
    original = smoe.fp8.quantize_weights

    def counting(*arguments, **options):
        times[0] += 1
        return original(*arguments, **options)

    x = inputs(world)[world.tokens("uneven")]
    buffers = [torch.zeros(parallel._local(n).shape, device=x.device) for n in ("w_up", "w_down")]
    optimizer = torch.optim.SGD(parallel.parameters(), lr=1e-3, foreach=False)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(smoe.fp8, "quantize_weights", counting)
        for step in (1, 2):
            for accumulate in (None, tuple(buffers)):
                out, _ = parallel(x, grad_accum=accumulate)
                out.float().square().sum().backward()
            assert times[0] == 2 * step, "the experts and the shared expert"
            optimizer.step()
    assert parallel.w_up.grad is not None and buffers[0].any()
    got, _ = parallel(x)
    parallel.forget_fp8_weights()
    assert torch.equal(parallel(x)[0], got)
    weights = [local(p).detach() for p in (parallel.w_up, parallel.w_down)]
    ids, scores = smoe.route(parallel.router(x), K)
    options = {"precision": "fp8"} | TRANSPORT
    want = moe_expert_parallel(x, ids, scores, *weights, **options)
    quantised = smoe.quantize_weights(*weights)
    got = moe_expert_parallel(x, ids, scores, *weights, fp8_weights=quantised, **options)
    assert torch.equal(got, want)


@case
def fp8_recomputed(world):
    """Activation checkpointing recomputes the same bits."""
    parallel, _ = pair(world)
    found = []
    for call in (parallel, lambda x: checkpoint(parallel, x, use_reentrant=False)):
        parallel.zero_grad()
        x = inputs(world)[world.tokens("uneven")].requires_grad_()
        out, _ = call(x)
        out.float().square().sum().backward()
        found.append([out.detach(), x.grad, *(local(p.grad) for p in parallel.parameters())])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@case
def fp8_kept_bytes(world):
    """H is kept as codes and scales."""
    parallel, _ = pair(world)
    x = inputs(world)[world.tokens("even")]
    sizes = {}
    for keep_h in (None, "bf16"):
        parallel.keep_h = keep_h
        saved = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t, s=saved: s.append(t) or t, id):
            parallel(x)
        sizes[keep_h] = sum({t.data_ptr(): t.nbytes for t in saved if t.numel()}.values())
    routed = parallel(x)[1].tokens_per_expert[world.experts].sum()
    saving = sizes["bf16"] - sizes[None]
    assert saving >= 0.45 * 2 * 2 * N * int(routed) - 1024, (sizes, routed)


@contextlib.contextmanager
def fast_from(rows_each: int):
    """Makes "auto" take fp8 from this number of rows an expert on."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(smoe.fp8, "_auto_rows", lambda device, dtype, number, e, *_: rows_each * e)
        patch.setattr(smoe._library, "_choices", -rows_each)  # in the keys of cached choices
        yield


@case
def auto_chooses_as_one_process(world):
    """By the rows of all ranks together, so that ranks with few tokens choose as the others."""
    mean = T * K // E
    for routing in ("topk", "token_rounding", "expert_choice"):
        options = {"routing": routing, "tile": 8, "limits": {"max_tokens": None, "capacity": None}}
        (parallel, one), low, high = (
            pair(world, precision=p, **options) for p in ("auto", "fp8", None)
        )
        x = inputs(world)
        part = x[world.tokens("uneven")]
        found = set()
        for rows_each in (1, mean // 2, mean - 1, mean, mean + 1, 4 * mean, 10**6):
            with torch.no_grad(), fast_from(rows_each):
                got, alone = parallel(part)[0], one(x)[0]
                takes_fp8 = torch.equal(alone, low[1](x)[0])
                like = low if takes_fp8 else high
                assert torch.equal(got, like[0](part)[0]), (routing, rows_each, takes_fp8)
            found.add(takes_fp8)
        assert found == {True, False}


@case
def auto_with_max_tokens(world):
    """Over peer memory it supposes that every rank has max_tokens tokens."""
    if TRANSPORT.get("transport") != "peer":
        return
    limits = {"limits": {"max_tokens": T, "capacity": None}}
    auto, low, high = (pair(world, precision=p, **limits)[0] for p in ("auto", "fp8", None))
    x = inputs(world)[world.tokens("uneven")]
    most = T * world.size * K // E
    for rows_each, like in ((most, low), (most + 1, high)):
        with torch.no_grad(), fast_from(rows_each):
            assert torch.equal(auto(x)[0], like(x)[0])


@case
def fp8_compiled(world):
    if world.size != 2:
        return
    torch._dynamo.reset()
    for options in ({"keep_h": "bf16"}, {"precision": "auto"}):
        parallel, _ = pair(world, lb_coef=0.1, **options)
        whole = torch.compile(parallel, fullgraph=True, backend="aot_eager", dynamic=True)
        for tokens in (20, 31 + world.rank):
            found = []
            for call in (parallel, whole):
                parallel.zero_grad()
                leaf = inputs(world, seed=tokens)[:tokens].requires_grad_()
                out, aux = call(leaf)
                (out.float().square().sum() + aux.loss).backward()
                found.append([out, leaf.grad, *(local(p.grad) for p in parallel.parameters())])
            assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
        with torch.no_grad():
            assert torch.equal(whole(leaf)[0], parallel(leaf)[0])
    torch._dynamo.reset()


@case
def fp8_with_low_rank_factors(world):
    """As in one process."""
    parallel, one = pair(world)
    torch.manual_seed(4)
    for module in (parallel, one):
        module.add_lora(8, 8.0)
    state = {
        n: v.full_tensor() if hasattr(v, "full_tensor") else v
        for n, v in parallel.state_dict().items()
    }
    state["lora.up_b"] = torch.full_like(state["lora.up_b"], 0.01)
    for module in (parallel, one):
        module.load_state_dict(state)
    x, tokens = inputs(world), world.tokens("uneven")
    out, _ = parallel(x[tokens])
    near("out", out, one(x)[0][tokens])
    out.float().square().sum().backward()
    assert parallel.lora.up_a.grad is not None


@case
def fp8_refusals(world):
    """Calls that all ranks refuse do not break the group."""
    parallel, _ = pair(world)
    x = inputs(world)[world.tokens("even")]
    kind = {"precision": "fp8", "device": world.device} | TRANSPORT
    with pytest.raises(NotImplementedError, match="width is 32, must be a multiple of 64"):
        ExpertParallelMoE(E, K, D, 32, dtype=BF16, **kind)(x)
    with pytest.raises(NotImplementedError, match="must be bf16 for fp8"):
        ExpertParallelMoE(E, K, D, N, dtype=torch.float16, **kind)(x.half())
    with pytest.raises(ValueError, match="precision is 'fp4', must be None or one of"):
        ExpertParallelMoE(E, K, D, N, dtype=BF16, **kind | {"precision": "fp4"})
    with pytest.raises(ValueError, match="keep_h is 'bf16', must be None: precision is None"):
        ExpertParallelMoE(E, K, D, N, dtype=BF16, **kind | {"precision": None, "keep_h": "bf16"})
    weights = [parallel._local(n).detach() for n in ("w_up", "w_down")]
    ids, scores = smoe.route(parallel.router(x), K)
    quantised = smoe.quantize_weights(*weights)
    with pytest.raises(ValueError, match="fp8_weights is given, must be None: precision is None"):
        moe_expert_parallel(x, ids, scores, *weights, fp8_weights=quantised, **TRANSPORT)
    other = quantised._replace(experts=E + 1)
    with pytest.raises(ValueError, match=r"fp8_weights are of \(E, G, n, d\)"):
        options = {"precision": "fp8", "fp8_weights": other} | TRANSPORT
        moe_expert_parallel(x, ids, scores, *weights, **options)
    parallel(x)
