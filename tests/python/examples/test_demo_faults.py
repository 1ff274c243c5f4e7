"""Faults around the demo: foreign files, crafted checkpoints, a full disk, a run that diverges. The
command ends with one sentence, and saved results stay."""

import builtins
import errno
import json
import os
import shutil
import subprocess
import sys

import pytest
import torch
from demo_support import SCRIPT, TINY, flags, write_text
from lm import checkpoint, data, report, trainer
from lm.config import Config, parse
from lm.errors import UserError, exit_code
from lm.model import build
from rounding_study import main as study_main
from train_lm import main


@pytest.fixture
def text(tmp_path):
    """A folder of text."""
    return write_text(tmp_path / "text")


@pytest.fixture
def corpus(text):
    return data.load_corpus(tiny(text))


def tiny(text, **settings):
    return Config(**(TINY | {"data": str(text)} | settings))


def trained(text, corpus, folder, step, **settings):
    """A run that was stopped and saved at this step, and the path of its checkpoint."""
    run = trainer.Run("topk", tiny(text, **settings), corpus, folder)
    run.train(lambda: run.step >= step)
    return run, folder / checkpoint.NAME


def arguments(text, out, *more, **settings):
    return [*flags(**(TINY | {"data": text, "out": out, "steps": 4} | settings)), *more]


def study_arguments(text, out, *more, **settings):
    given = arguments(text, out, *more, **settings)
    tile = given.index("--tile")  # the study sets it
    return [*given[:tile], *given[tile + 2 :]]


def sentence_of(capfd, code, argv, program=main):
    """The one line that a command ends with."""
    assert program(argv) == code
    err = capfd.readouterr().err.splitlines()
    assert "Traceback" not in "".join(err)
    return err[-1]


# Files of other programs.


@pytest.mark.parametrize("program", [main, study_main])
def test_a_folder_of_other_files_is_refused(tmp_path, text, capfd, program):
    out = tmp_path / "out"
    out.mkdir()
    (out / "report.json").write_text("my work")
    given = arguments(text, out) if program is main else study_arguments(text, out)
    sentence = sentence_of(capfd, 2, given, program)
    assert f"{out} holds files that were not written by this program" in sentence
    assert [p.name for p in out.iterdir()] == ["report.json"]
    assert (out / "report.json").read_text() == "my work"


def test_starting_afresh_removes_the_checkpoints(tmp_path, text, capfd):
    out = tmp_path / "out"
    assert main(arguments(text, out)) == 0
    (out / "notes.txt").write_text("my work")
    assert main(arguments(text, out, steps=3)) == 0
    assert "were removed" in capfd.readouterr().out and (out / "notes.txt").exists()
    assert main(arguments(text, out, "--resume", steps=3)) == 0
    assert "topk: continuing at step 3 of 3" in capfd.readouterr().out


def test_a_file_named_checkpoints(tmp_path, text, capfd):
    out = tmp_path / "out"
    assert main(arguments(text, out)) == 0
    shutil.rmtree(out / "checkpoints")
    (out / "checkpoints").write_text("my work")
    assert "cannot write to output folder" in sentence_of(capfd, 2, arguments(text, out))


# Bad input.

YAML = [
    ("out: 2001-99-99", "is not valid YAML"),
    ('out: "a\\0b"', "without null and surrogate characters"),
    ('data: "\\ud800"', "without null and surrogate characters"),
    ("steps: " + "9" * 5000, "is not valid YAML"),
    ("steps: 0x" + "f" * 5000, "got an integer of 20000 bits"),
    ("lr: 1" + "0" * 400, "got an integer of 1329 bits"),
    ("lr: .inf", "lr is inf; it must be finite and at least 0"),
    ("lr: " + "[" * 5000, "is not valid YAML"),
    ("lr: " + "[" * 100 + "]" * 100, "'lr' in {file} takes one value, got several"),
    ("? [a]\n: 1", "has a key that is not a word"),
    ("lr: 1\nlr: 2", "has the key 'lr' twice"),
    ("steps: !!bool maybe", "is not valid YAML"),
    ("steps: !!int ''", "is not valid YAML"),
    ("out: ''", "out is empty"),
    ("# " + "x" * (1 << 20), "is larger than"),
]


@pytest.mark.parametrize(("content", "sentence"), YAML)
def test_a_strange_file_is_refused(tmp_path, capfd, content, sentence):
    file = tmp_path / "settings.yaml"
    file.write_text(content)
    found = sentence_of(capfd, 2, ["--config", str(file), "--device", "cpu"])
    assert sentence.replace("{file}", str(file)) in found


