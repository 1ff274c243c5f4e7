"""Tests of benchmarks/ import its modules by name."""

from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parents[3] / "benchmarks"


@pytest.fixture(autouse=True)
def modules_of_benchmarks(monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
