"""torchtitan 0.3 trains with the overrides as with its own experts: its trainer, on the CPU."""

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from days import of_today

pytest.importorskip(
    "torchtitan.trainer", reason="needs torchtitan 0.3 and its torch", exc_type=ImportError
)
pytestmark = pytest.mark.slow
HERE = Path(__file__).parent
LIMIT = 900  # seconds for all jobs, on a machine that has other work
OURS = "sonicmoe_cpp.integrations.torchtitan.overrides"
MODELS = ("qwen3", *of_today(["deepseek_v3", "gpt_oss"]))
EXPERTS = {
    "own": [],
    "swapped": ["titan_models.swapped"],
    "routed": [f"{OURS}.routed_experts"],
    "grouped": [f"{OURS}.grouped_experts"],
}
FP8 = {
    "fp8": [f'{OURS}.routed_experts={{"precision": "fp8"}}'],
    "shared": [
        f'{OURS}.routed_experts={{"precision": "fp8"}}',
        "sonicmoe_cpp.integrations.torchtitan.optimizers.share_fp8_weights",
    ],
}
# Under expert parallelism: the transport of the rows.
EXCHANGED = [f'{OURS}.routed_experts={{"transport": "all_to_all"}}']
ROUTERS = {
    "own": [],
    "router": [f"{OURS}.router"],
    "swapped": ["titan_models.swapped_router"],
    "frozen": ["titan_models.frozen_router"],
}
DEBUG = (
    "--training.disable-cuda-graphs",
    "--optimizer.implementation",
    "foreach",
    "--debug.seed=1",
)
BATCH = ("--training.global-batch-size", "4")
TWICE = ("--training.global-batch-size", "8")  # two ranks compute two micro-batches a step
# spmd_types, the default, needs torch 2.14 or later to shard over more than one rank.
DTENSOR = ("--parallelism.spmd-backend", "partial_dtensor")
SAVE = ("--checkpoint.enable", "--checkpoint.interval", "2", "--checkpoint.no-last-save-model-only")


class Folder:
    """A folder with text, tokens and tokenizer, and the jobs that run in it."""

    def __init__(self, path: Path):
        self.path = path
        from sonicmoe_cpp.integrations.torchtitan import tokens

        text, assets = path / "text", str(path / "assets")
        text.mkdir()
        shutil.copy(HERE.parents[2] / "LICENSE", text)
        self.tokens = str(path / "tokens.npy")
        tokens.write(str(text), "*", assets, self.tokens, train_vocab=512)
        self.common = ["--hf-assets-path", assets, "--dataloader.dataset-path", self.tokens]

    def job(self, name, config, overrides, *more, kill_at=None):
        """A job. `name` is also its dump folder; with overrides None the configuration keeps its
        own."""
        module = "titan_models"
        if config.startswith("sonicmoe"):
            module = "sonicmoe_cpp.integrations.torchtitan"
        arguments = ["--module", module, "--config", config, *self.common, *more]
        if overrides is not None:
            arguments += ["--override.imports", *overrides]
        arguments += ["--dump-folder", str(self.path / name)]
        return {"arguments": arguments, "kill_at": kill_at}

    def run(self, phases: list) -> dict:
        """Runs the phases. Returns the results of every world by its name."""
        path = self.path / "phases.json"
        path.write_text(json.dumps(phases))
        process = subprocess.Popen(
            [sys.executable, str(HERE / "titan_jobs.py"), str(path)],
            cwd=self.path,
            start_new_session=True,
        )
        try:
            code = process.wait(timeout=LIMIT)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # ranks may wait for one that failed
        if code != 0:
            logs = sorted(self.path.glob("*.log"))
            raise AssertionError("\n".join(log.read_text()[-4000:] for log in logs))
        names = [world["name"] for phase in phases for world in phase]
        return {name: json.loads((self.path / f"{name}.results").read_text()) for name in names}


def world(name: str, ranks: int, jobs: dict) -> dict:
    return {"name": name, "ranks": ranks, "jobs": jobs}


