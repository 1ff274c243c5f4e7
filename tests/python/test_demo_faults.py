"""Faults around the demo: foreign files, crafted checkpoints, a full disk, a run that diverges. The
command ends with one sentence, and saved results stay."""

import builtins
import errno
import json
import os
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
from safetensors.torch import load_file, save_file
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
    """A run that was stopped and saved at this step, and its checkpoint."""
    run = trainer.Run("topk", tiny(text, **settings), corpus, folder)
    run.train(lambda: run.step >= step)
    return run, folder / f"step-{step:08d}"


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


# Files of somebody else.


def test_only_files_of_the_demo_are_removed(tmp_path, text, capfd):
    out = tmp_path / "out"
    assert main(arguments(text, out)) == 0
    saved = out / "checkpoints" / "topk" / "step-00000004"
    backup = saved.with_name("step-00000004-backup")
    backup.mkdir()
    (backup / "state.json").write_text("{}")
    theirs = [backup / "state.json", out / "checkpoints" / "thesis.txt", out / ".probe"]
    theirs += [out / "checkpoints" / "topk" / "notes.txt", out / "checkpoints" / "other" / "a.txt"]
    for path in theirs[1:]:
        path.parent.mkdir(exist_ok=True)
        path.write_text("my work")
    assert main(arguments(text, out, steps=3)) == 0  # afresh
    assert not saved.exists() and saved.with_name("step-00000003").exists()
    assert all(path.exists() for path in theirs)
    assert "were removed" in capfd.readouterr().out
    assert main(arguments(text, out, "--resume", steps=3)) == 0  # not from the backup
    assert "topk: continuing at step 3 of 3" in capfd.readouterr().out


@pytest.mark.parametrize("more", [[], ["--resume"]])
@pytest.mark.parametrize("made", ["empty folder", "file", "symlink", "copy"])
def test_a_name_of_ours_that_we_did_not_write_is_refused(tmp_path, text, capfd, made, more):
    out = tmp_path / "out"
    assert main(arguments(text, out)) == 0
    saved = out / "checkpoints" / "topk" / "step-00000004"
    theirs = saved.with_name("step-00000009")
    if made == "empty folder":
        theirs.mkdir()
    elif made == "file":
        theirs.write_text("my work")
    elif made == "symlink":
        theirs.symlink_to(saved)
    else:
        theirs.mkdir()
        (theirs / "state.json").write_bytes((saved / "state.json").read_bytes())
    sentence = sentence_of(capfd, 2, arguments(text, out, *more))
    assert str(theirs) in sentence and "move it elsewhere" in sentence
    assert saved.exists() and os.path.lexists(theirs)


def test_a_note_in_a_checkpoint_is_not_removed_with_it(tmp_path, text, corpus, capfd):
    out = tmp_path / "out"
    assert main(arguments(text, out)) == 0
    note = out / "checkpoints" / "rounded" / "step-00000004" / "note.txt"
    note.write_text("my work")
    assert "holds note.txt" in sentence_of(capfd, 2, arguments(text, out))
    assert note.exists() and (out / "checkpoints" / "topk" / "step-00000004").exists()

    run, path = trained(text, corpus, tmp_path / "run", 3)
    (path / "note.txt").write_text("my work")
    run.train(lambda: run.step >= 5)
    assert (path / "note.txt").exists() and (path / "state.json").exists()
    assert [p.name for p in checkpoint.checkpoints(tmp_path / "run")][-1] == "step-00000005"


@pytest.mark.parametrize("name", [*report.FILES, "tokenizer.json"])
def test_a_report_that_is_not_ours_is_not_replaced(tmp_path, text, capfd, name):
    out = tmp_path / "out"
    out.mkdir()
    (out / name).write_text("my work")
    (out / "report.json.writing").write_text("my work")
    sentence = sentence_of(capfd, 2, arguments(text, out))
    assert f"{name} was not written by this program" in sentence
    assert sorted(p.name for p in out.iterdir()) == sorted([name, "report.json.writing"])
    assert (out / name).read_text() == "my work"


