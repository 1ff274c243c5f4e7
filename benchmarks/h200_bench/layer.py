"""Inputs and outputs of one measurement, and the library's calls on them."""

from __future__ import annotations

import ctypes

import torch
from shapes import Shape

from . import capi

BF = torch.bfloat16


class Data:
    """x, dout ~ N(0, 1), W ~ N(0, 1)/sqrt(fan-in), logits ~ N(0, 1), all bf16."""

    def __init__(self, shape: Shape, device: torch.device):
        T, d, n, E, K = shape.T, shape.d, shape.n, shape.E, shape.K
        self.shape, self.device = shape, device

        def empty(*size, dtype=BF):
            return torch.empty(*size, dtype=dtype, device=device)

        self.x, self.dout, self.out, self.dx = (empty(T, d) for _ in range(4))
        self.w_up, self.w_down = empty(E, 2 * n, d), empty(E, d, n)
        self.dw_up, self.dw_down = empty(E, 2 * n, d), empty(E, d, n)
        self.logits, self.dlogits = empty(T, E), empty(T, E)
        self.ids = empty(T, K, dtype=torch.int64)
        self.weights, self.dweights = (empty(T, K, dtype=torch.float32) for _ in range(2))

    def sample(self, seed: int, shift: torch.Tensor | None = None):
        """Generates all inputs from a seed; `shift` (E) is added to the logits."""
        torch.manual_seed(seed)
        self.x.normal_()
        self.dout.normal_()
        self.w_up.normal_(std=self.shape.d**-0.5)
        self.w_down.normal_(std=self.shape.n**-0.5)
        self.logits.normal_()
        if shift is not None:
            self.logits += shift

    def poison(self):
        """Fills all results with NaN."""
        results = (self.out, self.dx, self.dw_up, self.dw_down, self.dlogits)
        for t in (*results, self.weights, self.dweights):
            t.fill_(float("nan"))
        self.ids.fill_(-1)


def halves(w_up: torch.Tensor):
    """Gate and up of [gate; up] (E, 2n, d)."""
    n = w_up.shape[1] // 2
    return w_up[:, :n], w_up[:, n:]


def weights_of(w_up, w_down):
    gate, up = halves(w_up)
    return capi.Weights(gate=gate, up=up, down=w_down)


class Ours:
    """forward() computes the routing and the layer, backward() all gradients of the layer and of
    the routing."""

    def __init__(self, library: capi.Library, data: Data):
        self.library, self.data = library, data
        s = data.shape
        self.options = capi.RouteOptions(top_k=s.K)
        self.problem = capi.Problem(
            form=capi.FORM_IDS,
            dtype=capi.BF16,
            tokens=s.T,
            hidden=s.d,
            width=s.n,
            experts=s.E,
            top_k=s.K,
        )
        routing = capi.Routing(ids=data.ids, weights=data.weights)
        ids, weights = capi.view(data.ids), capi.view(data.weights)
        logits, dlogits = capi.view(data.logits), capi.view(data.dlogits)
        dweights = capi.view(data.dweights)
        call, exec_ = library.bound_call, library.exec
        self.route = call("smoe_route", self.options, logits, ids, weights, exec_)
        self.route_backward = call(
            "smoe_route_backward", self.options, logits, ids, dweights, dlogits, exec_
        )
        self.layer, self.layer_backward = layer_calls(
            library, data, self.problem, routing, data.dweights
        )
        self.forward = capi.in_turn(self.route, self.layer)
        self.backward = capi.in_turn(self.layer_backward, self.route_backward)


