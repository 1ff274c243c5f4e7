"""Time of a step with top-K and with token rounding, in one process.

Both are captured as CUDA graphs and replayed in turn, so that the host's time does not count.
"""

import re
import statistics
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from quality.graphs import EAGER_CALLS, beside, captured
from quality.model import Model, Rule

ROUNDS, REPLAYS = 9, 10
EXPERTS = re.compile("smoe|sonicmoe")  # in the names of this library's kernels
LEAST_US = 2.0  # kernels that take less in all are not listed


def milliseconds(graph: torch.cuda.CUDAGraph) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(REPLAYS):
        graph.replay()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / REPLAYS


def in_turn(steps: dict[str, Callable[[], None]]) -> dict[str, float]:
    """Median milliseconds of each step."""
    graphs = {}
    for name, step in steps.items():
        for _ in range(EAGER_CALLS):
            beside(step)
        graphs[name] = captured(step)[0]
    found: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(ROUNDS):
        for name, graph in graphs.items():
            found[name].append(milliseconds(graph))
    return {name: round(statistics.median(values), 4) for name, values in found.items()}


def short_name(kernel: str) -> str:
    """A kernel's name without its return type, namespaces, template arguments and parameters."""
    plain = kernel.replace("(anonymous namespace)::", "").removeprefix("void ")
    return re.split("[<(]", plain, maxsplit=1)[0].split("::")[-1].strip()


def busy(spans: list[tuple[str, float, float]]) -> dict[str, list[float]]:
    """[launches, microseconds] by name, longest first, of spans (name, begin, end) of one stream.

    A kernel may begin before the previous one has ended, to wait for it: that time counts for the
    previous one alone, so that the sum is the time in which any of them ran.
    """
    found: dict[str, list[float]] = {}
    reached = 0.0
    for name, begin, end in sorted(spans, key=lambda span: span[1:]):
        row = found.setdefault(name, [0, 0.0])
        row[0] += 1
        row[1] += max(0.0, end - max(begin, reached))
        reached = max(reached, end)
    return dict(sorted(found.items(), key=lambda item: -item[1][1]))


def kernels(step: Callable[[], None]) -> dict[str, Any]:
    """experts_ms: milliseconds of this library's kernels, routing and rounding included; kernels:
    busy() by short name, the library's as smoe::name."""
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        step()
        torch.cuda.synchronize()
    spans = []
    for event in seen.events():
        if event.device_type == DeviceType.CUDA:
            name = "smoe::" * bool(EXPERTS.search(event.name)) + short_name(event.name)
            spans.append((name, event.time_range.start, event.time_range.end))
    found = busy(spans)
    experts = sum(us for name, (_, us) in found.items() if name.startswith("smoe::"))
    listed = {name: [n, round(us, 1)] for name, (n, us) in found.items() if us >= LEAST_US}
    return {"experts_ms": round(experts / 1e3, 4), "kernels": listed}


def measure(
    model: Model, optimizer: torch.optim.Optimizer, rule: Rule, batch: tuple[Tensor, Tensor]
) -> dict[str, Any]:
    """{"topk": {...}, "rounded": {...}}: micro_ms, forward and backward of a micro-batch; step_ms,
    a whole step of the batch: its micro-batches one after another, clipping and the optimizer, with
    a learning rate of 0; and kernels() of a micro-batch. Changes the optimizer's state."""
    windows = max(1, rule.group // model.size.context)
    parts = list(zip(*(x.split(windows) for x in batch), strict=True))
    trained = [p for p in model.parameters() if p.requires_grad]
    for group in optimizer.param_groups:
        group["lr"].zero_()

    def backward(of: Rule | None, part: tuple[Tensor, Tensor]) -> None:
        loss, layers = model(*part, of)
        (loss + sum(layer.loss for layer in layers)).backward()

    def whole(of: Rule | None) -> None:
        optimizer.zero_grad(set_to_none=False)
        for part in parts:
            backward(of, part)
        nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()

    for parameter in trained:  # fixed places for the graphs to add gradients to
        parameter.grad = torch.zeros_like(parameter)
    rules = {"topk": None, "rounded": rule}
    micro = in_turn({name: lambda of=of: backward(of, parts[0]) for name, of in rules.items()})
    steps = in_turn({name: lambda of=of: whole(of) for name, of in rules.items()})
    result: dict[str, Any] = {"tokens": windows * model.size.context, "tile": rule.tile}
    result["step_tokens"] = batch[0].numel()
    for name, of in rules.items():
        result[name] = {"micro_ms": micro[name], "step_ms": steps[name]}
        result[name] |= kernels(lambda of=of: backward(of, parts[0]))
    optimizer.zero_grad()
    return result
