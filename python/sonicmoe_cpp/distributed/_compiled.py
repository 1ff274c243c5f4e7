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

from .. import _flops
from .._autograd import Derivative, register
from .._call import (
    ACCUMULATED,
    DIFFERENTIABLE,
    LAYER_TENSORS,
    NEEDS,
    NO_MAIN_GRADIENTS,
    Call,
    Fp8,
    MainGradients,
    Options,
    Tensors,
)
from .._ops import ops
from ._group import group_of
from .layer import expect_places, make_transport, places_of
from .own_experts import refuse_fp8
from .peer import Limits
from .transport import Forward, Transport


def _group(name: str):
    return group_of(dist.distributed_c10d._resolve_process_group(name))


def _call(
    tensors: Sequence,
    options: Sequence[float],
    main_gradients=NO_MAIN_GRADIENTS,
    codes: Tensor | None = None,
) -> Call:
    """`options` are Options, Fp8.least or -1 for a call without a precision, and Fp8.lists."""
    form, activation, alpha, limit, gate_layout, precision, least, lists = options
    named = Options(int(form), int(activation), alpha, limit, int(gate_layout), int(precision))
    fp8 = None if least < 0 else Fp8(int(least), codes, int(lists))
    return Call(Tensors(*tensors), named, MainGradients(*main_gradients), None, fp8)


def _transport(where: tuple, call: Call, layer: int, needs: int) -> Transport:
    group, transport, limits = where
    process_group = dist.distributed_c10d._resolve_process_group(group)
    by = make_transport(transport, process_group, Limits.of_numbers(list(limits)))
    by.refuse(call)
    refuse_fp8(call)
    return by.chosen(call, layer, needs)


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
    memory.places = places_of(tensors)
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


_TENSORS = len(LAYER_TENSORS)
_REQUIRED = ("x", "index", "weights", "w_up", "w_down")
_LAYER = ", ".join(f"Tensor{'' if name in _REQUIRED else '?'} {name}" for name in LAYER_TENSORS)
_MAIN = ", ".join(f"Tensor? {name}" for name in MainGradients._fields)
_CHANGED = "Tensor(a!)? g_gate, Tensor(b!)? g_up, Tensor(c!)? g_down"
_CODES = "Tensor? fp8_weights"
# The arguments after the tensors: the layer's number in the model, those of _call(), Place. `after`
# is not read: it orders an operator after the one that made the tensor.
_NUMBERS = "Tensor layer, float[] options"
_WHERE = "str group, str transport, float[] limits"


@torch.library.custom_op(
    "sonicmoe_cpp::expert_parallel_inference",
    mutates_args=(),
    schema=f"({_LAYER}, {_CODES}, {_NUMBERS}, {_WHERE}, Tensor? after) -> Tensor",
)
def inference(*given):
    tensors, (codes, layer, options, *where, _) = given[:_TENSORS], given[_TENSORS:]
    with _group(where[0]).call():
        call, layer = _call(tensors, options, codes=codes), int(layer)
        return _transport(where, call, layer, 0).forward(call, layer, 0).out


@inference.register_fake
def _(x, *_others):
    return x.new_empty(x.shape)


@torch.library.custom_op(
    "sonicmoe_cpp::expert_parallel_forward",
    mutates_args=(),
    schema=f"({_LAYER}, {_MAIN}, {_CODES}, {_NUMBERS}, int needs, {_WHERE}, Tensor? after)"
    " -> (Tensor out, Tensor ticket)",
)
def forward(*given):
    tensors, main_gradients = given[:_TENSORS], given[_TENSORS : _TENSORS + 3]
    codes, layer, options, needs, *where, _ = given[_TENSORS + 3 :]
    with _group(where[0]).call():
        call, layer = _call(tensors, options, main_gradients, codes), int(layer)
        result = _transport(where, call, layer, needs).forward(call, layer, needs)
    return result.out, _ticket(result, tensors)


@forward.register_fake
def _(x, *_others):
    return x.new_empty(x.shape), torch.empty((1,), dtype=torch.int64, device="cpu")


@torch.library.custom_op(
    "sonicmoe_cpp::expert_parallel_backward",
    mutates_args=MainGradients._fields,
    schema=f"(Tensor dout, Tensor?[] tensors, {_CHANGED}, Tensor ticket, {_NUMBERS}, int needs,"
    f" {_WHERE}) -> ({', '.join(['Tensor'] * len(DIFFERENTIABLE))})",
)
def backward(dout, tensors, *given):
    """Returns a gradient for each of DIFFERENTIABLE, an empty tensor where _returned() is false. A
    list of the other gradients would be shorter, but torch cannot compile an operator that changes
    its arguments and returns a list."""
    main_gradients, (ticket, layer, options, needs, *where) = given[:3], given[3:]
    with _group(where[0]).guarded():
        kept, call = _kept_by(ticket), _call(tensors, options, main_gradients)
        expect_places(tensors, kept.places)
        by = _transport(where, call, int(layer), needs)
        found = by.backward(dout, call, Forward(dout, kept.kept, kept.host), needs)
    gradients = [found.get(name) for name in DIFFERENTIABLE]
    return tuple(dout.new_empty(0) if g is None else g for g in gradients)


def _returned(needs: int, main_gradients: bool) -> list[bool]:
    """For each of DIFFERENTIABLE: true if its gradient is returned, false if it is added to a main
    gradient or not needed."""
    added = ACCUMULATED if main_gradients else ()
    return [bool(needs & bit) and name not in added for name, bit in NEEDS.items()]


@backward.register_fake
def _(dout, tensors, _g_gate, _g_up, g_down, _ticket, _layer, _options, needs, *_where):
    like = dict(zip(LAYER_TENSORS, tensors, strict=True))
    wanted = zip(DIFFERENTIABLE, _returned(needs, g_down is not None), strict=True)
    return tuple(
        torch.empty_like(like[name], memory_format=torch.preserve_format)
        if want
        else dout.new_empty(0)
        for name, want in wanted
    )


def _gradients(dout, *given) -> list:
    found = ops.expert_parallel_backward(dout, given[:_TENSORS], *given[_TENSORS:])
    g_down, needs = given[_TENSORS + 2], given[_TENSORS + 6]
    each = zip(found, _returned(needs, g_down is not None), strict=True)
    return [gradient if returned else None for gradient, returned in each]


_NAMES = (*LAYER_TENSORS, *MainGradients._fields)
_AFTER_TENSORS = ("layer", "options", "needs", "group", "transport", "limits")
register(
    "expert_parallel_forward",
    Derivative(
        inputs=(*_NAMES, "fp8_weights", *_AFTER_TENSORS, "after"),
        outputs=("out", "ticket"),
        gradients=DIFFERENTIABLE,
        takes=(*_NAMES, "ticket", *_AFTER_TENSORS),
        backward=_gradients,
        saved=frozenset((*_NAMES, "ticket", "layer")),
        always=True,
    ),
)


@torch.library.custom_op("sonicmoe_cpp::expert_parallel_all_gather", mutates_args=())
def all_gather(values: Tensor, group: str, timeout: float) -> Tensor:
    found = _group(group)
    with found.guarded():
        return found.gather_losses(values, timeout)


@all_gather.register_fake
def _(values, group, timeout):
    size = dist.distributed_c10d._resolve_process_group(group).size()
    return values.new_empty((size, *values.shape))


_flops.register_compiled()
