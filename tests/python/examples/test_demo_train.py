"""The demo's training: checkpoints, resuming, interruption, report, exit codes."""

import builtins
import itertools
import json
import math
import os
import re
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
import sonicmoe_cpp
import torch
from demo_support import SCRIPT, TINY, flags, write_text
from lm import checkpoint, data, files, measure, trainer
from lm import model as model_module
from lm.config import Config
from lm.errors import UserError
from lm.model import ROUTINGS, build, generate, rotary_table, rotate
from train_lm import main


@pytest.fixture
def text(tmp_path):
    """A folder of text."""
    return write_text(tmp_path / "text")


def tiny(text, **settings):
    return Config(**(TINY | {"data": str(text)} | settings))


def stop_at(run, step):
    return lambda: run.step >= step


def weights(run):
    return {name: value.clone() for name, value in run.model.state_dict().items()}


def moments(run):
    state = run.optimizer.state_dict()["state"]
    return {f"{i}.{key}": value for i, item in state.items() for key, value in item.items()}


def same_bits(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a)


@pytest.mark.parametrize("name", ROUTINGS)
@pytest.mark.parametrize("pause", [0, 1, 5, 7])
def test_an_interrupted_run_continues_to_the_same_bits(tmp_path, text, name, pause):
    config = tiny(text, rounding="stochastic")  # its draws are part of the random state
    corpus = data.load_corpus(config)
    whole = trainer.Run(name, config, corpus, tmp_path / "whole")
    assert whole.train(stop_at(whole, math.inf))

    first = trainer.Run(name, config, corpus, tmp_path / "parts")
    assert not first.train(stop_at(first, pause))
    torch.manual_seed(123)  # another process would have another random state
    second = trainer.Run(name, config, corpus, tmp_path / "parts")
    assert second.restore() and second.step == pause
    assert second.train(stop_at(second, math.inf))
    assert same_bits(weights(whole), weights(second))
    assert same_bits(moments(whole), moments(second))
    assert whole.history.train_loss == second.history.train_loss
    assert whole.history.val_loss == second.history.val_loss
    assert whole.history.padding == second.history.padding
    assert len(whole.history.train_loss) == config.steps


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_both_runs_start_equal_and_differ_by_their_routing(tmp_path, text, precision):
    config = tiny(text, precision=precision)
    corpus = data.load_corpus(config)
    runs = [trainer.Run(name, config, corpus, tmp_path / name) for name in ROUTINGS]
    assert same_bits(weights(runs[0]), weights(runs[1]))
    for run in runs:
        run.train(stop_at(run, math.inf))
        assert run.history.val_loss[-1] < run.history.val_loss[0] - 0.3
    assert runs[0].history.val_loss[0] == runs[1].history.val_loss[0]
    assert not same_bits(weights(runs[0]), weights(runs[1]))


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_batch_in_parts_gives_the_same_training(tmp_path, text, precision):
    """Without load balancing, whose loss is not a sum over tokens. Several steps, because AdamW's
    first step depends only on the signs of the gradients."""
    losses = []
    for parts in (1, 2, 4):
        config = tiny(text, accumulate=parts, lb_coef=0.0, steps=6, precision=precision)
        run = trainer.Run("topk", config, data.load_corpus(config), tmp_path / str(parts))
        run.train(stop_at(run, math.inf))
        losses.append(run.history.train_loss)
        tokens = config.tokens * config.layers * config.top_k
        assert all(p["topk_rows"] == tokens * parts for p in run.history.padding)
    assert losses[0][-1] < losses[0][0]
    limit = 1e-5 if precision == "fp32" else 2e-3
    assert np.abs(np.diff(losses, axis=0)).max() < limit


def test_gradients_of_experts_are_summed_in_place(text, monkeypatch):
    config = tiny(text)
    inputs, targets = data.Batches(data.load_corpus(config).train, config)[0]

    def gradients():
        model = build(config, "topk")
        for _ in range(2):
            loss, _ = trainer.cross_entropy(model, inputs, targets, config)
            loss.backward()
        return {name: p.grad for name, p in model.named_parameters()}

    summed = []
    kept = model_module.main_gradients

    def watch(moe):
        summed.append(kept(moe))
        return summed[-1]

    monkeypatch.setattr(model_module, "main_gradients", watch)
    found = gradients()
    assert len(summed) == 2 * config.layers and summed[0][0] is summed[config.layers][0]
    assert found["blocks.0.moe.w_up"] is summed[0][0]
    monkeypatch.setattr(model_module, "main_gradients", lambda moe: None)
    assert same_bits(found, gradients())


