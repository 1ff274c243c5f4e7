"""The studies of quality: their plan, their model, and a small one from begin to end."""

import json
import shutil
from dataclasses import replace

import demo_support  # noqa: F401 (finds the examples)
import numpy as np
import pytest
import quality_study
import torch
from cuda_support import needs_cuda
from days import turn
from lm.errors import UserError
from quality import pool, report, text, times, train
from quality.graphs import EAGER_CALLS, Replayed
from quality.model import EAGER, Model, Rule, changed_rows
from quality.settings import ARCHITECTURES, SIZES, Job
from test_make_text import make_parts

CPU = torch.device("cpu")
TINY = ["--size", "tiny", "--tune-size", "tiny", "--device", "cpu", "--seeds", "1"]
TINY += ["--tokens", "6144", "--pretrain-tokens", "6144", "--tune-tokens", "6144"]


@pytest.fixture(scope="module")
def parts(tmp_path_factory):
    return make_parts(tmp_path_factory.mktemp("text"))


def test_an_epoch_takes_every_window_once_in_the_order_of_the_seed():
    tokens = np.arange(8 * 10 + 1, dtype=np.int32)
    windows = [text.Windows(tokens, 8, CPU, seed) for seed in (0, 0, 1)]
    rows = [w.batch(0, 10)[0][:, 0].tolist() for w in windows]
    assert rows[0] == rows[1] != rows[2] and sorted(rows[0]) == list(range(0, 80, 8))
    again = [windows[0].batch(first, 5)[0][:, 0].tolist() for first in (0, 5, 8)]
    assert again[0] + again[1] == rows[0] and again[2][:2] == rows[0][8:]
    inputs, targets = windows[0].batch(3, 2)
    assert torch.equal(inputs + 1, targets)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_rounding_of_micro_batches_is_that_of_separate_calls(name):
    """The pairs of a step's micro-batches in one call of the layer compute what a call for each
    micro-batch computes, and the loads of rounding are whole tiles in each."""
    torch.manual_seed(0)
    model = Model("tiny", name, 300)
    size = SIZES["tiny"]
    inputs, targets = torch.randint(300, (2, size.batch, size.context))
    torch.nn.init.normal_(model.head)
    group = 2 * size.context
    rule = Rule("nearest", size.tile, group)
    loss, layers = model(inputs, targets, rule)
    each = [model(a, b, rule)[0] for a, b in zip(inputs.split(2), targets.split(2), strict=True)]
    assert loss.item() == pytest.approx(torch.stack(each).mean().item(), abs=2e-6)
    plain, _ = model(inputs, targets, None)
    assert abs(loss.item() - plain.item()) > 1e-5
    for layer in layers:
        rows = layer.offsets.diff()
        assert rows.shape == (inputs.numel() // group, layer.counts.numel())
        assert ((rows % size.tile == 0) | (rows == group)).all()
        added, dropped = changed_rows(layer).tolist()
        assert rows.sum() - layer.counts.sum() == added - dropped and added > 0 and dropped > 0


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_rounding_to_single_rows_is_topk(name):
    """With a tile of one row the study's path for rounding computes what its path for top-K does,
    gradients included: the two differ by rounding alone."""
    torch.manual_seed(0)
    model = Model("tiny", name, 300)
    inputs, targets = torch.randint(300, (2, 4, 64))
    torch.nn.init.normal_(model.head)
    found = []
    for rule in (None, Rule("nearest", 1, 128)):
        model.zero_grad()
        loss, layers = model(inputs, targets, rule)
        (loss + sum(layer.loss for layer in layers)).backward()
        found.append([loss.detach(), *(p.grad.clone() for p in model.parameters())])
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


def test_selection_bias_moves_and_weights_learn(parts, tmp_path):
    place = train.Place(CPU, parts, tmp_path, float("inf"), EAGER)
    job = Job("rounding", "deepseek", "tiny", 0, 6144, 1e-2)
    record = train.train(job, place)
    assert record["val_loss"] < record["curve"][0]["loss"] - 0.05
    assert record["steps"] == 12 and record["loads"].keys() == {"largest", "deviation"}
    run = train.Run(job, place, train.new_model(job, place), "sources")
    run.train()
    assert run.model.blocks[0].moe.selection_bias.abs().max() > 0


def test_a_seed_and_an_order_change_what_they_name(parts, tmp_path):
    """The seed alone sets the initial weights, and `order` the order of the text."""
    place = train.Place(CPU, parts, tmp_path, float("inf"), EAGER)
    job = Job("spread", "olmoe", "tiny", 0, 6144, 1e-3)
    same, order, weights = (
        replace(job, again=1),
        replace(job, order=1),
        replace(job, seed=1, order=0),
    )
    runs = [
        train.Run(j, place, train.new_model(j, place), "sources")
        for j in (job, same, order, weights)
    ]
    embeddings = [run.model.embedding for run in runs]
    batches = [run.windows.batch(0, 4)[0] for run in runs]
    for seen, equal in ((embeddings, [True, True, False]), (batches, [True, False, True])):
        assert [torch.equal(seen[0], other) for other in seen[1:]] == equal
    assert len({j.name for j in (job, same, order, weights)}) == 4


@needs_cuda
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_steps_as_graphs_learn_what_eager_steps_learn(name, parts, tmp_path, capfd):
    """Rounding begins after a step that is a graph without it."""
    found = []
    for graph in (False, True):
        place = train.Place(torch.device("cuda"), parts, tmp_path, float("inf"), EAGER, graph)
        job = Job("rounding", name, "tiny", 0, 60 * 512, 1e-3)
        job = replace(job, mode="nearest", ratio=2, begin="tenth")
        run = train.Run(job, place, train.new_model(job, place), "sources")
        found.append((run.train().tolist(), run.evaluate(train.WHOLE, run.rule), run.timed_steps))
    (eager, eager_loss, _), (replayed, replayed_loss, timed) = found
    assert timed == 60 - 2 * (EAGER_CALLS + 1) and "not captured" not in capfd.readouterr().err
    assert replayed == pytest.approx(eager, abs=0.02) and eager[-1] < eager[0] - 0.1
    assert replayed_loss == pytest.approx(eager_loss, abs=0.02)


@needs_cuda
def test_a_function_that_cannot_be_captured_stays_eager(capfd):
    x = torch.ones(2, device="cuda")
    double = Replayed(lambda x: 2 * x if x.sum().item() else x, True)  # .item() waits: no graph
    assert [double(x).sum().item() for _ in range(6)] == [4.0] * 6
    assert "is not captured as a CUDA graph" in capfd.readouterr().err and double.settled
    assert torch.randn(8, device="cuda").unique().numel() > 1  # the generator draws again


def test_stochastic_rounding_and_the_cpu_have_no_graphs(parts, tmp_path):
    """A graph would repeat the seed of its capture, which the host draws."""
    place = train.Place(CPU, parts, tmp_path, float("inf"), EAGER)
    job = Job("rounding", "olmoe", "tiny", 0, 6144, 1e-3)
    run = train.Run(job, place, train.new_model(job, place), "sources")
    rules = [None, Rule("nearest", 8, 128), Rule("stochastic", 8, 128)]
    assert [run.graph(rule) for rule in rules] == [False] * 3
    place.device = torch.device("cuda")
    assert [run.graph(rule) for rule in rules] == [True, True, False]
    place.graph = False
    assert [run.graph(rule) for rule in rules] == [False] * 3


@needs_cuda
@pytest.mark.parametrize("study", [train.train, train.measure])
def test_the_time_of_a_step_is_measured_on_cuda(study, parts, tmp_path):
    place = train.Place(torch.device("cuda"), parts, tmp_path, float("inf"), EAGER)
    job = Job("rounding", "olmoe", "tiny", 0, 6144, 1e-2, mode="nearest", ratio=2, timed=True)
    record = study(job, place)
    assert "times_failed" not in record and record["times"]["tokens"] == 128
    assert record["times"]["step_tokens"] == 512
    for of in ("topk", "rounded"):
        found = record["times"][of]
        assert found["step_ms"] > found["micro_ms"] > found["experts_ms"] > 0
    assert "smoe::select_tokens" in found["kernels"]


def test_a_run_past_the_deadline_is_dropped(parts, tmp_path):
    place = train.Place(CPU, parts, tmp_path, 0.0, EAGER)
    with pytest.raises(train.OutOfTime):
        train.train(Job("rounding", "olmoe", "tiny", 0, 6144, 1e-3), place)


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        (["--architectures", "olmoe,mixtral"], "architectures has 'mixtral'; each must be one of"),
        (["--modes", "best"], "modes has 'best'"),
        (["--ratios", "a"], "ratios are 'a'; they must be integers"),
        (["--ratios", "0"], r"ratios are \[0\]; each must be at least 1"),
        (["--ratios", "3"], "ratio is 3; with olmoe this is 192 tokens, which must divide the 512"),
        (["--seeds", "0"], "seeds is 0; it must be from 1 to 1000"),
        (["--tokens", "100"], "tokens is 100; it must be at least 5120"),
    ],
)
def test_refusals(given, sentence):
    with pytest.raises(UserError, match=sentence):
        quality_study.plan(quality_study.options(["rounding", *TINY, *given]))