def test_aliases_of_aliases_take_no_time(tmp_path):
    lines = ["steps: &a0 [x, x]"] + [f"a{i}: &a{i} [*a{i - 1}, *a{i - 1}]" for i in range(1, 60)]
    (tmp_path / "bomb.yaml").write_text("\n".join([*lines, "lr: *a59"]))
    with pytest.raises(UserError, match="takes one value, got several"):
        parse(["--config", str(tmp_path / "bomb.yaml")])


FLAGS = [
    (["--beta2", "1"], "beta2 is 1.0; it must be from 0 to 0.99999"),
    (["--seed", str(2**64)], f"seed is {2**64}; it must be from 0 to {2**63 - 1}"),
    (["--glob", "/etc/*"], "glob is '/etc/*'; it must be a pattern relative to the data folder"),
    (["--lr", "1e400"], "lr is inf; it must be finite and at least 0"),
    (["--threads", "100000"], "threads is 100000; it must be at most 4 times the cores"),
    (["--width", "100000000"], "these settings need at least"),
    (["--batch", str(2**30)], "these settings need at least"),
    (["--steps", "9" * 4000], "it must be from 1 to 10000000"),
    (["--out", "x" * 5000], "File name too long"),
    (["--out", ""], "out is empty"),
]


@pytest.mark.parametrize(("argv", "sentence"), FLAGS)
def test_strange_flags_are_refused(tmp_path, text, capfd, argv, sentence):
    found = sentence_of(capfd, 2, arguments(text, tmp_path / "out", *argv))
    assert sentence in found and len(found) < 700


def test_the_size_of_the_model_is_known_before_it_is_built(text):
    config = tiny(text)
    assert config.parameters == sum(p.numel() for p in build(config, "topk").parameters())


def test_a_folder_whose_name_is_not_utf8_gets_its_report(tmp_path, monkeypatch):
    folder = write_text(tmp_path / os.fsdecode(b"caf\xe9"))
    out = tmp_path / os.fsdecode(b"out\xe9")
    command = [sys.executable, str(SCRIPT), *arguments(folder, out, "--json")]
    strict = os.environ | {"PYTHONIOENCODING": "utf-8:strict"}
    done = subprocess.run(command, capture_output=True, env=strict, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["data"]["source"] == str(folder)
    assert b"caf\xe9" in (out / "report.md").read_bytes()


# A full disk and other failures of the machine.


class FullDisk:
    """From call n on, every write to the disk fails, until the disk has room again."""

    def __init__(self, patch, after):
        self.left, self.failed = after, False
        for module, names in (
            (builtins, ["open"]),
            (os, ["mkdir", "fsync", "replace", "rename", "unlink", "rmdir"]),
        ):
            for name in names:
                patch.setattr(module, name, self.wrap(getattr(module, name), name))

    def wrap(self, call, name):
        def wrapped(*args, **kwargs):
            mode = args[1] if len(args) > 1 else kwargs.get("mode", "r")
            if name != "open" or (isinstance(mode, str) and set(mode) & set("wxa")):
                self.left -= 1
                if self.left < 0:
                    self.failed = True
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return call(*args, **kwargs)

        return wrapped


def test_a_full_disk_at_any_write_is_one_sentence_and_loses_nothing(
    tmp_path, text, capfd, monkeypatch
):
    small = {"steps": 2, "save_every": 1, "eval_every": 2, "sample_tokens": 1, "layers": 1}
    monkeypatch.setattr(report, "plot", lambda report: b"PNG")  # it takes most of the time
    whole = arguments(text, tmp_path / "whole", **small)
    assert main(whole) == 0
    want = torch.load(tmp_path / "whole/checkpoints/rounded" / checkpoint.NAME)["model"]
    seen = set()
    for after in range(200):
        out = tmp_path / f"out{after}"
        if after % 2:  # half of them over the results of an earlier run
            assert main(arguments(text, out, **(small | {"steps": 1}))) == 0
        capfd.readouterr()
        with pytest.MonkeyPatch.context() as patch:
            disk = FullDisk(patch, after)
            code = main(arguments(text, out, **small))
        if not disk.failed:
            assert code == 0
            break
        err = capfd.readouterr().err
        assert code == 2 and err.startswith("error: ") and err.count("\n") == 1, err
        seen.add(err.split(str(tmp_path))[0])
        if not after % 2:
            assert main(arguments(text, out, "--resume", **small)) == 0
        else:
            assert main(arguments(text, out, **small)) == 0
        found = torch.load(out / "checkpoints/rounded" / checkpoint.NAME)["model"]
        assert all(torch.equal(want[name], found[name]) for name in want)
    else:
        raise AssertionError("the demo writes more often than was tried")
    assert len(seen) >= 4, seen


def test_a_closed_stderr_stops_nothing(tmp_path, text):
    command = [sys.executable, str(SCRIPT), *arguments(text, tmp_path / "out")]
    assert subprocess.run(["sh", "-c", '"$@" 2>&-', "sh", *command], check=False).returncode == 0


@pytest.mark.parametrize("stream", ["full", "closed pipe"])
def test_an_output_that_cannot_be_written_is_no_traceback(tmp_path, text, stream):
    command = [sys.executable, str(SCRIPT), *arguments(text, tmp_path / "out")]
    if stream == "full":
        with open("/dev/full", "w") as full:
            done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, check=False)
    else:
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
            process.stdout.close()
            done = subprocess.CompletedProcess(command, process.wait(), b"", process.stderr.read())
    assert done.returncode == 2, done.stderr
    err = done.stderr.decode()
    assert "Traceback" not in err and "Exception ignored" not in err
    assert err.count("\n") == 1 and err.startswith("error: ")


