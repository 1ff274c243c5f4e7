"""The expert layer whose experts are divided among the ranks of a process group."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from .. import _checks, _ops
from .._names import FORM
from ..layer import Activation, arguments
from ..routing import Pairs
from ._group import group_of
from .transport import TRANSPORTS, AllToAll, Facts, Transport

TIMEOUT = 600.0  # seconds, as NCCL's own
# Gradients of these take the rows of x, which backward sends again.
_OF_X = _ops.NEEDS["w_gate"] | _ops.NEEDS["w_up"]


class Place(NamedTuple):
    """Where a call takes place: its transport, and its layer's number in the model."""

    transport: Transport
    layer: int


def make_transport(name: str, group, timeout: float) -> Transport:
    """ "auto" takes the fastest one that serves the group, which is all_to_all today."""
    _checks.one_of("transport", name, TRANSPORTS)
    _checks.number("timeout", timeout)
    if not 0 < timeout < float("inf"):
        raise ValueError(f"timeout is {timeout}, must be a positive number of seconds")
    return AllToAll(group_of(group), float(timeout))


def _needs(tensors: tuple) -> int:
    """What this rank needs a gradient of, as bits of _ops.NEEDS."""
    if not torch.is_grad_enabled():
        return 0
    wanted = zip(_ops.LAYER_TENSORS, tensors, strict=True)
    return sum(_ops.NEEDS[name] for name, t in wanted if isinstance(t, Tensor) and t.requires_grad)


def forward(place: Place, tensors: tuple, options: tuple, main_gradients: tuple, needs: int):
    """(out, h, saved, weights of the pairs received, Routes). `tensors` are LAYER_TENSORS, with
    the caller's pairs among all experts, and the weights of this rank's; h and saved are None where
    no rank records gradients."""
    x, token, expert, weights, *experts = tensors
    facts = Facts(place.layer, experts[2].shape[0], x.shape[0], x.shape[1], x.dtype, needs)
    by = place.transport
    routes = by.routes(token, expert, facts)
    rows = by.dispatch(x, routes)
    row_weights = by.dispatch_weights(weights, routes)
    local = (rows, routes.row, routes.expert, row_weights, *experts)
    h = saved = None
    if routes.needs:
        partial, h, saved = _ops.run("moe_forward", *local, *options, *main_gradients)
    else:
        partial = _ops.run("moe_inference", *local, *options)
    return by.combine(partial, routes, x.shape[0]), h, saved, row_weights, routes


def backward(place: Place, dout: Tensor, kept: tuple, options: tuple, main: tuple, needs: int):
    """The gradients of _ops.DIFFERENTIABLE, None for those that `needs`, this rank's, lacks.
    `kept` is (x, weights of the pairs received, slots of the caller, w_gate, w_up, w_down, b_up,
    b_down, h, saved, Routes)."""
    x, row_weights, slots, *experts, h, saved, routes = kept
    by = place.transport
    by.begin_backward(routes)
    drows = by.dispatch(dout, routes)
    rows = by.dispatch(x, routes) if routes.needs & _OF_X else torch.empty_like(drows)
    local = (rows, routes.row, routes.expert, row_weights, *experts)
    # Of x and the weights every rank gives what any of them needs.
    shared = routes.needs & (_ops.NEEDS["x"] | _ops.NEEDS["weights"])
    wanted = tuple(bool((needs | shared) & bit) for bit in _ops.NEEDS.values())
    found = _ops.gradients(drows, (*local, *options), wanted, h, saved, main)
    gradients = dict(zip(_ops.DIFFERENTIABLE, found, strict=True))
    if shared & _ops.NEEDS["x"]:
        gradients["x"] = by.combine(gradients["x"], routes, x.shape[0])
    if shared & _ops.NEEDS["weights"]:
        gradients["weights"] = by.return_weights(gradients["weights"], routes, slots)
    return [gradients[name] if needs & bit else None for name, bit in _ops.NEEDS.items()]


def _recorded(ctx, x, weights, *others):
    *experts, (place, token, expert, options, main_gradients, needs) = others
    tensors = (x, token, expert, weights, *experts)
    group = place.transport.group
    with group.guarded():
        out, h, saved, row_weights, routes = forward(place, tensors, options, main_gradients, needs)
    ctx.set_materialize_grads(False)
    ctx.rest = place, options, main_gradients, needs, weights.numel(), routes
    ctx.save_for_backward(x, row_weights, *experts, h, saved)
    return out