def layer_calls(library, data, problem, routing, dweights):
    """moe_forward and moe_backward with this routing and their own buffers. The attribute
    `without_dx` of the latter is a backward that computes no dX."""
    forward_sizes = library.sizes(problem, capi.FORWARD)
    backward_sizes = library.sizes(problem, capi.BACKWARD)

    def buffer(size):
        return torch.empty(max(size, 256), dtype=torch.uint8, device=data.device)

    h, saved = buffer(forward_sizes.h_bytes), buffer(forward_sizes.saved_bytes)
    scratch = buffer(max(forward_sizes.scratch_bytes, backward_sizes.scratch_bytes))
    pointer = ctypes.pointer
    state = {
        "x": pointer(capi.view(data.x)),
        "routing": pointer(routing),
        "weights": pointer(weights_of(data.w_up, data.w_down)),
        "h": h.data_ptr(),
        "h_bytes": forward_sizes.h_bytes,
        "saved": saved.data_ptr(),
        "saved_bytes": forward_sizes.saved_bytes,
        "scratch": scratch.data_ptr(),
        "scratch_bytes": scratch.numel(),
    }
    forward_args = capi.ForwardArgs(out=pointer(capi.view(data.out)), **state)

    def backward_call(**outputs):
        arguments = capi.BackwardArgs(
            dout=pointer(capi.view(data.dout)),
            dweights=pointer(capi.view(dweights)),
            grads=pointer(weights_of(data.dw_up, data.dw_down)),
            **outputs,
            **state,
        )
        return library.bound_call("smoe_moe_backward", problem, arguments, library.exec)

    forward = library.bound_call("smoe_moe_forward", problem, forward_args, library.exec)
    backward = backward_call(dx=pointer(capi.view(data.dx)))
    backward.without_dx = backward_call()
    forward.kept = backward.kept = (h, saved, scratch, state)
    return forward, backward


class Rounded:
    """Like Ours, with token rounding (tile 128) instead of top-k."""

    def __init__(self, library: capi.Library, data: Data, mode: str):
        s = data.shape
        self.route_options = capi.RouteOptions(top_k=s.K)
        pointer = ctypes.pointer
        options = capi.RoundOptions(mode=capi.ROUNDING[mode], route=pointer(self.route_options))
        capacity, scratch_bytes = ctypes.c_int64(), ctypes.c_int64()
        byref = ctypes.byref
        library.call("smoe_round_capacity", byref(options), s.T, s.E, byref(capacity))
        library.call(
            "smoe_round_scratch_bytes",
            byref(options),
            s.T,
            s.E,
            byref(library.exec),
            byref(scratch_bytes),
        )
        rows, device = capacity.value, data.device

        def empty(size, dtype):
            return torch.empty(size, dtype=dtype, device=device)

        self.token, self.expert = (empty(rows, torch.int32) for _ in range(2))
        self.weight, self.dweight = (empty(rows, torch.float32) for _ in range(2))
        self.offsets = empty(s.E + 1, torch.int64)
        scratch = empty(max(scratch_bytes.value, 256), torch.uint8)
        scratch_arguments = (ctypes.c_void_p(scratch.data_ptr()), ctypes.c_int64(scratch.numel()))
        pairs = capi.Pairs(
            token=self.token, expert=self.expert, weight=self.weight, offsets=self.offsets
        )
        problem = capi.Problem(
            form=capi.FORM_PAIRS,
            dtype=capi.BF16,
            tokens=s.T,
            hidden=s.d,
            width=s.n,
            experts=s.E,
            capacity=rows,
        )
        routing = capi.Routing(token=self.token, expert=self.expert, weights=self.weight)
        logits, dlogits = capi.view(data.logits), capi.view(data.dlogits)
        dweight = capi.view(self.dweight)
        call, exec_ = library.bound_call, library.exec
        self.round = call("smoe_token_round", options, logits, pairs, *scratch_arguments, exec_)
        self.round_backward = call(
            "smoe_token_round_backward",
            options,
            logits,
            pairs,
            dweight,
            dlogits,
            *scratch_arguments,
            exec_,
        )
        self.kept = scratch
        self.layer, self.layer_backward = layer_calls(library, data, problem, routing, self.dweight)
        self.forward = capi.in_turn(self.round, self.layer)
        self.backward = capi.in_turn(self.layer_backward, self.round_backward)