def test_an_output_folder_of_an_earlier_version_is_ours(tmp_path, text):
    out = tmp_path / "out"
    assert main(arguments(text, out)) == 0
    (out / ".train_lm").unlink()
    assert main(arguments(text, out)) == 0


def test_the_study_leaves_files_of_somebody_else(tmp_path, text, capfd):
    out = tmp_path / "study"
    out.mkdir()
    (out / "study.md").write_text("my work")
    given = study_arguments(text, out)
    assert "study.md was not written" in sentence_of(capfd, 2, given, study_main)
    assert (out / "study.md").read_text() == "my work"


@pytest.mark.parametrize("made", ["folder", "dangling", "file"])
def test_a_symlink_or_file_named_checkpoints(tmp_path, text, capfd, made):
    out = tmp_path / "out"
    out.mkdir()
    target = tmp_path / "large-disk"
    if made == "folder":
        target.mkdir()
        (target / "thesis.txt").write_text("my work")
    if made == "file":
        (out / "checkpoints").write_text("my work")
    else:
        (out / "checkpoints").symlink_to(target)
    if made != "folder":
        sentence = sentence_of(capfd, 2, arguments(text, out))
        assert "cannot write to output folder" in sentence
        return
    for _ in range(2):
        assert main(arguments(text, out)) == 0
    assert (target / "thesis.txt").exists() and (target / "topk" / "step-00000004").exists()


# Checkpoints that were crafted or damaged.


def crafted(file, change):
    tensors = {name: value.clone() for name, value in load_file(file).items()}
    change(tensors)
    save_file(tensors, file)


CRAFTED = [
    ("0.exp_avg", lambda t: t[:1], "is of another shape: 0.exp_avg is"),
    ("1.exp_avg_sq", lambda t: t.repeat(2, 1), "is of another shape: 1.exp_avg_sq is"),
    ("1.exp_avg", lambda t: t.double(), "torch.float64"),
    ("2.exp_avg_sq", lambda t: t.bfloat16(), "torch.bfloat16"),
    ("0.step", lambda t: t.expand(2), "is of another shape: 0.step is (2,)"),
    ("0.step", lambda t: t + 1, "0.step in optimizer.safetensors is 5.0, the run's step is 4"),
    ("0.step", lambda t: t * float("nan"), "0.step in optimizer.safetensors is not finite"),
    ("0.exp_avg", lambda t: t / 0, "0.exp_avg in optimizer.safetensors is not finite"),
    ("0.exp_avg_sq", lambda t: -t.abs() - 1, "is negative"),
    ("3.exp_avg", lambda t: None, "lacks 3.exp_avg"),
    ("rng", lambda t: None, "lacks rng"),
    ("rng", lambda t: torch.zeros_like(t), "rng in optimizer.safetensors is no random state"),
    ("rng", lambda t: t[:-1], "is of another shape: rng"),
    ("rng", lambda t: t.float(), "torch.float32"),
    ("0.max_exp_avg_sq", lambda t: torch.ones(2), "holds 0.max_exp_avg_sq"),
    ("x", lambda t: torch.ones(2), "holds x"),
]


@pytest.mark.parametrize(("name", "change", "sentence"), CRAFTED)
def test_crafted_moments_are_refused(tmp_path, text, corpus, name, change, sentence):
    run, path = trained(text, corpus, tmp_path / "run", 4)

    def replace(tensors):
        value = change(tensors.get(name))
        if value is None:
            del tensors[name]
        else:
            tensors[name] = value.contiguous().clone()

    crafted(path / "optimizer.safetensors", replace)
    random_state = torch.get_rng_state()
    with pytest.raises(UserError) as caught:
        run.restore()
    assert sentence in str(caught.value)
    assert torch.equal(random_state, torch.get_rng_state())