def one_rank(folder: Folder) -> dict:
    job = folder.job
    jobs = {
        f"{model}/{name}": job(f"1/{model}/{name}", model, overrides)
        for model in MODELS
        for name, overrides in EXPERTS.items()
    }

    def add(name, config, overrides, *more, kill_at=None):
        jobs[name] = job(f"1/{name}", config, overrides, *more, kill_at=kill_at)

    for name, overrides in ROUTERS.items():
        add(f"sigmoid/{name}", "deepseek_v3_sigmoid", overrides)
        add(f"no bias/{name}", "qwen3_without_bias", overrides)
    ours = EXPERTS["routed"]
    for tile in (1, 16):
        rounding = f'{OURS}.token_rounding={{"tile": {tile}}}'
        add(f"rounding/{tile}", "deepseek_v3_sigmoid", [rounding])
    add("rounding/1 gpt_oss", "gpt_oss_sigmoid", [f'{OURS}.token_rounding={{"tile": 1}}'])
    add("gpt_oss_sigmoid/own", "gpt_oss_sigmoid", [])
    add("sigmoid saves", "deepseek_v3_sigmoid", [], *SAVE, "--training.steps", "2")
    add("full AC", "qwen3_full_ac", ours)
    add("selective AC", "qwen3_selective_ac", ours)
    add("kept AC", "qwen3_selective_ac", [*ours, f"{OURS}.selective_ac"])
    add("compiled", "qwen3", ours, "--compile.enable", "--compile.backend", "aot_eager")
    for backend in ("partial_dtensor", "full_dtensor"):
        add(backend, "qwen3", ours, "--parallelism.spmd-backend", backend)
    for name in ("own", "routed"):
        other = EXPERTS["routed" if name == "own" else "own"]
        add(f"{name} saves", "qwen3", EXPERTS[name], *SAVE, "--training.steps", "2")
        saved = str(folder.path / f"1/{name} saves/checkpoint/step-2")
        start = ("--checkpoint.initial-load-path", saved)
        whole = "--checkpoint.no-initial-load-model-only"
        add(f"{name} is loaded", "qwen3", other, *SAVE, *start, whole)
    add("softmax with bias", "qwen3", ROUTERS["router"])
    add("debug", "sonicmoe_debug", None, *DEBUG, *BATCH)
    add("debug, own experts", "sonicmoe_debug", [], *DEBUG, *BATCH, "--training.steps", "1")
    add("killed", "sonicmoe_debug", None, *DEBUG, *BATCH, kill_at=7)
    return jobs


def two_ranks(folder: Folder) -> dict:
    jobs = {}

    def add(name, config, overrides, *more, kill_at=None):
        jobs[name] = folder.job(f"2/{name}", config, overrides, *more, *DTENSOR, kill_at=kill_at)

    for name, overrides in EXPERTS.items():
        add(f"FSDP/{name}", "qwen3", overrides)
    degree = ("--parallelism.expert-parallel-degree", "2")
    for name, overrides in FP8.items():
        add(f"fp8, FSDP/{name}", "qwen3_fp8", overrides, *TWICE)
        add(f"fp8, EP/{name}", "qwen3_fp8", overrides, *TWICE, *degree)
    for model in MODELS:
        for name in ("own", "swapped", "routed"):
            add(f"EP/{model}/{name}", model, EXPERTS[name], *degree)
        add(f"EP/{model}/exchanged", model, EXCHANGED, *degree)
    split = ("--parallelism.tensor-parallel-degree", "2")
    for name in ("own", "swapped", "routed"):
        add(f"TP/{name}", "qwen3", EXPERTS[name], *split)
    add("TP/gpt_oss", "gpt_oss", EXPERTS["routed"], *split)
    compiled = ("--compile.enable", "--compile.backend", "aot_eager")
    add("compiled", "qwen3", EXPERTS["routed"], *degree, *compiled)
    add("exchanged, compiled", "qwen3", EXCHANGED, *degree, *compiled)
    add("exchanged, full AC", "qwen3_full_ac", EXCHANGED, *degree)
    kept = [*EXCHANGED, f"{OURS}.selective_ac"]
    add("exchanged, kept AC", "qwen3_selective_ac", kept, *degree)
    add("exchanged, kept AC, compiled", "qwen3_selective_ac", kept, *degree, *compiled)
    for name, overrides in (("own", []), ("exchanged", EXCHANGED)):
        add(f"EP and TP/{name}", "qwen3", overrides, *degree, *split)
    rounding = [f"{OURS}.token_rounding"]
    add("EP/rounding", "deepseek_v3_sigmoid", rounding, *degree)
    add("TP/rounding", "deepseek_v3_sigmoid", rounding, *split)
    add("debug", "sonicmoe_debug", None, *DEBUG, *BATCH)
    add("killed", "sonicmoe_debug", None, *DEBUG, *BATCH, kill_at=7)
    return jobs


