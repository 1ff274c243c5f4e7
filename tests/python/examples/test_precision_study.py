"""The study of fp8 experts: its arithmetic, its refusals, and a small one from start to report."""

import json
import math

import pytest
import torch
from demo_support import TINY, flags, write_text
from lm.config import Config
from lm.errors import UserError
from lm.files import UNFINISHED
from precision_study import cosines, gradients, main, parse_arguments, summarise, table

SMALL = {"width": 128, "heads": 2, "expert_width": 128, "experts": 4, "top_k": 2}


def test_summary_compares_runs_of_the_same_seed():
    losses = {"bf16": [3.0, 4.0], "fp8": [3.5, 4.25]}
    runs = [{"precision": p, "val_loss": v} for p, values in losses.items() for v in values]
    summary = summarise(runs)
    assert summary["bf16"]["mean"] == 3.5 and summary["fp8"]["mean"] == 3.875
    assert summary["gap"]["mean"] == 0.375
    assert summary["gap"]["std"] == pytest.approx(0.1768, abs=1e-4)
    assert "| fp8 - bf16, same seed | +0.3750 ± 0.1768 | |" in table(summary)


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        (["--expert-width", "96"], "expert_width is 96; fp8 needs a multiple of 64"),
        (["--width", "160"], "width is 160; fp8 needs a multiple of 64"),
        (["--seeds", "1"], "seeds is 1; it must be from 2 to 1000"),
    ],
)
def test_refusals(given, sentence):
    with pytest.raises(UserError, match=sentence):
        parse_arguments(given)


def test_gradients_in_fp8_differ_by_the_rounding_of_e4m3():
    """Every rounding to e4m3 adds an error of about 0.026 of a normal value, so two operands in
    fp8 cost 0.0007 of the cosine."""
    config = Config(**SMALL, batch=4, context=64, device="cpu")
    found = cosines(config)
    for kept in found.values():
        assert all(0.996 < value < 0.9993 for value in kept.values())
    assert found["bf16"]["d w_down"] > found["fp8"]["d w_down"]
    assert all(torch.equal(a, b) for a, b in zip(*map(list, twice(config)), strict=True))


def twice(config):
    return (gradients(config, precision="fp8").values() for _ in range(2))


def test_a_study_is_trained_once_and_reported(tmp_path, capsys):
    text = write_text(tmp_path / "text")
    given = flags(**TINY | SMALL | {"data": text, "out": tmp_path / "study", "steps": 3})
    assert main(["--seeds", "2", *given]) == 0
    record = json.loads((tmp_path / "study/precision.json").read_text())
    assert [run["precision"] for run in record["runs"]] == ["bf16", "fp8"] * 2
    assert record["train_tokens"] > 0
    assert all(abs(run["last_train_loss"] - run["val_loss"]) < 1 for run in record["runs"])
    of_seed = [[r["val_loss"] for r in record["runs"] if r["seed"] == s] for s in (0, 1)]
    assert all(a != b and abs(a - b) < 0.05 for a, b in of_seed)  # the two precisions differ
    assert (tmp_path / "study/precision.png").read_bytes().startswith(b"\x89PNG")
    capsys.readouterr()
    assert main(["--seeds", "2", *given]) == 0
    assert "step" not in capsys.readouterr().out  # nothing was trained again
    assert main(["--seeds", "2", *given, "--steps", "4"]) == 2
    assert "is of other settings or text" in capsys.readouterr().err
    (tmp_path / f"study/precision.json{UNFINISHED}").mkdir()
    assert main(["--seeds", "2", *given]) == 2
    assert "cannot write the report to" in capsys.readouterr().err
    damaged = tmp_path / "study/runs/fp8-1.json"
    whole = json.loads(damaged.read_text())
    for content, sentence in (
        ("{", "fp8-1.json cannot be read"),
        ("[" * 100_000, "fp8-1.json cannot be read"),
        ("null", "fp8-1.json is no result of fp8-1; move it elsewhere"),
        (json.dumps(whole | {"val_loss": math.nan}), "is no result of fp8-1"),
        (json.dumps(whole | {"curve": [1.0]}), "is no result of fp8-1"),
        (json.dumps(whole | {"train_loss": []}), "is no result of fp8-1"),
        (json.dumps(whole | {"precision": "bf16"}), "is no result of fp8-1"),
    ):
        damaged.write_text(content)
        assert main(["--seeds", "2", *given]) == 2
        assert sentence in capsys.readouterr().err