def test_crafted_weights_are_refused(tmp_path, text, corpus):
    run, path = trained(text, corpus, tmp_path / "run", 4)
    for change, sentence in (
        (lambda t: t.update({"head.weight": t["head.weight"].double()}), "torch.float64"),
        (lambda t: t["head.weight"].zero_().div_(0), "head.weight in model.safetensors is not"),
        (lambda t: t.pop("norm.weight"), "lacks"),
    ):
        whole = (path / "model.safetensors").read_bytes()
        crafted(path / "model.safetensors", change)
        with pytest.raises(UserError) as caught:
            run.restore()
        assert sentence in str(caught.value)
        (path / "model.safetensors").write_bytes(whole)
    assert run.restore()


STATES = [
    (lambda s: s.clear(), "does not name its step"),
    (lambda s: s.pop("config"), "state.json has no dict 'config'"),
    (lambda s: s.pop("text"), "state.json has no str 'text'"),
    (lambda s: s.update(run="rounded"), "is of another run: rounded, not topk"),
    (lambda s: s.update(config=[]), "state.json has no dict 'config'"),
    (lambda s: s.update(more=1), "unknown key 'more'"),
    (lambda s: s["history"].pop("padding"), "no 'padding' in its history"),
    (lambda s: s["history"].update(more=1), "unknown key 'more'"),
    (lambda s: s["history"]["train_loss"].pop(), "'train_loss' in its history is not that of"),
    (lambda s: s["history"]["val_loss"].append(1.0), "'val_loss' in its history"),
    (lambda s: s["history"]["padding"][0].clear(), "'padding' in its history"),
    (lambda s: s["history"].update(seconds=float("nan")), "'seconds' in its history"),
]


@pytest.mark.parametrize(("change", "sentence"), STATES)
def test_a_state_without_its_keys_is_refused(tmp_path, text, corpus, change, sentence):
    run, path = trained(text, corpus, tmp_path / "run", 4)
    state = json.loads((path / "state.json").read_text())
    change(state)
    (path / "state.json").write_text(json.dumps(state))
    with pytest.raises(UserError) as caught:
        run.restore()
    assert sentence in str(caught.value)


@pytest.mark.parametrize("content", ["", "[]", "[" * 100_000, "9" * 5000, "\udcff", '{"step": 1}'])
def test_a_state_that_is_no_state_is_refused(tmp_path, text, corpus, content):
    run, path = trained(text, corpus, tmp_path / "run", 4)
    (path / "state.json").write_text(content, errors="surrogateescape")
    with pytest.raises(UserError, match="move it elsewhere"):
        run.restore()


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
    want = load_file(tmp_path / "whole/checkpoints/rounded/step-00000002/model.safetensors")
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
        found = load_file(out / "checkpoints/rounded/step-00000002/model.safetensors")
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
    assert "step-00000007 is kept" in str(caught.value) and "C++" not in str(caught.value)
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
    (path,) = checkpoint.checkpoints(out / "checkpoints" / "topk")
    weights = load_file(path / "model.safetensors")
    assert all(value.isfinite().all() for value in weights.values())
    assert f"{path} is kept" in sentence
    # Continuing diverges at the same step.
    assert sentence_of(capfd, 1, arguments(text, out, "--resume", **hot)) == sentence


def test_a_loss_that_is_not_finite_is_named_at_its_step(tmp_path, text, corpus):
    run, path = trained(text, corpus, tmp_path / "run", 5)
    (tmp_path / "run" / "step-00000009").mkdir()  # somebody else's; it hides no sentence
    with torch.no_grad():
        run.model.head.weight[3, 2] = float("inf")
    with pytest.raises(
        UserError, match="topk diverged: the loss of step 6 is not finite"
    ) as caught:
        run.train(lambda: False)
    assert caught.value.status == 1 and f"{path} is kept" in str(caught.value)
    (tmp_path / "run" / "step-00000009").rmdir()
    assert run.restore() and run.step == 5


def test_weights_that_are_not_finite_replace_no_checkpoint(tmp_path, text, corpus):
    run, path = trained(text, corpus, tmp_path / "run", 5)
    run.step = 6
    with torch.no_grad():
        run.model.norm.weight[0] = float("nan")
    with pytest.raises(UserError, match="weights or moments are not finite after step 6"):
        run.save()
    assert checkpoint.checkpoints(tmp_path / "run") == [path]


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
