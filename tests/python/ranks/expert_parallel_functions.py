"""Cases of moe_expert_parallel and moe_pairs_expert_parallel against the layer in plain PyTorch."""

from __future__ import annotations

import warnings

import pytest
import reference
import sonicmoe_cpp as smoe
import torch
import torch.distributed as dist
from expert_parallel_base import TRANSPORT, D, E, K, N, T, World, case
from reference import Layer
from sonicmoe_cpp.distributed import moe_expert_parallel, moe_pairs_expert_parallel
from sonicmoe_cpp.distributed._group import Group


def of_one_process(layer: Layer, split: str) -> Layer:
    """The layer with the tokens of all ranks together."""
    if split == "none":
        for name in ("x", "weights"):
            setattr(layer, name, getattr(layer, name).detach()[:0].requires_grad_())
        layer.ids, layer.dout = layer.ids[:0], layer.dout[:0]
    return layer


def by_ids(mine: Layer, group=None, options=None) -> torch.Tensor:
    options = TRANSPORT | (options or {}) | mine.options
    options |= {"b_up": mine.b_up, "b_down": mine.b_down}
    arguments = (mine.x, mine.ids, mine.weights, mine.w_up, mine.w_down)
    return moe_expert_parallel(*arguments, group=group, **options)


def by_pairs(mine: Layer) -> torch.Tensor:
    """The layer by pairs in random order, among them empty pairs of every kind; gate and up weights
    are separate where the layout allows it."""
    token = torch.arange(mine.ids.shape[0]).repeat_interleave(K).to(mine.ids)
    expert, weight = mine.ids.flatten(), mine.weights.flatten()
    order = torch.randperm(token.numel(), generator=torch.Generator().manual_seed(3))
    order = order.to(token.device)
    extra = torch.tensor([-1, 0, 0, len(mine.x)], device=token.device)
    pairs = (
        torch.cat((extra, token[order])).int(),
        torch.cat((torch.tensor([0, -1, E, 1], device=token.device), expert[order])).int(),
        torch.cat((weight.new_full((4,), float("nan")), weight[order])),
    )
    options = {"b_up": mine.b_up, "b_down": mine.b_down} | mine.options
    w_up = mine.w_up
    if mine.options["gate_layout"] == "concatenated" and reference.is_gated(options["activation"]):
        w_up = tuple(mine.w_up.chunk(2, dim=1))
        if mine.b_up is None:
            options.pop("gate_layout")
    options |= TRANSPORT
    return moe_pairs_expert_parallel(mine.x, pairs, w_up, mine.w_down, **options)


def mine_of(world: World, layer: Layer, dtype, split: str) -> Layer:
    """The tokens and experts of this rank."""
    mine = layer.to(dtype, world.device)
    tokens = world.tokens(split)
    mine.ids, mine.dout = mine.ids[tokens], mine.dout[tokens]
    for name, value in mine.leaves().items():
        rows = tokens if name in ("x", "weights") else world.experts
        setattr(mine, name, value.detach()[rows].clone().requires_grad_())
    return mine


def results(mine: Layer, function) -> dict:
    """As Layer.step, but `function` takes the whole Layer."""
    out = function(mine)
    leaves = mine.leaves()
    grads = torch.autograd.grad(out, list(leaves.values()), mine.dout)
    return {"out": out.detach()} | dict(zip(leaves, grads, strict=True))


def check_function(world: World, layer: Layer, split="even", function=by_ids) -> None:
    layer = of_one_process(layer, split)
    exact = layer.step(reference.moe)
    for dtype in world.mean_dtypes():
        plain = layer.to(dtype).step(reference.moe)
        got = results(mine_of(world, layer, dtype, split), function)
        for name, value in got.items():
            rows = world.tokens(split) if name in ("out", "x", "weights") else world.experts
            want = exact[name][rows]
            reference.assert_twice(name, value.cpu(), plain[name][rows], want, dtype)


def random_layer(**options) -> Layer:
    return Layer(T, D, N, E, K, **options)


def skewed(layer: Layer, experts: int, first=0) -> Layer:
    """Routes all tokens to `experts` experts from `first` on. A token may have the same expert
    twice."""
    layer.ids = first + layer.ids % experts
    return layer


