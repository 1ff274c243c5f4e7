"""Cases of ExpertParallelMoE against MoE, which has the same weights and all ranks' tokens."""

from __future__ import annotations

import io
from itertools import product

import pytest
import reference
import sonicmoe_cpp as smoe
import torch
import torch.distributed as dist
from expert_parallel_base import SPLITS, TRANSPORT, D, E, K, N, T, World, case
from sonicmoe_cpp.distributed import ExpertParallelMoE, clip_grad_norm_, moe_expert_parallel


def modules(world: World, **options) -> tuple[ExpertParallelMoE, smoe.MoE]:
    """Two modules with equal weights: `one` loads the gathered weights of `parallel`."""
    torch.manual_seed(world.rank)  # all ranks must use rank 0's seed
    dtype = torch.float32 if world.device == "cpu" else torch.bfloat16
    where = {"device": world.device, "dtype": dtype, "router_dtype": torch.float32}
    sizes = (E, K, D, N)
    parallel = ExpertParallelMoE(*sizes, **where, **options, **TRANSPORT)
    one = smoe.MoE(*sizes, **where, **options)
    state = {
        n: v.full_tensor() if hasattr(v, "full_tensor") else v
        for n, v in parallel.state_dict().items()
    }
    one.load_state_dict(state)
    return parallel, one


def inputs(world: World, split: str, seed=1) -> torch.Tensor:
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(T, D, generator=g)
    if split == "none":
        x = x[:0]
    return x.to(world.device, torch.float32 if world.device == "cpu" else torch.bfloat16)


def close(world: World, name: str, got, want, roundings=2) -> None:
    """Checks that results are equal up to the order of sums; on CUDA, where modules are in bf16, up
    to `roundings` roundings of bf16."""
    allowed = 2e-6 if world.device == "cpu" else roundings * torch.finfo(torch.bfloat16).eps
    assert got.dtype == want.dtype and got.shape == want.shape, name
    assert reference.error(got, want) <= allowed, (name, reference.error(got, want))


def check_module(world: World, split="uneven", mask=False, call=None, **options) -> None:
    parallel, one = modules(world, bias=True, lb_coef=0.1, z_coef=0.01, **options)
    whole = inputs(world, split).requires_grad_()
    tokens = world.tokens(split)
    part = whole.detach()[tokens].clone().requires_grad_()
    masks = ({}, {})
    if mask:
        padding = torch.arange(len(whole), device=whole.device) % 4 == 1
        masks = {"padding_mask": padding}, {"padding_mask": padding[tokens]}
    torch.manual_seed(5 + world.rank)  # rank 0 has the seed of the single process
    out, aux = (call or parallel)(part, **masks[1])
    torch.manual_seed(5)
    want, of_one = one(whole, **masks[0])
    (out.float().square().sum() + aux.loss).backward()
    (want.float().square().sum() + of_one.loss).backward()
    close(world, "out", out, want[tokens])
    close(world, "x", part.grad, whole.grad[tokens])
    for name in ("loss", "load_balancing", "z"):
        torch.testing.assert_close(getattr(aux, name), getattr(of_one, name), rtol=1e-5, atol=1e-7)
    assert torch.equal(aux.tokens_per_expert, of_one.tokens_per_expert)
    parallel.sum_replicated_gradients()
    for name, parameter in one.named_parameters():
        got, want = parallel.get_parameter(name).grad, parameter.grad
        if hasattr(got, "to_local"):
            got, want = got.to_local(), want[world.experts]
        close(world, name, got, want)


SCORES = (
    {"score": "softmax_after_topk"},
    {"score": "softmax_before_topk", "renormalize": True, "scale": 2.5},
    {"score": "sigmoid", "renormalize": True, "n_group": 4, "topk_group": 2},
    {"score": "sigmoid", "selection_bias": True, "shared_experts": 2},
    {"score": "sqrt_softplus", "renormalize": True, "selection_bias": True},
)


@case
def module_scores(world):
    for options in SCORES:
        check_module(world, **options)


