"""What benchmarks/ times beside ours computes what its checker expects, and that can tell."""

import sys
from pathlib import Path

import pytest
import torch

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
SHAPE = (96, 64, 32, 8, 2)


@pytest.fixture
def bench(monkeypatch):
    """(rivals, a checker over drawn data)"""
    if not BENCHMARKS.is_dir():
        pytest.skip("this copy has no benchmarks/")
    monkeypatch.syspath_prepend(BENCHMARKS)
    from h200_bench import check, layer, rivals

    data = layer.Data(layer.Shape(*SHAPE), torch.device("cpu"))
    data.draw(0)
    return rivals, check.Checker(data)


def run(rivals, checker, layer):
    out, grads = rivals.Autograd(checker.data, layer).both()
    checker.check_autograd("layer", out, grads)
    return out, grads


def test_our_front_end_agrees(bench):
    rivals, checker = bench
    run(rivals, checker, rivals.torch_front_end(checker.data.shape, "cpu"))


def test_the_stand_in_for_sonicmoe_agrees(bench, monkeypatch):
    import sonicmoe_cpp.compat.sonicmoe as stand_in
    from sonicmoe_cpp.compat.sonicmoe import enums, functional

    rivals, checker = bench
    modules = {"sonicmoe": stand_in, "sonicmoe.enums": enums, "sonicmoe.functional": functional}
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    run(rivals, checker, rivals.sonicmoe_layer(checker.data.shape))


def test_transformers_agrees(bench):
    pytest.importorskip("transformers.integrations.moe")
    rivals, checker = bench
    run(rivals, checker, rivals.transformers_layer(checker.data.shape))


@pytest.mark.parametrize("which", range(5))
def test_one_wrong_result_is_rejected(bench, which):
    rivals, checker = bench
    layer = rivals.torch_front_end(checker.data.shape, "cpu")
    out, grads = rivals.Autograd(checker.data, layer).both()
    results = [t.detach().clone() for t in (out, *grads)]
    rows = results[which].view(-1, results[which].shape[-1])
    rows[: rows.shape[0] // 2] = rows[: rows.shape[0] // 2].flip(0)
    with pytest.raises(SystemExit, match="wrong"):
        checker.check_autograd("layer", results[0], results[1:])