def test_a_step_that_fails_saves_the_steps_before(tmp_path, text, corpus, monkeypatch):
    whole, _ = trained(text, corpus, tmp_path / "whole", 12, rounding="stochastic")
    config = whole.config
    run = trainer.Run("topk", config, corpus, tmp_path / "run")
    kept = trainer.cross_entropy

    def fails(model, inputs, targets, config):
        if run.step == 7 and model.training:
            torch.rand(3)  # a step that draws and then fails
            raise RuntimeError("Resource temporarily unavailable\nC++ stack")
        return kept(model, inputs, targets, config)

    monkeypatch.setattr(trainer, "cross_entropy", fails)
    with pytest.raises(UserError) as caught:
        run.train(lambda: False)
    assert caught.value.status == 1
    assert "topk: training failed after step 7: Resource temporarily" in str(caught.value)
    assert f"{checkpoint.NAME} is kept" in str(caught.value) and "C++" not in str(caught.value)
    monkeypatch.setattr(trainer, "cross_entropy", kept)
    again = trainer.Run("topk", config, corpus, tmp_path / "run")
    assert again.restore() and again.step == 7
    again.train(lambda: False)
    assert again.history.train_loss == whole.history.train_loss


# Runs that diverge.


def test_a_run_that_diverges_ends_with_a_sentence(tmp_path, text, capfd):
    out = tmp_path / "out"
    hot = {"lr": 1e30, "clip": 0, "warmup": 0, "save_every": 1, "steps": 40}
    sentence = sentence_of(capfd, 1, arguments(text, out, **hot))
    assert "topk diverged: " in sentence and "not finite" in sentence
    assert not (out / "report.json").exists()
    path = checkpoint.newest(out / "checkpoints" / "topk")
    weights = torch.load(path)["model"]
    assert all(value.isfinite().all() for value in weights.values())
    assert f"{path} is kept" in sentence
    # Continuing diverges at the same step.
    assert sentence_of(capfd, 1, arguments(text, out, "--resume", **hot)) == sentence


def test_a_loss_that_is_not_finite_is_named_at_its_step(tmp_path, text, corpus):
    run, path = trained(text, corpus, tmp_path / "run", 5)
    with torch.no_grad():
        run.model.head.weight[3, 2] = float("inf")
    with pytest.raises(
        UserError, match="topk diverged: the loss of step 6 is not finite"
    ) as caught:
        run.train(lambda: False)
    assert caught.value.status == 1 and f"{path} is kept" in str(caught.value)
    assert run.restore() and run.step == 5


def test_weights_that_are_not_finite_replace_no_checkpoint(tmp_path, text, corpus):
    run, path = trained(text, corpus, tmp_path / "run", 5)
    run.step = 6
    with torch.no_grad():
        run.model.norm.weight[0] = float("nan")
    with pytest.raises(UserError, match="weights or moments are not finite after step 6"):
        run.save()
    assert torch.load(path)["step"] == 5


def test_a_study_whose_run_diverges_ends_with_a_sentence(tmp_path, text, capfd):
    once = ("--seeds", "1", "--ratios", "1", "--modes", "up,up")
    hot = {"lr": 1e30, "clip": 0, "warmup": 0, "steps": 40}
    given = study_arguments(text, tmp_path / "study", *once, **hot)
    assert "diverged" in sentence_of(capfd, 1, given, study_main)


def test_a_sentence_is_one_line_of_bounded_length(capfd):
    def command():
        raise UserError("first\nsecond " + "9" * 5000)

    assert exit_code(command, "") == 2
    err = capfd.readouterr().err
    assert err.count("\n") == 1 and len(err) < 700 and err.startswith("error: first second 999")
