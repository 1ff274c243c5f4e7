"""Where the time of a step goes: milliseconds of the GPU by part of the model, of one step under
torch's profiler."""

import functools
import json
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import Any

from torch import nn
from torch.profiler import ProfilerActivity, profile, record_function

PREFIX = "part: "
STEP = PREFIX + "step"
KERNELS = ("kernel", "gpu_memcpy", "gpu_memset")
LAUNCHES = ("cuda_runtime", "cuda_driver")
NODE = "autograd::engine::evaluate_function: "
LONGEST, NAME = 12, 70  # kernels of the table, and characters of their names


def part_of(path: str, module: nn.Module) -> str | None:
    """The part of the step that a module is, by the names of transformers; None: its parent's."""
    own = path.rpartition(".")[2]
    if own == "experts":
        return "experts"
    if own in ("gate", "router") or isinstance(getattr(module, "experts", None), nn.Module):
        return "router"
    if "norm" in own:
        return "norms"
    if own == "lm_head":
        return "head and loss"
    if own == "self_attn":
        return "attention"
    return "attention's linear layers" if own.endswith("_proj") and "attn" in path else None


def _ranged(call, part: str):
    @functools.wraps(call)
    def ranged(*args, **kwargs):
        with record_function(PREFIX + part):
            return call(*args, **kwargs)

    return ranged


class Trace:
    """One step from the construction to end(), before which the device must be idle."""

    def __init__(self, model: nn.Module):
        self._undo = []
        compiled = []  # modules whose insides are one call
        for path, module in model.named_modules():
            part = part_of(path, module)
            if part is None or any(path.startswith(f"{outer}.") for outer in compiled[-1:]):
                continue
            name = "forward"
            if module._compiled_call_impl is not None:
                name = "_compiled_call_impl"
                compiled.append(path)
            self._undo.append((module, name, vars(module).get(name)))
            setattr(module, name, _ranged(getattr(module, name), part))
        self._loss_of = model.get_base_model()
        self._loss = self._loss_of.loss_function
        self._loss_of.loss_function = _ranged(self._loss, "head and loss")
        self._profile = profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA])
        self._profile.start()
        self._step = record_function(STEP)
        self._step.__enter__()

    def end(self) -> dict[str, Any]:
        self._step.__exit__(None, None, None)
        self._profile.stop()
        self._loss_of.loss_function = self._loss
        for module, name, before in self._undo:
            if before is None:
                delattr(module, name)
            else:
                setattr(module, name, before)
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "trace.json"
            self._profile.export_chrome_trace(str(path))
            return attribute(json.loads(path.read_bytes())["traceEvents"])


def _forward_parts(events: list[dict], main: Any) -> dict[int, str]:
    """The part of each autograd node of the main thread, by its sequence number. The last operator
    with a number made the node."""
    parts = {}
    for event, part, _ in _walk([e for e in events if e["tid"] == main]):
        if event["args"].get("Fwd thread id") == 0:  # others are nodes
            parts[event["args"]["Sequence number"]] = part or "other"
    return parts


def _walk(events: list[dict]):
    """(event, part, node) of each event of one thread: the innermost range, and the autograd node
    that it runs in, unless a range is inside of that."""
    stack: list[tuple[float, str | None, int | None]] = []
    for event in sorted(events, key=lambda e: (e["ts"], -e["dur"])):
        while stack and stack[-1][0] <= event["ts"]:
            stack.pop()
        _, part, node = stack[-1] if stack else (0, None, None)
        name, end = event["name"], event["ts"] + event["dur"]
        if event["cat"] == "user_annotation":
            if name.startswith("Optimizer."):
                part = "optimizer"
            elif name.startswith(PREFIX) and name != STEP:
                part = name.removeprefix(PREFIX)
            stack.append((end, part, node))
        elif name.startswith(NODE):
            part, node = None, event["args"].get("Sequence number", -1)
            stack.append((end, part, node))
        yield event, part, node


def attribute(events: list[dict]) -> dict[str, Any]:
    """The events of a Chrome trace as {"parts": {part: {phase: ms}}, "kernels", "busy_ms",
    "longest": {kernel: [ms, count]}}. Phases are forward, recomputed (by checkpointing, in
    backward) and backward."""
    host = [e for e in events if e.get("cat") in ("cpu_op", "user_annotation", *LAUNCHES)]
    host = [{"args": {}, "dur": 0} | e for e in host]
    main = next(e["tid"] for e in host if e["name"] == STEP)
    nodes = _forward_parts(host, main)
    launched: dict[int, tuple[str, str]] = {}
    for thread in {e["tid"] for e in host}:
        for event, part, node in _walk([e for e in host if e["tid"] == thread]):
            if event["cat"] not in LAUNCHES or "correlation" not in event["args"]:
                continue
            phase = "forward"
            if node is not None:
                phase = "recomputed" if part else "backward"
            place = part or (nodes.get(node) if node is not None else None) or "other"
            launched[event["args"]["correlation"]] = place, phase
    parts: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    longest: dict[str, list] = defaultdict(lambda: [0.0, 0])
    spans = []
    for event in events:
        if event.get("cat") not in KERNELS:
            continue
        place, phase = launched.get(event["args"].get("correlation"), ("other", "forward"))
        parts[place][phase] += event["dur"] / 1e3
        entry = longest[event["name"][:NAME]]
        entry[0] += event["dur"] / 1e3
        entry[1] += 1
        spans.append((event["ts"], event["ts"] + event["dur"]))
    found = sorted(longest.items(), key=lambda item: -item[1][0])
    return {
        "parts": {name: dict(phases) for name, phases in parts.items()},
        "kernels": len(spans),
        "busy_ms": _union(spans) / 1e3,
        "longest": {name: [round(ms, 2), count] for name, (ms, count) in found[:LONGEST]},
    }


def _union(spans: list[tuple[float, float]]) -> float:
    total, until = 0.0, float("-inf")
    for begin, end in sorted(spans):
        total += max(0.0, end - max(begin, until))
        until = max(until, end)
    return total


def table(found: dict[str, Any], step_ms: float) -> str:
    """The trace as text; step_ms is the time of a step without the profiler."""
    phases = ("forward", "recomputed", "backward")
    lines = [f"{'ms of the GPU in one step':<28}" + "".join(f"{p:>12}" for p in (*phases, "all"))]
    rows = sorted(found["parts"].items(), key=lambda item: -sum(item[1].values()))
    for name, times in rows:
        values = [times.get(phase, 0.0) for phase in phases]
        lines.append(f"  {name:<26}" + "".join(f"{v:12.1f}" for v in (*values, sum(values))))
    busy = found["busy_ms"]
    lines.append(
        f"  {found['kernels']} kernels, busy {busy:.1f} ms of a step of {step_ms:.1f} ms, idle "
        f"{max(0.0, step_ms - busy):.1f} ms"
    )
    lines += [f"  {ms:8.1f} ms {n:6} {name}" for name, (ms, n) in found["longest"].items()]
    return "\n".join(lines)
