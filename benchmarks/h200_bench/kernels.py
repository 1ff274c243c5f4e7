"""Times of single kernels, by CUPTI, and of torch.bmm with the same shapes in a similar pass."""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Collection
from dataclasses import dataclass

import torch

from . import capi, timing

ROUNDS = 3  # bursts of each; the times of two bursts differ by 2 to 3 %
# The portable engine's kernels are named after their epilogues.
PORTABLE = {
    "activategrad<": "dH",
    "activate<": "A",
    "activatestaged<": "A",
    "storeexpert<": "dW",
    "store<": "Y",
    "storestaged<": "Y",
}


def role_of(which, name):
    """The role of a kernel: the tensor that it computes, as in docs/notation.md. "rest" is routing,
    metadata and similar."""
    low = name.lower()
    for part, role in PORTABLE.items():
        if "portable::" in low and part in low:
            return role if role != "Y" or which == "fwd" else "dX~"
    if "up_" in low or "upkernel" in low:
        return "A"
    if "hidden_grad" in low:
        return "dH"
    if "weight_grad" in low:
        return "dW"
    if "down" in low or "input_grad" in low:
        return "Y" if which == "fwd" else "dX~"
    if "sum_rows" in low or "sum_token" in low:
        return "O" if which == "fwd" else "dX"
    return "rest"