@case
def module_sequences(world):
    """The first of 12 sequences may be all padding."""
    options = {"lb_coef": 0.1, "score": "sigmoid", "balance": "sequence"}
    parallel, one = modules(world, **options)
    whole = inputs(world, "even").view(12, -1, D)
    each = 12 // world.size
    for padded in (0, 1, whole.shape[1]):
        padding = torch.zeros(whole.shape[:2], dtype=torch.bool, device=whole.device)
        padding[0, :padded] = True
        part = slice(each * world.rank, each * (world.rank + 1))
        _, aux = parallel(whole[part], padding_mask=padding[part])
        _, of_one = one(whole, padding_mask=padding)
        torch.testing.assert_close(aux.loss, of_one.loss, rtol=1e-5, atol=1e-7)
        assert torch.equal(aux.tokens_per_expert, of_one.tokens_per_expert)
        for module, loss in ((parallel, aux.loss), (one, of_one.loss)):
            module.router.weight.grad = None
            loss.backward()
        parallel.sum_replicated_gradients()
        close(world, "router", parallel.router.weight.grad, one.router.weight.grad)


@case
def module_splits(world):
    for split in SPLITS:
        for routing in ("topk", "token_rounding", "expert_choice"):
            check_module(world, split, routing=routing, tile=8)


@case
def module_padding(world):
    for routing in ("topk", "token_rounding", "expert_choice"):
        check_module(world, mask=True, routing=routing, tile=8)


@case
def module_activations(world):
    check_module(world, activation="relu2", shared_experts=1)
    check_module(world, gate_layout="interleaved", activation="geglu")


@case
def module_fake_quantisation(world):
    check_module(world, fake_quantize="fp8_blocks")


@case
def module_rounding_modes(world):
    """Rounding is decided over the whole group, as in one process; stochastic rounding takes its
    random numbers from rank 0."""
    for rounding in ("nearest", "up", "down", "score", "stochastic", "balanced"):
        check_module(world, routing="token_rounding", rounding=rounding, tile=8)


@case
def module_rounds_over_the_group(world):
    """One rank's tokens are too few to fill a tile, those of all ranks are enough. In evaluation
    the routing is top-k."""
    parallel, one = modules(world, routing="token_rounding", tile=2 * T * K // E, rounding="up")
    x, tokens = inputs(world, "even"), world.tokens("even")
    close(world, "training", parallel(x[tokens])[0], one(x)[0][tokens])
    close(world, "evaluation", parallel.eval()(x[tokens])[0], one.eval()(x)[0][tokens])
    assert reference.error(one(x)[0], one.train()(x)[0]) > 0.1


@case
def module_selection_bias(world):
    parallel, one = modules(world, score="sigmoid", selection_bias=True)
    x, tokens = inputs(world, "uneven"), world.tokens("uneven")
    for _ in range(3):
        parallel.update_selection_bias(parallel(x[tokens])[1].tokens_per_expert, 0.1)
        one.update_selection_bias(one(x)[1].tokens_per_expert, 0.1)
    assert torch.equal(parallel.selection_bias, one.selection_bias)
    assert (parallel.selection_bias != 0).any()


@case
def module_from_the_meta_device(world):
    kind = {"bias": True, "router_dtype": torch.float32} | TRANSPORT
    empty = ExpertParallelMoE(E, K, D, N, device="meta", **kind)
    with pytest.raises(ValueError, match="x is on meta, for which the process group has no"):
        empty(torch.empty(4, D, device="meta"))
    empty.to_empty(device=world.device)
    parallel = ExpertParallelMoE(E, K, D, N, device=world.device, **kind)
    for layer in (empty, parallel):
        torch.manual_seed(0)
        layer.reset_parameters()
    for name, value in parallel.state_dict().items():
        got = empty.state_dict()[name]
        got, value = (t.to_local() if hasattr(t, "to_local") else t for t in (got, value))
        assert torch.equal(got, value), name


@case
def module_on_a_mesh(world):
    """Without `device`, a module is on the device of its mesh. Another device is refused."""
    mesh = dist.init_device_mesh(world.device, (world.size,), mesh_dim_names=("ep",))
    kind = {"group": mesh["ep"], "score": "sigmoid", "selection_bias": True, **TRANSPORT}
    kind |= {name: training_kind(world)[name] for name in ("dtype", "router_dtype")}
    layer = ExpertParallelMoE(E, K, D, N, **kind)
    parts = [*layer.parameters(), *layer.buffers()]
    assert {t.device.type for t in parts} == {layer.w_up.device_mesh.device_type} == {world.device}
    layer(inputs(world, "even"))[0].float().sum().backward()
    other = "cpu" if world.device == "cuda" else "cuda"
    with pytest.raises(ValueError, match=f"device is {other}, must be meta or of the type of"):
        ExpertParallelMoE(E, K, D, N, device=other, **kind)
    with torch.device("meta"):
        assert ExpertParallelMoE(E, K, D, N, **kind).w_up.device.type == "meta"


@case
def module_from_the_meta_device_for_gloo(world):
    """With a gloo group, a module from the meta device is for the CPU, also beside a GPU."""
    if world.device == "cuda":
        return
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "is_available", lambda: True)
        layer = ExpertParallelMoE(E, K, D, N, device="meta", **TRANSPORT)
    assert layer.w_up.device_mesh.device_type == "cpu"


