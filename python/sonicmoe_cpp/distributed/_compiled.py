"""The layer as operators, so that torch.compile sees one call and no communication.

Their results' sizes depend on the routing. Operators take no objects: a group is its name, Routes
are tensors.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from .. import _ops
from . import layer
from ._group import group_of
from .transport import Routes

OPTION_TYPES = {"alpha": float, "limit": float}
ROUTE_TENSORS = ("row", "expert", "token", "slot")


def _group(name: str):
    return group_of(dist.distributed_c10d._resolve_process_group(name))


def _place(where: str, timeout: float, number: int) -> layer.Place:
    group = dist.distributed_c10d._resolve_process_group(where)
    return layer.Place(layer.make_transport("auto", group, timeout), number)


def _options(numbers: Sequence[float]) -> tuple:
    named = zip(_ops.OPTIONS, numbers, strict=True)
    return tuple(OPTION_TYPES.get(name, int)(value) for name, value in named)


def _lists(routes: Routes) -> Tensor:
    """What Routes holds beside tensors, in host memory."""
    counts = routes.sent_rows, routes.received_rows, routes.sent_pairs, routes.received_pairs
    return torch.tensor([*itertools.chain(*counts), routes.needs, routes.call])


def _routes(lists: Tensor, tensors: tuple) -> Routes:
    *counts, needs, call = lists.tolist()
    size = len(counts) // 4
    parts = [counts[i * size : (i + 1) * size] for i in range(4)]
    named = dict(zip(ROUTE_TENSORS, tensors, strict=True))
    return Routes(*parts, needs, call, **named)


@torch.library.custom_op("sonicmoe_cpp::expert_parallel_inference", mutates_args=())
def inference(
    x: Tensor,
    token: Tensor,
    expert: Tensor,
    weights: Tensor,
    w_gate: Tensor | None,
    w_up: Tensor,
    w_down: Tensor,
    b_up: Tensor | None,
    b_down: Tensor | None,
    numbers: Sequence[float],
    where: str,
    timeout: float,
    number: int,
) -> Tensor:
    place = _place(where, timeout, number)
    tensors = (x, token, expert, weights, w_gate, w_up, w_down, b_up, b_down)
    with place.transport.group.call():
        return layer.forward(place, tensors, _options(numbers), (None,) * 3, 0)[0]


@inference.register_fake
def _(x, *_others):
    return x.new_empty(x.shape)


@torch.library.custom_op("sonicmoe_cpp::expert_parallel_forward", mutates_args=())
def recorded(
    x: Tensor,
    token: Tensor,
    expert: Tensor,
    weights: Tensor,
    w_gate: Tensor | None,
    w_up: Tensor,
    w_down: Tensor,
    b_up: Tensor | None,
    b_down: Tensor | None,
    numbers: Sequence[float],
    needs: int,
    where: str,
    timeout: float,
    number: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    place = _place(where, timeout, number)
    tensors = (x, token, expert, weights, w_gate, w_up, w_down, b_up, b_down)
    with place.transport.group.call():
        found = layer.forward(place, tensors, _options(numbers), (None,) * 3, needs)
    *results, routes = found
    return *results, *(getattr(routes, name) for name in ROUTE_TENSORS), _lists(routes)


@recorded.register_fake
def _(x, token, expert, weights, w_gate, w_up, w_down, b_up, b_down, numbers, needs, where, *_rest):
    context = torch.library.get_ctx()
    bytes_saved, received, rows, pairs = (context.new_dynamic_size() for _ in range(4))
    width = w_up.shape[1] * (1 if w_gate is None else 2)
    size = dist.distributed_c10d._resolve_process_group(where).size()
    return (
        x.new_empty(x.shape),
        x.new_empty((received, width)),
        x.new_empty((bytes_saved,), dtype=torch.uint8),
        weights.new_empty((received,)),
        x.new_empty((received,), dtype=torch.int32),
        x.new_empty((received,), dtype=torch.int32),
        x.new_empty((rows,), dtype=torch.int64),
        x.new_empty((pairs,), dtype=torch.int64),
        torch.empty((4 * size + 2,), dtype=torch.int64, device="cpu"),
    )


@torch.library.custom_op("sonicmoe_cpp::expert_parallel_backward", mutates_args=())
def differentiated(
    dout: Tensor,
    x: Tensor,
    row_weights: Tensor,
    experts: Sequence[Tensor | None],
    kept: Sequence[Tensor],
    routes: Sequence[Tensor],
    slots: int,
    numbers: Sequence[float],
    needs: int,
    where: str,
    timeout: float,
    number: int,
) -> list[Tensor]:
    place = _place(where, timeout, number)
    *tensors, lists = routes
    state = (x, row_weights, slots, *experts, *kept, _routes(lists, tuple(tensors)))
    with place.transport.group.guarded():
        found = layer.backward(place, dout, state, _options(numbers), (None,) * 3, needs)
    return [g for g in found if g is not None]


@differentiated.register_fake
def _(dout, x, row_weights, experts, kept, routes, slots, numbers, needs, *_rest):
    like = dict(zip(_ops.DIFFERENTIABLE, (x, None, *experts), strict=True))
    found = []
    for name, bit in _ops.NEEDS.items():
        if needs & bit:
            weights = name == "weights"
            found.append(
                row_weights.new_empty((slots,)) if weights else torch.empty_like(like[name])
            )
    return found


def _setup(ctx, inputs, output):
    x, _, _, weights, *experts, numbers, needs, where, timeout, number = inputs
    _, h, saved, row_weights, *routes = output
    ctx.mark_non_differentiable(*output[1:])
    ctx.rest = numbers, needs, where, timeout, number
    ctx.slots = weights.shape[0]
    ctx.save_for_backward(x, row_weights, h, saved, *routes, *experts)


def _backward(ctx, dout, *_others):
    x, row_weights, h, saved, *rest = ctx.saved_tensors
    routes, experts = rest[:5], rest[5:]
    numbers, needs, *where = ctx.rest
    found = torch.ops.sonicmoe_cpp.expert_parallel_backward(
        *(dout, x, row_weights, list(experts), [h, saved], list(routes)),
        *(ctx.slots, numbers, needs, *where),
    )
    found = iter(found)
    gradients = [next(found) if needs & bit else None for bit in _ops.NEEDS.values()]
    x, weights, *experts = gradients
    return x, None, None, weights, *experts, *[None] * 5


recorded.register_autograd(_backward, setup_context=_setup)


@torch.library.custom_op("sonicmoe_cpp::expert_parallel_all_gather", mutates_args=())
def all_gather(values: Tensor, where: str, timeout: float) -> Tensor:
    group = _group(where)
    with group.guarded():
        return group.all_gather(values, timeout)


@all_gather.register_fake
def _(values, where, timeout):
    size = dist.distributed_c10d._resolve_process_group(where).size()
    return values.new_empty((size, *values.shape))
