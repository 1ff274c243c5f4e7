"""Expert parallelism of a measurement: every rank holds E / W experts of each layer, and FSDP2
shards all other parameters over the W ranks."""

from __future__ import annotations

import torch
import torch.distributed as dist
from sonicmoe_cpp.distributed.layer import Place, make_transport
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm


def divide_experts(model: nn.Module, options, ranks: int) -> None:
    """Leaves this rank's experts in each layer of a model on the meta device, and lets rows travel
    over peer memory (over torch.distributed's all-to-all on the CPU)."""
    name = "peer" if options.device == "cuda" else "all_to_all"
    for layer in model.layers:
        routed = layer.moe.routed_experts
        experts = routed.inner_experts
        for parameter, value in list(experts.named_parameters(recurse=False)):
            if len(value) % ranks:
                raise ValueError(f"{len(value)} experts cannot be divided over {ranks} ranks")
            setattr(experts, parameter, nn.Parameter(value[: len(value) // ranks]))
        limits = routed.limits._replace(
            max_tokens=options.tokens,
            capacity=options.capacity or None,
            keep_rows=bool(options.keep_rows),
        )
        transport = make_transport(name, dist.group.WORLD, limits)
        routed.place = Place.of_module(transport)


def divided(model: nn.Module) -> set[nn.Parameter]:
    """The experts' parameters. FSDP2 ignores them: a rank is the only owner of its experts, and
    hooks of FSDP2 inside a block would make torch.compile run the whole block eagerly."""
    return set(parameter_groups(model)[0])


def add_in_place(model: nn.Module) -> None:
    """Lets backward add to the fp32 gradients of the experts in the kernels that compute them.
    Otherwise a micro-batch's gradients are stored in bf16, cast, and added by another kernel."""
    for layer in model.layers:
        experts = layer.moe.routed_experts.inner_experts
        parameters = (experts.w1_EFD, experts.w3_EFD, experts.w2_EDF)
        for parameter in parameters:
            parameter.grad = torch.zeros_like(parameter)
        gate, up, down = (parameter.grad for parameter in parameters)
        experts.grad_accum = ((gate, up), down)


def sum_gradients(model: nn.Module) -> None:
    """Makes FSDP2 sum gradients over the ranks instead of averaging them, because the experts'
    gradients are also sums over all ranks' tokens. The caller divides the loss by the number of
    ranks. By a plain sum: the scaled sum of bf16 (--reduce bfloat16) is 0 in torch 2.11."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)


def parameter_groups(model: nn.Module) -> list[list[nn.Parameter]]:
    """The experts' parameters, then all others: an optimizer's call takes DTensors of one mesh."""
    groups: tuple[list, list] = ([], [])
    for name, parameter in model.named_parameters():
        groups["inner_experts" not in name].append(parameter)
    return list(groups)


def part_of_rank(tensor: Tensor) -> Tensor:
    """This rank's part of a DTensor; any other tensor itself."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def norm_of_parts(parameters: list[nn.Parameter]) -> Tensor:
    """The norm of gradients, of which each rank has a part that no other rank has."""
    squares = get_total_norm([part_of_rank(p.grad) for p in parameters]).square()
    dist.all_reduce(squares)
    return squares.sqrt()


def clip_gradients(groups: list[list[nn.Parameter]], most: float) -> Tensor:
    """As torch's clip_grad_norm_(), for groups of parameters of different meshes. Each rank has a
    part of every gradient that no other rank has: its own experts, and its shards of the others."""
    trained = [[p for p in group if p.grad is not None] for group in groups]
    norm = norm_of_parts([p for group in trained for p in group])
    for group in trained:
        clip_grads_with_norm_(group, most, norm)
    return norm
