"""After replace(), torchtitan 0.2.2 (from its wheel) trains as with its own experts."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

pytest.importorskip("torch.distributed")
pytestmark = pytest.mark.slow
HERE = Path(__file__).parent
LIMIT = 400  # seconds, on a machine that has other work
# Not installed, because torchtitan 0.3 is.
WHEEL = (
    "download --quiet --disable-pip-version-check --no-deps --retries 0 --timeout 5 "
    "torchtitan==0.2.2"
)


def unpacked(folder: Path) -> None:
    command = [sys.executable, "-m", "pip", *WHEEL.split()]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    wheels = list(folder.glob("*.whl"))
    if not wheels:
        pytest.skip(f"the wheel cannot be had: {done.stderr.strip().splitlines()[-1:]}")
    zipfile.ZipFile(wheels[0]).extractall(folder / "titan")


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    folder = tmp_path_factory.mktemp("titan02")
    unpacked(folder)
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(
            [sys.executable, str(HERE / "titan_02_jobs.py"), str(folder)],
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            code = process.wait(timeout=LIMIT)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # a rank may wait for one that failed
    text = (folder / "log").read_text()
    missing = re.search(r"No module named '(?!sonicmoe_cpp|torchtitan).*'", text)
    if missing:
        pytest.skip(f"torchtitan 0.2.2 needs more: {missing[0]}")
    assert code == 0, text[-4000:]
    return json.loads((folder / "results").read_text())


def difference(steps, reference) -> tuple:
    """The rms difference over the steps, of losses and of relative gradient norms."""
    pairs = list(zip(steps, reference, strict=True))
    loss = sum((a[0] - b[0]) ** 2 for a, b in pairs) / len(pairs)
    norm = sum((a[1] / b[1] - 1) ** 2 for a, b in pairs) / len(pairs)
    return loss**0.5, norm**0.5


@pytest.mark.parametrize("way", ["one process", "compiled", "FSDP2", "EP"])
def test_training_is_that_of_its_own_experts(results, way):
    """The difference from its own experts is less than a quarter of what swapped experts cause."""
    own, swapped, replaced = (
        results[f"{way}/{experts}"] for experts in ("own", "swapped", "replaced")
    )
    found, broken = difference(replaced, own), difference(swapped, own)
    assert found[0] < broken[0] / 4 and found[1] < broken[1] / 4, (found, broken)


def test_the_seam_was_replaced(results):
    """Our experts round differently. Equal bits would mean that torchtitan's own experts ran."""
    assert results["one process/replaced"] != results["one process/own"]
