"""One rank of ep2.py: python -m torch.distributed.run ... -m ep2_bench.worker ...

Times this library's layer over peer memory and the other implementations in one run, and writes one
line of JSON for each layer to --out.
"""

from __future__ import annotations

import argparse
import functools
import gc
import json
import os
import time

import torch
import torch._dynamo
import torch.distributed as dist

from ep2_bench import nvshmem, rivals, timing
from ep2_bench.data import CAPACITY, Data, shape_of

LARGEST_ERROR = 0.02  # of a result: norm of the difference from ours / norm of ours
LARGEST_OF_FP8 = 0.1
NAMES = ("out", "dx", "dweights", "dw_up", "dw_down")
SKEWS = (0.6, 0.4, 0.55, 0.45)  # part of the choices that falls on rank 0, one for each layer


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--configs", nargs="+", required=True)
    parser.add_argument("--rivals", choices=("torch", "nvshmem", "fp8"), default="torch")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--burst", type=float, default=60.0, help="milliseconds")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--until", type=float, required=True, help="by time.time()")
    parser.add_argument("--out", required=True)
    return parser.parse_args()


def results(call, data: Data) -> tuple:
    out = call()
    return out.detach(), *torch.autograd.grad(out, data.leaves(), data.dout)


def error(got: torch.Tensor, want: torch.Tensor) -> float:
    got, want = got.float().flatten(), want.float().flatten()
    return ((got - want).norm() / want.norm().clamp(min=1e-20)).item()


def wrong(found: tuple, expected: tuple, device, largest=LARGEST_ERROR) -> str | None:
    """A sentence on the results that differ too much from ours on at least one rank, or None."""
    errors = {n: error(g, w) for n, g, w in zip(NAMES, found, expected, strict=True)}
    errors = {name: timing.slowest(value, device) for name, value in errors.items()}
    # `not <=` instead of `>`, so that a NaN counts as wrong.
    bad = [f"{n} {v:.3f}" for n, v in errors.items() if not v <= largest]
    return f"wrong results: {', '.join(bad)}" if bad else None


