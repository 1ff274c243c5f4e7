"""Expert parallelism by torch.distributed's all-to-all over gloo, against one process, with 1 to 4
ranks. Each world of processes runs all cases of expert_parallel_cases.py once."""

import expert_parallel_cases as cases
import pytest
import worlds
from days import of_today

pytestmark = pytest.mark.slow
# The first one saves the checkpoint that the others load.
SIZES = (2, 1, *of_today([3, 4]))
LIMIT = 600.0  # seconds; two ranks also compile, 80 s on two busy cores


def of_rank(rank, size, folder):
    return cases.run_all(cases.World(rank, size, "cpu", folder, saves=size == SIZES[0]))


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    folder, found = tmp_path_factory.mktemp("worlds"), {}

    def run(size):
        try:
            return worlds.run(of_rank, size, folder, LIMIT)
        except AssertionError as error:
            return error  # kept for all tests of this size, so that they do not wait again

    def of_size(size):
        for each in SIZES[: SIZES.index(size) + 1]:
            if each not in found:
                found[each] = run(each)
        if isinstance(found[size], AssertionError):
            raise found[size]
        return found[size]

    return of_size


@pytest.mark.parametrize("name", cases.CASES)
@pytest.mark.parametrize("size", SIZES)
def test_as_one_process(results, size, name):
    for rank, found in enumerate(results(size)):
        assert found is not None, f"rank {rank} was killed"
        assert "error" not in found, found["traceback"]
        assert name in found["result"], "an earlier case failed"
        assert found["result"][name] is None, f"rank {rank}: {found['result'][name]}"
