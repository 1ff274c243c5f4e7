"""Expert parallelism over peer memory on CPUs: the code around the exchange's operators, which
exchange_fake.py replaces. peer_cases.py tests the exchange itself on GPUs."""

import contextlib
import gc
import itertools
import re
import time
import weakref
from pathlib import Path

import exchange_fake
import expert_parallel_base as base
import expert_parallel_cases as cases
import pytest
import torch
import torch.distributed as dist
import worlds
from days import of_today
from sonicmoe_cpp import _ops
from sonicmoe_cpp.distributed import (
    ExpertParallelError,
    ExpertParallelMoE,
    _memory,
    buffers,
    check_exchange,
    peer,
    reset_exchange,
)
from sonicmoe_cpp.distributed._group import group_of

pytestmark = pytest.mark.slow
LIMIT = 900.0  # seconds; 280 on two cores beside other tests
# exact: the ranks read sizes and numbers of rows in each forward; arena: they read nothing.
WORLDS = {
    "exact": (2, {"transport": "peer"}),
    "arena": (3, {"transport": "peer", "max_tokens": base.T, "capacity": 12.0}),
    "auto": (2, {"transport": "auto", "max_tokens": base.T}),
}


def of_rank(rank, size, folder, options):
    fake = exchange_fake.install()
    base.TRANSPORT.update(options)
    found = cases.run_all(cases.World(rank, size, "cpu", folder, saves=True))
    return {"cases": found, "calls": fake.calls}


def exact(*world):
    return of_rank(*world, WORLDS["exact"][1])


def arena(*world):
    return of_rank(*world, WORLDS["arena"][1])


def auto(*world):
    return of_rank(*world, WORLDS["auto"][1])


@pytest.mark.parametrize("function", [*of_today([exact, auto]), arena])
def test_as_one_process(function, tmp_path):
    size, _ = WORLDS[function.__name__]
    for rank, found in enumerate(worlds.run(function, size, tmp_path, LIMIT)):
        assert "error" not in found, found["traceback"]
        problems = {n: p for n, p in found["result"]["cases"].items() if p is not None}
        assert not problems, (rank, problems)
        calls = found["result"]["calls"]
        assert calls["exchange_forward"] > 100 and calls["exchange_backward"] > 100, calls
        assert calls["exchange_inference"] > 0 and calls["exchange_backward_accumulate"] > 0, calls


def layer_of(**options):
    torch.manual_seed(0)
    return ExpertParallelMoE(12, 3, 24, 16, **({"transport": "peer", "timeout": 20.0} | options))


def step(layer, tokens):
    out, _ = layer(torch.randn(tokens, 24))
    out.square().sum().backward()
    return out


def one(function, tmp_path, size=2):
    """Runs the function on all ranks and returns their results."""
    found = worlds.run(function, size, tmp_path, 60.0)
    for each in found:
        assert "error" not in each, each["traceback"]
    return [each["result"] for each in found]


def grows(rank, size, folder):
    """The backward of an earlier forward uses the exchange that its forward used. A forward uses
    the smallest exchange that is large enough."""
    fake = exchange_fake.install()
    layer, other = layer_of(), layer_of()
    first, _ = layer(torch.randn(10, 24))
    second, _ = other(torch.randn(40 - 30 * rank, 24))
    used = []
    of = fake.of
    fake.of = lambda call, number, *rest: used.append(number) or of(call, number, *rest)
    (first.sum() + second.sum()).backward()
    step(layer, 41)
    step(layer, 59)
    backwards = len(used)
    for tokens in (40 - 35 * rank, 60, 10, 41):
        step(layer, tokens)
    return [[*o.shape] for o in fake.opened], used[:2], used[backwards:]


def test_exchanges_grow_and_are_shared(tmp_path):
    shapes = [[10, 30, 24], [40, 120, 24], [60, 180, 24]]
    for opened, backwards, steps in one(grows, tmp_path):
        assert opened == shapes
        assert backwards == [1, 0]
        assert [number for number, _ in itertools.groupby(steps)] == [1, 2, 0, 2]


