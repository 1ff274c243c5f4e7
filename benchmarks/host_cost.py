#!/usr/bin/env python3
"""Measures microseconds of host time for calls of moe(), its backward and route().

    python benchmarks/host_cost.py [--device cuda] [--profile] [--out FILE]

Shapes are tiny (T=64). A few calls are enqueued, then the benchmark waits for the device, so that
the launch queue is never full and no call waits for another. The limits are those of
docs/notes/2026-11-host-cost.md. --profile prints the functions that take most time.
"""

import argparse
import cProfile
import json
import os
import pstats
import statistics
import subprocess
import time
from datetime import date
from pathlib import Path

import sonicmoe_cpp
import torch

T, D, N, E, K = 64, 256, 128, 16, 4
QUEUED = 32  # calls between two synchronisations
LIMITS = {"forward": 60.0, "forward + backward": 200.0, "route": 30.0}


def calls(device: str) -> dict:
    """The measured calls by name."""
    dtype = torch.bfloat16

    def leaf(*size, scale=1.0, of=dtype):
        return (scale * torch.randn(*size)).to(device, of).requires_grad_()

    x, w_up, w_down = leaf(T, D), leaf(E, 2 * N, D, scale=D**-0.5), leaf(E, D, N, scale=N**-0.5)
    logits, dout = leaf(T, E), leaf(T, D).detach()
    ids, weights = sonicmoe_cpp.route(logits.detach(), K)
    weights.requires_grad_()
    leaves = (x, weights, w_up, w_down)

    def forward():
        return sonicmoe_cpp.moe(x, ids, weights, w_up, w_down)

    def inference():
        with torch.no_grad():
            forward()

    def both():
        forward().backward(dout)
        for t in leaves:
            t.grad = None

    def one_thread():
        with torch.autograd.set_multithreading_enabled(False):
            both()

    class Nothing(torch.autograd.Function):
        """An operation without work on the same leaves: the cost of autograd alone."""

        @staticmethod
        def forward(ctx, *tensors):
            ctx.save_for_backward(*tensors)
            return dout.detach()

        @staticmethod
        def backward(ctx, gradient):
            return ctx.saved_tensors

    def nothing():
        Nothing.apply(*leaves).backward(dout)
        for t in leaves:
            t.grad = None

    return {
        "forward": forward,
        "forward + backward": both,
        "forward + backward, autograd on one thread": one_thread,
        "autograd alone, forward + backward": nothing,
        "inference": inference,
        "route": lambda: sonicmoe_cpp.route(logits, K),
        "token_round": lambda: sonicmoe_cpp.token_round(logits, K, tile=16),
        "torch.empty": lambda: torch.empty(T, D, device=device, dtype=dtype),
        "torch linear": lambda: torch.nn.functional.linear(x, w_up[0]),
    }


def wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def commit() -> str:
    """The measured commit; SONICMOE_COMMIT names it where there is no git history."""
    command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short", "HEAD"]
    named = os.environ.get("SONICMOE_COMMIT")
    return (
        named or subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    )


def measure(named: dict, device: str, rounds: int = 80) -> dict[str, tuple[float, float]]:
    """Microseconds a call: the fastest round, which other processes disturbed least, and the median
    one. Rounds of all calls alternate, so that all run under the same load."""
    samples = {name: [] for name in named}
    for number in range(rounds + 2):
        for name, call in named.items():
            wait(device)
            began = time.perf_counter()
            for _ in range(QUEUED):
                call()
            if number >= 2:  # the first two load kernels and fill caches
                samples[name].append((time.perf_counter() - began) / QUEUED * 1e6)
    wait(device)
    return {name: (min(values), statistics.median(values)) for name, values in samples.items()}


def show_profile(call, device: str) -> None:
    profile = cProfile.Profile()
    for _ in range(40):
        wait(device)
        profile.enable()
        for _ in range(QUEUED):
            call()
        profile.disable()
    pstats.Stats(profile).sort_stats("tottime").print_stats(16)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--profile", action="store_true", help="print a profile")
    parser.add_argument("--out", type=Path, help="JSON file to write")
    arguments = parser.parse_args()
    device = arguments.device
    reason = sonicmoe_cpp.unsupported_reason(device)
    if reason is not None:
        parser.error(reason)
    measured = measure(calls(device), device)
    for name, (best, median) in measured.items():
        limit = f"   limit {LIMITS[name]:.0f}" if name in LIMITS else ""
        print(f"{name:44} {best:8.1f} us best {median:8.1f} median{limit}")
    if arguments.profile:
        for name in ("forward", "forward + backward"):
            show_profile(calls(device)[name], device)
    if arguments.out:
        record = {
            "commit": commit(),
            "date": date.today().isoformat(),
            "torch": torch.__version__,
            "device": torch.cuda.get_device_name() if device == "cuda" else "cpu",
            "shape": {"T": T, "d": D, "n": N, "E": E, "K": K},
            "microseconds": {
                name: {"best": round(best, 1), "median": round(median, 1)}
                for name, (best, median) in measured.items()
            },
        }
        arguments.out.write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    main()
