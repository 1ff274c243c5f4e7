"""What benchmarks/ times beside ours computes what its checker expects, and that can tell."""

import sys
import types
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


def sorted_pairs(expert_idxs, num_experts):
    """What scattermoe returns: experts in order, the pairs in that order, where experts end."""
    experts, pairs = expert_idxs.flatten().sort()
    return experts, pairs, expert_idxs.flatten().bincount(minlength=num_experts).cumsum(-1)


def products_by_expert(
    inputs, weights, k, experts, pairs, ends, biases=None, gates=None,
    grouped_in=False, grouped_out=False,
):  # fmt: skip
    """scattermoe's grouped product: rows by token and pair (k of a token) or by expert."""
    rows = inputs if grouped_in else inputs[pairs // k]
    out = torch.einsum("ri,rio->ro", rows, weights[experts])
    if not grouped_out:
        out = torch.zeros_like(out).index_copy(0, pairs, out)
    if gates is not None:
        out = (gates.unsqueeze(-1) * out.view(*gates.shape, -1)).sum(1)
    return out


def test_the_layer_around_scattermoe_agrees(bench, monkeypatch):
    rivals, checker = bench
    with pytest.raises(ImportError):
        rivals.scattermoe_layer(checker.data.shape)
    products = types.ModuleType("scattermoe.parallel_experts")
    products.flatten_sort_count, products.parallel_linear = sorted_pairs, products_by_expert
    monkeypatch.setitem(sys.modules, "scattermoe", types.ModuleType("scattermoe"))
    monkeypatch.setitem(sys.modules, "scattermoe.parallel_experts", products)
    run(rivals, checker, rivals.scattermoe_layer(checker.data.shape))


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
