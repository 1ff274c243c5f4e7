"""Times calls: hot (chip at its power limit), cool (after a pause), or single with L2 flushed."""

from __future__ import annotations

import math
import random
import statistics
import time

import torch

DROPPED = 0.4  # fraction of a burst at its begin, until the clock is stable


def elapsed(calls, run):
    """Milliseconds a call, of `calls` calls without a pause."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(calls):
        run()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / calls


def burst(run, milliseconds, once):
    """Milliseconds a call in the later part of a burst."""
    calls = max(3, round(milliseconds / once))
    dropped = max(1, round(DROPPED * calls))
    for _ in range(dropped):
        run()
    return elapsed(calls - dropped, run)


def hot_round(runs: dict, milliseconds: float, times: dict):
    """Times one burst of each without a pause, in random order; appends to `times`."""
    once = {name: elapsed(1, run) for name, run in runs.items()}
    names = list(runs)
    random.shuffle(names)
    for name in names:
        times.setdefault(name, []).append(burst(runs[name], milliseconds, once[name]))


def cool_round(runs: dict, times: dict, idle=0.03):
    """Times one call of each after a pause and one warm-up call."""
    for name, run in runs.items():
        torch.cuda.synchronize()
        time.sleep(idle)
        run()
        times.setdefault(name, []).append(elapsed(1, run))


class Flusher:
    """Writes more than L2 holds, so that the next call has no L2 hits."""

    def __init__(self, device, mebibytes=256):
        self.block = torch.empty(mebibytes << 20, dtype=torch.uint8, device=device)

    def __call__(self):
        self.block.zero_()


def lead_over(run, flush):
    """Number of flushes that take longer than the host needs to enqueue `run`."""
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(3):
        run()
    host = 1e3 * (time.perf_counter() - began) / 3
    return 1 + math.ceil(1.5 * host / elapsed(5, flush))


def flushed_round(runs: dict, calls: int, flush, times: dict):
    """Times single calls by events, with L2 flushed before each; appends the median. The flushes
    give the host a lead, so that its own time (host_microseconds) is not part of the result."""
    samples = {name: [] for name in runs}
    leads = {name: lead_over(run, flush) for name, run in runs.items()}
    for _ in range(calls):
        for name, run in runs.items():
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            for _ in range(leads[name]):
                flush()
            begin.record()
            run()
            end.record()
            samples[name].append((begin, end))
    torch.cuda.synchronize()
    for name, pairs in samples.items():
        median = statistics.median(begin.elapsed_time(end) for begin, end in pairs)
        times.setdefault(name, []).append(median)


def host_microseconds(run, calls=50):
    """Host time of a call, independent of the device's work."""
    run()
    torch.cuda.synchronize()
    costs = []
    for _ in range(calls):
        begin = time.perf_counter()
        run()
        costs.append(1e6 * (time.perf_counter() - begin))
        torch.cuda.synchronize()
    return statistics.median(costs)
