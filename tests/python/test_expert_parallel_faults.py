"""Ranks of expert parallelism that die, fail, stall or leave a step: the others end with a sentence
that names them, within the time limit."""

import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import exchange_fake
import expert_parallel_functions as functions
import pytest
import torch
import worlds
from sonicmoe_cpp.distributed import ExpertParallelMoE, _group, transport

pytestmark = pytest.mark.slow
SIZE = 3
SOON = 30.0  # seconds for a rank that is gone: less than the time limit of 60
TIMEOUT = 5.0


def module(timeout=60.0, **options):
    torch.manual_seed(0)
    return ExpertParallelMoE(12, 3, 24, 16, timeout=timeout, **options)


def steps(layer, count=3, **kind):
    x = torch.randn(40, 24, **kind).requires_grad_()
    for _ in range(count):
        out, _ = layer(x)
        out.square().sum().backward()


def at_exchange(number, action):
    """Calls action() before the exchange of this number."""
    launch = _group.Group._launch

    def counted(self, *arguments):
        if self.exchanges + 1 == number:
            action()
        return launch(self, *arguments)

    _group.Group._launch = counted


def die():
    os.kill(os.getpid(), signal.SIGKILL)


# Exchanges of a step: 2 to 6 are a forward's (counts, pairs, rows, weights, rows back), 7 its
# losses', 8 to 12 the backward's. The first one is that of the module's seed.
FORWARD, BACKWARD, LATER = 6, 10, 21


def killed(rank, size, folder, victim, number):
    if rank == victim:
        at_exchange(number, die)
    steps(module())


def killed_1_first(*world):
    """Rank 1 is killed before the first exchange, which is that of the module's seed."""
    killed(*world, 1, 1)


def killed_1_forward(*world):
    killed(*world, 1, FORWARD)


def killed_1_backward(*world):
    killed(*world, 1, BACKWARD)


def killed_0_later(*world):
    """Rank 0's process holds the store of the process group."""
    killed(*world, 0, LATER)


@pytest.mark.parametrize(
    ("function", "victim"),
    [(killed_1_first, 1), (killed_1_forward, 1), (killed_1_backward, 1), (killed_0_later, 0)],
)
def test_a_killed_rank(function, victim, tmp_path):
    found = worlds.run(function, SIZE, tmp_path)
    assert found[victim] is None
    for each in found[:victim] + found[victim + 1 :]:
        assert "ExpertParallelError: expert parallelism, call" in each["error"], each
        assert each["seconds"] < SOON
        assert re.search(rf"ranks? (.* )?{victim} \(process \d+\).* ended", each["error"]), each


def stalls(rank, size, folder):
    layer = module(TIMEOUT)
    if rank == 2:
        at_exchange(FORWARD, lambda: time.sleep(2 * TIMEOUT))
    steps(layer)


def test_a_rank_that_does_not_come(tmp_path):
    found = worlds.run(stalls, SIZE, tmp_path)
    for each in found[:2]:
        assert "rank 2 did not come within 5 s" in each["error"], each
        assert TIMEOUT <= each["seconds"] < SOON
    assert "ExpertParallelError" in found[2]["error"]  # the late rank raises too
    assert found[2]["seconds"] < 2 * TIMEOUT + SOON


def stops(rank, size, folder):
    """Rank 0, whose process holds the store of the process group, is stopped until the other ranks
    have ended, at most a minute; then it is killed."""
    layer = module(TIMEOUT)
    files = " && ".join(f"[ -f {folder}/{other}-of-{size}.json ]" for other in (1, 2))
    wait = f"for i in $(seq 600); do {files} && break; sleep 0.1; done"
    kill = ["sh", "-c", f"{wait}; kill -KILL {os.getpid()}"]
    if rank == 0:
        at_exchange(FORWARD, lambda: subprocess.Popen(kill) and stop())
    steps(layer)


def stop():
    os.kill(os.getpid(), signal.SIGSTOP)


def test_a_rank_whose_process_is_stopped(tmp_path):
    found = worlds.run(stops, SIZE, tmp_path)
    assert found[0] is None
    sentence = "rank 0 (the store of the process group does not answer) did not come within 5 s"
    assert any(sentence in each["error"] for each in found[1:]), found
    for each in found[1:]:
        assert "ExpertParallelError" in each["error"], each
        assert each["seconds"] < SOON


def refuses(rank, size, folder):
    layer = module()
    steps(layer, 1)
    if rank == 1:
        layer(torch.zeros(4, 25))
    steps(layer)


def test_a_rank_that_refuses(tmp_path):
    found = worlds.run(refuses, SIZE, tmp_path)
    sentence = "ValueError: x has shape (4, 25), its last dimension must be 24"
    assert found[1]["error"] == sentence
    for each in (found[0], found[2]):
        assert f"rank 1 failed: {sentence}" in each["error"], each
        assert each["seconds"] < SOON


def all_refuse(rank, size, folder):
    """All ranks raise an error between a forward and its backward; rank 2 comes late to the
    backward."""
    layer = module()
    out, _ = layer(torch.randn(5, 24))
    with pytest.raises(ValueError, match="its last dimension must be 24"):
        layer(torch.zeros(4, 25))
    if rank == 2:
        time.sleep(2.5 * _group.PATIENCE)
    out.square().sum().backward()
    steps(layer)
    return "done"


