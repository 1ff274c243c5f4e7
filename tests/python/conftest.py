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


@pytest.fixture
def poisoned():
    """Fresh memory holds NaN and 0xFF: what nobody writes shows."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)
