"""benchmarks/fp8.py: its smallest layer on the CPU, its arithmetic, and the casts of the layers
beside."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

BENCHMARKS = Path(__file__).resolve().parents[3] / "benchmarks"


@pytest.fixture
def fp8():
    import fp8

    return fp8


def times(whole):
    return {"fwd_ms": whole / 4, "bwd_ms": 3 * whole / 4}


def row(config, d, n, fp8_ms, auto_ms=1.0, **more):
    shape = {"config": config, "T": 1024, "d": d, "n": n, "E": 8, "K": 2}
    found = shape | {"bf16": times(1.0), "fp8": times(fp8_ms), "auto": times(auto_ms)}
    return found | {"kept_mib": {"bf16": 100.0, "fp8": 52.0}} | more


def a_record():
    rows = [
        row("wide", 4096, 1024, 0.8, torch_scaled=times(1.2), deep_gemm=times(0.72)),
        row("wider", 2048, 2048, 0.5, auto_ms=0.5),
        row("narrow", 1536, 512, 0.9),
        row("tiny", 128, 128, 9.0, auto_ms=9.0),
    ]
    products = {"A": {"ours_ms": 1.0, "cublas_ms": 0.9, "of_cublas": 0.9}}
    return {"rows": rows, "products": [{"config": "wide", "products": products}]}


def test_the_summary_is_right(fp8):
    forward, both, narrow, auto, *rivals, kept, products = fp8.summary(a_record()).values()
    assert forward == both == {"mean": pytest.approx((2 / 0.8) ** 0.5), "least": 1.25, "of": 2}
    assert narrow["least"] == pytest.approx(1 / 0.9) and narrow["of"] == 1
    assert auto["of"] == 3 and auto["least"] == 1.0
    for rival, speed in zip(rivals, (1.5, 0.9), strict=True):
        assert rival == {"mean": pytest.approx(speed), "least": pytest.approx(speed), "of": 1}
    assert kept["least"] == pytest.approx(100 / 52)
    assert products["least"] == 0.9
    lines = fp8.summary_lines(a_record())
    assert [line.rsplit(": ", 1)[1] for line in lines] == [
        "met", "met", "MISSED", "met", "met", "MISSED", "met", "MISSED"
    ]  # fmt: skip
    empty = fp8.summary_lines({"rows": [], "products": []})
    assert all(line.endswith("nothing measured") for line in empty) and len(empty) == len(lines)


def test_steps_of_the_program_are_read(fp8):
    text = "\n".join(
        [
            '{"config": "x", "T": 8, "d": 256, "n": 128, "E": 4, "K": 2, "fwd_ratio": 1.5}',
            '{"config": "x", "precision": "bf16", "steps_ms": {"A": 2.0}}',
            '{"config": "x", "precision": "fp8", "steps_ms": {"A": 1.0, "dX~": 3.0}}',
        ]
    )
    ((config, shape, steps),) = fp8.steps_of(fp8.lines_of(text))
    assert config == "x" and shape.rows == 16 and steps == {"A": 1.0, "dX~": 3.0}
    assert [size(shape) for size in fp8.PRODUCTS.values()] == [
        (256, 256), (256, 128), (128, 256), (256, 256)
    ]  # fmt: skip


def test_the_casts_of_the_layer_beside(fp8):
    from h200_bench import scaled

    values = torch.randn(40, 64) * torch.logspace(-6, 6, 40)[:, None]
    values[3] = 0
    codes, scales = scaled.cast(values)
    assert torch.equal(torch.exp2(torch.log2(scales).round()), scales)  # powers of two
    most = codes.float().abs().amax(-1)
    assert (most <= 448).all() and (most[values.abs().amax(-1) > 0] > 223).all()
    error = (codes.float() * scales[:, None] - values).abs()
    assert (error <= values.abs() / 16 + scales[:, None] * 2**-9).all()


def test_the_casts_of_blocks(fp8):
    from h200_bench import blocks

    weights = torch.randn(3, 256, 128) * torch.logspace(-3, 3, 256)[:, None]
    weights[1, 128:] = 0
    codes, scales = blocks.cast_weights(weights)
    wide = scales.repeat_interleave(128, 1).repeat_interleave(128, 2)
    assert scales.shape == (3, 2, 1) and codes.shape == weights.shape
    error = (codes.float() * wide - weights).abs()
    assert (error <= weights.abs() / 16 + wide * 2**-9).all()
    turned, turned_scales = blocks.cast_transposed(weights)
    assert torch.equal(turned.float(), codes.float().transpose(1, 2))
    assert torch.equal(turned_scales, scales.transpose(1, 2))
    codes, scales = blocks.cast_rows(weights[0])
    assert scales.shape == (256, 1) and scales.stride(0) == 1
    assert torch.equal(codes.float().abs().amax(-1), torch.full((256,), 448.0))
    error = (codes.float() * scales - weights[0]).abs()
    assert (error <= weights[0].abs() / 16 + scales * 2**-9).all()


def run(out, *more):
    command = [sys.executable, str(BENCHMARKS / "fp8.py"), "--device=cpu", "--configs", "tiny"]
    return subprocess.run(
        [*command, "--rounds=1", f"--out={out}", *more],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        env=os.environ | {"TORCHDYNAMO_DISABLE": "1"},  # compiling takes minutes
    )


@pytest.mark.slow
def test_the_smallest_layer(fp8, tmp_path):
    """Every contender computes the layer, and a second run repeats no measurement."""
    out = tmp_path / "fp8.json"
    ran = run(out)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    (found,) = json.loads(out.read_text())["rows"]
    assert "left_out" not in found
    for name in (*fp8.PRECISIONS, *fp8.RIVALS):
        assert found[name]["fwd_ms"] > 0
        assert min(found["cosine"][name].values()) >= fp8.LEAST_COSINE[name]
    assert max(found["cosine"]["fp8"].values()) < fp8.LEAST_COSINE["bf16"]
    assert found["quantise_ms"] > 0 and found["step_ms"].keys() == {"1", "4"}
    assert found["kept_mib"]["fp8"] < 0.65 * found["kept_mib"]["bf16"]  # ids and weights are equal
    again = run(out)
    assert again.returncode == 0 and "cosine" not in again.stdout


@pytest.mark.slow
def test_a_wrong_layer_is_not_timed(fp8, monkeypatch):
    """A wrong result of ours ends the run; a rival with one is left out with the reason."""
    monkeypatch.setattr(torch, "compile", lambda function: function)
    data = fp8.Data(fp8.TINY["tiny"], torch.device("cpu"))
    data.sample(0)
    for wrong, ends in (*((rival, False) for rival in fp8.RIVALS), ("fp8", True)):
        found, left_out = fp8.contenders(data)
        results = found[wrong].results

        def shifted(results=results):
            out, gradients = results()
            return out.roll(1, 0), gradients

        monkeypatch.setattr(found[wrong], "results", shifted)
        if ends:
            with pytest.raises(SystemExit, match="fp8 is wrong: cosines"):
                fp8.checked(found, data, left_out)
        else:
            fp8.checked(found, data, left_out)
            assert wrong not in found and f"{wrong} is wrong" in left_out[wrong]
