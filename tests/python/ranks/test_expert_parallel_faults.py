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
import torch.distributed as dist
import worlds
from sonicmoe_cpp import Activation
from sonicmoe_cpp.distributed import ExpertParallelMoE, _group, _health, transport

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


def die():
    os.kill(os.getpid(), signal.SIGKILL)


# Exchanges: 1 is the group's first, 2 that of the module's seed. Those of a step are, on the CPU, 3
# and 4 for the losses, 5 to 9 of the layer (counts, pairs, rows, weights, rows back), and 10 to 14
# of its backward. On CUDA they are 3, 4 to 8 and 9 to 12.
FORWARD, BACKWARD, LATER = 6, 11, 23


def killed(rank, size, folder, victim, number):
    if rank == victim:
        worlds.at_exchange(number, die)
    steps(module())


def killed_1_first(*world):
    """Rank 1 is killed before the group's first exchange."""
    killed(*world, 1, 1)


def killed_1_forward(*world):
    killed(*world, 1, FORWARD)


def killed_1_backward(*world):
    killed(*world, 1, BACKWARD)


def killed_0_first(*world):
    """The store is lost before a rank has read which process rank 0 is."""
    killed(*world, 0, 1)


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


def test_rank_0_killed_before_the_first_exchange(tmp_path):
    found = worlds.run(killed_0_first, SIZE, tmp_path)
    for each in found[1:]:
        assert re.search(r"rank 0 \(.*\) has ended|rank [12] failed|ranks 0", each["error"]), each
        assert each["seconds"] < SOON


def restarted(rank, size, folder, late):
    """As after a restart by torchrun, whose store survives: it has a failure of rank 1 and the
    process of rank 1, from before this attempt. Rank 1 is so late that the others read it."""
    if rank == 1:
        before = _health.RankHealth(dist.group.WORLD)
        ended = subprocess.Popen(["true"])
        ended.wait()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(_health.Process, "now", lambda: 0)
            before.this = before.this._replace(pid=ended.pid)
            before._write("process/1", [*before.this, 0])
            before.failed(_health.FOR_GOOD, "in the attempt before")
        _health._made.clear()
    dist.barrier()
    if late == "at first" and rank == 1:
        time.sleep(2.5 * _group.PATIENCE)
    layer = module()
    if late == "later" and rank == 1:
        time.sleep(2.5 * _group.PATIENCE)
    steps(layer)
    return "done"


def restarted_and_late_at_first(*world):
    restarted(*world, "at first")


def restarted_and_late_later(*world):
    restarted(*world, "later")


@pytest.mark.parametrize("function", [restarted_and_late_at_first, restarted_and_late_later])
def test_restart_with_the_same_store(function, tmp_path):
    for each in worlds.run(function, SIZE, tmp_path):
        assert "error" not in each, each


def stalls(rank, size, folder):
    layer = module(TIMEOUT)
    if rank == 2:
        worlds.at_exchange(FORWARD, lambda: time.sleep(2 * TIMEOUT))
    steps(layer)


def test_a_rank_that_does_not_come(tmp_path):
    found = worlds.run(stalls, SIZE, tmp_path)
    for each in found[:2]:
        assert "rank 2 did not come within 5 s (" in each["error"], each
        assert TIMEOUT <= each["seconds"] < SOON
    assert "ExpertParallelError" in found[2]["error"]  # the late rank raises too
    assert found[2]["seconds"] < 2 * TIMEOUT + SOON


def fails_and_leaves(rank, size, folder):
    """Rank 2 reports a fault of its kernels in one call, which the others do not see, and does not
    come to the next one."""
    layer = module(TIMEOUT)
    steps(layer, 1)
    if rank == 2:
        health = _group.group_of(None).health
        health.failed(_group.group_of(None).moment_before, "rank 1 did not send its rows")
        time.sleep(2 * TIMEOUT)
        return
    steps(layer, 1)


def test_a_rank_that_failed_before_and_does_not_come(tmp_path):
    sentence = "rank 2 did not come within 5 s (rank 2 failed before: rank 1 did not send its rows)"
    for each in worlds.run(fails_and_leaves, SIZE, tmp_path)[:2]:
        assert sentence in each["error"] or "failed: rank 2 did not come" in each["error"], each
        assert TIMEOUT <= each["seconds"] < SOON


def stops(rank, size, folder):
    """Rank 0, whose process holds the store of the process group, is stopped until the other ranks
    have ended, at most a minute; then it is killed."""
    layer = module(TIMEOUT)
    files = " && ".join(f"[ -f {folder}/{other}-of-{size}.json ]" for other in (1, 2))
    wait = f"for i in $(seq 600); do {files} && break; sleep 0.1; done"
    kill = ["sh", "-c", f"{wait}; kill -KILL {os.getpid()}"]
    if rank == 0:
        worlds.at_exchange(FORWARD, lambda: subprocess.Popen(kill) and stop())
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
        worlds.at_exchange(layer.transport.group.exchanges + 1, interrupt.start)
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
    assert any("sums of the losses on rank 1" in error for error in others), others


def waits_elsewhere(rank, size, folder):
    """Collectives that do not match, as a hook of the user's between them could make them."""
    group = _group.group_of(None)
    group.read_all(_group.ROUTING, [0], torch.device("cpu"), 60.0)
    if rank == 1:
        group.all_gather(torch.zeros(3), 4.0)
    else:
        group.send(torch.zeros(size, 1), [1] * size, [1] * size, 4.0)()


def test_ranks_that_wait_in_different_exchanges(tmp_path):
    found = [each["error"] for each in worlds.run(waits_elsewhere, 2, tmp_path)]
    sentence = "all ranks wait (rank 0 in an exchange of rows, rank 1 in an exchange of sums)"
    assert any(sentence in error for error in found), found