@case
def module_refusals(world):
    if world.size > 1:
        with pytest.raises(ValueError, match=f"must be a multiple of the group's {world.size}"):
            ExpertParallelMoE(E + 1, K, D, N)
    with pytest.raises(TypeError, match="cannot be pickled: save its state_dict"):
        torch.save(modules(world)[0], io.BytesIO())
    x = inputs(world, "even")
    none = torch.empty(0, 2 * N, D).to(x), torch.empty(0, D, N).to(x)
    ids, weights = smoe.route(x[:, :E].float(), K)
    with pytest.raises(ValueError, match="w_down has 0 experts, must have an equal number on"):
        moe_expert_parallel(x, ids, weights, *none)


@case
def module_clipping(world):
    parallel, one = modules(world, bias=True)
    x, tokens = inputs(world, "uneven"), world.tokens("uneven")
    parallel(x[tokens])[0].float().square().sum().backward()
    one(x)[0].float().square().sum().backward()
    parallel.sum_replicated_gradients()
    got = clip_grad_norm_(parallel.parameters(), 1.0)
    want = torch.nn.utils.clip_grad_norm_(one.parameters(), 1.0)
    close(world, "norm", got.float(), want.float(), 8)
    for name, parameter in one.named_parameters():
        gradient = parallel.get_parameter(name).grad
        if hasattr(gradient, "full_tensor"):
            gradient = gradient.full_tensor()
        close(world, name, gradient, parameter.grad, 8)


@case
def module_clipping_of_gradients_that_some_ranks_lack(world):
    """A part of an expert parameter whose gradient is None counts as 0. The norm of bf16 gradients
    is as exact as that of fp32 gradients."""
    parallel, _ = modules(world)
    for dtype, norm_type in product((torch.float32, torch.bfloat16), (2.0, float("inf"), 1.0)):
        parallel.to(dtype)
        for name in ("w_up", "w_down"):
            parameter = parallel.get_parameter(name)
            parameter.grad = None
            if name == "w_up" and world.rank == world.size - 1:
                parameter.grad = torch.ones_like(parameter)
        count = E // world.size * 2 * N * D
        want = 1.0 if norm_type == float("inf") else count ** (1 / norm_type)
        got = clip_grad_norm_(parallel.parameters(), want / 2, norm_type)
        assert reference.error(got, torch.full_like(got, want)) < 1e-5
        if world.rank == world.size - 1:
            clipped = parallel.w_up.grad.to_local()
            assert reference.error(clipped, torch.full_like(clipped, 0.5)) < 1e-2


@case
def module_gradients_that_some_ranks_lack(world):
    """A missing gradient counts as 0 in the sum; a gradient that no rank has stays None."""
    parallel, _ = modules(world, shared_experts=1)
    shared = parallel.shared_up, parallel.shared_down
    if world.rank == world.size - 1:
        for parameter in shared:
            parameter.grad = torch.ones_like(parameter)
    parallel.sum_replicated_gradients()
    assert parallel.router.weight.grad is None
    for parameter in shared:
        assert torch.equal(parameter.grad, torch.ones_like(parameter))


@case
def module_nan(world):
    """A NaN on one rank appears in the output of its token and in the losses of all ranks."""
    parallel, _ = modules(world, lb_coef=0.1)
    x = inputs(world, "even")[world.tokens("even")].clone()
    if world.rank == 0:
        x[3, 2] = float("nan")
    out, aux = parallel(x)
    rows = out.isnan().any(-1).nonzero().flatten().tolist()
    assert rows == ([3] if world.rank == 0 else [])
    assert aux.loss.isnan() and aux.z.isnan()


@case
def module_autocast(world):
    parallel, one = modules(world)
    x, tokens = inputs(world, "even").requires_grad_(), world.tokens("even")
    part = x.detach()[tokens].clone().requires_grad_()
    with torch.autocast(world.device, dtype=torch.bfloat16):
        got, want = parallel(part)[0], one(x)[0]
    assert got.dtype == torch.bfloat16
    got.float().square().sum().backward()
    want.float().square().sum().backward()
    parallel.sum_replicated_gradients()
    pairs = {"out": (got, want[tokens]), "x": (part.grad, x.grad[tokens])}
    for name in ("w_up", "w_down"):
        gradient = one.get_parameter(name).grad[world.experts]
        pairs[name] = parallel.get_parameter(name).grad.to_local(), gradient
    pairs["router"] = parallel.router.weight.grad, one.router.weight.grad
    for name, (mine, whole) in pairs.items():
        assert mine.dtype == whole.dtype, name
        error = reference.error(mine, whole)
        assert error < 4 * torch.finfo(torch.bfloat16).eps, (name, error)