def too_many(rank, size, folder):
    exchange_fake.install()
    layer = layer_of(max_tokens=8)
    with pytest.raises(
        ValueError, match="x has 9 tokens, must have at most max_tokens, which is 8"
    ):
        layer(torch.randn(9, 24))
    step(layer, 8)
    return "done"


def test_more_tokens_than_the_limit(tmp_path):
    assert one(too_many, tmp_path) == ["done"] * 2


def overflows(rank, size, folder):
    """After the fault every call raises, check_exchange() too, until all ranks have reset."""
    fake = exchange_fake.install()
    layer = layer_of(max_tokens=8, capacity=0.01)
    out, _ = layer(torch.randn(8, 24))
    sentences = []
    for call in (out.sum().backward, lambda: layer(torch.randn(8, 24)), check_exchange):
        dist.barrier()
        with pytest.raises(RuntimeError) as caught:
            call()
        sentences.append(str(caught.value))
    dist.barrier()
    reset_exchange(timeout=20.0)
    check_exchange()
    fake.run("exchange_check", None, 0)
    layer.transport.limits = layer.transport.limits._replace(capacity=50.0)
    step(layer, 8)
    return sentences


def test_an_overflow(tmp_path):
    for sentences in one(overflows, tmp_path):
        for sentence in sentences:
            assert "rank 1 got more rows for its experts than its capacity" in sentence
            assert sentence.endswith(peer.ADVICE)


def learns_later(rank, size, folder):
    """Rank 1 notices the fault in a later call than rank 0. After the reset all ranks have the same
    count of calls."""
    fake = exchange_fake.install()
    layer = layer_of()
    step(layer, 8)
    fake.fault = exchange_fake.MISSING
    for _ in range(1 + 2 * rank):
        raises = pytest.raises(RuntimeError, match="rank 1 did not send its routing")
        with raises, group_of(None).call():
            check_exchange()
    time.sleep(2.0 * rank)  # the other rank waits and looks for a fault of this one
    reset_exchange(timeout=20.0)
    step(layer, 8)
    return group_of(None).calls


def test_a_reset_after_different_numbers_of_calls(tmp_path):
    first, second = one(learns_later, tmp_path)
    assert first == second


def chooses(rank, size, folder, problem):
    """If rank 1 cannot use peer memory, no rank uses it. The choice is made once."""
    fake = exchange_fake.install()
    if rank == 1:
        if problem in ("memory", "mapping"):
            exchange_fake.FakeMemory.problem = problem
        elif problem == "reach":
            _memory.reaches = lambda *_: False
        elif problem == "host":
            _memory.host_number = lambda: 1
        elif problem == "library":

            def absent(*_):
                raise NotImplementedError("exchange_bytes is not served by the backend")

            fake.bytes = absent
    if problem == "gpu":
        _memory.gpu_number = lambda index: 7
    layer = layer_of(transport="auto")
    for _ in range(2):
        step(layer, 8)
    memory = group_of(None).memory[torch.float32]
    assert (fake.calls.get("exchange_forward", 0) == 0) == (problem != "")
    assert fake.calls["exchange_bytes"] == 1
    try:
        step(layer_of(), 8)
    except RuntimeError as error:
        return [memory.problem, str(error)]
    return [memory.problem, None]


def no_problem(*world):
    return chooses(*world, "")


def no_memory(*world):
    return chooses(*world, "memory")


def no_mapping(*world):
    return chooses(*world, "mapping")


def no_reach(*world):
    return chooses(*world, "reach")


def other_host(*world):
    return chooses(*world, "host")


def other_library(*world):
    return chooses(*world, "library")


def one_gpu(*world):
    return chooses(*world, "gpu")