def test_a_checkpoint_holds_plain_weights_and_replaces_the_one_before(tmp_path, text):
    config = tiny(text)
    run = trainer.Run("topk", config, data.load_corpus(config), tmp_path / "run")
    run.train(stop_at(run, 7))
    (path,) = (tmp_path / "run").iterdir()
    saved = torch.load(path, weights_only=True)
    assert same_bits(saved["model"], weights(run))
    assert saved["model"]["blocks.0.moe.w_up"].shape == (4, 16, 16)
    assert saved["step"] == 7 and saved["run"] == "topk"
    assert saved["config"] == vars(config)


@pytest.mark.parametrize("fails", ["open", "fsync", "replace"])
def test_an_interrupted_write_leaves_the_last_checkpoint(tmp_path, text, monkeypatch, fails):
    config = tiny(text)
    corpus = data.load_corpus(config)
    run = trainer.Run("topk", config, corpus, tmp_path / "run")
    run.train(stop_at(run, 3))
    before = weights(run)
    run._train_step()

    def broken(*_args):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(builtins if fails == "open" else os, fails, broken)
        with pytest.raises(UserError, match="No space left on device; the one before it is intact"):
            run.save()
    again = trainer.Run("topk", config, corpus, tmp_path / "run")
    assert again.restore() and again.step == 3
    assert same_bits(weights(again), before)
    run.save()  # the rest of the broken write does not disturb
    assert [p.name for p in (tmp_path / "run").iterdir()] == [checkpoint.NAME]


def test_write_file_never_shows_half_a_file(tmp_path, monkeypatch):
    path = tmp_path / "report.json"
    files.write_file(path, b"old")

    def broken(_handle):
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", broken)
        with pytest.raises(OSError):
            files.write_file(path, b"new and longer")
    assert path.read_bytes() == b"old"


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"expert_width": 16}, "is of another shape: it has expert_width = 8"),
        ({"vocab": 285}, "is of another shape: it has vocab = 280, asked for is vocab = 285"),
        ({"lr": 0.1}, "is of another run: it has lr = 0.004, asked for is lr = 0.1"),
    ],
)
def test_a_checkpoint_of_another_run_is_refused(tmp_path, text, settings, sentence):
    config = tiny(text)
    run = trainer.Run("topk", config, data.load_corpus(config), tmp_path / "run")
    run.train(stop_at(run, 1))
    other = tiny(text, **settings)
    again = trainer.Run("topk", other, data.load_corpus(other), tmp_path / "run")
    with pytest.raises(UserError) as caught:
        again.restore()
    assert sentence in str(caught.value)


