"""Custom operators of the expert-parallel layer: torch.compile sees one operator and no
communication.

The sizes of the results depend on the routing. An operator cannot take an object, so a group is
passed by its name, and a forward keeps only tensors and numbers for backward.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from .. import _ops
from . import layer
from ._group import group_of
from .peer import Limits
from .transport import Forward, Transport

OPTION_TYPES = {"alpha": float, "limit": float}
_NO_MAIN_GRADIENTS = (None,) * 3


def _group(name: str):
    return group_of(dist.distributed_c10d._resolve_process_group(name))


def _transport(where: str, name: str, limits: Sequence[float], *call) -> Transport:
    group = dist.distributed_c10d._resolve_process_group(where)
    by = layer.make_transport(name, group, Limits.of_numbers(list(limits)))
    return by.chosen(*call)


def _options(numbers: Sequence[float]) -> tuple:
    named = zip(_ops.OPTIONS, numbers, strict=True)
    return tuple(OPTION_TYPES.get(name, int)(value) for name, value in named)


@torch.library.custom_op("sonicmoe_cpp::expert_parallel_inference", mutates_args=())
def inference(
    x: Tensor,
    index: Tensor,
    second: Tensor | None,
    weights: Tensor,
    w_gate: Tensor | None,
    w_up: Tensor,
    w_down: Tensor,
    b_up: Tensor | None,
    b_down: Tensor | None,
    numbers: Sequence[float],
    where: str,
    transport: str,
    limits: Sequence[float],
    number: int,
) -> Tensor:
    tensors = (x, index, second, weights, w_gate, w_up, w_down, b_up, b_down)
    with _group(where).call():
        by = _transport(where, transport, limits, tensors, number, 0)
        return by.forward(tensors, _options(numbers), _NO_MAIN_GRADIENTS, number, 0).out


@inference.register_fake
def _(x, *_others):
    return x.new_empty(x.shape)


@torch.library.custom_op("sonicmoe_cpp::expert_parallel_forward", mutates_args=())
def recorded(
    x: Tensor,
    index: Tensor,
    second: Tensor | None,
    weights: Tensor,
    w_gate: Tensor | None,
    w_up: Tensor,
    w_down: Tensor,
    b_up: Tensor | None,
    b_down: Tensor | None,
    numbers: Sequence[float],
    needs: int,
    where: str,
    transport: str,
    limits: Sequence[float],
    number: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Returns the output, H, metadata, five more tensors (empty if the transport keeps none), and
    the numbers that the transport keeps."""
    tensors = (x, index, second, weights, w_gate, w_up, w_down, b_up, b_down)
    with _group(where).call():
        by = _transport(where, transport, limits, tensors, number, needs)
        given = by.forward(tensors, _options(numbers), _NO_MAIN_GRADIENTS, number, needs)
    h, saved, *rest = given.kept
    if not rest:
        rest = [t.new_empty((0,)) for t in _like_routes(weights)]
    host = torch.tensor(given.host, dtype=torch.int64)
    return given.out, h, saved, *rest, host


def _like_routes(weights: Tensor) -> list[Tensor]:
    """Empty tensors of the dtypes that AllToAll keeps in addition to H and metadata."""
    dtypes = (weights.dtype, torch.int64, torch.int64, torch.int32, torch.int32)
    return [weights.new_empty((0,), dtype=dtype) for dtype in dtypes]


@recorded.register_fake
def _(x, index, second, weights, w_gate, w_up, *_rest):
    context = torch.library.get_ctx()
    bytes_saved, received, numbers = (context.new_dynamic_size() for _ in range(3))
    width = w_up.shape[1] * (1 if w_gate is None else 2)
    return (
        x.new_empty(x.shape),
        x.new_empty((received, width)),
        x.new_empty((bytes_saved,), dtype=torch.uint8),
        *(t.new_empty((context.new_dynamic_size(),)) for t in _like_routes(weights)),
        torch.empty((numbers,), dtype=torch.int64, device="cpu"),
    )


@torch.library.custom_op("sonicmoe_cpp::expert_parallel_backward", mutates_args=())
def differentiated(
    dout: Tensor,
    tensors: Sequence[Tensor | None],
    kept: Sequence[Tensor],
    host: Tensor,
    numbers: Sequence[float],
    needs: int,
    where: str,
    transport: str,
    limits: Sequence[float],
    number: int,
) -> list[Tensor]:
    with _group(where).guarded():
        by = _transport(where, transport, limits, tuple(tensors), number, needs)
        given = Forward(dout, tuple(kept), tuple(host.tolist()))
        options = _options(numbers)
        found = by.backward(dout, tuple(tensors), options, _NO_MAIN_GRADIENTS, given, needs)
    return [g for g in found if g is not None]


@differentiated.register_fake
def _(dout, tensors, kept, host, numbers, needs, *_rest):
    like = dict(zip(_ops.LAYER_TENSORS, tensors, strict=True))
    wanted = [like[name] for name, bit in _ops.NEEDS.items() if needs & bit]
    return [torch.empty_like(t, memory_format=torch.preserve_format) for t in wanted]


def _setup(ctx, inputs, output):
    count = len(_ops.LAYER_TENSORS)
    ctx.rest = inputs[count:]
    ctx.mark_non_differentiable(*output[1:])
    ctx.save_for_backward(*inputs[:count], *output[1:])


def _backward(ctx, dout, *_others):
    count = len(_ops.LAYER_TENSORS)
    tensors, (*kept, host) = ctx.saved_tensors[:count], ctx.saved_tensors[count:]
    numbers, needs, *place = ctx.rest
    found = iter(
        torch.ops.sonicmoe_cpp.expert_parallel_backward(
            dout, list(tensors), kept, host, numbers, needs, *place
        )
    )
    bits = [_ops.NEEDS.get(name, 0) for name in _ops.LAYER_TENSORS]
    gradients = [next(found) if needs & bit else None for bit in bits]
    return *gradients, *[None] * len(ctx.rest)


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