def roundings(folder: Folder, ranks: int) -> dict:
    """Trainings with four sequences a step, on one rank and on two. They begin with the weights of
    one checkpoint, because initial weights depend on the number of ranks."""
    saved = str(folder.path / "1/sigmoid saves/checkpoint/step-2")
    load = ("--checkpoint.enable", "--checkpoint.initial-load-path", saved)
    jobs = {}

    def add(name, options, *more):
        overrides = [f"{OURS}.token_rounding={json.dumps({'tile': 16} | options)}"]
        arguments = (*more, *load, *DTENSOR)
        jobs[name] = folder.job(f"{ranks}/{name}", "deepseek_v3_sigmoid", overrides, *arguments)

    if ranks == 1:
        add("rounding of four", {}, "--training.local-batch-size", "4")
        return jobs
    degree = ("--parallelism.expert-parallel-degree", "2")
    together = {"transport": "all_to_all"}
    add("rounding alone", {})
    add("rounding together", together, *degree)
    compiled = ("--compile.enable", "--compile.backend", "aot_eager")
    add("rounding together, compiled", together, *degree, *compiled)
    return jobs


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """{number of ranks: {name: result}}. In each world a run is killed in step 7; the other number
    of ranks resumes it from its checkpoint of step 5."""
    folder = Folder(tmp_path_factory.mktemp("titan"))
    phases = [[world("one", 1, one_rank(folder)), world("two", 2, two_ranks(folder))], []]
    for ranks, other in ((1, 2), (2, 1)):
        more = (*DEBUG, *BATCH, *DTENSOR)
        resumed = folder.job(f"{other}/killed", "sonicmoe_debug", None, *more)
        jobs = {"resumed": resumed} | roundings(folder, ranks)
        phases[1].append(world(f"resumed by {ranks}", ranks, jobs))
    found = folder.run(phases)
    return {
        ranks: found[name] | found[f"resumed by {ranks}"]
        for ranks, name in ((1, "one"), (2, "two"))
    }


def difference(run, reference) -> tuple:
    """The rms difference over the steps, of losses and of relative gradient norms."""
    assert "error" not in run, run
    assert run["steps"].keys() == reference["steps"].keys()
    pairs = [(run["steps"][s], reference["steps"][s]) for s in reference["steps"]]
    loss = sum((a["loss"] - b["loss"]) ** 2 for a, b in pairs) / len(pairs)
    norm = sum((a["grad_norm"] / b["grad_norm"] - 1) ** 2 for a, b in pairs) / len(pairs)
    return loss**0.5, norm**0.5


def assert_within_noise(runs, *names):
    """Checks that runs differ from torchtitan's own experts by less than a quarter of what swapped
    experts do. Rounding makes runs differ; the loss jumps if it exchanges two experts of a token.
    """
    loss, norm = difference(runs["swapped"], runs["own"])
    for name in names:
        found = difference(runs[name], runs["own"])
        assert found[0] < loss / 4 and found[1] < norm / 4, (name, found, (loss, norm))


def of(results, prefix):
    return {n.removeprefix(prefix): r for n, r in results.items() if n.startswith(prefix)}


@pytest.mark.parametrize("model", MODELS)
def test_losses_are_those_of_its_own_experts(results, model):
    runs = of(results[1], f"{model}/")
    assert_within_noise(runs, "routed", "grouped")
    assert runs["routed"]["names"] == runs["grouped"]["names"] == runs["own"]["names"]


def test_fsdp(results):
    assert_within_noise(of(results[2], "FSDP/"), "routed", "grouped")


@pytest.mark.parametrize("form", ["FSDP", "EP"])
def test_fp8_weights_are_shared_by_micro_batches(results, form):
    """The training has the same bits. Each of the two layers quantises once in each of four steps;
    without the override, the layer's operator quantises."""
    runs = of(results[2], f"fp8, {form}/")
    assert difference(runs["shared"], runs["fp8"]) == (0, 0)
    assert (runs["shared"]["quantised"], runs["fp8"]["quantised"]) == (2 * 4, 0)


@pytest.mark.parametrize("model", MODELS)
def test_expert_parallel(results, model):
    assert_within_noise(of(results[2], f"EP/{model}/"), "routed", "exchanged")


@pytest.mark.parametrize("name", ["compiled", "exchanged, compiled"])
def test_expert_parallel_compiled(results, name):
    assert_within_noise(of(results[2], "EP/qwen3/") | {name: results[2][name]}, name)


@pytest.mark.parametrize("name", ["full AC", "kept AC", "kept AC, compiled"])
def test_expert_parallel_checkpointed(results, name):
    whole = results[2]["exchanged, compiled" if "compiled" in name else "EP/qwen3/exchanged"]
    assert difference(results[2][f"exchanged, {name}"], whole) == (0, 0)


def test_expert_and_tensor_parallel(results):
    loss, norm = difference(results[2]["EP and TP/exchanged"], results[2]["EP and TP/own"])
    assert loss < 1e-4 and norm < 1e-4