def test_a_study_that_stops_early_can_be_compared():
    """Pretraining is first, top-K precedes rounding with the same seed, and the first mode has all
    its seeds before the second begins. The first mode alone begins later too."""
    given = ["rounding", "finetune", "--begins", "start,tenth", "--modes", "up,down"]
    jobs = quality_study.plan(quality_study.options(given))
    assert jobs[0].study == "pretrain" and len({job.name for job in jobs}) == len(jobs)
    first, others = jobs[1 : 1 + 3 * (3 * 4 + 5)], jobs[1 + 3 * (3 * 4 + 5) :]
    assert [job.seed for job in first] == sorted(job.seed for job in first)
    assert [job.ratio for job in first[:4]] == [0, 1, 2, 4]
    assert {(job.begin, job.mode) for job in first if job.ratio} == {("start", "up")}
    assert len(others) == 3 * 3 * 3 * 2 and {job.ratio for job in others[:18]} == {1}
    assert {(job.begin, job.mode) for job in others} == {("start", "down"), ("tenth", "up")}
    assert [job.name for job in jobs if job.timed] == [
        f"rounding-{name}-0.1b-up2-seed0" for name in ("olmoe", "qwen3", "deepseek")
    ]


def test_one_architecture_may_show_the_spread_and_the_other_modes():
    given = ["rounding", "spread", "times", "--modes", "nearest,up", "--others", "qwen3"]
    jobs = quality_study.plan(quality_study.options([*given, "--seeds", "2", "--ratios", "2"]))
    assert [job.name for job in jobs if job.study == "times"] == [
        f"times-{name}-wide-nearest2-seed0" for name in ("olmoe", "qwen3", "deepseek")
    ]
    assert [job.name for job in jobs if job.study == "spread"] == [
        f"spread-qwen3-0.1b-{what}" for what in ("order1-seed0", "order0-seed1", "again1-seed0")
    ]
    ups = [job for job in jobs if job.mode == "up"]
    assert [job.architecture for job in ups] == ["qwen3"] * 2 and jobs[-2:] == ups


