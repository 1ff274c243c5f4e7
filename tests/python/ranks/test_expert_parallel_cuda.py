"""Expert parallelism on two GPUs: the cases that gloo runs, over NCCL and over peer memory, and
ranks that end.

    torchrun --nproc-per-node 2 tests/python/ranks/expert_parallel_cases.py --transport all_to_all
    python tests/python/ranks/peer_cases.py

run the cases alone.
"""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import worlds
from cuda_support import needs_cuda
from sonicmoe_cpp.distributed import ExpertParallelMoE
from test_expert_parallel_faults import BACKWARD, FORWARD, TIMEOUT, die, steps

pytestmark = [
    needs_cuda,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
]


def test_as_one_process():
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    cases = Path(__file__).parent / "expert_parallel_cases.py"
    command = [*torchrun, str(cases), "--transport", "all_to_all"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=180)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count(": ok") > 60, done.stdout


def test_peer_memory():
    cases = Path(__file__).parent / "peer_cases.py"
    command = [sys.executable, str(cases), "--seconds", "300"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stdout + done.stderr


def training(timeout):
    torch.manual_seed(0)
    where = {"device": "cuda", "dtype": torch.bfloat16, "transport": "all_to_all"}
    layer = ExpertParallelMoE(12, 3, 24, 16, timeout=timeout, **where)
    steps(layer, device="cuda", dtype=torch.bfloat16)


def killed_forward(rank, size, folder):
    if rank == 1:
        worlds.at_exchange(FORWARD, die)
    training(60.0)


def killed_backward(rank, size, folder):
    if rank == 1:
        worlds.at_exchange(BACKWARD, die)
    training(60.0)


def never_comes(rank, size, folder):
    if rank == 1:
        worlds.at_exchange(2, lambda: time.sleep(4 * TIMEOUT))
    training(TIMEOUT)


@pytest.mark.parametrize("function", [killed_forward, killed_backward])
def test_a_killed_rank(function, tmp_path):
    """The host notices the killed rank when it reads counts: in this call or in the next one."""
    found = worlds.run(function, 2, tmp_path, 60.0, "nccl")
    assert found[1] is None
    assert "rank 1 (process" in found[0]["error"] and "has ended" in found[0]["error"], found[0]


def test_a_rank_that_does_not_come(tmp_path):
    found = worlds.run(never_comes, 2, tmp_path, 60.0, "nccl")
    assert "rank 1 did not come within 5 s" in found[0]["error"], found[0]
