"""Examples of pages run as they are written; what pages cite is there."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.parametrize(
    "page",
    [
        "README.md",
        "docs/pytorch.md",
        "docs/porting.md",
        "docs/determinism.md",
        "docs/fp8.md",
        "docs/packed.md",
    ],
)
def test_first_example(page):
    if not (ROOT / page).is_file():
        pytest.skip("this copy has no documentation")
    example = re.search(r"```python\n(.*?)```", (ROOT / page).read_text(), re.DOTALL).group(1)
    names = {}
    exec(compile(example, page, "exec"), names)
    x, out = names["x"], names["out"]
    assert out.shape[-1] == x.shape[-1] and out.numel() == x.numel()
    assert torch.isfinite(out).all() and out.abs().sum() > 0


@pytest.mark.parametrize("page, has", [("docs/porting.md", "def score_on_input(")])
def test_example_that_compares_itself(page, has):
    if not (ROOT / page).is_file():
        pytest.skip("this copy has no documentation")
    examples = re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)
    (example,) = (e for e in examples if has in e)
    assert "assert_close(found, expected" in example
    torch.manual_seed(0)
    exec(compile(example, page, "exec"), {})


@pytest.mark.slow
@pytest.mark.parametrize(
    "page, has",
    [("docs/distributed.md", "ExpertParallelMoE("), ("docs/porting.md", "fully_shard(")],
)
def test_example_for_two_processes(page, has, tmp_path):
    if not (ROOT / page).is_file():
        pytest.skip("this copy has no documentation")
    examples = re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)
    script = tmp_path / "layer.py"
    script.write_text(next(e for e in examples if has in e))
    run_on_two_processes(tmp_path, script)


@pytest.mark.slow
def test_example_of_expert_parallelism(tmp_path):
    """The example continues from its own checkpoint, and its loss falls."""
    script = ROOT / "examples/expert_parallel.py"
    if not script.is_file():
        pytest.skip("this copy has no examples")
    arguments = ("--folder", str(tmp_path / "ep"), "--steps", "21")
    out = "".join(run_on_two_processes(tmp_path, script, *arguments) for _ in range(2))
    losses = [float(line.split()[-1]) for line in out.splitlines() if line.startswith("step")]
    assert re.findall(r"step (\d+)", out) == ["0", "20", "40"] and losses[2] < 0.8 * losses[0]


@pytest.mark.slow
def test_example_of_two_micro_batches(tmp_path):
    """Interleaved micro-batches have the losses of micro-batches in turn, also after steps of the
    optimizer."""
    script = ROOT / "examples/two_micro_batches.py"
    if not script.is_file():
        pytest.skip("this copy has no examples")
    sizes = ("--steps", "3", "--layers", "2", "--tokens", "16")
    found = []
    for options in (sizes, (*sizes, "--in-turn")):
        out = run_on_two_processes(tmp_path, script, *options)
        (line,) = (line for line in out.splitlines() if line.startswith("losses"))
        found.append(line.split()[1:])
    assert found[0] == found[1] and len(set(found[0])) == 3


# torch's process groups sometimes abort while the interpreter is torn down
# (github.com/pytorch/pytorch/pull/179291), so these processes end without a teardown.
WITHOUT_TEARDOWN = """
import os, runpy, sys
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
sys.stdout.flush()
os._exit(0)
"""


def run_on_two_processes(folder, script, *arguments) -> str:
    whole = folder / "without_teardown.py"
    whole.write_text(WITHOUT_TEARDOWN)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command = [*torchrun, "--nproc-per-node", "2", str(whole), str(script), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_hooks_have_the_pinned_versions():
    hooks = ROOT / ".pre-commit-config.yaml"
    if not hooks.is_file():
        pytest.skip("this copy has no hooks")
    pins = set((ROOT / "tools/requirements-dev.txt").read_text().split())
    used = re.findall(r"additional_dependencies: \[(.*)\]", hooks.read_text())
    assert len(used) == 3 and set(used) <= pins


def test_lines_that_the_engine_page_cites():
    """Each citation links a line of a file and quotes its text."""
    page = ROOT / "docs/engine.md"
    if not page.is_file():
        pytest.skip("this copy has no documentation")
    cited = re.findall(r"\[`([\w.]+):(\d+)`\]\((\S+?)#L(\d+)\) `(.+?)`", page.read_text())
    assert len(cited) > 10
    for name, shown, link, line, code in cited:
        assert link.endswith("/" + name) and shown == line
        lines = (page.parent / link).resolve().read_text().splitlines()
        where = [i for i, text in enumerate(lines, 1) if code in text]
        assert int(line) in where, f"{name}: `{code}` stands in line {where}, not {line}"