@case
def ids_even(world):
    check_function(world, random_layer(bias=True))


@case
def ids_uneven(world):
    check_function(world, random_layer(bias=True, gate_layout="interleaved"), "uneven")


@case
def ids_of_a_last_rank_without_tokens(world):
    check_function(world, random_layer(bias=True), "last without")


@case
def ids_of_a_first_rank_without_tokens(world):
    check_function(world, random_layer(bias=True), "first without")


@case
def no_tokens_anywhere(world):
    check_function(world, random_layer(bias=True), "none")


@case
def all_tokens_to_one_rank(world):
    check_function(world, skewed(random_layer(bias=True), E // world.size), "uneven")


@case
def all_tokens_to_the_last_expert(world):
    check_function(world, skewed(random_layer(), 1, E - 1), "uneven")


@case
def empty_slots_and_tokens_without_experts(world):
    layer = random_layer()
    layer.ids[::2, 1] = -1
    layer.ids[::3, 2] = E
    layer.ids[5:20] = E + 7
    check_function(world, layer, "uneven")


@case
def activations(world):
    for name in reference.ACTIVATIONS:
        check_function(world, random_layer(activation=name, bias=name in ("swiglu", "relu2")))


@case
def pairs_uneven(world):
    check_function(world, random_layer(), "uneven", by_pairs)


@case
def pairs_without_gate(world):
    check_function(world, random_layer(activation="relu2", bias=True), "first without", by_pairs)


@case
def one_rank_has_the_bits_of_moe(world):
    """A group of one: the sum of a token's experts is rounded once."""
    groups = [dist.new_group([rank]) for rank in range(world.size)]
    layer = random_layer(bias=True)
    for dtype in world.mean_dtypes():
        alone = layer.to(dtype, world.device)
        want = alone.step(smoe.moe)
        got = results(alone, lambda mine: by_ids(mine, groups[world.rank]))
        for name, value in got.items():
            exactly = world.device == "cpu"
            allowed = 0 if exactly else torch.finfo(dtype).eps
            assert reference.error(value, want[name]) <= allowed, (name, dtype)


@case
def bits_of_the_rounding_points(world):
    """Each rank's partial sum is rounded to the dtype; the partial sums are added in fp32, in the
    order of the ranks."""
    for dtype in world.mean_dtypes():
        layer = random_layer(bias=True)
        got = results(mine_of(world, layer, dtype, "uneven"), by_ids)
        whole = layer.to(dtype, world.device)
        total = {"out": 0.0, "x": 0.0, "weights": 0.0}
        token = torch.arange(T, device=world.device).repeat_interleave(K)
        for rank in range(world.size):
            there = whole.ids // (E // world.size) == rank
            expert = torch.where(there, whole.ids, -1).flatten()

            def of_rank(mine, expert=expert, token=token):
                pairs = (token, expert, mine.weights.flatten())
                options = {"b_up": mine.b_up, "b_down": mine.b_down} | mine.options
                return smoe.moe_pairs(mine.x, pairs, mine.w_up, mine.w_down, **options)

            part = results(whole, of_rank)
            total = {name: value + part[name].float() for name, value in total.items()}
        for name, value in total.items():
            rows = world.tokens("uneven")
            assert torch.equal(got[name], value[rows].to(got[name].dtype)), (name, dtype)


@case
def repeats_have_equal_bits(world):
    mine = mine_of(world, random_layer(bias=True), torch.bfloat16, "uneven")
    first = results(mine, by_ids)
    for _ in range(10):
        again = results(mine, by_ids)
        assert all(torch.equal(again[name], first[name]) for name in first)


@case
def a_token_does_not_depend_on_the_others(world):
    for dtype in world.mean_dtypes():
        mine = mine_of(world, random_layer(bias=True), dtype, "uneven")
        whole = results(mine, by_ids)
        for rows in (slice(0, 3), slice(2, None, 3), slice(4, 4 + world.rank)):
            part = mine_of(world, random_layer(bias=True), dtype, "uneven")
            part.ids, part.dout = mine.ids[rows], mine.dout[rows]
            part.x, part.weights = (
                t.detach()[rows].clone().requires_grad_() for t in (mine.x, mine.weights)
            )
            found = results(part, by_ids)
            for name in ("out", "x", "weights"):
                assert torch.equal(found[name], whole[name][rows]), name


@case
def gradients_that_are_not_wanted(world):
    mine = mine_of(world, random_layer(bias=True), torch.bfloat16, "uneven")
    whole = results(mine, by_ids)
    with torch.no_grad():
        assert torch.equal(by_ids(mine), whole["out"])
    for wanted in (("x",), ("weights",), ("w_up",), ("w_down", "b_up"), ("x", "weights")):
        for name, leaf in mine.leaves().items():
            leaf.requires_grad_(name in wanted)
        leaves = [getattr(mine, name) for name in wanted]
        found = torch.autograd.grad(by_ids(mine), leaves, mine.dout)
        for name, gradient in zip(wanted, found, strict=True):
            assert torch.equal(gradient, whole[name]), name


@case
def gradients_that_one_rank_wants(world):
    """Only rank 0 needs the gradient of x. The other ranks still send their part of it."""
    mine = mine_of(world, random_layer(), torch.bfloat16, "even")
    whole = results(mine, by_ids)
    mine.x.requires_grad_(world.rank == 0)
    mine.weights.requires_grad_(world.rank == world.size - 1)
    out = by_ids(mine)
    out.backward(mine.dout)
    assert torch.equal(mine.w_up.grad, whole["w_up"])
    assert (mine.x.grad is not None) == (world.rank == 0)
    for name in ("x", "weights"):
        gradient = getattr(mine, name).grad
        assert gradient is None or torch.equal(gradient, whole[name])


@case
def main_gradients(world):
    mine = mine_of(world, random_layer(), torch.bfloat16, "uneven")
    whole = results(mine, by_ids)
    buffers = tuple(
        torch.ones_like(w, dtype=torch.float32).detach() for w in (mine.w_up, mine.w_down)
    )
    inputs = (mine.x, mine.weights)
    for x, weights in (inputs, [t.detach() for t in inputs]):  # also if nothing else needs one
        out = moe_expert_parallel(
            *(x, mine.ids, weights, mine.w_up, mine.w_down), grad_accum=buffers, **TRANSPORT
        )
        out.backward(mine.dout)
    assert mine.w_up.grad is None and mine.w_down.grad is None
    for buffer, name in zip(buffers, ("w_up", "w_down"), strict=True):
        error = reference.error((buffer - 1) / 2, whole[name])
        assert error < 2 * torch.finfo(torch.bfloat16).eps, (name, error)


class NoGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return None


@case
def no_gradient_in(world):
    """A rank whose output gets no gradient takes part with zeros."""
    mine = mine_of(world, random_layer(), torch.bfloat16, "even")
    if world.rank == 0:
        mine.dout = torch.zeros_like(mine.dout)
    want = results(mine, by_ids)
    out = by_ids(mine)
    if world.rank == 0:
        NoGradient.apply(out).sum().backward()
    else:
        out.backward(mine.dout)
    for name, leaf in mine.leaves().items():
        assert torch.equal(leaf.grad, want[name]), name


@case
def second_derivatives_are_refused(world):
    mine = mine_of(world, random_layer(), torch.bfloat16, "even")
    (dx,) = torch.autograd.grad(by_ids(mine).float().square().sum(), mine.x, create_graph=True)
    with pytest.raises(RuntimeError, match="differentiate twice"):
        dx.float().square().sum().backward()


@case
def host_waits(world):
    """The host waits once in a forward, to read its sizes; with max_tokens the sizes are known.
    torch does not see waits inside the library: a forward over peer memory without a capacity has
    one."""
    if world.device != "cuda":
        return
    expected = 0 if "max_tokens" in TRANSPORT else 1
    mine = mine_of(world, random_layer(bias=True), torch.bfloat16, "uneven")
    results(mine, by_ids)
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            results(mine, by_ids)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    waits = [str(w.message) for w in found if "synchronizing" in str(w.message)]
    assert len(waits) == expected, waits


@case
def refusals(world):
    """Every rank raises the error, and the next call works."""
    layer = random_layer()
    mine = mine_of(world, layer, torch.bfloat16, "even")
    with pytest.raises(TypeError, match="w_down has dtype float64, must be x's bfloat16"):
        mine.w_down, kept = mine.w_down.double(), mine.w_down
        by_ids(mine)
    mine.w_down = kept
    with pytest.raises(ValueError, match=r"transport is \"pigeon\", must be one of: auto, all_to"):
        moe_expert_parallel(
            mine.x, mine.ids, mine.weights, mine.w_up, mine.w_down, transport="pigeon"
        )
    with pytest.raises(ValueError, match="timeout is -1, must be a positive"):
        moe_expert_parallel(mine.x, mine.ids, mine.weights, mine.w_up, mine.w_down, timeout=-1)
    with pytest.raises(TypeError, match="group is str, must be a ProcessGroup"):
        moe_expert_parallel(mine.x, mine.ids, mine.weights, mine.w_up, mine.w_down, group="ep")
    by_ids(mine)


@case
def keeps_no_rows_of_others(world):
    """For backward a rank keeps only its own x, H of the rows routed to it, and metadata."""
    mine = mine_of(world, random_layer(), torch.bfloat16, "even")
    kept = {}

    def pack(t):
        kept[t.untyped_storage().data_ptr()] = (tuple(t.shape), t.dtype)
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        out = by_ids(mine)
    wide = [shape for shape, dtype in kept.values() if shape[-1:] == (D,) and len(shape) == 2]
    assert wide == [tuple(mine.x.shape)], kept
    out.backward(mine.dout)


@case
def kept_rows(world):
    """Ranks that keep rows of x do not send them again, and have the same bits; if one rank does
    not keep its rows, all ranks send them."""
    if TRANSPORT.get("transport") == "peer":
        return
    sent, send = [], Group.send

    def counted(self, rows, *rest):
        sent.append(rows.dim())
        return send(self, rows, *rest)

    def by_kept(keep):
        rows = {"transport": "all_to_all", "keep_rows": keep}
        return lambda mine: by_ids(mine, options=rows)

    for dtype in world.mean_dtypes():
        mine = mine_of(world, random_layer(bias=True), dtype, "uneven")
        want = results(mine, by_kept(False))
        # X, partial sums, dO and dX; X again.
        for keep, rows in ((False, 5), (True, 4), (world.rank == 0, 4 if world.size == 1 else 5)):
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(Group, "send", counted)
                sent.clear()
                got = results(mine, by_kept(keep))
            for name, value in got.items():
                assert torch.equal(value, want[name]), (name, keep)
            of_pairs = 3  # rows and experts, weights, and their gradients
            assert len(sent) == rows + of_pairs, (keep, sent)
    for name in ("w_up", "w_gate"):  # frozen: nothing needs x, so nothing is kept
        if getattr(mine, name, None) is not None:
            getattr(mine, name).requires_grad_(False)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.shape) or t, lambda t: t):
        by_kept(True)(mine)
    assert sum(len(shape) == 2 and shape[1] == D for shape in kept) == 2, kept  # x and b_down


@case
def saved_tensors_changed(world):
    """As test_saved_tensors_ranks.py, with changes that all transports and devices know: other
    strides, and an H that has lost rows."""
    layer = of_one_process(random_layer(), "even")

    def gradients(change):
        mine = mine_of(world, layer, world.mean_dtypes()[-1], "even")
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t, change):
            out = by_ids(mine)
        return torch.autograd.grad(out, list(mine.leaves().values()), mine.dout)

    def padded(t):  # weights on CUDA must begin at multiples of 16 bytes
        return torch.nn.functional.pad(t, (8, 16))[..., 8:-16]

    def apart(t):  # CUDA refuses weights of which no stride is 1
        return torch.stack([t, t], -1)[..., 0] if t.dim() < 3 else padded(t)

    want = gradients(lambda t: t)
    for change in (apart, padded):
        got = gradients(lambda t, change=change: change(t) if t.dim() > 0 else t)
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    with pytest.raises(ValueError, match="a tensor kept for backward has shape"):
        gradients(lambda t: t[:-1] if t.dim() == 2 and t.shape[1] == 2 * N else t)
    got = gradients(lambda t: t)  # the refusal has broken nothing
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
