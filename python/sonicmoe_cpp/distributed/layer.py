"""The expert layer whose experts are divided among the ranks of a process group."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from .. import _checks, _ops
from ..layer import Activation, arguments
from ..lora import arguments_of
from ..routing import Pairs
from . import own_experts
from ._group import group_of
from .peer import Auto, Limits, PeerMemory
from .transport import TRANSPORTS, AllToAll, Forward, Transport

TIMEOUT = 600.0  # seconds, as in NCCL
_NO_MODULE = torch.tensor(0, device="cpu")  # the number of a layer that is called as a function


class Place(NamedTuple):
    """The transport of a call, and the number of its layer in the model. The number is a tensor on
    the CPU, because torch.compile would recompile for each value of an int."""

    transport: Transport
    number: Tensor

    @classmethod
    def of_module(cls, transport: Transport) -> Place:
        """The place of a new module."""
        return cls(transport, torch.tensor(transport.group.next_layer(), device="cpu"))


def make_transport(name: str, group, limits: Limits) -> Transport:
    _checks.one_of("transport", name, TRANSPORTS)
    limits.check()
    group = group_of(group)
    if name == "all_to_all":
        return AllToAll(group, limits.timeout, limits.keep_rows)
    if name == "peer" and limits.keep_rows:
        raise ValueError('keep_rows is True, but transport is "peer", which sends rows again')
    return (PeerMemory if name == "peer" else Auto)(group, limits)


def _needs(tensors: tuple) -> int:
    """The gradients that this rank needs, as bits of NEEDS."""
    if not torch.is_grad_enabled():
        return 0
    wanted = zip(own_experts.TENSORS, tensors, strict=False)
    needs = own_experts.NEEDS
    return sum(needs[name] for name, t in wanted if isinstance(t, Tensor) and t.requires_grad)


_W_DOWN = _ops.LAYER_TENSORS.index("w_down")
_WEIGHTS = sum(_ops.NEEDS[name] for name in _ops.ACCUMULATED)


def _without_gradients(tensors: tuple, main_gradients: tuple, needs: int) -> tuple:
    """The tensors, but weights that have a main gradient are detached, so that autograd records no
    gradient for them. Otherwise, in torch 2.11, the backward of a DTensor's to_local() would
    replace the missing gradient by zeros as large as the weight. If no other tensor needs a
    gradient, nothing is detached, because autograd would then not call backward."""
    if main_gradients[-1] is None or not needs & ~_WEIGHTS:
        return tensors
    named = zip(_ops.LAYER_TENSORS, tensors, strict=True)
    return tuple(
        t.detach() if name in _ops.ACCUMULATED and t is not None else t for name, t in named
    )


def places_of(tensors: Sequence[Tensor | None]) -> list:
    """Shape and device of each tensor."""
    return [None if t is None else (t.shape, t.device) for t in tensors]


def expect_places(tensors: Sequence[Tensor | None], places: list, count: int) -> None:
    """Refuses tensors that a hook of saved tensors has replaced by others of another shape or on
    another device. An exchange takes its number of rows from the shape of H, and index arithmetic
    of torch would take an index on the meta device. The first `count` are the layer's arguments."""
    for at, (have, want) in enumerate(zip(places_of(tensors), places, strict=True)):
        if have != want:
            found, kept = ([*each[0]] if each else None for each in (have, want))
            name = "a tensor kept for backward" if at >= count else own_experts.TENSORS[at]
            raise ValueError(
                f"{name} has shape {found} on {have and have[1]} in backward, must have {kept} on "
                f"{want and want[1]} as in forward"
            )


def _recorded(ctx, x, weights, *others):
    *experts, (transport, layer, routing, options, main_gradients, needs) = others
    tensors = (x, *routing, weights, *experts)
    with transport.group.guarded():
        given = transport.forward(tensors, options, main_gradients, layer, needs)
    ctx.set_materialize_grads(False)
    saved = (*tensors, *given.kept)
    places = places_of(saved), len(tensors)
    ctx.rest = transport, options, main_gradients, needs, given.host, places
    ctx.save_for_backward(*saved)
    return given.out


# Autograd does not record the communication, so a second derivative would silently be wrong.
@once_differentiable
def _differentiated(ctx, dout):
    transport, options, main_gradients, needs, host, places = ctx.rest
    with transport.group.guarded():
        saved = ctx.saved_tensors
        expect_places(saved, *places)
        count = places[1]
        tensors, kept = saved[:count], saved[count:]
        if dout is None:
            dout = torch.zeros_like(tensors[0])  # the other ranks wait for this rank's rows
        given = Forward(dout, kept, host)
        found = transport.backward(dout, tensors, options, main_gradients, given, needs)
    return *found, None


_record = _ops.function("moe_expert_parallel", _recorded, _differentiated)


def _compiled(
    place: Place, tensors: tuple, options: tuple, main_gradients: tuple, needs: int, after
):
    """Calls the layer as one operator (_compiled.py)."""
    by = place.transport
    rest = (by.group.name, by.name, by.limits_as_numbers(), after)
    how = (place.number, [float(option) for option in options])
    if needs:
        given = (*tensors, *main_gradients, *how, needs)
        return _ops.ops.expert_parallel_forward(*given, *rest)[0]
    return _ops.ops.expert_parallel_inference(*tensors, *how, *rest)


