"""Times calls that all ranks make together, interleaved and hot. A time is the slowest rank's."""

from __future__ import annotations

import statistics
import time

import torch
import torch.distributed as dist

HEAT = 8  # bursts of the first call that heat the GPU before the measurement


def slowest(value: float, device) -> float:
    """The maximum of `value` over all ranks."""
    found = torch.tensor([value], device=device, dtype=torch.float64)
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return found.item()


def burst(call, count: int, device) -> float:
    """Milliseconds of one call: the mean over `count` calls without a pause between them. On CUDA,
    `count` calls that are not timed come first. Without them the clock would depend on the burst
    before: a GPU that has waited for NCCL is cooler and faster."""
    dist.barrier()
    if device.type != "cuda":
        began = time.perf_counter()
        for _ in range(count):
            call()
        return slowest(1e3 * (time.perf_counter() - began) / count, device)
    torch.cuda.synchronize()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for _ in range(count):
        call()
    begin.record()
    for _ in range(count):
        call()
    end.record()
    end.synchronize()
    return slowest(begin.elapsed_time(end) / count, device)


def steps_of(call, burst_ms: float, device) -> int:
    """The number of calls that take about `burst_ms`. It is estimated twice, because the first
    calls of a process are slow: a burst of few calls would then be timed as a slow one."""
    count = 2
    for _ in range(2):
        count = max(3, round(burst_ms / max(burst(call, count, device), 1e-3)))
    return count


def interleaved(calls: dict, device, burst_ms: float, rounds: int) -> dict[str, float]:
    """The median over rounds of each call's time, in milliseconds. A round has one burst of every
    call; every second round has the opposite order. First, calls that are not counted bring the GPU
    to its power limit."""
    counts = {}
    for name, call in calls.items():
        call()
        counts[name] = steps_of(call, burst_ms, device)
    name, call = next(iter(calls.items()))
    burst(call, round(HEAT * counts[name]), device)
    found = {name: [] for name in calls}
    for i in range(rounds):
        for name, call in list(calls.items())[:: -1 if i % 2 else 1]:
            found[name].append(burst(call, counts[name], device))
    return {name: statistics.median(values) for name, values in found.items()}
