"""Cases of ExpertParallelMoE under torch.compile."""

from __future__ import annotations

import functools

import pytest
import torch
from expert_parallel_base import case
from expert_parallel_modules import close, inputs, modules


@case
def compiled(world):
    if world.size != 2:
        return
    torch._dynamo.reset()
    for options in ({}, {"score": "sigmoid", "renormalize": True, "shared_experts": 1}):
        parallel, _ = modules(world, bias=True, lb_coef=0.1, z_coef=0.01, **options)
        whole = torch.compile(parallel, fullgraph=True, backend="aot_eager", dynamic=True)
        for tokens in (20, 31 + world.rank, 5):
            x = inputs(world, "even", seed=tokens)[:tokens]
            found = []
            for call in (parallel, whole):
                parallel.zero_grad()
                leaf = x.clone().requires_grad_()
                out, aux = call(leaf)
                (out.float().square().sum() + aux.loss).backward()
                found.append(
                    [out, aux.loss, leaf.grad, *(p.grad.clone() for p in parallel.parameters())]
                )
            for a, b in zip(*found, strict=True):
                a, b = (t.to_local() if hasattr(t, "to_local") else t for t in (a, b))
                assert torch.equal(a, b)
        with torch.no_grad():
            assert torch.equal(whole(x)[0], parallel(x)[0])


@case
def compiled_graphs_that_differ(world):
    """One rank has a graph of its own, for T = 0 or 1, or runs eagerly."""
    if world.size != 2:
        return
    torch._dynamo.reset()
    parallel, _ = modules(world, lb_coef=0.1)
    whole = torch.compile(parallel)
    for tokens, eager in (((9, 9), False), ((1, 5), False), ((0, 6), False), ((7, 6), True)):
        x = inputs(world, "even")[: tokens[world.rank]]
        found = []
        for call in (parallel, parallel if eager and world.rank == 0 else whole):
            leaf = x.clone().requires_grad_()
            out, aux = call(leaf)
            (out.float().square().sum() + aux.loss).backward()
            found.append((out, aux.loss, leaf.grad))
        for got, want in zip(*found, strict=True):
            close(world, f"tokens {tokens}", got.detach(), want.detach())


@case
def compiled_main_gradients(world):
    """Micro-batches of a compiled layer add the same bits to main gradients as those of an eager
    one."""
    if world.size != 2:
        return
    torch._dynamo.reset()
    parallel, _ = modules(world, bias=True)
    whole = torch.compile(parallel, fullgraph=True, backend="aot_eager")
    x = inputs(world, "even")[world.tokens("even")]
    found = []
    for call in (parallel, whole):
        parallel.zero_grad()
        weights = [parallel._local(name) for name in ("w_up", "w_down")]
        buffers = [torch.ones_like(w, dtype=torch.float32) for w in weights]
        leaf = x.clone().requires_grad_()
        for _ in range(2):
            out, _ = call(leaf, grad_accum=tuple(buffers))
            out.float().square().sum().backward()
        assert parallel.w_up.grad is None and parallel.w_down.grad is None
        assert all(not torch.equal(b, torch.ones_like(b)) for b in buffers)
        others = [parallel.router.weight, parallel.b_up, parallel.b_down]
        gradients = [p.grad.to_local() if hasattr(p, "to_local") else p.grad for p in others]
        found.append([leaf.grad, *gradients, *buffers])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@case
def compiled_blocks_share_one_graph(world):
    """Blocks with selective checkpointing, compiled without fullgraph: one graph for all of them,
    and what they keep is freed with the ticket."""
    if world.size != 2:
        return
    from sonicmoe_cpp.distributed import _compiled
    from torch._dynamo.testing import CompileCounterWithBackend
    from torch.utils import checkpoint

    torch._dynamo.reset()
    kept = [torch.ops.sonicmoe_cpp.expert_parallel_forward.default]
    context = functools.partial(checkpoint.create_selective_checkpoint_contexts, kept)

    class Block(torch.nn.Module):
        def __init__(self, layer):
            super().__init__()
            self.layer = layer

        def forward(self, x):
            return x + self.layer(x)[0]

    def block(layer, x):
        return checkpoint.checkpoint(layer, x, use_reentrant=False, context_fn=context)

    blocks = [Block(modules(world)[0]) for _ in range(3)]
    counter = CompileCounterWithBackend("aot_eager")
    whole = torch.compile(block, backend=counter)
    x = inputs(world, "even")[world.tokens("even")]
    found = []
    for call in (block, whole):
        leaf = x.clone().requires_grad_()
        out = functools.reduce(lambda t, layer: call(layer, t), blocks, leaf)
        alive = len(_compiled._alive)
        assert alive == (0 if call is block else len(blocks))
        out.float().square().sum().backward()
        found.append([out.detach(), leaf.grad])
        for layer in blocks:
            found[-1] += [p.grad.clone() for p in layer.parameters()]
            layer.zero_grad()
        del out
    assert len(_compiled._alive) == 0
    assert counter.frame_count == 1
    for a, b in zip(*found, strict=True):
        a, b = (t.to_local() if hasattr(t, "to_local") else t for t in (a, b))
        assert torch.equal(a, b)


@case
def a_copied_ticket_is_refused(world):
    from sonicmoe_cpp.distributed import _compiled
    from sonicmoe_cpp.distributed.transport import Forward

    ticket = _compiled._ticket(Forward(torch.zeros(1), (torch.ones(2),), (3,)), ())
    copy, number = ticket.clone(), int(ticket)
    memory = _compiled._kept_by(copy)
    assert memory.kept[0].tolist() == [1, 1] and memory.host == (3,)
    del ticket, memory
    with pytest.raises(RuntimeError, match=f"under ticket {number} is gone"):
        _compiled._kept_by(copy)


@case
def compiled_rounding_breaks_the_graph(world):
    if world.size != 2:
        return
    torch._dynamo.reset()
    parallel, _ = modules(world, routing="token_rounding", tile=8)
    x = inputs(world, "even")[world.tokens("even")]
    call = torch.compile(parallel, backend="aot_eager", dynamic=True)
    assert torch.equal(call(x)[0], parallel(x)[0])
