"""benchmarks/scaling.py measures what it says: training at its smallest size on CPUs; layers, the
record and the plot from made-up times."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from days import turn

BENCHMARKS = Path(__file__).resolve().parents[3] / "benchmarks"
TRAINING = ["--model=debug", "--tokens=256", "--sequence=64", "--steps=16", "--policy=none"]
TRAINING += ["--settle=0", "--warm-up=5"]


@pytest.fixture
def scaling():
    import scaling
    from pages import scaling as page

    return scaling, page


def times(whole):
    return {"fwd_ms": whole / 4, "bwd_ms": 3 * whole / 4}


def a_layer(ranks=8):
    row = {"config": "qwen3-235b-T8192", "T": 8192, "d": 4096, "n": 1536, "E": 128, "K": 8}
    row |= {"ranks": ranks, "ours_torch": times(13.0), "alone_torch": times(12.0)}
    return row | {"nccl_grouped": times(20.0), "gather_scatter": times(19.5)}


def driver(scaling, monkeypatch, tmp_path, *given):
    out = f"--out={tmp_path / 'scaling.json'}"
    monkeypatch.setattr(sys, "argv", ["scaling.py", *given, "--device=cpu", out])
    return scaling.Driver(scaling.arguments())


@turn(0, of=3)
@pytest.mark.slow
def test_both_ways_of_dividing_train_alike(tmp_path, scaling):
    pytest.importorskip("torchtitan.models.common.moe", reason="needs torchtitan 0.3")
    out = tmp_path / "scaling.json"
    given = ["training", "--device=cpu", "--ranks=2", "--scaling=weak", "--eager", *TRAINING]
    program = [sys.executable, str(BENCHMARKS / "scaling.py"), *given, f"--out={out}"]
    ran = subprocess.run(program, capture_output=True, text=True, timeout=300)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    fsdp, ep = json.loads(out.read_text())["training"]
    assert (fsdp["parallel"], ep["parallel"]) == ("fsdp", "ep")
    assert fsdp["tokens_per_s"] > 0 and ep["tokens_per_s"] > 0
    pairs = zip(fsdp["losses"], ep["losses"], strict=True)
    assert all(abs(a - b) < 1e-3 for a, b in pairs)
    # AdamW's steps hide a wrong factor of the gradients; the norms of the gradients do not.
    pairs = zip(fsdp["expert_norms"], ep["expert_norms"], strict=True)
    assert all(abs(a / b - 1) < 2e-2 for a, b in pairs)
    assert fsdp["losses"][0] - fsdp["losses"][-1] > 0.01  # weights have moved
    assert "debug weak ep over 2" in ran.stdout
    again = subprocess.run(program, capture_output=True, text=True, timeout=120)  # measures nothing
    assert again.returncode == 0 and json.loads(out.read_text())["training"] == [fsdp, ep]


def test_layers(scaling, tmp_path, monkeypatch):
    scaling, _ = scaling
    given = ["layers", "--ranks", "1", "4", "8", "--layers=qwen3-235b-T8192"]
    made = driver(scaling, monkeypatch, tmp_path, *given)
    asked = []

    def worker(rivals, configs, seconds):
        asked.append((made.options.gpus, configs))
        late = {"config": configs[0], "late": True}
        return ([a_layer()], "") if made.options.gpus == 8 else ([late], "")

    monkeypatch.setattr(made, "worker", worker)
    assert not made.layers()  # four ranks had no time
    assert asked == [(8, ["qwen3-235b-T8192"]), (4, ["qwen3-235b-T8192"])]
    assert list(made.record["problems"]) == ["layers over 4 ranks"]
    (line,) = scaling.summary(json.loads((tmp_path / "scaling.json").read_text()))
    assert "1.083 of alone (goal 1.12), others 1.50 times ours (goal 1.25)" in line
    ranks = json.loads((tmp_path / "ranks.json").read_text())
    (row,) = ranks["rows"]
    assert (row["ranks"], row["ours"], row["alone"]) == (8, times(13.0), times(12.0))
    assert row["gather_scatter"] == times(19.5) and ranks["device"] == "cpu"
    resumed = driver(scaling, monkeypatch, tmp_path, *given)
    assert resumed.record["layers"] == made.record["layers"]
    assert driver(scaling, monkeypatch, tmp_path, *given, "--again").record["layers"] == []


def test_fp8_beside_bf16(scaling, tmp_path, monkeypatch):
    scaling, _ = scaling
    given = ["fp8", "--ranks", "1", "2", "--layers=qwen3-235b-T8192"]
    made = driver(scaling, monkeypatch, tmp_path, *given)
    row = a_layer(2) | {"ours_fp8": times(10.0), "alone_fp8": times(9.6)}
    row |= {"ours_all_to_all": times(20.0), "fp8_all_to_all": times(16.0)}

    def worker(rivals, configs, seconds):
        assert (rivals, made.options.gpus) == ("fp8", 2)
        return [row, {"kept": {}}], ""

    monkeypatch.setattr(made, "worker", worker)
    assert made.fp8()
    (line,) = scaling.summary(json.loads((tmp_path / "scaling.json").read_text()))
    assert "peer memory: 1.300, all-to-all: 1.250, alone: 1.250" in line
    monkeypatch.setattr(made, "worker", lambda *_: ([], "exit 1"))
    assert not made.fp8() and made.record["problems"] == {"fp8": "exit 1"}


def test_parts_have_equal_tokens(scaling, tmp_path, monkeypatch):
    scaling, _ = scaling
    given = ["training", "--ranks", "1", "2", "8", "--sequence=64", "--tokens=256"]
    made = driver(scaling, monkeypatch, tmp_path, *given, "--seconds=0")
    found = scaling.parts(made.options)
    assert found[0] == scaling.Part(8, "weak", "fsdp", 256)
    strong = [part for part in found if part.scaling == "strong"]
    assert {part.ranks * part.tokens_per_gpu for part in strong} == {8 * 64}
    assert [part.parallel for part in found if part.ranks == 1] == ["fsdp", "fsdp"]
    assert not made.training() and made.record["training"] == []
    assert set(made.record["problems"].values()) == {"no time was left"}


def test_the_page(scaling):
    _, page = scaling
    rate = {"model": "7B-n256", "tokens_per_gpu": 16384, "tokens_per_s": 200_000}
    rate |= {"tokens_per_day_and_gpu": 4.1e9, "scaling": "weak"}
    rates = [rate | {"ranks": r, "parallel": p} for r in (2, 4) for p in ("fsdp", "ep")]
    large = {"model": "7B-n256", "scaling": "strong", "parallel": "fsdp", "ranks": 1}
    rates.append(large | {"tokens_per_gpu": 32768, "absent": "out of memory"})
    record = {"layers": [a_layer(4), a_layer()]}
    record |= {"training": rates, "device": "GPU", "torch": "2.11", "commit": "abc"}
    record |= {"date": "2026-11-24T00:00:00"}
    text = page.part(record)
    assert "| 4 | 12.00 | 13.00 | 1.083 | 1.50 |" in text
    assert "FSDP2 and expert parallelism | 4 | 16384 | 200,000 | 4.10 billion |" in text
    assert "FSDP2 | 1 | 32768 | out of memory | out of memory |" in text