def stays_in_an_earlier_exchange(rank, size, folder):
    """Rank 1 says where it waits, and never comes to the next exchange."""
    group = _group.group_of(None)
    group.read_all(_group.ROUTING, [0], torch.device("cpu"), 60.0)
    if rank == 1:
        group.health.waits(group.exchanges, "an exchange of sums")
    dist.barrier()
    if rank == 1:
        return time.sleep(TIMEOUT)
    group.read_all(_group.ROUTING, [0], torch.device("cpu"), 1.0)


def test_a_rank_that_stays_in_an_earlier_exchange(tmp_path):
    found = worlds.run(stays_in_an_earlier_exchange, 2, tmp_path)[0]["error"]
    sentence = (
        "rank 1 did not come within 1 s (rank 1 last waited in an exchange of sums, this rank"
    )
    assert sentence in found, found


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


def other_precision(rank, size, folder):
    """As the attribute of a module that is set after the constructor."""
    layer = module()
    layer.precision = "auto" if rank == 1 else None
    layer(torch.randn(5, 24))


def test_ranks_with_another_precision(tmp_path):
    found = worlds.run(other_precision, SIZE, tmp_path)
    assert 'but precision is "auto" on rank 1 and None on rank 0' in found[0]["error"], found[0]


DIFFERENT = {
    "top_k": 2,
    "hidden_size": 32,
    "intermediate_size": 8,
    "activation": "geglu",
    "gate_layout": "interleaved",
    "bias": True,
    "routing": "expert_choice",
    "score": "softmax_before_topk",
    "renormalize": True,
    "scale": 2.0,
    "tile": 64,
    "rounding": "up",
    "seed": 1,
    "lb_coef": 0.1,
    "z_coef": 0.1,
    "router_dtype": torch.float64,
    "dtype": torch.float64,
    "shared_experts": 1,
    "precision": "auto",
    "transport": "all_to_all",
}
SIZES = {"num_experts": 12, "top_k": 3, "hidden_size": 24, "intermediate_size": 16}


def other_options(rank, size, folder):
    """Rank 1 alone has another value of one option; each option in a group of its own."""
    _health.GRACE = 0.0
    found = {}
    for name, value in DIFFERENT.items():
        options = SIZES | {"group": dist.new_group(range(size))}
        if rank == 1:
            options[name] = value
        try:
            if name == "scale":  # from the meta device, with weights of a checkpoint
                layer = ExpertParallelMoE(**options, device="meta").to_empty(device="cpu")
                layer(torch.zeros(4, 24))
            else:
                ExpertParallelMoE(**options)
        except _health.ExpertParallelError as error:
            found[name] = str(error)
    return found


def test_ranks_with_other_options(tmp_path):
    found = worlds.run(other_options, SIZE, tmp_path)
    for name, value in DIFFERENT.items():
        for rank, each in enumerate(found):
            sentence = each["result"][name]
            assert f"but {name} is " in sentence, sentence
            other = f"{value!r} on rank 1" if name == "activation" else f"{value} on rank 1"
            assert other in sentence.replace("('geglu', None, None)", "'geglu'"), sentence
            assert f"on rank {rank}" in sentence or rank == 1, sentence


def another_activation(rank, size, folder):
    _health.GRACE = 0.0
    world = functions.World(rank, size, "cpu", folder, saves=False)
    found = {}
    options = {"activation": "geglu", "gate_layout": "interleaved"}
    options["alpha or limit of activation"] = Activation("swiglu_oai", limit=3.0)
    for name, value in options.items():
        mine = functions.mine_of(world, functions.random_layer(), torch.float32, "even")
        option = name.rpartition(" ")[-1]
        if option == "activation":
            mine.options[option] = "swiglu" if value == "geglu" else Activation("swiglu_oai")
        if rank == 1:
            mine.options[option] = value
        try:
            functions.by_ids(mine, dist.new_group(range(size)))
        except _health.ExpertParallelError as error:
            found[name] = str(error)
    return found


def test_ranks_that_call_functions_with_other_options(tmp_path):
    for each in worlds.run(another_activation, SIZE, tmp_path):
        found = each["result"]
        assert "but activation is geglu on rank 1 and swiglu on rank" in found["activation"] or (
            "but activation is swiglu on rank 0 and geglu on rank 1" in found["activation"]
        )
        assert "but gate_layout is " in found["gate_layout"]
        name = "alpha or limit of activation"
        assert f"but {name} is of hash " in found[name]


def a_short_limit(rank, size, folder):
    """Rank 1 comes to the first exchange when rank 0 has given up."""
    until = time.monotonic() + 20
    while rank == 1 and time.monotonic() < until and not (folder / f"0-of-{size}.json").is_file():
        time.sleep(0.05)
    _group.group_of(None).read_all(_group.ROUTING, [0], torch.device("cpu"), 1e-4)


def test_a_limit_below_a_millisecond(tmp_path):
    found = worlds.run(a_short_limit, 2, tmp_path)[0]
    assert "rank 1 did not come within 0.0001 s" in found["error"], found
    assert found["seconds"] < 15


def test_faults_over_peer_memory():
    """A rank is killed, stalls or raises, over the exchange that stands for peer memory on CPUs."""
    program = [sys.executable, str(Path(__file__).with_name("peer_cases.py"))]
    ran = subprocess.run([*program, "--device=cpu", "--faults"], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert ran.stdout.count("ok ") == 4 and "0 failed, 0 not run" in ran.stdout, ran.stdout


def test_one_process_without_a_group():
    with pytest.raises(ValueError, match="expert parallelism needs a process group"):
        ExpertParallelMoE(12, 3, 24, 16)
