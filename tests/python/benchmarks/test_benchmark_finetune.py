"""The record of fine-tuned models: rows from reports of examples/finetune.py, and their tables."""

import importlib.util
import json
import sys
import types
from pathlib import Path

import pytest
import torch

GIB = 2**30


@pytest.fixture
def models():
    import finetune_models

    return finetune_models


@pytest.fixture
def page():
    from pages import finetune

    return finetune


def a_report(**settings):
    given = {"config": "qwen3-30b", "model": "", "weights": "", "compile": True, "cap_gib": 0.0}
    given |= {"rank": 16, "sequence": 4096, "optim": "adamw_torch_fused", "factors": "fp32"}
    given |= {"offload_embedding": False, "dense": "", "unpack_mib": 0}
    parts = {"experts": {"forward": 50.0, "backward": 70.0}, "norms": {"recomputed": 3.0}}
    run = {"tokens_per_s": 10000.4, "step_ms": 409.6, "peak_bytes": 64 * GIB}
    run["trace"] = {"parts": parts, "kernels": 4321, "busy_ms": 300.0}
    other = {"parts": {"experts": {"forward": 500.0}}, "kernels": 9876, "busy_ms": 700.0}
    beside = run | {"experts": "grouped_mm", "fits": True, "trace": other, "tokens_per_s": 5000.0}
    report = {"settings": given | settings, "device": "NVIDIA H200", "beside": beside}
    return report | run | {"predicted_bytes": {"peak": 65 * GIB}}


def test_a_report_replaces_the_row_of_its_kind(models, tmp_path):
    record = tmp_path / "finetune.json"
    head = {"device": "NVIDIA H200", "torch": "2", "commit": "a", "date": "2026-11-27T00:00:00"}
    old = [
        {"model": m, "weights": "bf16", "rank": 16, "sequence": 4096} for m in ("qwen3-30b", "x")
    ]
    record.write_text(json.dumps(head | {"models": old}))
    for name, tokens_per_s in (("first", 1.0), ("second", 10000.4)):
        report = tmp_path / f"{name}.json"
        report.write_text(json.dumps(a_report() | {"tokens_per_s": tokens_per_s}))
        models.main([str(report), "--commit", "b", "--record", str(record)])
    rows = json.loads(record.read_text())["models"]
    assert [row["model"] for row in rows] == ["qwen3-30b", "qwen3-30b", "x"]
    assert rows[1]["tokens_per_s"] == 10000 and rows[1]["predicted_gib"] == 65
    assert rows[1]["beside"]["tokens_per_s"] == 5000


def test_the_tables_show_the_row(models, page):
    head = {"device": "NVIDIA H200", "torch": "2", "commit": "a", "date": "2026-11-27T00:00:00"}
    record = head | {"models": [models.row_of(a_report(), "b")]}
    assert (
        "| fp32, adamw torch fused, compiled | 4096 | - | 64.0 | 10000 | 64.0, 5000 | 2.00 |"
        in (page.models(record))
    )
    text = page.trace(record)
    assert "| experts | 50.0 | 0.0 | 70.0 | 120.0 | 500.0 |" in text
    assert "| norms | 0.0 | 3.0 | 0.0 | 3.0 | 0.0 |" in text
    assert "4,321 kernels, with transformers' experts 9,876" in text
    other = models.row_of(a_report(weights="nf4-nested") | {"beside": None}, "c")
    both = page.trace({"models": [{}, *record["models"], other]})
    assert both.startswith(text) and "qwen3-30b, nf4-nested, compiled, 4,321 kernels." in both
    assert page.trace({"models": [{}]}) == "Not measured yet."


@pytest.mark.parametrize("fits", (True, False))
def test_a_rival_that_does_not_fit_has_no_numbers(models, fits):
    report = a_report()
    report["beside"]["fits"] = fits
    assert ("beside" in models.row_of(report, "b")) == fits


def sorted_pairs(ids, num_experts):
    """The experts of the pairs in ascending order, the pairs in this order, the ends of experts."""
    experts, pairs = ids.flatten().sort()
    return experts, pairs, experts.bincount(minlength=num_experts).cumsum(-1)


def product(
    x, weights, k, experts, pairs, ends, a, b, scale, biases=None, gates=None,
    grouped_in=False, grouped_out=False,
):  # fmt: skip
    """axolotl's product: weights (E, in, out), A (E r, in), B (out, E r)."""
    count = weights.shape[0]
    a, b = a.view(count, -1, a.shape[1]), b.view(b.shape[0], count, -1).permute(1, 2, 0)
    rows = x if grouped_in else x[pairs // k]
    out = torch.einsum("pi,pio->po", rows, weights[experts])
    low = torch.einsum("pi,pri->pr", rows, a[experts])
    out = out + scale * torch.einsum("pr,pro->po", low, b[experts])
    if biases is not None:
        out = out + biases[experts]
    if not grouped_out:
        out = torch.empty_like(out).index_copy(0, pairs, out)
    if gates is not None:
        out = (gates.unsqueeze(-1) * out.view(*gates.shape, -1)).sum(1)
    return out


@pytest.fixture
def bench(models, monkeypatch):
    """benchmarks/finetune.py on the CPU in fp32, under a name that examples/finetune.py has not."""
    path = Path(models.__file__).with_name("finetune.py")
    spec = importlib.util.spec_from_file_location("finetune_layers", path)
    bench = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, bench)
    spec.loader.exec_module(bench)
    monkeypatch.setattr(bench, "CUDA", torch.device("cpu"))
    monkeypatch.setattr(bench, "BF", torch.float32)
    return bench