# Exchanges record no graph, so that a second derivative would silently lack what travels.
@once_differentiable
def _differentiated(ctx, dout):
    place, options, main_gradients, needs, slots, routes = ctx.rest
    with place.transport.group.guarded():
        x, row_weights, *others = ctx.saved_tensors
        if dout is None:
            dout = torch.zeros_like(x)  # the other ranks wait for this one's rows
        kept = (x, row_weights, slots, *others, routes)
        found = backward(place, dout, kept, options, main_gradients, needs)
    return *found, None


_record = _ops.function("moe_expert_parallel", _recorded, _differentiated)


def _as_pairs(tensors: tuple, options: tuple) -> tuple[tuple, tuple]:
    """LAYER_TENSORS and options of the form "ids" as those of the form "pairs"."""
    x, ids, _, weights, *experts = tensors
    token = torch.arange(ids.shape[0], device=x.device).unsqueeze(1).expand(ids.shape)
    at = _ops.OPTIONS.index("form")
    options = (*options[:at], FORM["pairs"], *options[at + 1 :])
    return (x, token.reshape(-1), ids.reshape(-1), weights.reshape(-1), *experts), options


def _run(place: Place, form: str, *others) -> Tensor:
    tensors, options, main_gradients = arguments(form, *others)
    if form == "ids":
        tensors, options = _as_pairs(tensors, options)
    needs = _needs(tensors)
    if torch.compiler.is_compiling():
        if main_gradients[1] is not None:
            raise NotImplementedError("grad_accum is not served by compiled expert parallelism")
        rest = (place.transport.group.name, place.transport.timeout, place.layer)
        numbers = [float(option) for option in options]
        if needs:
            return _ops.ops.expert_parallel_forward(*tensors, numbers, needs, *rest)[0]
        return _ops.ops.expert_parallel_inference(*tensors, numbers, *rest)
    place.transport.group.check_device("x", tensors[0].device)
    if not needs:
        return forward(place, tensors, options, main_gradients, needs)[0]
    x, token, expert, weights, *experts = tensors
    return _record(x, weights, *experts, (place, token, expert, options, main_gradients, needs))


def run(place: Place, form: str, *others) -> Tensor:
    """The layer over what layer.arguments() takes, with expert numbers among all ranks' experts."""
    if torch.compiler.is_compiling():
        return _run(place, form, *others)
    with place.transport.group.call():
        return _run(place, form, *others)


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
    b_up: Tensor | None = None,
    b_down: Tensor | None = None,
    activation: str | Activation = "swiglu",
    gate_layout: str = "concatenated",
    grad_accum: tuple | None = None,
) -> Tensor:
    """moe() with E experts over W ranks: rank r has the weights of experts r*E/W to (r+1)*E/W.

    Every rank of `group` (a ProcessGroup, a DeviceMesh of one dimension, None for all ranks) calls
    it with its own tokens, x (T, d) with any T, and topk_ids (T, K) among all E experts; weights
    and biases are those of the rank's own experts. Returns (T, d). Every rank calls backward too,
    in the same order; an expert's gradient is that of the sum of all ranks' losses. If a rank ends,
    fails, or does not come within `timeout` seconds, the others raise ExpertParallelError.
    """
    place = Place(make_transport(transport, group, timeout), 0)
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
    b_up: Tensor | None = None,
    b_down: Tensor | None = None,
    activation: str | Activation = "swiglu",
    gate_layout: str = "concatenated",
    grad_accum: tuple | None = None,
) -> Tensor:
    """moe_pairs() with experts over ranks, as moe_expert_parallel(): the pairs' tokens are those of
    this rank, their experts are counted among all."""
    if not isinstance(pairs, (tuple, list)) or len(pairs) < 3:
        raise TypeError("pairs must be Pairs, or a tuple (token, expert, weight)")
    place = Place(make_transport(transport, group, timeout), 0)
    experts = (w_up, w_down, b_up, b_down)
    return run(place, "pairs", x, tuple(pairs[:3]), experts, (activation, gate_layout), grad_accum)