REASONS = [
    (no_problem, None),
    (no_memory, "rank 1 has not enough device memory for its buffer"),
    (no_mapping, "rank 1 cannot map the others' buffers"),
    (no_reach, "rank 1 has a GPU that cannot access the others' memory"),
    (other_host, "the ranks are not on one host"),
    (other_library, "rank 1 has a library whose CUDA backend does not serve it"),
    (one_gpu, "two ranks have the same GPU"),
]


@pytest.mark.parametrize(("function", "reason"), REASONS)
def test_ranks_choose_together(function, reason, tmp_path):
    for problem, raised in one(function, tmp_path):
        if reason is None:
            assert problem is None and raised is None
        else:
            assert problem == f"peer memory cannot be used: {reason}"
            assert raised == f'{problem}: use transport="all_to_all"'


def refuses(rank, size, folder):
    """Rank 1 raises before it sends. Rank 0, which waits for its sizes, ends with rank 1's
    sentence."""
    exchange_fake.install()
    layer = layer_of()
    step(layer, 8)
    if rank == 1:
        layer(torch.zeros(4, 25))
    step(layer, 8)


def test_an_exception_on_one_rank(tmp_path):
    found = worlds.run(refuses, 2, tmp_path, 60.0)
    assert found[1]["error"].startswith("ValueError: x has shape (4, 25)")
    assert "rank 1 failed: ValueError: x has shape (4, 25)" in found[0]["error"]


def is_late(rank, size, folder, calls_after):
    """Rank 0 notices rank 1's exception when the GPU's time limit is over: after its own call, or
    in its next call."""
    fake = exchange_fake.install()
    layer, group = layer_of(), group_of(None)
    step(layer, 8)
    if rank == 1:
        with pytest.raises(ValueError, match="x has shape"):
            layer(torch.zeros(4, 25))
        dist.barrier()
        return None
    with group.call():  # a forward that has only enqueued its work
        pass
    dist.barrier()
    fake.fault = exchange_fake.MISSING
    with contextlib.ExitStack() as stack:
        if calls_after:
            stack.enter_context(group.call())
        with pytest.raises(RuntimeError) as caught:
            check_exchange()
    return str(caught.value)


def late_backward(*world):
    return is_late(*world, 0)


def late_forward(*world):
    return is_late(*world, 1)


@pytest.mark.parametrize("function", [late_backward, late_forward])
def test_the_cause_of_a_fault_that_shows_late(function, tmp_path):
    sentence, _ = one(function, tmp_path)
    cause = "(rank 1 failed: ValueError: x has shape (4, 25), its last dimension must be 24)"
    assert f"within the time limit of 5000 ms {cause}. The outputs" in sentence, sentence


def without_gpus(rank, size, folder):
    """On CPUs "auto" is all-to-all, and "peer" is refused."""
    step(layer_of(transport="auto"), 8)
    layer = layer_of()
    with pytest.raises(
        NotImplementedError, match="serves bfloat16, float16 on cuda, and x is float32 on cpu"
    ):
        step(layer, 8)
    return "done"


def test_without_gpus(tmp_path):
    assert one(without_gpus, tmp_path) == ["done"] * 2


def test_limits():
    check = peer.Limits(1.0)._replace
    for limits, sentence in (
        (check(timeout=-1), "timeout is -1, must be a positive number of seconds"),
        (check(max_tokens=0), "max_tokens is 0, must be at least 1"),
        (check(capacity=2.0), "capacity is given without max_tokens, must come with it"),
        (check(capacity=-2.0, max_tokens=4), "capacity is -2.0, must be positive"),
    ):
        with pytest.raises(ValueError, match=sentence):
            limits.check()
    limits = peer.Limits(1.5, 7, 1.25, 3, True)
    assert peer.Limits.of_numbers(limits.numbers()) == limits
    assert peer.Limits.of_numbers(peer.Limits(2.0).numbers()) == peer.Limits(2.0)


