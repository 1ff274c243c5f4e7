"""The rounding study: its plan, its arithmetic, and a small one from start to report."""

import json
import math
import signal
import subprocess
import sys

import pytest
from days import turn
from demo_support import EXAMPLES, TINY, flags, write_text
from lm import study
from lm.config import Config
from lm.errors import UserError
from rounding_study import main, parse_arguments

SCRIPT = EXAMPLES / "rounding_study.py"
# T K / E = 4 * 16 * 2 / 4 = 32 rows an expert.
CONFIG = Config(**TINY)


def result(mode, ratio, seed, loss):
    return {
        "mode": mode,
        "ratio": ratio,
        "seed": seed,
        "val_loss": loss,
        "tile": 32 // (ratio or 1),
    }


def test_every_seed_has_its_own_topk_run_first():
    planned = study.cases(CONFIG, ["nearest", "up"], [1, 4], 2)
    assert len(planned) == 2 * (1 + 2 * 2) == len({case.name for case in planned})
    assert [case.seed for case in planned if not case.ratio] == [0, 1]
    assert not planned[0].ratio
    tiles = {case.ratio: case.config(CONFIG).tile for case in planned if case.ratio}
    assert tiles == {1: 32, 4: 8}


@pytest.mark.parametrize("ratio", [0, 3, 64])
def test_a_ratio_without_a_tile_is_refused(ratio):
    with pytest.raises(UserError, match=f"ratio is {ratio}; it must divide the 32 rows"):
        study.cases(CONFIG, ["up"], [ratio], 1)


def test_gaps_are_taken_seed_by_seed():
    rows = study.summarise(
        [
            result("topk", 0, 0, 3.0),
            result("topk", 0, 1, 4.0),
            result("up", 2, 0, 3.5),
            result("up", 2, 1, 4.25),
            result("down", 2, 1, 3.5),
        ]
    )
    by_name = {(r["mode"], r["ratio"]): r for r in rows}
    up = by_name["up", 2]
    assert (up["loss"], up["lowest"], up["highest"]) == (3.875, 3.5, 4.25)
    assert up["gap"] == 0.375 and up["gap_std"] == pytest.approx(0.25 / math.sqrt(2))
    down = by_name["down", 2]
    assert down["gap"] == -0.5 and down["gap_std"] is None and down["seeds"] == 1
    assert "| down | 2 | 16 | 1 | 3.5000 (3.5000 to 3.5000) | -0.5000 |" in study.table(rows)
    assert "| up | 2 | 16 | 2 | 3.8750 (3.5000 to 4.2500) | +0.3750 ± 0.1768 |" in study.table(rows)


@pytest.mark.parametrize("modes", [["topk"], ["up"], ["up", "topk"]])
def test_an_interrupted_study_is_drawn_from_what_there_is(modes):
    found = [result(mode, int(mode != "topk"), 0, 3.0) for mode in modes]
    assert study.plot(study.summarise(found)).startswith(b"\x89PNG")


def test_a_mode_or_ratio_that_is_given_twice_is_trained_once():
    own, _ = parse_arguments(["--modes", "up,up", "--ratios", "2,2", "--device", "cpu"])
    assert (own.modes, own.ratios) == (["up"], [2])


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"val_loss": math.nan}, "is no result of topk-0"),
        ({"seed": 1}, "is no result of topk-0"),
        ({"tile": None}, "is no result of topk-0"),
        ({"settings": {}}, "is of a study with other settings"),
        ("[1]", "is no result of topk-0"),
        ("null", "is no result of topk-0"),
        ("{", "cannot be read"),
        ("[" * 100_000, "cannot be read"),
    ],
)
def test_a_result_that_is_none_is_refused(tmp_path, change, sentence):
    case = study.Case("topk", 0, 0)
    whole = {"val_loss": 3.0, "train_seconds": 1.0, "tile": 8, "text": ""}
    study.save_result(tmp_path, case, whole | {"settings": study.settings(CONFIG)})
    assert study.load_result(tmp_path, case, CONFIG)["val_loss"] == 3.0
    path = study.result_file(tmp_path, case)
    if isinstance(change, dict):
        change = json.dumps(json.loads(path.read_text()) | change)
    path.write_text(change)
    with pytest.raises(UserError, match=sentence):
        study.load_result(tmp_path, case, CONFIG)


def arguments(tmp_path, **settings):
    text = write_text(tmp_path / "text")
    given = TINY | {"data": text, "out": tmp_path / "study"} | settings
    given.pop("tile")  # the study sets it
    return ["--seeds", "2", "--ratios", "4", "--modes", "nearest", *flags(**given)]


@turn(1, of=2)
def test_a_study_is_trained_once_and_reported(tmp_path, capsys):
    given = arguments(tmp_path, steps=4)
    assert main(given) == 0
    out = tmp_path / "study"
    document = json.loads((out / "study.json").read_text())
    assert [(r["mode"], r["seeds"]) for r in document["rows"]] == [("topk", 2), ("nearest", 2)]
    assert (out / "study.png").stat().st_size > 5000
    assert (out / "study.md").read_text() in capsys.readouterr().out

    one = out / "runs" / "topk-1.json"
    one.unlink()
    before = {path: path.stat().st_mtime_ns for path in (out / "runs").iterdir()}
    assert main(given) == 0
    assert one.exists() and all(path.stat().st_mtime_ns == at for path, at in before.items())
    assert json.loads((out / "study.json").read_text())["runs"] == document["runs"]

    (tmp_path / "text" / "more.txt").write_text("more of it " * 50)
    assert main(given) == 0  # all runs have results, so the text is not read
    one.unlink()
    assert main(given) == 2
    assert "were trained on other text" in capsys.readouterr().err
    assert main([*given, "--layers", "1"]) == 2
    assert "of a study with other settings" in capsys.readouterr().err


def test_ctrl_c_saves_and_the_study_goes_on(tmp_path):
    given = arguments(tmp_path, steps=100_000, save_every=100_000)
    command = [sys.executable, SCRIPT, *given]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True) as process:
        assert "step     0 of" in process.stdout.readline()  # training begins
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=60)
    assert process.returncode == 130, errors
    assert "the same command continues" in errors
    # Checkpoints are far apart, so this one was written at the signal.
    assert (tmp_path / "study/checkpoints/topk-0/checkpoint.pt").is_file()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["--modes", "sideways"], "mode is 'sideways'"),
        (["--ratios", "one"], "ratios are 'one'"),
        (["--seeds", "0"], "seeds is 0"),
        (["--data", "/nowhere"], "/nowhere does not exist"),
    ],
)
def test_bad_input_is_one_sentence(given, message, tmp_path, capsys):
    assert main([*given, "--out", str(tmp_path), "--device", "cpu"]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1
