"""Time of a micro-batch, forward and backward, with top-K and with token rounding, in one process.

Both are captured as CUDA graphs and replayed in turn, so that the host's time does not count.
"""

import re
import statistics
from collections.abc import Callable
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from quality.model import Model, Rule
from quality.text import Windows

ROUNDS, REPLAYS = 9, 10
EXPERTS = re.compile("smoe|sonicmoe")  # in the names of this library's kernels


def captured(step: Callable[[], None]) -> torch.cuda.CUDAGraph:
    """The step as a CUDA graph, after three steps that set up what it needs."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph


def milliseconds(graph: torch.cuda.CUDAGraph) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(REPLAYS):
        graph.replay()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / REPLAYS


def experts_ms(step: Callable[[], None]) -> float:
    """Milliseconds of this library's kernels, routing and rounding included."""
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        step()
        torch.cuda.synchronize()
    found = (e for e in seen.key_averages() if EXPERTS.search(e.key))
    return sum(e.self_device_time_total for e in found) / 1e3


def measure(model: Model, rule: Rule, windows: Windows) -> dict[str, Any]:
    """{"topk": {...}, "rounded": {...}}: medians of step_ms, and experts_ms of one step."""
    count = max(1, rule.group // model.size.context)
    inputs, targets = windows.batch(0, count)

    def step(of: Rule | None) -> Callable[[], None]:
        def run() -> None:
            loss, layers = model(inputs, targets, of)
            (loss + sum(layer.loss for layer in layers)).backward()

        return run

    steps = {"topk": step(None), "rounded": step(rule)}
    for parameter in model.parameters():  # fixed places for the graphs to add gradients to
        if parameter.requires_grad and parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
    graphs = {name: captured(run) for name, run in steps.items()}
    found: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(ROUNDS):
        for name, graph in graphs.items():
            found[name].append(milliseconds(graph))
    result: dict[str, Any] = {"tokens": count * model.size.context, "tile": rule.tile}
    for name, run in steps.items():
        values = {"step_ms": round(statistics.median(found[name]), 4)}
        values["experts_ms"] = round(experts_ms(run), 4)
        result[name] = values
    for parameter in model.parameters():
        parameter.grad = None
    return result