def test_faults_are_known_by_their_sentence():
    """The library's own sentence, which exchange_fake.py repeats."""
    source = Path(__file__).resolve().parents[3] / "src/cuda/exchange/exchange.cc"
    if not source.is_file():
        pytest.skip("this copy has no src/")
    pieces = re.findall(r'"([^"]*)"', source.read_text())
    sentence = "".join(pieces)
    assert peer._ADVICE.search(exchange_fake.OVERFLOW)
    assert exchange_fake.OVERFLOW[exchange_fake.OVERFLOW.index(". The") :] in sentence


def test_operators_refuse():
    like = torch.empty(0, dtype=torch.bfloat16)
    shape = (like, 2, 16, 32, 64)
    with pytest.raises(NotImplementedError, match="is not served by the backend cpu"):
        _ops.run("exchange_bytes", *shape)
    with pytest.raises(ValueError, match="addresses must be 2 contiguous int64 numbers"):
        _ops.run("exchange_open", *shape, torch.tensor([256]), 100, 0, 1000, 0)
    with pytest.raises(ValueError, match="exchange is 0, must be the number of an exchange"):
        _ops.run("exchange_check", like, 0)


def test_buffers_are_aligned_at_equal_offsets():
    assert _memory.aligned([1024, 4096], 1024) == [1024, 4096]
    assert _memory.aligned([1040, 4112], 4112) == [1280, 4352]
    for addresses, own in (([1024, 4112], 1024), ([1024, 0], 1024), ([1024, 4096], 8192)):
        with pytest.raises(RuntimeError, match="buffer"):
            _memory.aligned(addresses, own)


def keeps_rows_alone(rank, size, folder):
    """Over peer memory all ranks must keep rows, or none; by all-to-all they may differ."""
    exchange_fake.install()
    step(layer_of(transport="all_to_all", keep_rows=rank == 0), 8)
    with pytest.raises(ExpertParallelError) as caught:
        layer_of(keep_rows=rank == 0)
    return str(caught.value)


def test_ranks_that_differ_in_keep_rows(tmp_path):
    for sentence in one(keeps_rows_alone, tmp_path):
        assert "keep_rows is " in sentence, sentence


def cannot_share(rank, size, folder):
    """One rank cannot share its memory: the others do not wait for it."""
    from torch.multiprocessing import reductions

    def reduce_tensor(memory):
        if rank == 1:
            raise RuntimeError("no handle")
        return None, ()

    reductions.reduce_tensor = reduce_tensor
    with pytest.raises(RuntimeError) as caught:
        _memory.CudaIpc.addresses(torch.empty(8), dist.group.WORLD)
    dist.barrier()
    return str(caught.value)


def test_memory_that_one_rank_cannot_share(tmp_path):
    others, own = one(cannot_share, tmp_path)
    assert others == "rank 1 of the group cannot share its memory"
    assert own == "no handle"


def forgets_its_exchange(rank, size, folder):
    """Other ranks and CUDA graphs may write the memory after its group is gone."""
    exchange_fake.install()
    allocated = []
    allocate = exchange_fake.FakeMemory.allocate

    def watched(size, device):
        memory = allocate(size, device)
        allocated.append(weakref.ref(memory))
        return memory

    exchange_fake.FakeMemory.allocate = staticmethod(watched)
    step(layer_of(), 8)
    group_of(None).memory.clear()
    gc.collect()
    return [memory() is not None for memory in allocated]


def test_memory_outlives_its_group(tmp_path):
    assert one(forgets_its_exchange, tmp_path) == [[True], [True]]


def test_sizes_grow_by_half_at_least():
    shape = buffers.Shape(100, 300, 24)
    assert shape.grown(buffers.Shape(101, 200, 24)) == (150, 300, 24)
    assert shape.grown(buffers.Shape(1000, 3000, 48)) == (1000, 3000, 48)