@case
def module_checkpointing(world):
    from torch.utils.checkpoint import checkpoint

    parallel, _ = modules(world, routing="token_rounding", tile=8, rounding="stochastic")
    x = inputs(world, "uneven")[world.tokens("uneven")]
    found = []
    for reentrant in (None, False, True):
        torch.manual_seed(world.rank)
        parallel.zero_grad()
        leaf = x.clone().requires_grad_()
        if reentrant is None:
            out = parallel(leaf)[0]
        else:
            out = checkpoint(lambda t: parallel(t)[0], leaf, use_reentrant=reentrant)
        out.float().square().sum().backward()
        found.append([out, leaf.grad, *(p.grad.clone() for p in parallel.parameters())])
    for values in zip(*found, strict=True):
        first, *others = (t.to_local() if hasattr(t, "to_local") else t for t in values)
        assert all(torch.equal(first, other) for other in others)


# ---- checkpoints and FSDP2 -----------------------------------------------------------------------


def train(module, optimizer, x) -> torch.Tensor:
    out, aux = module(x)
    (out.float().square().sum() + aux.loss).backward()
    module.sum_replicated_gradients()
    optimizer.step()
    optimizer.zero_grad()
    return module(x)[0].detach()


def adam(module):
    return torch.optim.AdamW(module.parameters(), lr=1e-2)


def training_kind(world: World) -> dict:
    dtype = torch.float32 if world.device == "cpu" else torch.bfloat16
    return {"device": world.device, "dtype": dtype, "router_dtype": torch.float32}


def trained_by_one(world: World, steps: int) -> tuple[smoe.MoE, torch.optim.Optimizer]:
    """The module of a single process after some steps, computed by every rank itself."""
    torch.manual_seed(11)
    one = smoe.MoE(E, K, D, N, bias=True, lb_coef=0.1, **training_kind(world))
    optimizer = adam(one)
    for _ in range(steps):
        out, aux = one(inputs(world, "even"))
        (out.float().square().sum() + aux.loss).backward()
        optimizer.step()
        optimizer.zero_grad()
    return one, optimizer


