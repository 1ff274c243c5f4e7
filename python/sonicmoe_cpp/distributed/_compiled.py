"""Custom operators of the expert-parallel layer: torch.compile sees one operator and no
communication.

Operators take tensors and numbers only:
- A group is passed by its name.
- The number of the layer in the model is a tensor (int64 on the CPU), because torch.compile would
  recompile for each value of an int.
- The tensors that a forward keeps for backward have sizes that depend on the routing. So the
  operator returns a ticket instead, a tensor of one number, by which _kept_by() finds them.
"""

from __future__ import annotations

import itertools
import sys
import weakref
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from .. import _flops, _ops
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
    by.refuse(call[0])
    return by.chosen(*call)


def _options(numbers: Sequence[float]) -> tuple:
    named = zip(_ops.OPTIONS, numbers, strict=True)
    return tuple(OPTION_TYPES.get(name, int)(value) for name, value in named)


class _Kept(bytearray):
    """The memory of a ticket. It holds the state that a forward keeps for backward, so this state
    lives as long as the ticket."""

    kept: tuple
    host: tuple
    places: list  # of the tensors that autograd saves


_alive: weakref.WeakValueDictionary[int, _Kept] = weakref.WeakValueDictionary()
_tickets = itertools.count()


def _ticket(forward: Forward, tensors: tuple) -> Tensor:
    number = next(_tickets)
    memory = _Kept(number.to_bytes(8, sys.byteorder))
    memory.kept, memory.host = forward.kept, forward.host
    memory.places = layer.places_of(tensors)
    _alive[number] = memory
    return torch.frombuffer(memory, dtype=torch.int64)  # the tensor's storage refers to `memory`


def _kept_by(ticket: Tensor) -> _Kept:
    memory = _alive.get(int(ticket))
    if memory is None:
        raise RuntimeError(
            f"what an expert-parallel layer keeps for backward under ticket {int(ticket)} is gone, "
            "because the ticket was copied: exclude this layer from hooks that copy saved tensors, "
            "such as save_on_cpu"
        )
    return memory


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
    number: Tensor,
    numbers: Sequence[float],
    where: str,
    transport: str,
    limits: Sequence[float],
    after: Tensor | None,
) -> Tensor:
    tensors = (x, index, second, weights, w_gate, w_up, w_down, b_up, b_down)
    with _group(where).call():
        options = _options(numbers)
        by = _transport(where, transport, limits, tensors, options, int(number), 0)
        return by.forward(tensors, options, _NO_MAIN_GRADIENTS, int(number), 0).out


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
    g_gate: Tensor | None,
    g_up: Tensor | None,
    g_down: Tensor | None,
    number: Tensor,
    numbers: Sequence[float],
    needs: int,
    where: str,
    transport: str,
    limits: Sequence[float],
    after: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Returns the output and a ticket. g_gate, g_up and g_down are main gradients (grad_accum).
    `after` is not read: it orders this operator after the one that made it."""
    tensors = (x, index, second, weights, w_gate, w_up, w_down, b_up, b_down)
    main_gradients = (g_gate, g_up, g_down)
    with _group(where).call():
        options = _options(numbers)
        by = _transport(where, transport, limits, tensors, options, int(number), needs)
        given = by.forward(tensors, options, main_gradients, int(number), needs)
    return given.out, _ticket(given, tensors)


@recorded.register_fake
def _(x, *_others):
    return x.new_empty(x.shape), torch.empty((1,), dtype=torch.int64, device="cpu")


@torch.library.custom_op(
    "sonicmoe_cpp::expert_parallel_backward", mutates_args=("g_gate", "g_up", "g_down")
)
def differentiated(
    dout: Tensor,
    tensors: Sequence[Tensor | None],
    g_gate: Tensor | None,
    g_up: Tensor | None,
    g_down: Tensor | None,
    ticket: Tensor,
    number: Tensor,
    numbers: Sequence[float],
    needs: int,
    where: str,
    transport: str,
    limits: Sequence[float],
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Returns a gradient for each of _ops.DIFFERENTIABLE, an empty tensor where _returned() is
    false. A list of the other gradients would be shorter, but torch cannot compile an operator that
    changes its arguments and returns a list."""
    with _group(where).guarded():
        memory, options = _kept_by(ticket), _options(numbers)
        layer.expect_places(tensors, memory.places, len(tensors))
        by = _transport(where, transport, limits, tuple(tensors), options, int(number), needs)
        given = Forward(dout, memory.kept, memory.host)
        main_gradients = (g_gate, g_up, g_down)
        found = by.backward(dout, tuple(tensors), options, main_gradients, given, needs)
    return tuple(dout.new_empty(0) if g is None else g for g in found)


def _returned(needs: int, main_gradients: bool) -> list[bool]:
    """For each of _ops.DIFFERENTIABLE: true if its gradient is returned, false if it is added to a
    main gradient or not needed."""
    added = _ops.ACCUMULATED if main_gradients else ()
    return [bool(needs & bit) and name not in added for name, bit in _ops.NEEDS.items()]


@differentiated.register_fake
def _(dout, tensors, g_gate, g_up, g_down, ticket, number, numbers, needs, *_rest):
    like = dict(zip(_ops.LAYER_TENSORS, tensors, strict=True))
    wanted = zip(_ops.DIFFERENTIABLE, _returned(needs, g_down is not None), strict=True)
    return tuple(
        torch.empty_like(like[name], memory_format=torch.preserve_format)
        if want
        else dout.new_empty(0)
        for name, want in wanted
    )


_TENSORS = len(_ops.LAYER_TENSORS)
_SAVED = _TENSORS + 4  # the tensors, three main gradients and the layer's number


def _setup(ctx, inputs, output):
    ctx.rest = inputs[_SAVED:-1]  # without `after`
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(*inputs[:_SAVED], output[1])


def _backward(ctx, dout, _ticket_gradient):
    *tensors, number, ticket = ctx.saved_tensors
    tensors, main_gradients = tensors[:_TENSORS], tensors[_TENSORS:]
    numbers, needs, *place = ctx.rest
    found = torch.ops.sonicmoe_cpp.expert_parallel_backward(
        dout, tensors, *main_gradients, ticket, number, numbers, needs, *place
    )
    returned = _returned(needs, main_gradients[-1] is not None)
    each = zip(_ops.DIFFERENTIABLE, found, returned, strict=True)
    named = {name: gradient for name, gradient, wanted in each if wanted}
    of_inputs = [named.get(name) for name in _ops.LAYER_TENSORS]
    return *of_inputs, *[None] * (_SAVED - _TENSORS), *[None] * len(ctx.rest), None


recorded.register_autograd(_backward, setup_context=_setup)


@torch.library.custom_op("sonicmoe_cpp::expert_parallel_all_gather", mutates_args=())
def all_gather(values: Tensor, where: str, timeout: float) -> Tensor:
    group = _group(where)
    with group.guarded():
        return group.gather_losses(values, timeout)


@all_gather.register_fake
def _(values, where, timeout):
    size = dist.distributed_c10d._resolve_process_group(where).size()
    return values.new_empty((size, *values.shape))


_flops.register_compiled()
