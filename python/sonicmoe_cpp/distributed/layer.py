"""The expert layer whose experts are divided among the ranks of a process group."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from .. import _arguments, _checks, fp8
from .._autograd import Derivative, recorded
from .._call import ACCUMULATED, LAYER_TENSORS, NEEDS, Call, Tensors
from .._ops import ops, refuse_transforms
from .._weights import Activation
from ..fp8 import NOTHING, Fp8Weights, Request, request_of
from ..lora import with_factors
from ..routing import Pairs
from ._group import group_of
from .own_experts import ALL_NEEDS, TENSORS, call_of, refuse_fp8, tensors_of
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
    return (PeerMemory if name == "peer" else Auto)(group, limits)


def _needs(call: Call) -> int:
    """The gradients that this rank needs, as bits of ALL_NEEDS."""
    if not torch.is_grad_enabled():
        return 0
    named = zip(TENSORS, tensors_of(call), strict=True)
    return sum(ALL_NEEDS[name] for name, t in named if isinstance(t, Tensor) and t.requires_grad)


_WEIGHTS = sum(NEEDS[name] for name in ACCUMULATED)


def _without_gradients(call: Call, needs: int) -> Call:
    """The call, but weights that have a main gradient are detached, so that autograd records no
    gradient for them. Otherwise, in torch 2.11, the backward of a DTensor's to_local() would
    replace the missing gradient by zeros as large as the weight. If no other tensor needs a
    gradient, nothing is detached, because autograd would then not call backward."""
    if call.main_gradients.g_down is None or not needs & ~_WEIGHTS:
        return call
    named = zip(LAYER_TENSORS, call.tensors, strict=True)
    detached = [t.detach() if n in ACCUMULATED and t is not None else t for n, t in named]
    return call._replace(tensors=Tensors(*detached))


def places_of(tensors: Sequence[Tensor | None]) -> list:
    """Shape and device of each tensor."""
    return [None if t is None else (t.shape, t.device) for t in tensors]


def expect_places(tensors: Sequence[Tensor | None], places: list) -> None:
    """Refuses tensors that a hook of saved tensors has replaced by others of another shape or on
    another device. An exchange takes its number of rows from the shape of H, and index arithmetic
    of torch would take an index on the meta device."""
    for at, (have, want) in enumerate(zip(places_of(tensors), places, strict=True)):
        if have != want:
            found, kept = ([*each[0]] if each else None for each in (have, want))
            name = TENSORS[at] if at < len(TENSORS) else "a tensor kept for backward"
            raise ValueError(
                f"{name} has shape {found} on {have and have[1]} in backward, must have {kept} on "
                f"{want and want[1]} as in forward"
            )


def _forward(*values):
    tensors, rest = values[: len(TENSORS)], values[len(TENSORS) :]
    options, main_gradients, scales, needs, transport, layer, of_fp8 = rest
    with transport.group.guarded():
        call = call_of(tensors, options, main_gradients, scales)._replace(fp8=of_fp8)
        given = transport.forward(call, layer, needs)
    return given.out, given.host, places_of((*tensors, *given.kept)), *given.kept


def backward_arguments(dout, *values) -> tuple:
    """The transport, and what its backward() and backward_parts() take."""
    tensors, rest = values[: len(TENSORS)], values[len(TENSORS) :]
    options, main_gradients, scales, needs, transport, host, places, *kept = rest
    expect_places((*tensors, *kept), places)
    call = call_of(tensors, options, main_gradients, scales)
    return transport, (dout, call, Forward(dout, tuple(kept), host), needs)


def _backward(*values):
    transport, arguments = backward_arguments(*values)
    found = transport.backward(*arguments)
    return [found.get(name) for name in ALL_NEEDS]


def _guarded(backward: Callable) -> Callable:
    """Guards the whole backward, in which saved tensors may be recomputed. Autograd does not record
    the communication, so a second derivative would silently be wrong."""

    @once_differentiable
    def run(ctx, dout):
        transport = next(value for value in ctx.rest if isinstance(value, Transport))
        with transport.group.guarded():
            return backward(ctx, dout)

    return run


_NAMES = (*TENSORS, "options", "main_gradients", "scales", "needs", "transport")
_record = recorded(
    "moe_expert_parallel",
    Derivative(
        inputs=(*_NAMES, "layer", "fp8"),
        outputs=("out", "host", "places"),  # and the tensors that the transport keeps
        gradients=tuple(ALL_NEEDS),
        takes=(*_NAMES, "host", "places"),
        backward=_backward,
        saved=frozenset(TENSORS),
        always=True,  # the other ranks wait for this rank's rows
    ),
    _forward,
    _guarded,
)


def _compiled(place: Place, call: Call, needs: int, after) -> Tensor:
    """Calls the layer as one operator (_compiled.py)."""
    by = place.transport
    where = (by.group.name, by.name, by.limits_as_numbers(), after)
    options = [float(option) for option in call.options]
    choice, codes = (-1.0, 1.0), None
    if call.fp8 is not None:
        choice, codes = (float(call.fp8.least), float(call.fp8.lists)), call.fp8.codes()
    options.extend(choice)
    if needs:
        given = (*call.tensors, *call.main_gradients, codes, place.number, options, needs)
        return ops.expert_parallel_forward(*given, *where)[0]
    return ops.expert_parallel_inference(*call.tensors, codes, place.number, options, *where)


def _call(arguments: tuple, request: Request, factors: dict | None, lists: int) -> Call:
    """The call of the arguments of run()."""
    if factors is not None and request.precision == "auto" and arguments[1].is_cuda:
        request = NOTHING  # as in one process
    # The ranks choose what "auto" is; until then the call has the options of fp8.
    asked = request._replace(precision="fp8") if request.precision == "auto" else request
    call = _arguments.call_of(*arguments, asked)
    if request is not NOTHING:
        call = fp8.over_ranks(request, call, lists)
    return call if factors is None else with_factors(call, **factors)


class Prepared(NamedTuple):
    """A call whose arguments are checked."""

    call: Call
    needs: int  # bits of ALL_NEEDS
    transport: Transport
    layer: int  # its number in the model

    def rest(self) -> tuple:
        """What backward_arguments() takes after the tensors."""
        call = self.call
        scales = None if call.factors is None else call.factors[4:]
        return call.options, call.main_gradients, scales, self.needs, self.transport


def _checked(arguments: tuple, request: Request, factors: dict | None, lists: int) -> tuple:
    """The call of the arguments, and the gradients that this rank needs."""
    call = _call(arguments, request, factors, lists)
    refuse_transforms("moe_expert_parallel", tensors_of(call))
    if call.tensors.w_down.shape[0] == 0:
        raise ValueError("w_down has 0 experts, must have an equal number on all ranks")
    needs = _needs(call)
    return _without_gradients(call, needs), needs


def prepare(
    place: Place,
    arguments: tuple,
    request: Request,
    factors: dict | None,
    lists: int,
    before: Callable,
) -> Prepared:
    """All that comes before the rows of an eager call. The arguments are those of run()."""
    call, needs = _checked(arguments, request, factors, lists)
    place.transport.group.check_device("x", call.tensors.x.device)
    place.transport.refuse(call)
    refuse_fp8(call)
    before()
    layer = int(place.number)
    return Prepared(call, needs, place.transport.chosen(call, layer, needs), layer)


def _run(
    place: Place, *arguments, request: Request, factors: dict | None, lists: int, before: Callable
) -> Tensor:
    if torch.compiler.is_compiling():
        return _compiled(place, *_checked(arguments, request, factors, lists), before())
    prepared = prepare(place, arguments, request, factors, lists, before)
    call, needs, transport, layer = prepared
    if not needs:
        return transport.forward(call, layer, needs).out
    return _record(*tensors_of(call), *prepared.rest(), layer, call.fp8)


def run(
    place: Place,
    form: str,
    *others,
    request: Request = NOTHING,
    factors: dict | None = None,
    lists: int = 1,
    before: Callable[[], Tensor | None] = lambda: None,
) -> Tensor:
    """Runs the layer on the arguments of call_of(). Expert ids are in [0, E), over all
    ranks. `factors` are the arguments `up` and `down` of lora_moe(). `lists` is the number of ranks
    that give the same list of pairs. before() is called when the
    arguments are checked, before the ranks exchange rows. If it returns a tensor, this order holds
    in graphs too, where only a tensor that goes from one operator to the other keeps it. Ranks that
    have different graphs, or none, would otherwise wait for each other in different exchanges."""
    rest = {"request": request, "factors": factors, "lists": lists, "before": before}
    if torch.compiler.is_compiling():
        return _run(place, form, *others, **rest)
    with place.transport.group.call():
        return _run(place, form, *others, **rest)


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
    precision: str | None = None,
    keep_h: str | None = None,
    fp8_weights: Fp8Weights | None = None,
) -> Tensor:
    """moe() with the E experts divided over W ranks. Returns (T, d).

    Every rank of `group` (a ProcessGroup, a DeviceMesh of one dimension, or None for all ranks)
    calls it with its own tokens x (T, d), with any T, and with ids (T, K) in [0, E). Rank r passes
    the weights and biases of the experts r*E/W to (r+1)*E/W - 1. Every rank also calls backward, in
    the same order.
    An expert's gradient is the gradient of the sum of all ranks' losses.

    If a rank ends, fails, or does not make the call within `timeout` seconds, the other ranks raise
    ExpertParallelError. transport, max_tokens, capacity and keep_rows are as in ExpertParallelMoE;
    capacity is relative to max_tokens * K rows. precision, keep_h and fp8_weights (of this rank's
    experts) are as in moe(); all ranks pass the same precision and keep_h.
    """
    limits = Limits(timeout, max_tokens, capacity, keep_rows=keep_rows)
    place = Place(make_transport(transport, group, limits), _NO_MODULE)
    routing, experts = (topk_ids, None, topk_weights), (w_up, w_down, b_up, b_down)
    request = request_of(precision, keep_h, fp8_weights)
    style = (activation, gate_layout)
    return run(place, "ids", x, routing, experts, style, grad_accum, request=request)


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
    precision: str | None = None,
    keep_h: str | None = None,
    fp8_weights: Fp8Weights | None = None,
) -> Tensor:
    """moe_pairs() with the experts divided over ranks, as in moe_expert_parallel(). The pairs name
    tokens of this rank and experts in [0, E). capacity is relative to the number of pairs in the
    longest list of a rank."""
    routing = _arguments.pairs_index(pairs)
    limits = Limits(timeout, max_tokens, capacity, keep_rows=keep_rows)
    place = Place(make_transport(transport, group, limits), _NO_MODULE)
    experts = (w_up, w_down, b_up, b_down)
    request = request_of(precision, keep_h, fp8_weights)
    style = (activation, gate_layout)
    return run(place, "pairs", x, routing, experts, style, grad_accum, request=request)
