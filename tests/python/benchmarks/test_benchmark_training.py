"""Runs benchmarks/training.py at its smallest size, on the CPU."""

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy
import pytest
import torch
from days import turn

pytest.importorskip("torchtitan.models.common.moe", reason="needs torchtitan 0.3")
BENCHMARKS = Path(__file__).resolve().parents[3] / "benchmarks"


@pytest.fixture
def bench():
    from training_bench import model, profile

    return model, profile


@turn(1, of=3)
@pytest.mark.slow
def test_both_kinds_of_experts_train_alike(tmp_path, bench):
    out = tmp_path / "training.json"
    options = {"device": "cpu", "gpus": 1, "models": "debug", "tokens": 256, "sequence": 64}
    options |= {"steps": 2, "policies": "selective", "out": str(out), "micro-batches": 2}
    options |= {"settle": 3, "warm-up": 2}
    given = [f"--{name}={value}" for name, value in options.items()]
    program = [sys.executable, str(BENCHMARKS / "training.py"), "--eager", *given]
    ran = subprocess.run(program, capture_output=True, text=True, timeout=300)
    assert ran.returncode == 0, ran.stdout
    (row,) = json.loads(out.read_text())["rows"]
    assert (row["tokens_per_gpu"], row["micro_batches"], row["reduce"]) == (256, 2, "float32")
    for kind in ("ours", "titan"):
        assert row[kind]["tokens_per_s"] > 0 and row[kind]["parameters"] == 198016
        assert row[kind]["steps"] == 6  # three to settle, one more before the two measured ones
        assert len(row[kind]["losses"]) == 3
        assert 1 < row[kind]["load"]["expert"] <= 4 and row[kind]["load"]["rank"] == 1
    pairs = zip(row["ours"]["losses"], row["titan"]["losses"], strict=True)
    assert all(abs(a - b) < 1e-3 for a, b in pairs)
    kinds = [row[kind]["experts"].removeprefix("FSDP") for kind in ("ours", "titan")]
    assert kinds == ["SonicRoutedExperts", "RoutedExperts"]


@turn(1, of=3)
@pytest.mark.slow
def test_parameters_that_stay_gathered_change_no_loss(tmp_path, bench):
    """Two ranks with divided experts, several micro-batches a step. If FSDP2 did not gather the
    other parameters again after the optimizer changed them, the losses would differ."""
    out = tmp_path / "training.json"
    options = {"device": "cpu", "gpus": 2, "models": "debug", "tokens": 128, "sequence": 64}
    options |= {"steps": 3, "policies": "selective", "out": str(out), "micro-batches": 2}
    options |= {"warm-up": 1, "capacity": 1.5, "keep-rows": 1}
    given = [f"--{name}={value}" for name, value in options.items()]
    given += ["--eager", "--experts", "ours", "--parallel", "ep", "ep-gathered"]
    program = [sys.executable, str(BENCHMARKS / "training.py"), *given]
    ran = subprocess.run(program, capture_output=True, text=True, timeout=300)
    (row,) = json.loads(out.read_text())["rows"]
    found = {run["parallel"]: run["losses"] for run in (row["ours"], *row["others"])}
    assert len(found) == 2, ran.stdout
    assert found["ep"] == found["ep-gathered"]
    assert found["ep"][0] - found["ep"][-1] > 0.01  # the optimizer has changed parameters


@pytest.mark.parametrize(("parallel", "reductions"), [("ep", 3), ("ep-gathered", 1)])
def test_gathered_gradients_are_reduced_once_a_step(bench, monkeypatch, parallel, reductions):
    """By FSDP2, for each group of its parameters; a step has three micro-batches."""
    from torch.distributed.fsdp._fully_shard import _fsdp_param_group
    from training_bench import worker

    options = {"device": "cpu", "model": "debug", "experts": "ours", "parallel": parallel}
    options |= {"policy": "none", "compile": 0, "tokens": 128, "sequence": 64, "steps": 1}
    options |= {"micro-batches": 3, "out": "/dev/null"}
    given = [f"--{name}={value}" for name, value in options.items()]
    monkeypatch.setattr(sys, "argv", ["worker", *given])
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        training = worker.Training(worker.arguments())
        counts = []
        reduce = _fsdp_param_group.foreach_reduce

        def counted(*arguments, **named):
            counts[-1] += 1
            return reduce(*arguments, **named)

        monkeypatch.setattr(_fsdp_param_group, "foreach_reduce", counted)
        for micro_batches in (1, 3):
            counts.append(0)
            training.step(micro_batches)
    finally:
        torch.distributed.destroy_process_group()
    assert counts[0] > 0 and counts[1] == reductions * counts[0]