def record(seed, loss, ratio=0, **more):
    settings = {"study": "rounding", "architecture": "olmoe", "size": "tiny", "seed": seed}
    settings |= {"ratio": ratio, "mode": "nearest" if ratio else "topk", "begin": "start"}
    return {"settings": settings, "val_loss": loss, "loads": {"largest": [2.0]}} | more


def test_differences_are_taken_seed_by_seed():
    found = [record(0, 3.0), record(1, 4.0)]
    found += [record(s, 3.5 + s / 2, 2, val_loss_rounded=4.0 + s) for s in (0, 1)]
    topk, nearest = report.rounding_rows(found)
    assert topk["gaps"] == [0, 0] and nearest["gaps"] == [0.5, 0]
    assert nearest["gaps_rounded"] == [1.0, 1.0]
    assert "| nearest | 2 | 2 | 3.7500 ± 0.3536 | +0.2500 ± 0.3536 |" in report.rounding_table(
        [nearest]
    )


def test_the_spread_names_what_differs():
    found = [record(0, 3.0), record(1, 3.2)]
    for i, more in enumerate(({"order": 1}, {"seed": 1, "order": 0}, {"again": 1})):
        made = record(0, 3.1 + i / 10)
        made["settings"] |= {"study": "spread", "order": None, "again": 0} | more
        found.append(made)
    rows = [row.split(" | ") for row in report.spread_table(found).splitlines()[2:]]
    assert [(row[1], row[-1]) for row in rows] == [
        ("nothing", "0.3000 |"),
        ("the order of the text", "0.1000 |"),
        ("the initial weights", "0.2000 |"),
        ("both", "0.2000 |"),
    ]


def test_kernels_that_overlap_are_counted_once():
    spans = [("b", 5, 12), ("a", 0, 10), ("a", 20, 21), ("c", 6, 9)]
    assert times.busy(spans) == {"a": [2, 11], "b": [1, 2], "c": [1, 0]}


