"""The record of fine-tuned models: rows from reports of examples/finetune.py, and their tables."""

import json

import pytest

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
    assert page.trace({"models": [{}]}) == "Not measured yet."


@pytest.mark.parametrize("fits", (True, False))
def test_a_rival_that_does_not_fit_has_no_numbers(models, fits):
    report = a_report()
    report["beside"]["fits"] = fits
    assert ("beside" in models.row_of(report, "b")) == fits
