"""A call over ranks in parts, as nodes of autograd: begin sends rows, compute sends partial sums,
finish gives the output. What the caller enqueues between them runs while rows travel. Backward runs
the nodes in reverse, so there it runs while rows of dO, or dX, travel."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..fp8 import NOTHING, Request
from .layer import Prepared, backward_arguments, places_of, prepare
from .own_experts import TENSORS, tensors_of
from .transport import Parts, finished


class Begun:
    """A step of one call: the parts of its forward, and in backward those of its backward."""

    def __init__(self, prepared: Prepared):
        self.prepared: Prepared | None = prepared  # until the output is there
        self.group = prepared.transport.group
        self._parts: Parts | None = None  # of the pass that runs
        self.computed = False
        self._versions = self._read_versions()
        call, needs, transport, layer = prepared
        parts = transport.forward_parts(call, layer, needs)
        with self.group.guarded():
            if needs:
                self._token = _Begin.apply(self, parts, *tensors_of(call))
            else:
                self.begin(parts)

    # ---- forward ---------------------------------------------------------------------------------

    def compute(self) -> None:
        """Computes this rank's experts and sends partial sums; finish() does it, too. If one rank
        calls it, all ranks must."""
        if self.computed:
            raise RuntimeError("compute() is called twice, or after finish(), must be called once")
        self.computed = True
        with self.group.guarded(self):
            if self.prepared.needs:
                self._token = _Compute.apply(self, self._token)
            else:
                self.part()

    def finish(self) -> Tensor:
        """Waits for the partial sums of all ranks. Returns the output (T, d)."""
        prepared = self.prepared
        if prepared is None:
            raise RuntimeError("finish() is called twice, must be called once after begin()")
        with self.group.guarded(self):
            if self._versions != self._read_versions():
                raise RuntimeError(
                    "x, the routing or the weights have been changed in place between begin() and "
                    "finish(), must stay as they are"
                )
            out = _Finish.apply(self, self._token) if prepared.needs else self.end().out
        self.computed, self.prepared, self._token = True, None, None
        return out

    def _read_versions(self) -> list:
        """By which changes of the call's tensors are found, as autograd finds them."""
        given = [t for t in tensors_of(self.prepared.call) if t is not None]
        return [t._version for t in given if not t.is_inference()]

    # ---- parts of either pass --------------------------------------------------------------------

    def begin(self, parts: Parts) -> None:
        next(parts)
        self._parts, self.group.step = parts, self

    def part(self) -> None:
        next(self._parts)

    def end(self):
        """The result of the pass."""
        found = finished(self._parts)
        self._parts = self.group.step = None
        return found


# The nodes. Each takes the token of the node before it and gives one: an empty tensor on the device
# of x, so that autograd runs the nodes there, in reverse order. The tensors with gradients are
# arguments of the first node, whose backward is the last one. What backward needs is saved by the
# last node, so that activation checkpointing does not end its recomputation between two nodes.


class _Begin(torch.autograd.Function):
    @staticmethod
    def forward(ctx, step: Begun, parts: Parts, *tensors):
        ctx.step = step
        step.begin(parts)
        return tensors[0].new_empty(0)

    @staticmethod
    @once_differentiable
    def backward(ctx, _):
        with ctx.step.group.guarded(ctx.step):
            found = ctx.step.end()
        return None, None, *map(found.get, TENSORS)


class _Compute(torch.autograd.Function):
    @staticmethod
    def forward(ctx, step: Begun, token):
        ctx.step = step
        step.part()
        return token.new_empty(0)

    @staticmethod
    @once_differentiable
    def backward(ctx, token):
        with ctx.step.group.guarded(ctx.step):
            ctx.step.part()
        return None, token


class _Finish(torch.autograd.Function):
    @staticmethod
    def forward(ctx, step: Begun, _token):
        given, prepared = step.end(), step.prepared
        saved = (*tensors_of(prepared.call), *given.kept)
        ctx.step, ctx.rest = step, (*prepared.rest(), given.host, places_of(saved))
        ctx.save_for_backward(*saved)
        return given.out

    @staticmethod
    @once_differentiable
    def backward(ctx, dout):
        with ctx.step.group.guarded():
            saved = ctx.saved_tensors  # which may be recomputed now
            tensors, kept = saved[: len(TENSORS)], saved[len(TENSORS) :]
            by, arguments = backward_arguments(dout, *tensors, *ctx.rest, *kept)
            ctx.step.begin(by.backward_parts(*arguments))
        return None, dout.new_empty(0)


def begin(
    place,
    form: str,
    *others,
    request: Request = NOTHING,
    factors: dict | None = None,
    lists: int = 1,
    before: Callable = lambda: None,
) -> Begun:
    """Begins the call that run() of layer.py makes with these arguments."""
    with place.transport.group.call():
        return Begun(prepare(place, (form, *others), request, factors, lists, before))