def _run(place: Place, *others, factors: dict | None, before: Callable) -> Tensor:
    tensors, options, main_gradients = arguments(*others)
    if factors is not None:
        given, scales = arguments_of(tensors, **factors)
        tensors, options = (*tensors, *given), (*options, *scales)
    _ops.refuse_transforms("moe_expert_parallel", *tensors)
    if tensors[_W_DOWN].shape[0] == 0:
        raise ValueError("w_down has 0 experts, must have an equal number on all ranks")
    needs = _needs(tensors)
    tensors = _without_gradients(tensors, main_gradients, needs)
    if torch.compiler.is_compiling():
        return _compiled(place, tensors, options, main_gradients, needs, before())
    place.transport.group.check_device("x", tensors[0].device)
    place.transport.refuse(tensors)
    before()
    layer = int(place.number)
    transport = place.transport.chosen(tensors, options, layer, needs)
    if not needs:
        return transport.forward(tensors, options, main_gradients, layer, needs).out
    x, index, second, weights, *experts = tensors
    rest = (transport, layer, (index, second), options, main_gradients, needs)
    return _record(x, weights, *experts, rest)


def run(
    place: Place,
    form: str,
    *others,
    factors: dict | None = None,
    before: Callable[[], Tensor | None] = lambda: None,
) -> Tensor:
    """Runs the layer on the arguments of layer.arguments(). Expert ids are in [0, E), over all
    ranks. `factors` are the arguments `up` and `down` of lora_moe(). before() is called when the
    arguments are checked, before the ranks exchange rows. If it returns a tensor, this order holds
    in graphs too, where only a tensor that goes from one operator to the other keeps it. Ranks that
    have different graphs, or none, would otherwise wait for each other in different exchanges."""
    if torch.compiler.is_compiling():
        return _run(place, form, *others, factors=factors, before=before)
    with place.transport.group.call():
        return _run(place, form, *others, factors=factors, before=before)


def moe_expert_parallel(
    x: Tensor,
    topk_ids: Tensor,
    topk_weights: Tensor,
    w_up: Tensor | tuple[Tensor, Tensor],
    w_down: Tensor,
    *,
    group=None,
    transport: str = "auto",
    timeout: float = TIMEOUT,
    max_tokens: int | None = None,
    capacity: float | None = None,
    keep_rows: bool = False,
    b_up: Tensor | None = None,
    b_down: Tensor | None = None,
    activation: str | Activation = "swiglu",
    gate_layout: str = "concatenated",
    grad_accum: tuple | None = None,
) -> Tensor:
    """moe() with the E experts divided over W ranks. Returns (T, d).

    Every rank of `group` (a ProcessGroup, a DeviceMesh of one dimension, or None for all ranks)
    calls it with its own tokens x (T, d), with any T, and with ids (T, K) in [0, E). Rank r passes
    the weights and biases of the experts r*E/W to (r+1)*E/W - 1. Every rank also calls backward, in
    the same order.
    An expert's gradient is the gradient of the sum of all ranks' losses.

    If a rank ends, fails, or does not make the call within `timeout` seconds, the other ranks raise
    ExpertParallelError. transport, max_tokens, capacity and keep_rows are as in ExpertParallelMoE;
    capacity is relative to max_tokens * K rows.
    """
    limits = Limits(timeout, max_tokens, capacity, keep_rows=keep_rows)
    place = Place(make_transport(transport, group, limits), _NO_MODULE)
    routing, experts = (topk_ids, None, topk_weights), (w_up, w_down, b_up, b_down)
    return run(place, "ids", x, routing, experts, (activation, gate_layout), grad_accum)


def moe_pairs_expert_parallel(
    x: Tensor,
    pairs: Pairs,
    w_up: Tensor | tuple[Tensor, Tensor],
    w_down: Tensor,
    *,
    group=None,
    transport: str = "auto",
    timeout: float = TIMEOUT,
    max_tokens: int | None = None,
    capacity: float | None = None,
    keep_rows: bool = False,
    b_up: Tensor | None = None,
    b_down: Tensor | None = None,
    activation: str | Activation = "swiglu",
    gate_layout: str = "concatenated",
    grad_accum: tuple | None = None,
) -> Tensor:
    """moe_pairs() with the experts divided over ranks, as in moe_expert_parallel(). The pairs name
    tokens of this rank and experts in [0, E). capacity is relative to the number of pairs in the
    longest list of a rank."""
    if not isinstance(pairs, (tuple, list)) or len(pairs) < 3:
        raise TypeError("pairs must be Pairs, or a tuple (token, expert, weight)")
    limits = Limits(timeout, max_tokens, capacity, keep_rows=keep_rows)
    place = Place(make_transport(transport, group, limits), _NO_MODULE)
    experts = (w_up, w_down, b_up, b_down)
    return run(place, "pairs", x, tuple(pairs[:3]), experts, (activation, gate_layout), grad_accum)
