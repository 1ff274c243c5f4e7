"""Cases of low-rank factors on experts that are divided among ranks, against MoE with the same
weights, factors and all ranks' tokens."""

from __future__ import annotations

import pytest
import reference
import sonicmoe_cpp as smoe
import torch
import torch.distributed as dist
from expert_parallel_base import TRANSPORT, D, E, K, N, World, case
from expert_parallel_modules import close, inputs
from sonicmoe_cpp.distributed import ExpertParallelMoE, clip_grad_norm_

RANK, ALPHA = 4, 6.0


def pair(world: World, group=None, adapt=None, **options) -> tuple[ExpertParallelMoE, smoe.MoE]:
    """Two modules with equal weights and factors, of which B is not zero."""
    torch.manual_seed(world.rank if group is None else 0)  # two groups have equal weights
    dtype = torch.float32 if world.device == "cpu" else torch.bfloat16
    kind = {"device": world.device, "dtype": dtype, "router_dtype": torch.float32} | options
    parallel = ExpertParallelMoE(E, K, D, N, group=group, **kind, **TRANSPORT)
    one = smoe.MoE(E, K, D, N, **kind | {"device": world.device})
    for module in (parallel, one):
        module.add_lora(RANK, ALPHA, **(adapt or {}))
    state = {n: whole(v) for n, v in parallel.state_dict().items()}
    generator = torch.Generator().manual_seed(5)
    for name in ("lora.up_b", "lora.down_b"):
        value = torch.randn(state[name].shape, generator=generator)
        state[name] = value.to(state[name])
    for module in (parallel, one):
        module.load_state_dict(state)
    return parallel, one


def whole(value: torch.Tensor) -> torch.Tensor:
    return value.full_tensor() if hasattr(value, "full_tensor") else value


def compare(world: World, parallel, one, split="uneven") -> None:
    """Output, losses, dx and the gradients of all parameters that are trained."""
    x = inputs(world, split)
    tokens = world.tokens(split)
    part = x[tokens].clone().requires_grad_()
    x.requires_grad_()
    torch.manual_seed(5 + world.rank)  # rank 0 has the seed of the single process
    out, aux = parallel(part)
    torch.manual_seed(5)
    want, of_one = one(x)
    (out.float().square().sum() + aux.loss).backward()
    (want.float().square().sum() + of_one.loss).backward()
    parallel.sum_replicated_gradients()
    close(world, "out", out, want[tokens])
    close(world, "loss", aux.loss, of_one.loss)
    close(world, "dx", part.grad, x.grad[tokens], 8)
    trained = 0
    for name, parameter in one.named_parameters():
        got = parallel.get_parameter(name)
        assert got.requires_grad == parameter.requires_grad, name
        if parameter.grad is None:
            assert got.grad is None, name
            continue
        trained += 1
        close(world, name, whole(got.grad), parameter.grad, 8)
    assert trained == 5, "the router and four factors"


@case
def lora_routings(world):
    for options in (
        {"lb_coef": 0.1, "bias": True, "gate_layout": "interleaved"},
        {"routing": "token_rounding", "tile": 8, "rounding": "stochastic"},
        {"routing": "expert_choice", "activation": "relu2"},
    ):
        compare(world, *pair(world, **options))


@case
def lora_of_ranks_without_tokens(world):
    for split in ("last without", "none"):
        compare(world, *pair(world), split)


@case
def lora_shared_factors(world):
    """A of the up-projection and B of the down-projection belong to all experts: every rank has a
    copy, and their gradients are summed over ranks."""
    parallel, one = pair(world, adapt={"share_outer": True})
    assert not hasattr(parallel.lora.up_a, "placements")
    assert len(parallel.replicated_parameters()) == 3
    compare(world, parallel, one)


@case
def lora_of_one_rank_has_the_bits_of_moe(world):
    """On CUDA a group of one rank may differ by a rounding."""
    alone = dist.new_group([world.rank], use_local_synchronization=True)
    parallel, one = pair(world, group=alone)
    x = inputs(world, "even")
    found = []
    for module in (parallel, one):
        out, _ = module(x)
        names = [n for n, p in module.named_parameters() if p.requires_grad]
        values = [module.get_parameter(n) for n in names]
        found.append([out, *torch.autograd.grad(out.float().square().sum(), values)])
        with torch.no_grad():
            found[-1].append(module(x)[0])
    for got, want in zip(*found, strict=True):
        if world.device == "cpu":
            assert torch.equal(whole(got), want)
        else:
            close(world, "", whole(got), want)


@case
def lora_that_one_rank_trains(world):
    """Rank 0 trains only the router, the others one of the factors: backward on every rank sends
    what the others need."""
    parallel, one = pair(world)
    for name in ("up_a", "up_b", "down_a", "down_b"):
        for module in (parallel, one):
            for other, parameter in module.lora.named_parameters():
                parameter.requires_grad_(other == name and (module is one or world.rank > 0))
                parameter.grad = None
        x = inputs(world, "even")
        parallel(x[world.tokens("even")])[0].float().square().sum().backward()
        one(x)[0].float().square().sum().backward()
        got = getattr(parallel.lora, name)
        if world.rank == 0:
            assert got.grad is None
            continue
        want = getattr(one.lora, name).grad[world.experts]
        close(world, name, got.grad.to_local(), want, 8)