def test_tensor_parallel(results):
    assert_within_noise(of(results[2], "TP/"), "routed")


@pytest.mark.parametrize("name", ["sigmoid", "no bias"])
def test_router(results, name):
    """The router chooses the same experts, with weights that differ in the last bits of fp32.
    Broken routers exceed the limit: swapped weights by losses, a gate without gradients by gradient
    norms."""
    runs, limit = of(results[1], f"{name}/"), 6e-5
    loss, norm = difference(runs["router"], runs["own"])
    assert loss < limit and norm < limit
    assert difference(runs["swapped"], runs["own"])[0] > 2 * limit
    assert difference(runs["frozen"], runs["own"])[1] > 2 * limit


def test_token_rounding(results):
    """Rounding to a tile of 1 is top-k; rounding to 16 changes the training."""
    runs = results[1]
    for rounded, own in (
        ("rounding/1", "sigmoid/own"),
        ("rounding/1 gpt_oss", "gpt_oss_sigmoid/own"),
    ):
        loss, norm = difference(runs[rounded], runs[own])
        assert loss < 3e-3 and norm < 3e-3, (rounded, loss, norm)
    assert difference(runs["rounding/16"], runs["sigmoid/own"])[0] > 1e-3


def test_token_rounding_over_ranks(results):
    """Two ranks round their tokens together, as one rank does that has the tokens of both."""
    whole = results[1]["rounding of four"]
    for name in ("rounding together", "rounding together, compiled"):
        loss, norm = difference(results[2][name], whole)
        assert loss < 1e-3 and norm < 1e-3, (name, loss, norm)
    assert difference(results[2]["rounding alone"], whole)[0] > 5e-3


@pytest.mark.parametrize("name", ["full AC", "selective AC", "kept AC", "partial_dtensor"])
def test_same_bits(results, name):
    assert difference(results[1][name], results[1]["qwen3/routed"]) == (0, 0)


@pytest.mark.parametrize("name", ["compiled", "full_dtensor"])
def test_nearly_same_bits(results, name):
    loss, norm = difference(results[1][name], results[1]["qwen3/routed"])
    assert loss < 1e-4 and norm < 1e-4


@pytest.mark.parametrize("saves", ["own", "routed"])
def test_checkpoints_are_interchangeable(results, saves):
    """Two steps with one kind of experts, then two with the other."""
    runs = results[1]
    steps = runs[f"{saves} saves"]["steps"] | runs[f"{saves} is loaded"]["steps"]
    assert list(runs[f"{saves} is loaded"]["steps"]) == ["3", "4"]
    assert_within_noise(of(runs, "qwen3/") | {"joined": {"steps": steps}}, "joined")


@pytest.mark.parametrize(("ranks", "other"), [(1, 2), (2, 1)])
def test_a_killed_run_goes_on_with_another_number_of_ranks(results, ranks, other):
    whole, resumed = results[ranks]["debug"]["steps"], results[other]["resumed"]["steps"]
    assert list(resumed) == ["6", "7", "8", "9", "10"]
    for step, found in resumed.items():
        assert abs(found["loss"] - whole[step]["loss"]) < 1e-3
    assert (
        abs(whole["6"]["loss"] - whole["1"]["loss"]) > 0.02
    )  # a run from the start would have the loss of step 1


def test_metrics(results):
    """The load of the experts, and torchtitan's own metrics."""
    steps = results[1]["debug"]["steps"]
    for found in steps.values():
        most, least = found["experts/max_load"], found["experts/min_load"]
        assert 0 <= least < 1 < most < 8
        assert most == max(found["experts/max_load/0"], found["experts/max_load/1"])
    own = results[1]["debug, own experts"]["steps"]["1"]
    assert abs(own["experts/max_load"] - steps["1"]["experts/max_load"]) < 0.05
    assert results[2]["debug"]["steps"]["1"]["experts/max_load"] < 8  # summed over ranks
    assert 0 < steps["1"]["lr/AdamW"] < steps["2"]["lr/AdamW"] > steps["10"]["lr/AdamW"]


@pytest.mark.parametrize(
    ("ranks", "name", "sentence"),
    [
        (1, "softmax with bias", 'score_func is "softmax" with an expert bias: .* load_balance'),
        (2, "TP/gpt_oss", "tensor_parallel_degree is 2, which would split them"),
        (2, "EP/rounding", "token rounding in torchtitan needs a transport where ep is 2: give"),
        (2, "TP/rounding", "token rounding in torchtitan needs whole .*: tp is 2, must be 1"),
    ],
)
def test_refusals(results, ranks, name, sentence):
    error = results[ranks][name]["error"]
    assert re.search(f"NotImplementedError: .*{sentence}", error), error