def test_what_all_ranks_refuse_breaks_nothing(tmp_path):
    for each in worlds.run(all_refuse, SIZE, tmp_path):
        assert each.get("result") == "done", each


def runs_out_of_memory(rank, size, folder):
    layer = module()
    if rank == 0:
        combine = transport.AllToAll.combine

        def fails(*arguments):
            transport.AllToAll.combine = combine
            raise MemoryError("no memory")

        transport.AllToAll.combine = fails
    try:
        steps(layer)
    except MemoryError as first:
        try:
            steps(layer)  # the group is broken, so further steps raise
        except RuntimeError as second:
            raise RuntimeError(f"{second}; {first}") from None


def test_a_rank_that_fails_in_the_middle_of_a_call(tmp_path):
    found = worlds.run(runs_out_of_memory, SIZE, tmp_path)
    assert "group has been broken since an earlier call (MemoryError" in found[0]["error"]
    for each in found[1:]:
        assert "rank 0 failed: MemoryError: no memory" in each["error"], each
        assert each["seconds"] < SOON


def interrupted(rank, size, folder, **options):
    """Ctrl-C at rank 1, which waits for rank 2, also ends rank 0, which waits too. Rank 2 comes
    after both have ended."""
    layer = module(**options)
    steps(layer, 1)
    if rank == 1:
        # A test that a shell started in the background has inherited that SIGINT is ignored.
        signal.signal(signal.SIGINT, signal.default_int_handler)
        interrupt = threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT))
        at_exchange(layer.transport.group.exchanges + 1, interrupt.start)
    ended = [folder / f"{other}-of-{size}.json" for other in (0, 1)]
    while rank == 2 and not all(file.is_file() for file in ended):
        time.sleep(0.05)
    steps(layer)


def interrupted_over_peer_memory(*world):
    """The ranks wait for each other's sizes."""
    exchange_fake.install()
    interrupted(*world, transport="peer")


def interrupted_in_an_exchange(*world):
    """The ranks wait for each other's rows."""
    exchange_fake.install()
    interrupted(*world, transport="peer", max_tokens=40, capacity=3.0)


@pytest.mark.parametrize(
    "function", [interrupted, interrupted_over_peer_memory, interrupted_in_an_exchange]
)
def test_ctrl_c(function, tmp_path):
    found = worlds.run(function, SIZE, tmp_path)
    assert found[1]["error"].startswith("KeyboardInterrupt"), found[1]
    assert found[0]["error"].endswith("rank 1 failed: KeyboardInterrupt"), found[0]
    assert found[0]["seconds"] < SOON and found[1]["seconds"] < SOON
    assert "ExpertParallelError" in found[2]["error"]


def leaves_a_step(rank, size, folder):
    """Rank 1 drops the backward of a step and begins the next step."""
    layer = module()
    x = torch.randn(40, 24, requires_grad=True)
    for step in range(3):
        out, _ = layer(x)
        if rank == 1 and step == 1:
            continue
        out.square().sum().backward()


def test_a_rank_that_leaves_a_step(tmp_path):
    found = worlds.run(leaves_a_step, SIZE, tmp_path)
    for each in found:
        assert "ExpertParallelError" in each["error"], each
        assert each["seconds"] < SOON
    others = found[0]["error"], found[2]["error"]
    assert any("call 4 in its forward on rank 1" in error for error in others), others


def makes_another_call(rank, size, folder):
    first, second = module(), module()
    steps(first, 1)
    steps(second if rank == 1 else first)


def test_ranks_that_call_different_layers(tmp_path):
    found = worlds.run(makes_another_call, SIZE, tmp_path)
    for each in found:
        assert "all ranks must make the same calls, but the layer is" in each["error"], each


def records(rank, size, folder):
    layer = module()
    with torch.set_grad_enabled(rank != 2):
        layer(torch.randn(5, 24))


def test_ranks_that_do_not_all_record_gradients(tmp_path):
    found = worlds.run(records, SIZE, tmp_path)
    for each in found:
        assert "the graph for gradients is" in each["error"], each


def other_sizes(rank, size, folder):
    layer = functions.random_layer()
    mine = functions.mine_of(
        functions.World(rank, size, "cpu", folder, saves=False), layer, torch.float32, "even"
    )
    if rank == 1:
        for name in ("x", "w_up"):
            setattr(mine, name, getattr(mine, name).detach()[..., :16].requires_grad_())
        mine.w_down = mine.w_down.detach()[:, :16].clone().requires_grad_()
    functions.by_ids(mine)


def test_ranks_with_other_sizes(tmp_path):
    found = worlds.run(other_sizes, SIZE, tmp_path)
    assert "but d is 16 on rank 1 and 24 on rank 0" in found[0]["error"], found[0]


def test_faults_over_peer_memory():
    """A rank is killed, stalls or raises, over the exchange that stands for peer memory on CPUs."""
    program = [sys.executable, str(Path(__file__).with_name("peer_cases.py"))]
    ran = subprocess.run([*program, "--device=cpu", "--faults"], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert ran.stdout.count("ok ") == 4 and "0 failed, 0 not run" in ran.stdout, ran.stdout


def test_one_process_without_a_group():
    with pytest.raises(ValueError, match="expert parallelism needs a process group"):
        ExpertParallelMoE(12, 3, 24, 16)