def test_a_damaged_checkpoint_and_changed_text_are_refused(tmp_path, text):
    config = tiny(text)
    run = trainer.Run("topk", config, data.load_corpus(config), tmp_path / "run")
    run.train(stop_at(run, 1))
    path = checkpoint.newest(tmp_path / "run")
    whole = path.read_bytes()
    before = weights(run)
    for damaged in (b"", b"\x08", whole[: len(whole) // 2]):
        path.write_bytes(damaged)
        with pytest.raises(UserError, match="cannot be read"):
            run.restore()
        assert same_bits(weights(run), before)
    torch.save({"model": weights(run)}, path)
    with pytest.raises(UserError, match="is no checkpoint of this program"):
        run.restore()
    path.write_bytes(whole)
    assert run.restore()
    (text / "file00.txt").write_text("other words " * 300)
    again = trainer.Run("topk", config, data.load_corpus(config), tmp_path / "run")
    with pytest.raises(UserError, match="was trained on other text than is here now"):
        again.restore()


def test_the_schedule_warms_up_and_ends_at_its_floor():
    config = Config(steps=100, warmup=10, lr=1.0, final_lr=0.1)
    rates = [trainer.learning_rate(config, step) for step in range(101)]
    assert rates[0] == pytest.approx(0.1)
    assert rates[9] == pytest.approx(1.0)
    assert max(rates) == pytest.approx(1.0)
    assert all(a >= b for a, b in itertools.pairwise(rates[10:]))
    assert rates[55] == pytest.approx(0.55)
    assert rates[100] == pytest.approx(0.1)


def test_the_model_is_causal_and_knows_positions(text):
    config = tiny(text)
    model = build(config, "topk").eval()
    torch.nn.init.normal_(model.head.weight)  # it starts at zero
    tokens = torch.randint(0, 280, (1, 16), generator=torch.Generator().manual_seed(0))
    changed = tokens.clone()
    changed[0, 9] = (changed[0, 9] + 1) % 280
    a, b = model(tokens)[0], model(changed)[0]
    assert torch.equal(a[:, :9], b[:, :9])
    assert not torch.allclose(a[:, 9:], b[:, 9:])
    # In a model of one layer, only the rotation depends on the order of the earlier tokens.
    model = build(tiny(text, layers=1), "topk").eval()
    torch.nn.init.normal_(model.head.weight)
    swapped = tokens.clone()
    swapped[0, [0, 1]] = tokens[0, [1, 0]]
    assert tokens[0, 0] != tokens[0, 1]
    assert not torch.allclose(model(tokens)[0][0, 15], model(swapped)[0][0, 15], atol=1e-3)


def test_attention_depends_on_distances_alone():
    q, k = torch.randn(2, 1, 8, generator=torch.Generator().manual_seed(0))
    table = rotary_table(32, 8)
    q, k = (rotate(x.expand(32, 8), table) for x in (q, k))
    scores = q @ k.T
    for distance in range(1, 31):
        band = scores.diagonal(-distance)
        assert torch.allclose(band, band[0].expand_as(band), atol=1e-5)
    assert not torch.allclose(scores.diagonal(-1)[0], scores.diagonal(-2)[0])


def test_generation_is_reproducible_and_outgrows_the_context(text):
    config = tiny(text)
    model = build(config, "topk")
    first = generate(model, [1, 2], 20, config)
    assert len(first) == 22 and first[:2] == [1, 2]
    assert first == generate(model, [1, 2], 20, config)


def test_evaluation_is_the_mean_over_all_tokens(text):
    config = tiny(text)  # 6 windows in batches of 4
    model = build(config, "rounded")
    inputs, targets = data.validation_windows(np.arange(6 * 16 + 1) % 280, 16)
    logits, _ = model.eval()(torch.from_numpy(inputs))
    wanted = torch.nn.functional.cross_entropy(
        logits.flatten(0, 1), torch.from_numpy(targets).flatten()
    )
    assert trainer.evaluate(model, inputs, targets, config) == pytest.approx(
        wanted.item(), rel=1e-6
    )


def test_memory_and_padding_are_measured(text):
    config = tiny(text)
    for name in ROUTINGS:
        model = build(config, name)
        memory = measure.activation_memory(config, model.blocks[0].moe, name)
        slack = 4 * 4 if name == "rounded" else 0  # E * tile/2 rows
        assert memory["row_capacity"] == 64 * 2 + slack
        assert memory["bytes_predicted"] == 4 * (64 * 16 + 2 * memory["row_capacity"] * 8)
        assert memory["bytes_measured"] >= memory["bytes_predicted"]
        model.train()
        _, auxes = model(torch.zeros(4, 16, dtype=torch.int64) + torch.arange(16))
        rows = measure.padding(config, auxes, torch.get_rng_state())
        assert rows["topk_rows"] == 2 * 64 * 2
        assert rows["topk_tiled"] % 8 == 0 and rows["topk_tiled"] >= rows["topk_rows"]
        assert rows["rounded_rows"] == rows["rounded_tiled"]


def test_padding_of_stochastic_rounding_is_that_of_the_step(text, tmp_path, monkeypatch):
    rounded = []

    def token_round(*arguments, **options):
        pairs = sonicmoe_cpp.token_round(*arguments, **options)
        rounded.append(int(pairs.offsets[-1]))
        return pairs

    monkeypatch.setattr("sonicmoe_cpp.module.token_round", token_round)
    config = tiny(text, rounding="stochastic", accumulate=2, steps=6, eval_every=1)
    run = trainer.Run("rounded", config, data.load_corpus(config), tmp_path)
    rounded.clear()
    assert run.train(lambda: False)
    each = [sum(rounded[i : i + 4]) for i in range(0, len(rounded), 4)]  # two layers, two parts
    assert len(set(each)) > 1
    assert [rows["rounded_rows"] for rows in run.history.padding] == each


def test_memory_in_bf16_is_without_copies_of_weights(text):
    """In bf16, tensors kept in addition to X and H take no more memory than in fp32, where autocast
    makes no copies of weights."""
    beside = {}
    for precision in ("fp32", "bf16"):
        config = tiny(text, precision=precision)
        memory = measure.activation_memory(config, build(config, "topk").blocks[0].moe, "topk")
        beside[precision] = memory["bytes_measured"] - memory["bytes_predicted"]
    assert 0 < beside["bf16"] <= beside["fp32"]


def start(text, out, *more, **settings):
    """Starts the script as a user does."""
    argv = [sys.executable, str(SCRIPT), *flags(**(TINY | settings)), "--data", str(text)]
    return subprocess.Popen(
        [*argv, "--out", str(out), *more],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_ctrl_c_saves_and_resuming_ends_at_the_same_report(tmp_path, text):
    long = {"steps": 240, "save_every": 1000, "eval_every": 40}
    process = start(text, tmp_path / "parts", **long)
    for line in process.stdout:
        if "topk  step    40" in line:
            process.send_signal(signal.SIGINT)
            break
    out, err = process.communicate(timeout=300)
    assert process.returncode == 130, err
    assert "stopped: topk is saved at step" in out
    assert "Traceback" not in err

    whole = start(text, tmp_path / "whole", "--json", **long)
    resumed = start(text, tmp_path / "parts", "--resume", **long)
    document, err = whole.communicate(timeout=300)
    assert whole.returncode == 0, err
    # stdout has the report only
    assert re.search(r"topk  step    40 of 240 .* tokens/s  about 0:\d\d:\d\d left\n", err)
    assert document == (tmp_path / "whole" / "report.json").read_text()
    out, err = resumed.communicate(timeout=300)
    assert resumed.returncode == 0, err
    assert "topk: continuing at step" in out and "rounded: no checkpoint yet" in out
    for run in ROUTINGS:
        path = f"checkpoints/{run}/{checkpoint.NAME}"
        a, b = (torch.load(tmp_path / side / path) for side in ("whole", "parts"))
        assert a["step"] == 240 and same_bits(a["model"], b["model"])
    whole, parts = (
        json.loads((tmp_path / side / "report.json").read_text()) for side in ("whole", "parts")
    )
    for run in ROUTINGS:
        assert whole["runs"][run]["val_loss"] == parts["runs"][run]["val_loss"]
    check_report(tmp_path / "whole", whole)


def check_report(out, report):
    assert report["seconds"] > 0
    assert report["baselines"]["bigram"] < report["baselines"]["unigram"]
    assert report["data"]["train_tokens"] > 0
    for run in ROUTINGS:
        figures = report["runs"][run]
        assert figures["val_loss"] < report["baselines"]["unigram"] + 0.5
        assert figures["below_bigram"] == pytest.approx(
            report["baselines"]["bigram"] - figures["val_loss"]
        )
        assert figures["tokens"] == 240 * 64
        assert figures["tokens_per_second"] > 0
        assert figures["activation_memory"]["bytes_measured"] > 0
        assert figures["padding"]["rounded_rows"] == figures["padding"]["rounded_tiled"] > 0
        assert len(figures["history"]["train_loss"]) == 240
    markdown = (out / "report.md").read_text()
    assert f"{report['runs']['rounded']['val_loss']:.3f}" in markdown
    assert (out / "sample.txt").read_text().startswith("def ")
    assert (out / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert (out / "tokenizer.json").exists()


def test_bad_input_is_one_sentence_and_exit_code_2(tmp_path, text, capfd):
    (tmp_path / "file").write_text("")
    (tmp_path / "nothing").mkdir()
    out = str(tmp_path / "out")
    for argv, sentence in (
        (["--data", str(tmp_path / "missing"), "--out", out], "does not exist or is not a folder"),
        (["--data", str(tmp_path / "nothing"), "--out", out], "has no text that matches"),
        (["--data", str(text), "--out", str(tmp_path / "file" / "out")], "cannot write to output"),
        (["--top-k", "65", "--out", out], "top_k is 65; it must be at most experts = 64"),
    ):
        assert main(argv) == 2
        err = capfd.readouterr().err
        assert sentence in err
        assert err.startswith("error: ") and err.count("\n") == 1
    process = start(text, tmp_path / "out", "--colour", "red")
    _, err = process.communicate(timeout=300)
    assert process.returncode == 2
    assert err == "error: unrecognized arguments: --colour red; --help lists the options\n"


def test_a_second_ctrl_c_interrupts_at_once():
    before = signal.getsignal(signal.SIGINT)  # ignored where a shell started us in the background
    with pytest.raises(KeyboardInterrupt), trainer.StopSignal() as stop:
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0)  # the handler runs between bytecodes
        assert stop() and stop.number == signal.SIGINT
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0)
    assert signal.getsignal(signal.SIGINT) is before