class Rank:
    """The measurements of one rank."""

    def __init__(self, options):
        self.options = options
        self.rank, self.ranks = dist.get_rank(), dist.get_world_size()
        cuda = options.device == "cuda"
        self.device = torch.device("cuda", torch.cuda.current_device()) if cuda else "cpu"
        self.device = torch.device(self.device)
        self.transport = "peer" if cuda else "all_to_all"

    def late(self) -> bool:
        """Whether the time --until has come on any rank; the same answer on all ranks."""
        return timing.slowest(time.time() - self.options.until, self.device) > 0

    def write(self, row: dict) -> None:
        if self.rank == 0:
            with open(self.options.out, "a") as file:
                file.write(json.dumps(row) + "\n")

    def free(self) -> None:
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.synchronize()
            torch.cuda.empty_cache()

    def checked(self, calls: dict, data: Data) -> dict[str, str]:
        """Removes calls with wrong results from `calls`; returns the reasons by name."""
        expected, reasons = results(calls["ours_torch"], data), {}
        for name, call in list(calls.items()):
            if name == "ours_torch" or name.startswith("alone"):
                continue
            largest = LARGEST_OF_FP8 if "fp8" in name else LARGEST_ERROR
            reason = wrong(results(call, data), expected, self.device, largest)
            if reason is not None:
                reasons[name] = reason
                del calls[name]
        return reasons

    def layer(self, config: str) -> dict:
        shape = shape_of(config)
        data = Data(shape, self.rank, self.ranks, self.device)
        those = rivals.in_fp8 if self.options.rivals == "fp8" else rivals.contenders
        calls = those(data, self.transport, CAPACITY if self.ranks > 1 else 2.0)
        if self.options.rivals == "nvshmem":
            buffers = nvshmem.Buffers(data, 1.1)
            calls = {"ours_torch": calls["ours_torch"], "alone_torch": calls["alone_torch"]}
            calls["vdev_2d"] = functools.partial(nvshmem.step, data, buffers)
        row = {"config": config, **vars(shape), "ranks": self.ranks}
        reasons = self.checked(calls, data)
        both = {name: functools.partial(results, call, data) for name, call in calls.items()}
        runs = {(name, "fwd"): call for name, call in calls.items()}
        runs |= {(name, "both"): call for name, call in both.items()}
        found = timing.interleaved(runs, self.device, self.options.burst, self.options.rounds)
        for name in calls:
            forward, whole = found[name, "fwd"], found[name, "both"]
            row[name] = {"fwd_ms": round(forward, 4), "bwd_ms": round(whole - forward, 4)}
        return row | ({"absent": reasons} if reasons else {})

    def kept(self, config: str) -> dict:
        """MiB that layers with uneven routings keep for backward on each rank: with as many rows as
        are routed (exact), and with `capacity` (arena)."""
        shape = shape_of(config)
        datas = [Data(shape, self.rank, self.ranks, self.device, share) for share in SKEWS]
        held = shape.E // self.ranks
        chosen = torch.stack([(data.ids < held).sum() for data in datas])
        dist.all_reduce(chosen)
        mean = self.ranks * shape.T * shape.K / self.ranks
        of_rank_0 = [count / mean for count in chosen.tolist()]
        most = max(max(part, 2 - part) for part in of_rank_0)
        capacity = 0.05 * (int(most / 0.05) + 1)
        modes = {"exact": {}, "arena": {"capacity": capacity}}
        row = {"config": config, "layers": len(SKEWS), "capacity": round(capacity, 2)}
        row["rows_of_rank_0_over_mean"] = [round(part, 3) for part in of_rank_0]
        for mode, options in modes.items():
            options |= {"transport": self.transport, "max_tokens": shape.T}
            row[f"{mode}_MiB"] = self.of_ranks(self.kept_by(datas, options))
        parts = zip(row["arena_MiB"], row["exact_MiB"], strict=True)
        row["arena_over_exact"] = [round(a / b, 3) for a, b in parts]
        return row

    def kept_by(self, datas: list, options: dict) -> float:
        for data in datas:  # makes the allocations that happen only once
            rivals.ours(data, **options)
        self.free()
        before = torch.cuda.memory_stats()["requested_bytes.all.current"]
        outs = [rivals.ours(data, **options) for data in datas]
        torch.cuda.synchronize()
        now = torch.cuda.memory_stats()["requested_bytes.all.current"]
        kept = now - before - sum(out.numel() * out.element_size() for out in outs)
        return round(kept / 2**20, 1)

    def of_ranks(self, value: float) -> list[float]:
        found = torch.zeros(self.ranks, device=self.device, dtype=torch.float64)
        found[self.rank] = value
        dist.all_reduce(found)
        return found.tolist()


def run(options) -> None:
    rank = Rank(options)
    # Few tokens first: a call sends partial sums of as many tokens as its buffer has room for.
    for config in sorted(options.configs, key=lambda name: shape_of(name).T):
        if rank.late():
            rank.write({"config": config, "late": True})
            continue
        torch._dynamo.reset()
        rank.write(rank.layer(config))
        rank.free()
    if options.rivals == "torch" and rank.device.type == "cuda" and not rank.late():
        rank.write({"kept": rank.kept(options.configs[0])})


def main() -> None:
    options = arguments()
    cuda = options.device == "cuda"
    if cuda:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    else:
        rivals.compiled = lambda function: function
    if options.rivals == "nvshmem":
        import torch.distributed._symmetric_memory as symmetric
        from sonicmoe_cpp.distributed import _memory

        reason = nvshmem.absent()
        if reason is not None:
            raise SystemExit(f"absent: {reason}")
        symmetric.set_backend("NVSHMEM")
        _memory.WAYS = (_memory.CudaIpc,)  # torch has one backend of symmetric memory a process
    dist.init_process_group("nccl" if cuda else "gloo")
    run(options)
    dist.barrier()
    dist.destroy_process_group()
    os._exit(0)  # torch's teardown may abort a process that has done its work


if __name__ == "__main__":
    main()
