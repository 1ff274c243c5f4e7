"""Groups of processes for the tests of expert parallelism, over gloo or NCCL.

They are forked from a server that has imported everything and computed nothing, so that each
takes a fraction of a second to start.
"""

from __future__ import annotations

import faulthandler
import json
import multiprocessing
import os
import signal
import socket
import sys
import time
import traceback
from pathlib import Path

import torch
import torch.distributed as dist
from sonicmoe_cpp.distributed import _group

_context = multiprocessing.get_context("forkserver")
PRELOAD = ["torch", "torch.distributed.checkpoint", "pytest", "sonicmoe_cpp.distributed"]


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def at_exchange(number: int, action) -> None:
    """Calls action() before the exchange of this number of a group."""
    launch = _group.Group._launch

    def counted(self, *arguments):
        if self.exchanges + 1 == number:
            action()
        return launch(self, *arguments)

    _group.Group._launch = counted


def leave() -> None:
    """Waits for the other ranks of the default group, if there is one, and ends this rank.

    It does not tear the interpreter down: a process group that a mesh or FSDP keeps has threads
    that may hold references to Python objects, and then the teardown sometimes aborts with
    "terminate called without an active exception" (github.com/pytorch/pytorch/pull/179291)."""
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()
    exit_at_once()


def exit_at_once() -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def _enter(function, backend, rank: int, size: int, port: int, folder: Path, environ) -> None:
    """Runs the function on one rank; writes its result, or the exception, to a file."""
    os.environ |= environ  # before CUDA starts
    if backend == "nccl":
        torch.cuda.set_device(rank)
    torch.set_num_threads(1)
    faulthandler.register(signal.SIGUSR1, _stack_file(folder, rank, size).open("w"))
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    began, found = time.monotonic(), {}
    try:
        dist.init_process_group(backend, rank=rank, world_size=size)
        found["result"] = function(rank, size, folder)
    except BaseException as error:
        found["error"] = f"{type(error).__name__}: {error}"
        found["traceback"] = traceback.format_exc()
    found["seconds"] = time.monotonic() - began
    _write_result(folder, rank, size, found)
    sys.stdout.flush()
    if "error" in found:
        return  # the interpreter ends the rest, as in a user's program
    _wait_for_results(folder, size)
    dist.destroy_process_group()
    exit_at_once()


def _write_result(folder: Path, rank: int, size: int, found: dict) -> None:
    unfinished = folder / f"{rank}-of-{size}.unfinished"
    unfinished.write_text(json.dumps(found))
    unfinished.rename(_result_file(folder, rank, size))


def _result_file(folder: Path, rank: int, size: int) -> Path:
    return folder / f"{rank}-of-{size}.json"


def _stack_file(folder: Path, rank: int, size: int) -> Path:
    return folder / f"{rank}-of-{size}.stack"


def _what_hangs(folder: Path, rank: int, size: int) -> str:
    """What a rank that does not end has raised, and where its threads are."""
    result, stack = _result_file(folder, rank, size), _stack_file(folder, rank, size)
    raised = result.read_text() if result.is_file() else "no result yet"
    return f"rank {rank}: {raised}\n{stack.read_text() if stack.is_file() else ''}"


def _wait_for_results(folder: Path, size: int, limit=60.0) -> None:
    """Waits until every rank has its result, so that no rank closes a connection that another rank
    uses. Not by a barrier: ranks whose cases failed at different places would wait in it forever,
    because their collectives no longer match."""
    until = time.monotonic() + limit
    files = [_result_file(folder, rank, size) for rank in range(size)]
    while time.monotonic() < until and not all(file.is_file() for file in files):
        time.sleep(0.01)


def run(
    function, size: int, folder: Path, limit=150.0, backend="gloo", environ: dict | None = None
) -> list[dict | None]:
    """Runs function(rank, size, folder) on every rank and returns the results; None for a rank that
    was killed. Fails if a process is left after `limit` seconds. `environ` is added to the ranks'
    environment."""
    _context.set_forkserver_preload(PRELOAD)
    port, extra = free_port(), environ or {}
    ranks = [
        _context.Process(target=_enter, args=(function, backend, rank, size, port, folder, extra))
        for rank in range(size)
    ]
    for process in ranks:
        process.start()
    until = time.monotonic() + limit
    for process in ranks:
        process.join(max(0.1, until - time.monotonic()))
    hanging = [rank for rank, process in enumerate(ranks) if process.is_alive()]
    for rank in hanging:
        os.kill(ranks[rank].pid, signal.SIGUSR1)
    time.sleep(1.0 if hanging else 0.0)  # in which they write their stacks
    for process in ranks:
        process.kill()
    found = "\n".join(_what_hangs(folder, rank, size) for rank in hanging)
    assert not hanging, f"ranks {hanging} of {size} still ran after {limit} s\n{found}"
    files = [_result_file(folder, rank, size) for rank in range(size)]
    return [json.loads(file.read_text()) if file.is_file() else None for file in files]