class Products:
    """The products of each role by torch.bmm, on already gathered, balanced rows."""

    def __init__(self, bound):
        s = bound.shape
        self.bound, self.flops = bound, s.rows * s.n * s.d
        rows = s.rows // s.E
        self.a = torch.randn(s.E, rows, s.n, device="cuda").bfloat16()
        self.h = torch.randn(s.E, rows, 2 * s.n, device="cuda").bfloat16()

    def calls(self):
        """role -> (flops, call); dW is both weight gradients."""
        b, bmm = self.bound, torch.bmm
        w1, w2 = b.w1.transpose(1, 2), b.w2.transpose(1, 2)
        xe, a = b.xe.transpose(1, 2), self.a.transpose(1, 2)
        return {
            "A": (4 * self.flops, lambda: bmm(b.xe, b.w1)),
            "Y": (2 * self.flops, lambda: bmm(self.a, b.w2)),
            "dH": (2 * self.flops, lambda: bmm(b.doe, w2)),
            "dW": (6 * self.flops, lambda: (bmm(a, b.doe), bmm(xe, self.h))),
            "dX~": (4 * self.flops, lambda: bmm(self.h, w1)),
        }

    def copy(self):
        """A copy that moves as many bytes, read and written, as the sum over a token's rows."""
        s = self.bound.shape
        source = self.bound.xe.flatten()
        target = torch.empty((s.rows + s.T) * s.d // 2, dtype=source.dtype, device=source.device)
        return lambda: target.copy_(source[: len(target)])


def marker(tensor):
    """Launches a kernel that occurs nowhere else; it separates the bursts in a trace."""
    torch.lgamma(tensor)


def traced(bursts):
    """[(name, microseconds)] of the kernels of each burst, in order of their begin.

    A kernel that begins before its predecessor has ended is timed from the predecessor's end on, so
    that the times of a burst add up to its duration.
    """
    tensor = torch.ones(1, device="cuda")
    marker(tensor)
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for calls, run in bursts:
            for _ in range(calls):
                run()
            marker(tensor)
        torch.cuda.synchronize()
    events = [
        (e.start_ns(), e.start_ns() + e.duration_ns(), e.name())
        for e in profile.profiler.kineto_results.events()
        if str(e.device_type()).endswith("CUDA") and not e.name().startswith("Memset")
    ]
    parts = [[]]
    reached = 0
    for start, end, name in sorted(events):
        if "lgamma" in name:
            parts.append([])
        else:
            parts[-1].append((name, max(0, end - max(start, reached)) * 1e-3))
        reached = max(reached, end)
    return parts[:-1]


def by_role(roles, kernels, calls, dropped):
    """role -> microseconds a call, without the first `dropped` calls. `roles` maps the kernels of a
    call to their roles."""
    each = len(kernels) // calls
    if each * calls != len(kernels):
        raise SystemExit(f"{len(kernels)} kernels in {calls} calls: the calls differ")
    totals = []
    for call in range(calls):
        of_call = {}
        part = kernels[call * each : (call + 1) * each]
        for role, (_, duration) in zip(roles(part), part, strict=True):
            of_call[role] = of_call.get(role, 0.0) + duration
        totals.append(of_call)
    kept = totals[dropped:]
    return {role: statistics.median(t[role] for t in kept) for role in kept[0]}


@dataclass(frozen=True)
class Pass:
    """Kernels that are launched in sequence, as in a layer."""

    run: Callable[[], None]
    roles: Callable[[list], list]  # of the kernels of a call
    keeps: Collection[str]  # roles that this pass times


def ours_in(which, run, keeps):
    return Pass(run, lambda part: [role_of(which, name) for name, _ in part], keeps)


def torch_in(calls):
    """The products of a pass in the same sequence as ours, so that the chip has the same clock."""
    run = capi.in_turn(*calls.values())
    run()
    counts = [len(part) for part in traced([(1, call) for call in calls.values()])]
    roles = [role for role, count in zip(calls, counts, strict=True) for _ in range(count)]
    return Pass(run, lambda _: roles, calls)


def passes_of(ours, products):
    """(ours or torch, pass) -> Pass. The sum into dX overlaps dW1. So dX counts only the time that
    it adds, and dW is timed in a backward without dX. The sum into O is compared with a copy."""
    calls = {name: call for name, (_, call) in products.calls().items()} | {"O": products.copy()}
    without_dx = ours.layer_backward.without_dx
    return {
        ("ours", "fwd"): ours_in("fwd", ours.forward, ("A", "Y", "O", "rest")),
        ("ours", "bwd"): ours_in("bwd", ours.backward, ("dH", "dX~", "dX", "rest")),
        ("ours", "dW"): ours_in("bwd", without_dx, ("dW",)),
        ("torch", "fwd"): torch_in({role: calls[role] for role in ("A", "Y", "O")}),
        ("torch", "bwd"): torch_in({role: calls[role] for role in ("dH", "dX~", "dW")}),
    }


def kernel_times(ours, products, burst_ms):
    """(ours or torch, role) -> microseconds, hot."""
    return times_by_role(passes_of(ours, products), burst_ms)


def times_by_role(passes, burst_ms):
    """(who, role) -> microseconds, hot, of the passes {(who, which): Pass}: medians of ROUNDS
    bursts of each pass, in random order."""
    for one in passes.values():
        one.run()
    lengths = {k: max(3, round(burst_ms / timing.elapsed(1, p.run))) for k, p in passes.items()}
    plan = [k for _ in range(ROUNDS) for k in random.sample(list(passes), len(passes))]
    times = {}
    bursts = traced([(lengths[k], passes[k].run) for k in plan])
    for key, kernels in zip(plan, bursts, strict=True):
        dropped = max(1, round(timing.DROPPED * lengths[key]))
        who, which = key
        for role, us in by_role(passes[key].roles, kernels, lengths[key], dropped).items():
            if role in passes[key].keeps:
                name = role if role != "rest" else f"rest of {which}"
                times.setdefault((who, name), []).append(us)
    return {key: statistics.median(samples) for key, samples in times.items()}


def kernel_rates(ours, bound, burst_ms):
    """role -> microseconds and TFLOP/s of our kernel and of torch.bmm, and their ratio."""
    products = Products(bound)
    flops = {role: count for role, (count, _) in products.calls().items()}
    times = kernel_times(ours, products, burst_ms)
    result = {role: {"us": round(us, 2)} for (who, role), us in times.items() if who == "ours"}
    for (who, role), us in times.items():
        if who != "torch":
            continue
        part = result[role]
        if role not in flops:
            part["of_copy"] = round(us / part["us"], 3)
            continue
        part["tflops"] = round(flops[role] / part["us"] * 1e-6, 1)
        part["bmm_us"] = round(us, 2)
        part["bmm_tflops"] = round(flops[role] / us * 1e-6, 1)
        part["of_bmm"] = round(us / part["us"], 3)
    return result
