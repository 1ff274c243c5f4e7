"""CUDA graphs of a step: the studies' models have so many short kernels that launching them one by
one takes longer than the kernels."""

import functools
import gc
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

EAGER_CALLS = 3  # before a capture: they compile, load kernels and create the optimizer's state


@functools.cache
def side_stream() -> torch.cuda.Stream:
    """Of all captures and of the calls before them, so that these share their memory."""
    return torch.cuda.Stream()


def beside(function: Callable[[], Any]) -> Any:
    """Calls the function on the side stream, which the current stream waits for."""
    side_stream().wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side_stream()):
        results = function()
    torch.cuda.current_stream().wait_stream(side_stream())
    return results


def captured(function: Callable[[], Any]) -> tuple[torch.cuda.CUDAGraph, Any]:
    """The function as a CUDA graph, and the results that the graph overwrites at each replay. The
    function must have been called EAGER_CALLS times."""
    gc.collect()  # graphs of earlier runs may be parts of reference cycles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=side_stream()):
        results = function()
    return graph, results


def leave_capture() -> None:
    """After a failed capture torch's generator still refuses to draw outside of one: it gets a new
    state, as after torch.manual_seed()."""
    state = torch.Generator("cuda").graphsafe_get_state()
    torch.cuda.default_generators[torch.cuda.current_device()].graphsafe_set_state(state)


class Replayed:
    """A function of tensors whose shapes do not change. Its first calls are eager. Then it is
    captured, and each call replays the graph; the results of a call last until the next one.

    All that the function reads or changes besides its arguments must stay at its place in device
    memory. With graph=False every call is eager, and also if the capture fails: then one sentence
    on stderr says so.
    """

    def __init__(self, function: Callable[..., Any], graph: bool):
        self._function, self._wanted, self._calls = function, graph, 0
        self._graph: torch.cuda.CUDAGraph | None = None
        self._inputs: tuple[Tensor, ...] = ()
        self._results: Any = None

    @property
    def settled(self) -> bool:
        """Whether the next call is like all later ones: a replay, or eager for good."""
        return not self._wanted or self._graph is not None

    def __call__(self, *inputs: Tensor) -> Any:
        if not self._wanted:
            return self._function(*inputs)
        if self._graph is None:
            if self._calls < EAGER_CALLS:
                self._calls += 1
                return beside(lambda: self._function(*inputs))
            if not self._capture(inputs):
                return self._function(*inputs)
        for held, given in zip(self._inputs, inputs, strict=True):
            held.copy_(given)
        self._graph.replay()
        return self._results

    def _capture(self, inputs: tuple[Tensor, ...]) -> bool:
        held = tuple(x.clone() for x in inputs)
        try:
            self._graph, self._results = captured(lambda: self._function(*held))
        except RuntimeError as error:
            self._wanted = False
            leave_capture()
            reason = str(error).splitlines()[0]
            print(f"a step is not captured as a CUDA graph: {reason}", file=sys.stderr, flush=True)
            return False
        self._inputs = held
        return True
