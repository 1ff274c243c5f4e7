"""Times of calls that all ranks make together: the slowest rank's, interleaved and hot."""

from __future__ import annotations

import statistics
import time

import torch
import torch.distributed as dist

HEAT = 8  # bursts before those that count


def slowest(value: float, device) -> float:
    """The largest value of all ranks."""
    found = torch.tensor([value], device=device, dtype=torch.float64)
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return found.item()


def burst(call, count: int, device) -> float:
    """Milliseconds of one of `count` calls without a pause."""
    dist.barrier()
    if device.type != "cuda":
        began = time.perf_counter()
        for _ in range(count):
            call()
        return slowest(1e3 * (time.perf_counter() - began) / count, device)
    torch.cuda.synchronize()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(count):
        call()
    end.record()
    end.synchronize()
    return slowest(begin.elapsed_time(end) / count, device)


def interleaved(calls: dict, device, burst_ms: float, rounds: int) -> dict[str, float]:
    """The median of each call's bursts, which alternate. The GPU is at its power limit by then."""
    counts = {}
    for name, call in calls.items():
        call()
        once = burst(call, 2, device)
        counts[name] = max(3, round(burst_ms / max(once, 1e-3)))
    name, call = next(iter(calls.items()))
    burst(call, round(HEAT * counts[name]), device)
    found = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            found[name].append(burst(call, counts[name], device))
    return {name: statistics.median(values) for name, values in found.items()}
