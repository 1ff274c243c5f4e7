"""As test_saved_tensors.py, for layers whose experts are divided among ranks: over gloo, and over
peer memory, for which exchange_fake.py stands."""

import exchange_fake
import pytest
import sonicmoe_cpp as smoe
import torch
import torch.distributed as dist
import worlds
from changed_tensors import (
    OTHER,
    REFUSED,
    SAME,
    differentiated,
    empty,
    flat,
    freed,
    half_freed,
    on_meta,
    truncated,
)
from sonicmoe_cpp.distributed import (
    ExpertParallelError,
    _group,
    _health,
    moe_expert_parallel,
    moe_pairs_expert_parallel,
)

pytestmark = pytest.mark.slow
SIZE = 2
E, K, T = 4, 2, 24
# The stand-in for the exchange does not read H, and it would read freed metadata. So over peer
# memory only changes are tried that the code around it sees.
SEEN = (truncated, empty, flat, on_meta)
FREED = (freed, half_freed)
# After these a gradient is equal, if there is one: the tensor was not changed, or is not read.
UNREAD = (*SEEN, *FREED)


def layer(rank: int, group, transport: str, pairs: bool):
    """The output of this rank's layer, and the tensors that it is differentiated in."""
    torch.manual_seed(rank)
    kind = {"requires_grad": True, "dtype": torch.bfloat16}
    x = torch.randn(T, 24, **kind)
    w_up, w_down = torch.randn(E // SIZE, 32, 24, **kind), torch.randn(E // SIZE, 24, 16, **kind)
    ids, weights = smoe.route(torch.randn(T, E), K)
    weights.requires_grad_()
    options = {"group": group, "transport": transport, "timeout": 10.0}
    if pairs:
        token = torch.arange(T).repeat_interleave(K)
        routing = (token, ids.flatten(), weights.flatten())
        out = moe_pairs_expert_parallel(x, routing, w_up, w_down, **options)
    else:
        out = moe_expert_parallel(x, ids, weights, w_up, w_down, **options)
    return out, (x, weights, w_up, w_down)


def gradients(rank: int, transport: str, pairs: bool, change, only=None):
    """Those of a group of its own, which a refusal may break. Otherwise differentiated()."""
    group = dist.new_group()
    return differentiated(lambda _: layer(rank, group, transport, pairs), "cpu", change, only)


def changes(rank: int, transport: str, others: tuple) -> dict:
    """Tries every change of every saved tensor. Returns how many were refused and how many not."""
    counts = {"refused": 0, "taken": 0}
    for pairs in (False, True):
        want, count, _ = gradients(rank, transport, pairs, lambda t: t)
        for change in SAME:
            got, *_ = gradients(rank, transport, pairs, change)
            for a, b in zip(got, want, strict=True):
                assert torch.equal(a, b), change.__name__
        for change in others:
            for only in range(count):
                try:
                    got, _, changed = gradients(rank, transport, pairs, change, only)
                except REFUSED:
                    counts["refused"] += 1
                    continue
                counts["taken"] += 1
                assert change is not on_meta or not changed, only
                for a, b in zip(got, want, strict=True):
                    assert a.shape == b.shape, (change.__name__, only)
                    if change in UNREAD:
                        assert torch.equal(a, b), (change.__name__, only)
    return counts


def over_gloo(rank, size, folder):
    _health.GRACE = _group.PATIENCE = 0.05  # both ranks refuse at once
    return changes(rank, "all_to_all", OTHER)


def over_peer_memory(rank, size, folder):
    exchange_fake.install()
    return changes(rank, "peer", SEEN)


@pytest.mark.parametrize("function", [over_gloo, over_peer_memory])
def test_each_saved_tensor_changed(function, tmp_path):
    for found in worlds.run(function, SIZE, tmp_path):
        assert "error" not in found, found["traceback"]
        assert found["result"]["refused"] > 20, found["result"]


def pairs_changed(rank, size, folder):
    """As test_pairs_changed() of test_saved_tensors.py."""
    torch.manual_seed(rank)
    x = torch.randn(T, 24)
    experts = torch.randn(E // SIZE, 32, 24), torch.randn(E // SIZE, 24, 16)
    ids, weights = smoe.route(torch.randn(T, E), K)
    pairs = torch.arange(T).repeat_interleave(K), ids.flatten(), weights.flatten()

    def run(at=0, change=lambda t: t, of_x=lambda t: t):
        changed = [change(t) if i == at else t for i, t in enumerate(pairs)]
        return moe_pairs_expert_parallel(of_x(x), changed, *experts, timeout=10.0)

    want = run()
    for at in range(3):
        for change in SAME:
            assert torch.equal(run(at, change), want), (at, change.__name__)
        for change in (truncated, *FREED, on_meta):
            with pytest.raises(REFUSED):
                run(at, change)
    for change in FREED:
        with pytest.raises(ValueError, match="x has freed memory"):
            run(of_x=change)
    assert torch.equal(run(), want)  # no refusal broke the group
    return "done"


def test_pairs_changed(tmp_path):
    for found in worlds.run(pairs_changed, SIZE, tmp_path):
        assert "error" not in found, found["traceback"]


def shortens_h(rank, size, folder):
    """Rank 1 alone loses rows of H. An exchange would take the number of rows from its shape."""
    exchange_fake.install()
    h = 24  # the number of rows that both ranks get
    cut = truncated if rank == 1 else lambda t: t

    def change(t):
        return cut(t) if t.dim() == 2 and t.shape[1] == 32 and t.shape[0] >= h else t

    with pytest.raises(RuntimeError if rank == 0 else ValueError) as caught:
        gradients(rank, "peer", False, change)
    return f"{type(caught.value).__name__}: {caught.value}"


def test_rows_of_h_that_one_rank_loses(tmp_path):
    first, second = (found["result"] for found in worlds.run(shortens_h, SIZE, tmp_path))
    assert second.startswith("ValueError: a tensor kept for backward has shape ["), second
    assert first.startswith(ExpertParallelError.__name__), first
    assert "rank 1 failed: ValueError: a tensor kept for backward has shape" in first, first
