"""Cases of peer memory alone: steps in any order, CUDA graphs, overflow, ways to map memory."""

from __future__ import annotations

import itertools
import os

import pytest
import torch
import torch.distributed as dist
from expert_parallel_base import TRANSPORT, D, E, K, N, T, World
from expert_parallel_functions import by_ids, mine_of, results
from expert_parallel_modules import inputs, modules, training_kind
from reference import Layer, error
from sonicmoe_cpp.distributed import (
    ExpertParallelError,
    ExpertParallelMoE,
    _memory,
    check_exchange,
    moe_expert_parallel,
    reset_exchange,
)
from sonicmoe_cpp.distributed._group import group_of

PEER_CASES = {}
# T of all ranks, d, n, E, K. On CUDA a rank's own tokens fill tile records of RECORD_ROWS rows. A
# step multiplies these before the rows of other ranks have arrived.
MIDDLE = {"cuda": (4096, 256, 128, 16, 4), "cpu": (512, 256, 128, 16, 4)}
LARGE = MIDDLE | {"cuda": (16384, 512, 256, 16, 4)}  # tiles for all multiprocessors
RECORD_ROWS = 128
REPEATS = 100


def case(function):
    PEER_CASES[function.__name__] = function
    return function


def middle(world: World, dtype=torch.bfloat16, seed=0, shapes=MIDDLE) -> Layer:
    """This rank's part of a layer whose rows fill several tiles."""
    shape = shapes[world.device]
    tokens, experts = shape[0], shape[3]
    layer = Layer(*shape, seed=seed).to(dtype, world.device)
    mine = slice(world.rank * tokens // world.size, (world.rank + 1) * tokens // world.size)
    held = slice(world.rank * experts // world.size, (world.rank + 1) * experts // world.size)
    layer.ids, layer.dout = layer.ids[mine], layer.dout[mine]
    if world.device == "cuda":
        own_rows = torch.bincount(layer.ids.flatten(), minlength=experts)[held]
        assert own_rows.max() >= RECORD_ROWS
    for name, value in layer.leaves().items():
        rows = mine if name in ("x", "weights") else held
        setattr(layer, name, value.detach()[rows].clone().requires_grad_())
    return layer


def run(layer: Layer, group=None, **options) -> torch.Tensor:
    tokens = MIDDLE[layer.x.device.type][0]
    options = TRANSPORT | {"max_tokens": tokens, "capacity": 2.0} | options
    weights = (layer.w_up, layer.w_down)
    return moe_expert_parallel(layer.x, layer.ids, layer.weights, *weights, group=group, **options)


def exact(layer: Layer, group=None) -> torch.Tensor:
    return run(layer, group, max_tokens=None, capacity=None)


def equal(a: dict, b: dict) -> None:
    for name, value in a.items():
        assert torch.equal(value, b[name]), name


@case
def repeats(world):
    """Repeated steps give equal bits, also with other routings between them."""
    layer, other = middle(world), middle(world, seed=1)
    first = results(layer, run)
    for _ in range(REPEATS):
        results(other, run)
        equal(results(layer, run), first)


@case
def fp8_has_the_bits_of_the_arena(world):
    """Rows that fill several tiles, quantised when they have come: repeated steps and the exact
    mode give equal bits, which are those of all-to-all up to roundings."""
    layer, other = middle(world), middle(world, seed=1)
    quantised = {"precision": "fp8"}
    first = results(layer, lambda mine: run(mine, **quantised))
    for _ in range(REPEATS // 10):
        results(other, lambda mine: run(mine, **quantised))
        equal(results(layer, lambda mine: run(mine, **quantised)), first)
    sizes = {"max_tokens": None, "capacity": None}
    equal(results(layer, lambda mine: run(mine, **quantised, **sizes)), first)
    rows = quantised | sizes | {"transport": "all_to_all"}
    for name, value in results(layer, lambda mine: run(mine, **rows)).items():
        assert error(first[name], value) <= 8 * torch.finfo(torch.bfloat16).eps, name


@case
def exact_mode_has_the_bits_of_the_arena(world):
    layer = middle(world)
    equal(results(layer, exact), results(layer, run))


@case
def as_all_to_all(world):
    for dtype in (torch.bfloat16, torch.float16):
        layer = middle(world, dtype)
        got = results(layer, run)
        rows = {"transport": "all_to_all", "max_tokens": None, "capacity": None}
        want = results(layer, lambda mine, rows=rows: run(mine, **rows))
        for name, value in got.items():
            found = error(value, want[name])
            assert found <= 2 * torch.finfo(dtype).eps, (name, dtype, found)


@case
def steps_in_any_order(world):
    """Several forwards before their backwards, in either order; forwards without a backward; an
    exception of all ranks between a forward and its backward."""
    layers = [middle(world, seed=seed) for seed in range(3)]
    want = [results(layer, run) for layer in layers]
    for order in ((0, 1, 2), (2, 1, 0)):
        outs = [run(layer) for layer in layers]
        for i in order:
            leaves = layers[i].leaves()
            found = torch.autograd.grad(outs[i], list(leaves.values()), layers[i].dout)
            equal(dict(zip(leaves, found, strict=True)), want[i])
    run(layers[0])
    with torch.no_grad():
        run(layers[1])
    with pytest.raises(ValueError, match="tokens, must have at most max_tokens, which is 1"):
        run(layers[2], max_tokens=1)
    equal(results(layers[2], run), want[2])


@case
def kept_rows_have_the_bits_of_rows_sent_again(world):
    """Also where a backward that sends rows again lies between a forward and its backward."""
    layer, other = middle(world), middle(world, seed=1)
    want, of_other = results(layer, run), results(other, run)

    def keeps(mine, **options):
        return run(mine, keep_rows=True, **options)

    for options in ({}, {"max_tokens": None, "capacity": None}):
        equal(results(layer, lambda mine, o=options: keeps(mine, **o)), want)
    out = keeps(layer)
    equal(results(other, run), of_other)
    leaves = layer.leaves()
    found = torch.autograd.grad(out, list(leaves.values()), layer.dout)
    equal(dict(zip(leaves, found, strict=True)), want)
    layer.ids %= MIDDLE[world.device][3] // world.size  # all tokens to rank 0
    options = {"capacity": 2.0 * world.size}
    again = results(layer, lambda mine: run(mine, **options))
    equal(results(layer, lambda mine: keeps(mine, **options)), again)


@case
def layers_share_one_exchange(world):
    x = inputs(world, "even")[world.tokens("even")]
    count = None
    for _ in range(4):
        parallel, _ = modules(world)
        out, aux = parallel(x.clone().requires_grad_())
        (out.float().square().sum() + aux.loss).backward()
        opened = sum(len(b.opened) for b in group_of(None).memory.values())
        assert count in (None, opened)
        count = opened


@case
def checkpointed(world):
    from torch.utils.checkpoint import checkpoint

    layer = middle(world)
    want = results(layer, run)

    def recomputed(mine):
        return checkpoint(lambda x: run(mine), mine.x, use_reentrant=False)

    equal(results(layer, recomputed), want)


@case
def overflow(world):
    """Every rank raises the error that names the rank; after a reset the next steps work."""
    if world.device != "cuda":
        return
    layer = middle(world)
    want = results(layer, run)
    layer.ids = layer.ids % (MIDDLE[world.device][3] // world.size)  # all to rank 0
    out = run(layer, capacity=0.6)
    torch.cuda.synchronize()
    dist.barrier()
    torch.cuda.synchronize()
    with pytest.raises(ExpertParallelError, match="rank 0 got more rows for its experts than"):
        check_exchange()
    with pytest.raises(ExpertParallelError, match="rank 0 got more rows"):
        out.backward(layer.dout)
    with pytest.raises(ExpertParallelError, match="reset_exchange"):
        run(layer)
    assert out.isnan().all()
    reset_exchange(timeout=TRANSPORT["timeout"])
    again = middle(world)
    equal(results(again, run), want)


def at_once(world, *calls) -> list:
    """The results of the calls, each on a stream of its own. On GPUs every second rank begins with
    the last one. One hardware queue has one order for all streams, so there the ranks agree."""
    if world.device != "cuda":
        return [call() for call in calls]
    order = list(range(len(calls)))
    if world.rank % 2 == 1 and os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS") != "1":
        order.reverse()
    current, found = torch.cuda.current_stream(), [None] * len(calls)
    for i in order:
        stream = torch.cuda.Stream()
        stream.wait_stream(current)
        with torch.cuda.stream(stream):
            found[i] = calls[i]()
    torch.cuda.synchronize()
    return found


@case
def beside_another_exchange(world):
    """Steps of two groups at once."""
    group = dist.new_group(list(range(world.size)))
    layer, other = (middle(world, seed=seed, shapes=LARGE) for seed in range(2))
    limits = {"max_tokens": LARGE[world.device][0]}

    def step():
        return results(layer, lambda mine: run(mine, **limits))

    def step_of_group():
        return results(other, lambda mine: run(mine, group, **limits))

    want = step(), step_of_group()
    for _ in range(REPEATS // 5):
        for got, expected in zip(at_once(world, step, step_of_group), want, strict=True):
            equal(got, expected)


@case
def beside_nccl(world):
    """Kernels of NCCL, which hold multiprocessors until all ranks have theirs."""
    if world.device != "cuda":
        return
    layer, shared = middle(world, shapes=LARGE), torch.ones(1 << 22, device=world.device)

    def step():
        return results(layer, lambda mine: run(mine, max_tokens=LARGE[world.device][0]))

    def reduce():
        for _ in range(4):
            dist.all_reduce(shared, dist.ReduceOp.MAX)

    want = step()
    for _ in range(REPEATS // 5):
        equal(at_once(world, step, reduce)[0], want)


def warm_up(step):
    """Runs steps on another stream, as torch requires before a graph capture."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()


def captured(step):
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        static = step()
    return graph, static


def replay(graph, static, step, seed):
    """The graph gives the bits of the same step without a graph."""
    graph.replay()
    torch.cuda.synchronize()
    check_exchange()
    found = [t.clone() for t in static]
    for got, want in zip(found, step(), strict=True):
        assert torch.equal(got, want), seed


@case
def graphs(world):
    """A step is captured once and replayed with other routings."""
    if world.device != "cuda":
        return
    layer = middle(world)
    leaves = list(layer.leaves().values())
    seeds = iter((*range(4), *range(REPEATS // 5)))
    refused = pytest.raises(RuntimeError, match="which a CUDA graph cannot hold")
    for keep_rows, count in ((False, 16), (True, 8)):

        def step(keep_rows=keep_rows):
            out = run(layer, keep_rows=keep_rows)
            return [out.detach(), *torch.autograd.grad(out, leaves, layer.dout)]

        warm_up(step)
        with refused, torch.cuda.graph(torch.cuda.CUDAGraph()):
            run(layer, capacity=None)
        graph, static = captured(step)
        for seed in itertools.islice(seeds, count):
            other = middle(world, seed=seed)
            for name, value in layer.leaves().items():
                value.data.copy_(getattr(other, name).detach())
            layer.ids.copy_(other.ids)
            layer.dout.copy_(other.dout)
            replay(graph, static, step, seed)


@case
def graphs_of_the_module(world):
    """The module in a graph, with its router and its losses; NCCL adds the losses' sums."""
    limits = {"max_tokens": T, "capacity": 4.0}
    kind = training_kind(world) | TRANSPORT | limits
    layer = ExpertParallelMoE(E, K, D, N, bias=True, lb_coef=0.1, **kind)
    x = inputs(world, "uneven")[world.tokens("uneven")].clone().requires_grad_()

    def step():
        out, aux = layer(x)
        loss = out.float().square().sum() + aux.loss
        found = torch.autograd.grad(loss, [x, *layer.parameters()])
        return [out.detach(), *(g.to_local() if hasattr(g, "to_local") else g for g in found)]

    if world.device != "cuda":
        step()
        return
    warm_up(step)
    graph, static = captured(step)
    for seed in range(2, 6):
        x.data.copy_(inputs(world, "uneven", seed)[world.tokens("uneven")])
        replay(graph, static, step, seed)


@case
def cuda_ipc(world):
    """The second way to map memory, in a group of its own."""
    if world.device != "cuda":
        return
    layer = middle(world)
    want = results(layer, run)
    ways = _memory.WAYS
    group = dist.new_group(list(range(world.size)))
    try:
        _memory.WAYS = (_memory.CudaIpc,)
        equal(results(layer, lambda mine: run(mine, group)), want)
    finally:
        _memory.WAYS = ways


@case
def way(world):
    """torch's symmetric memory is used where it works; CUDA IPC serves only machines without it."""
    if world.device != "cuda":
        return
    by_ids(mine_of(world, Layer(60, 24, 16, 12, 3), torch.bfloat16, "even"))
    for buffers in group_of(None).memory.values():
        assert buffers.way == _memory.SymmetricMemory.name, buffers.way
