"""Cases of expert parallelism that every rank of a world runs together, against one process.

    torchrun --nproc-per-node 2 tests/python/ranks/expert_parallel_cases.py [PART OF A NAME]
        [--device cpu|cuda] [--transport auto|all_to_all|peer] [--max-tokens T] [--capacity C]

runs them over NCCL where CUDA can be used, else over gloo. Every rank computes the one process's
results itself. peer_cases.py runs them over peer memory in all its forms.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

import expert_parallel_compiled as expert_parallel_compiled
import expert_parallel_fp8 as expert_parallel_fp8
import expert_parallel_functions as expert_parallel_functions
import expert_parallel_lora as expert_parallel_lora
import expert_parallel_modules as expert_parallel_modules
import expert_parallel_parts as expert_parallel_parts
import sonicmoe_cpp as smoe
import torch
import torch.distributed as dist
from expert_parallel_base import CASES, TRANSPORT, World
from worlds import leave


def run_cases(world: World, cases: dict, tell: Callable[..., None]) -> dict[str, str | None]:
    """Returns {case: the traceback of its exception on this rank, or None}. Calls tell(name) before
    each case and tell(name, seconds, problem) after it."""
    found = {}
    for name, check in cases.items():
        began = time.monotonic()
        tell(name)
        try:
            torch.manual_seed(0)
            check(world)
            found[name] = None
        except Exception:
            found[name] = traceback.format_exc()
        tell(name, time.monotonic() - began, found[name])
        if found[name] is not None:
            return found  # the other ranks may be in the middle of this case
    return found


def run_all(world: World, part: str = "") -> dict[str, str | None]:
    cases = {name: check for name, check in CASES.items() if part in name}
    return run_cases(world, cases, lambda *_: None)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("part", nargs="?", default="")
    parser.add_argument("--device", choices=("cpu", "cuda"))
    parser.add_argument("--transport", default="auto")
    parser.add_argument("--max-tokens", type=int)
    parser.add_argument("--capacity", type=float)
    options = parser.parse_args()
    if not any(options.part in name for name in CASES):
        parser.error(f"no case has {options.part!r} in its name")
    if options.device is None:
        options.device = "cuda" if smoe.unsupported_reason("cuda") is None else "cpu"
    return options


def main() -> None:
    options = arguments()
    cuda = options.device == "cuda"
    for name in ("transport", "max_tokens", "capacity"):
        if getattr(options, name) is not None:
            TRANSPORT[name] = getattr(options, name)
    if cuda:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    torch.set_num_threads(1)
    dist.init_process_group("nccl" if cuda else "gloo")
    with tempfile.TemporaryDirectory() as folder:
        shared = [folder]
        dist.broadcast_object_list(shared)
        folder = Path(shared[0])
        world = World(dist.get_rank(), dist.get_world_size(), options.device, folder, saves=True)
        found = run_all(world, options.part)
        for name, problem in found.items():
            sys.stdout.write(f"rank {dist.get_rank()}: {name}: {problem or 'ok'}\n")
        sys.stdout.flush()
        if any(found.values()):
            os._exit(1)
        dist.barrier()
    leave()


if __name__ == "__main__":
    main()