def test_the_names_of_kernels_are_short():
    name = "void smoe::cuda::(anonymous namespace)::rank_tokens<smoe::Row<4>, int>(Route, Scratch)"
    assert times.short_name(name) == "rank_tokens"
    assert times.short_name("Memset (Device)") == "Memset"


@turn(0, of=2)
def test_a_study_is_trained_once_and_reported(parts, tmp_path, capsys):
    out = tmp_path / "study"
    given = ["rounding", "finetune", "--text", str(parts), "--out", str(out), *TINY]
    given += ["--architectures", "qwen3", "--ratios", "1", "--gpus", "2"]
    assert quality_study.run_studies(given) == 0
    records = {r["name"]: r for r in map(json.loads, (out / "runs.jsonl").open())}
    assert len(records) == 1 + 2 + 5
    nearest = records["rounding-qwen3-tiny-nearest1-seed0"]
    assert nearest["val_loss_rounded"] != nearest["val_loss"]
    assert min(nearest["loads"]["added"]) > 0
    full, nf4 = (records[f"finetune-fp8-study-tiny-{v}-seed0"] for v in ("full", "lora-nf4"))
    assert full["parameters"]["trained"] == full["parameters"]["total"]
    assert 0 < nf4["parameters"]["trained"] < nf4["parameters"]["total"]
    assert full["curve"][0]["loss"] != nf4["curve"][0]["loss"]  # the experts were rounded to NF4
    assert nf4["val_loss"] < nf4["curve"][0]["loss"]
    assert nf4["val_loss_merged"] == pytest.approx(nf4["val_loss"], abs=1e-5)
    for name in ("quality-rounding.png", "quality-finetune.png"):
        assert (out / name).read_bytes().startswith(b"\x89PNG")
    assert "| lora-nf4 | 0.3 M | 1 |" in (out / "quality-finetune.md").read_text()
    before = (out / "runs.jsonl").read_bytes()
    assert quality_study.run_studies(given) == 0
    assert (out / "runs.jsonl").read_bytes() == before  # nothing was trained again
    spread = ["rounding", "spread", *given[2:], "--seeds", "2"]
    assert quality_study.run_studies(spread) == 0
    assert "| qwen3 tiny | nothing | 2 |" in (out / "quality-spread.md").read_text()
    assert quality_study.run_studies([*given, "--seeds", "2", "--limit", "1"]) == 3
    assert "5 of 15 runs are left" in capsys.readouterr().out
    with pytest.raises(UserError, match="with other settings; choose another --out"):
        quality_study.run_studies([*given, "--lr", "0.1"])


def test_the_time_of_a_run_is_expected_from_runs_of_its_length():
    job = Job("rounding", "olmoe", "tiny", 0, 6144, 1e-3)
    seen = {pool.kind(replace(job, study="times", size="wide")): 1.0}
    assert pool.expected(job, seen) == 0
    seen |= {pool.kind(replace(job, architecture="qwen3")): 10.0}
    assert pool.expected(job, seen) == pytest.approx(10 * pool.SLOWER)
    seen |= {pool.kind(job): 20.0}
    assert pool.expected(job, seen) == pytest.approx(20 * pool.SLOWER)


def test_times_need_a_gpu(parts, tmp_path):
    with pytest.raises(UserError, match="times cannot be measured on device cpu"):
        quality_study.run_studies(["times", "--text", str(parts), "--out", str(tmp_path), *TINY])


def test_a_failed_run_leaves_the_others(parts, tmp_path, capsys):
    for path in parts.iterdir():
        if not path.name.startswith("documentation"):
            shutil.copy(path, tmp_path)
    out = tmp_path / "study"
    given = ["finetune", "--text", str(tmp_path), "--out", str(out), *TINY, "--variants", "full"]
    assert quality_study.run_studies(given) == 1
    assert "-full-seed0: " in (sentence := capsys.readouterr().err)
    assert "has 0 tokens of documentation-train" in sentence
    (record,) = map(json.loads, (out / "runs.jsonl").open())
    assert record["name"] == "pretrain-fp8-study-tiny-seed0"


def test_runs_on_other_text_are_refused(parts, tmp_path):
    (tmp_path / quality_study.MARKER).touch()
    (tmp_path / "runs.jsonl").write_text(json.dumps({"text": {"sources-train": 1}}))
    given = ["rounding", "--text", str(parts), "--out", str(tmp_path), *TINY, "--ratios", "1"]
    with pytest.raises(UserError, match="has runs on other text than"):
        quality_study.run_studies(given)