@case
def checkpoint(world):
    """One world saves after a step; any number of ranks load the checkpoint and continue as one
    process would."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    x, tokens = inputs(world, "even"), world.tokens("even")
    kind = training_kind(world) | TRANSPORT
    parallel = ExpertParallelMoE(E, K, D, N, bias=True, lb_coef=0.1, **kind)
    if world.saves:
        parallel.load_state_dict(trained_by_one(world, 0)[0].state_dict())
        optimizer = adam(parallel)
        train(parallel, optimizer, x[tokens])
        state = dict(zip(("model", "optimizer"), get_state_dict(parallel, optimizer), strict=True))
        dcp.save(state, checkpoint_id=world.folder / "checkpoint")
        parallel = ExpertParallelMoE(E, K, D, N, bias=True, lb_coef=0.1, **kind)
    optimizer = adam(parallel)
    state = dict(zip(("model", "optimizer"), get_state_dict(parallel, optimizer), strict=True))
    dcp.load(state, checkpoint_id=world.folder / "checkpoint")
    set_state_dict(
        parallel, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
    )
    want = trained_by_one(world, 2)[0](x)[0][tokens]
    got = train(parallel, optimizer, x[tokens])
    # Adam's first step depends only on the signs of the gradients, and bf16 rounding can flip a
    # sign.
    allowed = 1e-4 if world.device == "cpu" else 0.3
    assert reference.error(got, want) < allowed, reference.error(got, want)

    one = smoe.MoE(E, K, D, N, bias=True, **training_kind(world))
    state = {"model": one.state_dict()}
    dcp.load(state, checkpoint_id=world.folder / "checkpoint", no_dist=True)
    one.load_state_dict(state["model"])
    want = trained_by_one(world, 1)[0](x)[0]
    assert reference.error(one(x)[0], want) < allowed


@case
def fsdp2_over_the_other_dimension(world):
    """2 x 2 ranks: experts divided over one dimension and sharded over the other."""
    if world.size != 4:
        return
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh(world.device, (2, 2), mesh_dim_names=("dp", "ep"))
    kind = training_kind(world)
    where = {**kind, "device": None, "group": mesh["ep"], **TRANSPORT}
    parallel = ExpertParallelMoE(E, K, D, N, bias=True, lb_coef=0.1, **where)
    parallel.load_state_dict(trained_by_one(world, 0)[0].state_dict())
    fully_shard(parallel.router, mesh=mesh["dp"])
    fully_shard(parallel, mesh=mesh["dp"])
    assert parallel.w_up.to_local().shape[0] == E // 4
    optimizer = adam(parallel)
    x, tokens = inputs(world, "uneven"), world.tokens("uneven")
    for _ in range(2):
        out, aux = parallel(x[tokens])
        # FSDP2 averages over dp, hence the factor 2. The load-balancing losses of a pair of ranks
        # cover only the pair's tokens, hence the factor 0.
        (2 * out.float().square().sum() + 0 * aux.loss).backward()
        parallel.sum_replicated_gradients()
        optimizer.step()
        optimizer.zero_grad()
    torch.manual_seed(11)
    one = smoe.MoE(E, K, D, N, bias=True, **kind)
    optimizer = adam(one)
    for _ in range(2):
        one(x)[0].float().square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        got, want = parallel(x[tokens])[0], one(x)[0][tokens]
    allowed = 1e-4 if world.device == "cpu" else 0.3  # as in checkpoint()
    assert reference.error(got, want) < allowed, reference.error(got, want)
    for name, value in parallel.state_dict().items():
        assert reference.error(value.full_tensor(), one.state_dict()[name]) < allowed, name


@case
def checkpoint_with_fsdp2(world):
    """2 x 2 ranks save experts that are divided and sharded. As many ranks load the checkpoint and
    continue with the same bits; one process loads it into MoE."""
    if world.size != 4:
        return
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh(world.device, (2, 2), mesh_dim_names=("dp", "ep"))
    kind = training_kind(world)
    x = inputs(world, "even")[world.tokens("even")]
    folder = world.folder / "checkpoint_with_fsdp2"

    def new():
        where = kind | TRANSPORT | {"group": mesh["ep"]}
        module = ExpertParallelMoE(E, K, D, N, bias=True, lb_coef=0.1, **where)
        fully_shard(module.router, mesh=mesh["dp"])  # it may have another dtype
        fully_shard(module, mesh=mesh["dp"])
        return module, adam(module)

    def state_of(module, optimizer):
        return dict(zip(("model", "optimizer"), get_state_dict(module, optimizer), strict=True))

    parallel, optimizer = new()
    train(parallel, optimizer, x)
    dcp.save(state_of(parallel, optimizer), checkpoint_id=folder)
    saved = {name: value.full_tensor() for name, value in parallel.state_dict().items()}
    torch.manual_seed(17)
    loaded, other_optimizer = new()
    assert not torch.equal(loaded.w_up.full_tensor(), saved["w_up"])
    state = state_of(loaded, other_optimizer)
    dcp.load(state, checkpoint_id=folder)
    model, moments = state["model"], state["optimizer"]
    set_state_dict(loaded, other_optimizer, model_state_dict=model, optim_state_dict=moments)
    for name, value in loaded.state_dict().items():
        assert torch.equal(value.full_tensor(), saved[name]), name
    train(parallel, optimizer, x)
    train(loaded, other_optimizer, x)
    for name, value in loaded.state_dict().items():
        assert torch.equal(value.full_tensor(), parallel.state_dict()[name].full_tensor()), name

    one = smoe.MoE(E, K, D, N, bias=True, **kind)
    state = {"model": one.state_dict()}
    dcp.load(state, checkpoint_id=folder, no_dist=True)
    assert all(torch.equal(value, saved[name]) for name, value in state["model"].items())


@case
def weights_do_not_depend_on_the_number_of_ranks(world):
    parallel, _ = modules(world)
    alone = dist.new_group([world.rank], use_local_synchronization=True)
    torch.manual_seed(0)
    where = {"device": world.device, "dtype": parallel.w_up.dtype}
    where |= TRANSPORT
    one = ExpertParallelMoE(E, K, D, N, group=alone, router_dtype=torch.float32, **where)
    for name, value in one.state_dict().items():
        if hasattr(value, "to_local"):
            own = parallel.get_parameter(name).to_local()
            assert torch.equal(value.to_local()[world.experts], own), name
        else:
            assert torch.equal(value, parallel.state_dict()[name]), name
    assert parallel.w_up.to_local().std() > 0.5 * D**-0.5
