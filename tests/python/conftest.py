"""Runs every test on one thread, because two OpenMP teams on few cores mostly wait for each other.
Fills fresh memory, so that a test sees memory that was never written."""

import functools
import sys
from pathlib import Path

import pytest
import sonicmoe_cpp
import torch

sys.path.insert(0, str(Path(__file__).parent / "support"))  # what tests of several folders share


@functools.cache
def engines_here():
    """The engines that serve the first GPU."""
    names = []
    for name in sonicmoe_cpp.engines():
        before = sonicmoe_cpp.use_engine(name)
        if sonicmoe_cpp.is_available("cuda"):
            names.append(name)
        sonicmoe_cpp.use_engine(before)
    return names


def pytest_generate_tests(metafunc):
    """Tests with the fixture each_engine run once for every engine that serves the GPU."""
    if "each_engine" in metafunc.fixturenames and len(engines_here()) > 1:
        metafunc.parametrize("each_engine", engines_here(), indirect=True)


# The files that take longest, for workers of pytest-xdist: a long file that starts last is waited
# for by workers without work.
LONGEST = (
    "test_torchtitan",
    "test_expert_parallel_peer",
    "test_package",
    "test_demo_faults",
    "test_benchmark_training",
    "test_expert_parallel",
    "test_forms",
    "test_megatron",
    "test_benchmark_scaling",
)


def pytest_collection_modifyitems(config, items):
    """Puts the longest files first. Removes the repetitions of a CPU test for other engines: the
    CPU has only one."""
    ranks = {name: rank for rank, name in enumerate(LONGEST)}
    items.sort(key=lambda item: ranks.get(item.path.stem, len(LONGEST)))
    others = engines_here()[1:]
    for item in list(items):
        parameters = item.callspec.params if hasattr(item, "callspec") else {}
        if parameters.get("device") == "cpu" and parameters.get("each_engine") in others:
            items.remove(item)
            config.hook.pytest_deselected(items=[item])


@pytest.fixture
def each_engine(request):
    before = sonicmoe_cpp.use_engine(getattr(request, "param", None))
    yield
    sonicmoe_cpp.use_engine(before)


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def poison_cuda():
    """Writes 0xFF to memory that torch's allocator will hand out next: it keeps freed blocks."""
    sizes = [512 << 10] * 64 + [16 << 20] * 8  # for its small and its large pool
    blocks = [torch.full((size,), 0xFF, dtype=torch.uint8, device="cuda") for size in sizes]
    torch.cuda.synchronize()
    blocks.clear()


@pytest.fixture
def poisoned():
    """Fresh memory holds NaN and 0xFF, so that a value that is never written is seen. torch fills
    the tensors that Python allocates. Memory that operators allocate is filled by poison.c on the
    CPU, and by poison_cuda() before the test on CUDA."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    if torch.cuda.is_available():
        poison_cuda()
    yield
    torch.use_deterministic_algorithms(False)
