"""Cases of expert parallelism that every rank of a world runs together, against one process.

    torchrun --nproc-per-node 2 tests/python/expert_parallel_cases.py [PART OF A NAME]

runs them over NCCL where CUDA can be used, else over gloo. Every rank computes the one process's
results itself.
"""

from __future__ import annotations

import os
import sys
import tempfile
import traceback
from pathlib import Path

import expert_parallel_functions as expert_parallel_functions
import expert_parallel_modules as expert_parallel_modules
import sonicmoe_cpp as smoe
import torch
import torch.distributed as dist
from expert_parallel_base import CASES, World


def run_all(world: World, part: str = "") -> dict[str, str | None]:
    """What went wrong on this rank, by case; None where nothing did."""
    found = {}
    for name, check in CASES.items():
        if part not in name:
            continue
        try:
            torch.manual_seed(0)
            check(world)
            found[name] = None
        except Exception:
            found[name] = traceback.format_exc()
            return found  # the other ranks may be in the middle of this case
    return found


def leave() -> None:
    """Ends a rank as test_training.py says."""
    dist.barrier()
    dist.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)


def main(part: str = "") -> None:
    cuda = smoe.unsupported_reason("cuda") is None
    if cuda:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    torch.set_num_threads(1)
    dist.init_process_group("nccl" if cuda else "gloo")
    with tempfile.TemporaryDirectory() as folder:
        shared = [folder]
        dist.broadcast_object_list(shared)
        device = "cuda" if cuda else "cpu"
        folder = Path(shared[0])
        world = World(dist.get_rank(), dist.get_world_size(), device, folder, saves=True)
        found = run_all(world, part)
        for name, problem in found.items():
            sys.stdout.write(f"rank {dist.get_rank()}: {name}: {problem or 'ok'}\n")
        sys.stdout.flush()
        if any(found.values()):
            os._exit(1)
        dist.barrier()
    leave()


if __name__ == "__main__":
    main(*sys.argv[1:])
