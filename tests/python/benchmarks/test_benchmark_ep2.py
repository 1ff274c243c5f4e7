"""Runs benchmarks/ep2.py at its smallest size on CPUs, and makes its parts of the documentation
from a record."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from days import turn

BENCHMARKS = Path(__file__).resolve().parents[3] / "benchmarks"


@pytest.fixture
def ep2():
    import ep2
    from pages import ranks

    return ep2, ranks


def times(whole):
    return {"fwd_ms": whole / 4, "bwd_ms": 3 * whole / 4}


def of_cpp(ours):
    ours, alone = times(ours) | {"replayed_ms": 2.3}, times(2.0) | {"replayed_ms": 1.9}
    found = {"alone": alone, "ours": ours, "hidden": 0.6, "not_overlapped_ms": 3.0}
    return found | {"dispatch_ms": 0.2, "combine_ms": 0.2}


def a_record():
    row = {"config": "7B-n256", "T": 24576, "d": 1536, "n": 256, "E": 128, "K": 8, "ranks": 2}
    row |= of_cpp(2.4)
    row |= {"alone_torch": times(2.0), "ours_torch": times(2.5), "nccl_grouped": times(6.0)}
    row |= {"nccl_grouped_mm": times(7.0), "gather_scatter": times(5.0)}
    row |= {"ours_all_to_all": times(4.0), "absent": {"vdev_2d": "no NVSHMEM"}}
    kept = {"config": "7B-n256", "layers": 4, "capacity": 1.25, "exact_MiB": [800.0, 810.0]}
    kept |= {"arena_MiB": [1000.0, 1004.0], "arena_over_exact": [1.25, 1.24]}
    kept |= {"rows_of_rank_0_over_mean": [1.2, 0.8, 1.1, 0.9]}
    found = {"rows": [row], "kept": kept, "gpus": 2, "device": "GPU", "torch": "2.11"}
    found |= {"date": "2026-11-23T00:00:00", "commit": "abc", "problems": {}}
    found["pretended"] = [row | of_cpp(2.6) | {"ranks": 8}]
    return found | {"dispatch_gbs": 371.0, "combine_gbs": 372.0}


@turn(2, of=3)
@pytest.mark.slow
def test_every_rival_has_our_results(tmp_path, ep2):
    out = tmp_path / "ep2.json"
    program = [sys.executable, str(BENCHMARKS / "ep2.py"), "--device=cpu", f"--out={out}"]
    ran = subprocess.run([*program, "--seconds=120"], capture_output=True, text=True, timeout=200)
    record = json.loads(out.read_text())
    assert "problems" not in record, ran.stdout
    (row,) = record["rows"]
    for name in ("ours_torch", "ours_exact", "ours_all_to_all", "alone_torch"):
        assert row[name]["fwd_ms"] > 0
    for name in ("nccl_grouped", "nccl_grouped_mm", "gather_scatter"):
        assert row[name]["fwd_ms"] > 0, row
    assert "absent" not in row  # a rival with wrong results
    assert ran.returncode == 1  # no exchange_bench ran, and no NVSHMEM


def test_a_record_names_no_files_of_the_machine(ep2):
    headline = ep2[0].headline
    assert headline("exit 1: File /home/me/torch/run.py\nabort") == "exit 1"
    assert headline("exit 1: ...\nabsent: no NVSHMEM\n/home/me") == "no NVSHMEM"


def test_layers_with_too_many_experts_are_not_sent_to_vdev_2d(ep2):
    from ep2_bench.data import refused_by_vdev

    assert refused_by_vdev(experts=32, ranks=2) is None
    assert refused_by_vdev(34, 2) == "it takes at most 16 experts a rank, the layer has 17"


def test_wrong_results_are_found(ep2):
    import torch
    from ep2_bench import worker

    worker.timing.slowest, kept = (lambda value, device: value), worker.timing.slowest
    try:
        right = tuple(torch.randn(50, 8) for _ in worker.NAMES)
        assert worker.wrong(tuple(t * 1.001 for t in right), right, "cpu") is None
        spoilt = (*right[:2], right[2] * 1.1, *right[3:])
        assert worker.wrong(spoilt, right, "cpu") == "wrong results: dweights 0.100"
        nan = (right[0] * float("nan"), *right[1:])
        assert worker.wrong(nan, right, "cpu") == "wrong results: out nan"
    finally:
        worker.timing.slowest = kept


def test_record_of_exchange_bench(ep2, tmp_path, monkeypatch, capsys):
    ep2, _ = ep2
    bench = tmp_path / "exchange_bench"
    line = {"config": "7B-n256", "T": 8, "d": 8, "n": 8, "E": 4, "K": 1, "ranks": 2, "devices": 2}
    lines = [
        {"bare": "push", "ranks": 2, "dispatch_gbs": 330.0, "combine_gbs": 325.0},
        {"bare": "copy", "ranks": 2, "dispatch_gbs": 370.0, "combine_gbs": 371.0},
        line | of_cpp(2.4) | {"transport": "auto", "ratio": 1.2},
    ]
    text = "\n".join(json.dumps(each) for each in lines)
    bench.write_text(f"#!/bin/sh\ncat <<'END'\n{text}\n" + '{"config": "cut\nEND\nexit 3\n')
    bench.chmod(0o755)
    given = ["ep2.py", "--device=cpu", f"--bench={bench}", f"--out={tmp_path / 'ep2.json'}"]
    monkeypatch.setattr(sys, "argv", given)
    driver = ep2.Driver(ep2.arguments())
    driver.in_cpp(20.0)
    (row,) = driver.record["rows"]
    assert ep2.total(row["ours"]) == pytest.approx(2.4) and row["hidden"] == 0.6
    assert (driver.record["dispatch_gbs"], driver.record["combine_gbs"]) == (370.0, 371.0)
    assert "pretended" not in driver.record
    driver.pretended(20.0)
    assert [each["ours"] for each in driver.record["pretended"]] == [row["ours"]]
    assert driver.record["problems"]["exchange_bench"].startswith("exit 3")
    assert not ep2.complete(row)
    ep2.summary(driver.record)
    assert "1.200 of alone (goal 1.15)" in capsys.readouterr().out


def test_parts_of_the_page(ep2):
    _, figures = ep2
    record = a_record()
    assert "7B-n256 with 8 ranks that share the GPUs: 1.300 times alone" in figures.cost(record)
    assert "| 2.00 | 2.40 | 1.200 | 1.15 | 3.00 | 0.60 | 2.30 |" in figures.cost(record)
    rivals = figures.rivals(record)
    assert "| 2.00 | 2.50 | 4.00 | 6.00 | 7.00 | 5.00 | 1.250 | 2.00 |" in rivals
    assert "all_to_all_vdev_2d, moe_grouped is absent at 7B-n256: no NVSHMEM." in rivals
    assert "`capacity=1.25` 1.25 and 1.24 times as much" in figures.memory(record)


def test_the_plot(ep2):
    matplotlib = pytest.importorskip("matplotlib")
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    _, figures = ep2
    figure = figures.plot(plt, a_record())
    assert len(figure.axes) == 2
    plt.close(figure)
