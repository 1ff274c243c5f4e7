"""One thread for every test: two OpenMP teams on few cores mostly wait for each other. And memory
that shows what nobody wrote."""

import pytest
import torch


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def poison_cuda():
    """0xFF in what torch's allocator hands out next: its blocks are kept when they are freed."""
    sizes = [512 << 10] * 64 + [16 << 20] * 8  # from either of its pools
    blocks = [torch.full((size,), 0xFF, dtype=torch.uint8, device="cuda") for size in sizes]
    torch.cuda.synchronize()
    blocks.clear()


@pytest.fixture
def poisoned():
    """Fresh memory holds NaN and 0xFF: what nobody writes shows. torch fills what Python asks for;
    what operators ask for is filled by poison.c (CPU) and beforehand (CUDA)."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    if torch.cuda.is_available():
        poison_cuda()
    yield
    torch.use_deterministic_algorithms(False)