def small_data(bench, activation, bias):
    shape = types.SimpleNamespace(d=24, n=16, E=6, K=2)
    return bench.Data(bench.Config(shape, activation, bias), tokens=40, rank=4)


@pytest.mark.parametrize(("activation", "bias"), [("swiglu", False), ("swiglu_oai", True)])
def test_the_layer_around_axolotls_products_agrees(bench, monkeypatch, activation, bias):
    import axolotl_lora

    stand_in = types.SimpleNamespace(flatten_sort_count=sorted_pairs, parallel_linear_lora=product)
    monkeypatch.setitem(sys.modules, axolotl_lora.PRODUCTS, stand_in)
    data = small_data(bench, activation, bias)
    out, grads = bench.reference(data)
    contenders, left_out = bench.installed(data, (out, *grads), errors := {"torch": 1e-6})
    assert list(contenders) == ["axolotl"] and not left_out
    assert errors["axolotl"] < 1e-5
    with torch.no_grad():
        contenders["axolotl"].leaves[3].mul_(1.1)  # B of up
    again = bench.errors_of(contenders["axolotl"], data, (out, *grads))
    assert again[0] > 1e-3


def test_a_wrong_package_is_left_out_with_its_error(bench, monkeypatch):
    import axolotl_lora

    def wrong(*args, **options):
        return 1.1 * product(*args, **options)

    stand_in = types.SimpleNamespace(flatten_sort_count=sorted_pairs, parallel_linear_lora=wrong)
    monkeypatch.setitem(sys.modules, axolotl_lora.PRODUCTS, stand_in)
    data = small_data(bench, "swiglu", False)
    out, grads = bench.reference(data)
    contenders, left_out = bench.installed(data, (out, *grads), {"torch": 1e-3})
    assert not contenders and left_out["axolotl"].endswith(", more than 4.00e-03")
    monkeypatch.delattr(stand_in, "flatten_sort_count")
    _, left_out = bench.installed(data, (out, *grads), {"torch": 1e-3})
    assert left_out["axolotl"].startswith("AttributeError: ")


def test_an_absent_package_is_left_out(bench, monkeypatch):
    import axolotl_lora

    monkeypatch.delitem(sys.modules, axolotl_lora.PRODUCTS, raising=False)
    monkeypatch.setattr(axolotl_lora.importlib.util, "find_spec", lambda name: None)
    data = small_data(bench, "swiglu", False)
    out, grads = bench.reference(data)
    assert bench.installed(data, (out, *grads), {"torch": 1.0}) == ({}, {"axolotl": "absent"})


def test_rows_of_a_later_run_replace_the_same_ones(models, tmp_path, capsys):
    record, other = tmp_path / "finetune.json", tmp_path / "later.json"
    old, wide = a_row(1.0), a_row(2.0) | {"r": 64}
    record.write_text(json.dumps({"device": "NVIDIA H200", "models": [], "rows": [old, wide]}))
    found = [a_row(3.0, axolotl=4.0), a_row(4.0) | {"T": 8192}]
    other.write_text(json.dumps({"device": "NVIDIA H200", "rows": found}))
    arguments = ["--layers", str(other), "--commit", "b", "--record", str(record)]
    models.main(arguments)
    rows = json.loads(record.read_text())["rows"]
    assert rows == [found[0] | {"commit": "b"}, wide, found[1] | {"commit": "b"}]
    other.write_text(json.dumps({"device": "NVIDIA H100", "rows": found}))
    with pytest.raises(SystemExit):
        models.main(arguments)
    assert "NVIDIA H100 is not the record's NVIDIA H200" in capsys.readouterr().err


def a_row(ms, **rivals):
    times = {"fwd_ms": ms, "bwd_ms": ms, "kept_mib": 1.0, "peak_mib": 2.0}
    row = {"config": "qwen3-30b", "T": 4096, "r": 16, "left_out": {}}
    row |= dict.fromkeys(("frozen", "lora"), times)
    for name, factor in {"torch": 2.0, "merged": 3.0, **rivals}.items():
        row[name] = times | {"fwd_ms": factor * ms, "bwd_ms": factor * ms}
    return row


def test_a_rival_that_was_timed_has_a_column_and_a_bar(page):
    head = {"device": "NVIDIA H200", "torch": "2", "commit": "a", "date": "2026-11-28T00:00:00"}
    without = head | {"rows": [a_row(1.0)]}
    assert "axolotl" not in page.layers(without)
    left_out = a_row(1.0) | {"r": 64, "left_out": {"axolotl": "OutOfMemoryError: too large"}}
    newer = a_row(1.0, axolotl=4.25) | {"commit": "b"}
    text = page.layers(head | {"rows": [newer, left_out]})
    assert "commit a. The rows of b are later. axolotl's" in text
    assert "| 2.00 | 3.00 | 4.25 |" in text and "| 2.00 | 3.00 | - |" in text
    assert "axolotl's layer is not timed at r 64, T 4096: OutOfMemoryError: too large." in text
    plt = pytest.importorskip("matplotlib.pyplot")
    figure = page.plot(plt, head | {"rows": [a_row(1.0, axolotl=4.25), left_out]})
    first, second = figure.axes
    bars = {c.get_label(): [b.get_height() for b in c] for c in first.containers}
    assert bars["axolotl's ScatterMoE layer"] == [4.25]
    assert len(second.containers) == 4 and second.containers[-1][0].get_height() == 0
    plt.close(figure)