def test_loads_and_the_bias_against_them(bench):
    from training_bench import worker

    class Layer(torch.nn.Module):
        def __init__(self, counts):
            super().__init__()
            self.expert_bias_E = torch.zeros(4)
            self.tokens_per_expert_E = torch.tensor(counts)

    layers = torch.nn.ModuleList([Layer([6.0, 2, 0, 0]), Layer([2.0, 2, 2, 2])])
    loads = worker.balance(layers, 1, 0.5)
    assert loads.tolist() == [2.0, 1.0]  # an expert 3 and 1 times the mean; one rank has all
    assert layers[0].expert_bias_E.tolist() == [-0.5, 0, 0.5, 0.5]
    assert not any(layer.tokens_per_expert_E.any() for layer in layers)
    assert not layers[1].expert_bias_E.any()


def test_what_is_missing_fails(tmp_path, bench, monkeypatch):
    import training

    out = str(tmp_path / "record.json")
    given = ["training.py", "--device=cpu", "--models=debug", "--budget=0", f"--out={out}"]
    for more in ([], ["--curve=2"]):
        monkeypatch.setattr(sys, "argv", [*given, *more])
        assert training.main() == 1
    monkeypatch.setattr(sys, "argv", ["training.py", "--curve=2"])
    assert training.arguments().out.endswith("results/h100/training_curves.json")


def test_only_the_kinds_asked_for_are_needed(tmp_path, bench, monkeypatch):
    import training

    measured = []

    def measure(driver, run):
        return {"tokens_per_s": 1} if run.experts in measured else None

    monkeypatch.setattr(training.Driver, "measure", measure)
    given = ["training.py", "--device=cpu", "--models=debug", f"--out={tmp_path / 'record.json'}"]
    for works, kinds, code in (
        (("ours",), ("ours",), 0),
        (("titan",), ("titan",), 0),
        (("ours",), ("ours", "titan"), 1),
        (("ours", "titan"), ("ours", "titan"), 0),
    ):
        measured[:] = works
        monkeypatch.setattr(sys, "argv", [*given, "--experts", *kinds])
        assert training.main() == code, kinds


def test_a_text_with_too_few_tokens_is_refused(tmp_path, bench):
    from training_bench import worker

    path = str(tmp_path / "tokens.npy")
    options = SimpleNamespace(tokens=32, sequence=16, text=path)  # a batch: 2 rows of 17
    for count in (0, 33, 34):
        numpy.save(path, numpy.arange(count, dtype=numpy.int32))
        with pytest.raises(ValueError, match=f"has {count} tokens, must have more than the 34 of"):
            worker.Text(options, 100, 0, 1)
    numpy.save(path, numpy.arange(35))
    text = worker.Text(options, 100, 0, 1)
    assert all(text(step).flatten().tolist() == list(range(34)) for step in range(3))


def test_loss_and_its_gradients(bench):
    model, _ = bench
    h, w = (torch.randn(size, 24, dtype=torch.float64) for size in (40, 60))
    labels = torch.randint(60, (40,))
    leaves = [t.clone().requires_grad_() for t in (h, w)]
    want = torch.nn.functional.cross_entropy(leaves[0] @ leaves[1].T, labels)
    expected = torch.autograd.grad(want, leaves)
    leaves = [t.float().requires_grad_() for t in (h, w)]
    loss = model.ChunkedLoss.apply(*leaves, labels)
    found = torch.autograd.grad(loss, leaves)
    for got, exact in zip((loss, *found), (want, *expected), strict=True):
        torch.testing.assert_close(got.double(), exact, rtol=1e-5, atol=1e-7)


def test_flops_are_those_of_the_model(bench):
    """Without the products of attention a token costs 6 flops for each active parameter, without
    norms and embeddings."""
    model, _ = bench
    from sonicmoe_cpp.integrations.torchtitan.sizes import SIZES

    size = SIZES["7B-n256"]
    with torch.device("meta"):
        built = model.Model(size, model.job(size, False, "none"), 4096)
    active = 0
    for name, p in built.named_parameters():
        if "inner_experts" in name:
            active += p.numel() * size.K // size.E
        elif "norm" not in name and "embeddings" not in name:
            active += p.numel()
    attention = 6 * size.layers * size.d * 4096
    assert built.flops_per_token() == 6 * active + attention


def test_kernels_are_told_apart(bench):
    _, profile = bench
    names = {
        "ncclDevKernel_AllGather_RING_LL": "communication",
        "nvjet_tst_256x128": "products",
        "cudnn_generated_fort_native_sdpa_sm90_flash_fprop": "attention",
        "void at::native::multi_tensor_apply_kernel<FusedAdam>": "optimizer",
        "Memcpy DtoD (Device -> Device)": "copies",
        "triton_red_fused_rms_norm": "other",
    }
    assert {name: profile.kind(name) for name in names} == names