@case
def lora_training(world):
    """Two steps with clipping; factors do not depend on the number of ranks."""
    parallel, one = pair(world, lb_coef=0.1)
    torch.manual_seed(0)
    alone = dist.new_group([world.rank], use_local_synchronization=True)
    where = {"device": world.device, "dtype": parallel.w_up.dtype} | TRANSPORT
    first = ExpertParallelMoE(E, K, D, N, group=alone, **where)
    torch.manual_seed(0)
    other = ExpertParallelMoE(E, K, D, N, **where)
    for module in (first, other):
        torch.manual_seed(1)
        module.add_lora(RANK, ALPHA)
    for name, value in other.lora.state_dict().items():
        assert torch.equal(whole(value), whole(first.lora.state_dict()[name])), name
    assert whole(other.lora.up_a).std() > 0.4 * D**-0.5 and not whole(other.lora.up_b).any()

    x, tokens = inputs(world, "uneven"), world.tokens("uneven")
    optimizers = [  # foreach refuses the router's plain tensors beside DTensors
        torch.optim.SGD([p for p in m.parameters() if p.requires_grad], 0.1, foreach=False)
        for m in (parallel, one)
    ]
    for _ in range(2):
        out, aux = parallel(x[tokens])
        (out.float().square().sum() + aux.loss).backward()
        parallel.sum_replicated_gradients()
        clip_grad_norm_([p for p in parallel.parameters() if p.requires_grad], 1.0)
        want, aux = one(x)
        (want.float().square().sum() + aux.loss).backward()
        torch.nn.utils.clip_grad_norm_([p for p in one.parameters() if p.requires_grad], 1.0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for name, value in one.lora.state_dict().items():
        found = reference.error(whole(parallel.lora.state_dict()[name]), value)
        assert found <= (1e-5 if world.device == "cpu" else 0.05), (name, found)


@case
def lora_checkpoint(world):
    """Saved by all ranks, loaded by one process and by ranks."""
    import torch.distributed.checkpoint as dcp

    parallel, _ = pair(world)
    folder = world.folder / f"lora-{world.size}"
    dcp.save({"model": parallel.state_dict()}, checkpoint_id=folder)
    again, one = pair(world)
    for module, options in ((again, {}), (one, {"no_dist": True})):
        with torch.no_grad():
            module.lora.up_b.zero_()
        state = {"model": module.state_dict()}
        dcp.load(state, checkpoint_id=folder, **options)
        module.load_state_dict(state["model"])
        for name, value in module.lora.state_dict().items():
            assert torch.equal(whole(value), whole(parallel.lora.state_dict()[name])), name


@case
def lora_in_a_compiled_module(world):
    """The graph breaks around the layer."""
    parallel, _ = pair(world)
    x = inputs(world, "uneven")[world.tokens("uneven")]
    model = torch.nn.Sequential(torch.nn.Identity(), parallel)
    want, _ = parallel(x)
    got, _ = torch.compile(model, backend="eager")(x)
    assert torch.equal(got, want)
    torch._dynamo.reset()


@case
def lora_with_fsdp2(world):
    """2 x 2 ranks: factors divided over one dimension and sharded over the other."""
    if world.size != 4:
        return
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh(world.device, (2, 2), mesh_dim_names=("dp", "ep"))
    dtype = torch.float32 if world.device == "cpu" else torch.bfloat16
    kind = {"router_dtype": torch.float32, "device": None, "dtype": dtype}
    parallel, one = pair(world, group=mesh["ep"], adapt={"dtype": dtype}, **kind)
    for parameter in (parallel.router.weight, one.router.weight):
        parameter.requires_grad_(False)
    fully_shard(parallel.router, mesh=mesh["dp"])
    fully_shard(parallel, mesh=mesh["dp"])
    with pytest.raises(ValueError, match="has low-rank factors already"):
        parallel.add_lora(RANK, ALPHA)
    parallel.set_gradient_divide_factor(1.0)
    parallel.set_force_sum_reduction_for_comms(True)  # torch 2.11's scaled sum of bf16 is 0
    x, tokens = inputs(world, "uneven"), world.tokens("uneven")
    out, _ = parallel(x[tokens])
    want, _ = one(x)
    close(world, "out", out, want[tokens])
    out.float().square().sum().backward()
    want.float().square().sum().backward()
    for name, parameter in one.lora.named_parameters():
        close(world, name, whole(getattr(parallel.lora, name).grad), parameter.grad, 8)
    plain = ExpertParallelMoE(E, K, D, N, group=mesh["ep"], **kind, **TRANSPORT)
    fully_shard(plain, mesh=mesh["dp"])
    with pytest.raises(ValueError, match="add_lora must come before fully_shard"):
        plain.add_lora(RANK, ALPHA)


@case
def lora_from_the_meta_device(world):
    torch.manual_seed(3)
    kind = {"dtype": torch.float32 if world.device == "cpu" else torch.bfloat16} | TRANSPORT
    layer = ExpertParallelMoE(E, K, D, N, device="meta", **kind)
    layer.add_lora(RANK, ALPHA)
    layer.to_empty(device=world.device)
    layer.reset_parameters()
    assert whole(layer.lora.up_a).std() > 0.4 * D**-0.5 and not whole(layer.lora.up_b).any()
    layer(inputs(world, "even")[world.tokens("even")])[0].sum().backward()


@case
def lora_refusals(world):
    parallel, _ = pair(world)
    with pytest.raises(ValueError, match="ExpertParallelMoE has low-rank factors already"):
        parallel.add_lora(RANK, ALPHA)
    x = inputs(world, "even")[world.tokens("even")]
    parallel.w_up.requires_grad_()
    with pytest.raises(ValueError, match="w_up requires a gradient, must be frozen"):
        parallel(x)
    parallel.w_up.requires_grad_(False)
    buffers = torch.zeros(E, 2 * N, D), torch.zeros(E, D, N)
    with pytest.raises(ValueError, match="grad_accum is given, but add_lora has frozen"):
        parallel(x, grad_accum=buffers)
    parallel(x)
