#!/usr/bin/env python3
"""Runs the device tests under compute-sanitizer's four tools on this machine's GPU.

    python tools/sanitize_gpu.py [--tests build/release/sonicmoe_cuda_tests] [--out RECORD.json]

memcheck finds accesses out of bounds and leaks, racecheck hazards in shared memory, initcheck reads
of uninitialised global memory, synccheck invalid barriers. Every tool runs every group of tests
below. Exits with 1 on a finding, a failed test, a hang, or if no test ran. Needs compute-sanitizer
(part of the CUDA toolkit) on PATH; takes about ten minutes.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TOOLS = ("memcheck", "racecheck", "initcheck", "synccheck")
HARNESS = "*Cuda.PassesTheHarness*"  # with every engine


@dataclass(frozen=True)
class Group:
    tests: str  # GoogleTest filter
    cases: str = ""  # part of the names of the harness's cases
    tools: tuple[str, ...] = TOOLS


# Together these launch every kind of kernel: all layouts, activations and gradient modes of the
# layer, the grouped GEMMs, routing, rounding, and the metadata of every form.
GROUPS = (
    Group(HARNESS, "layout"),
    Group(HARNESS, "activation"),
    Group(HARNESS, "grads"),
    Group(HARNESS, "gemm"),
    Group(HARNESS, "pairs"),
    Group(HARNESS, "route"),
    Group(HARNESS, "round"),
    # Without racecheck, which takes minutes for these tests; the groups above run the same kernels
    # under racecheck.
    Group("CudaMetadata*", tools=("memcheck", "initcheck", "synccheck")),
)
# Exit status of compute-sanitizer if it finds an error; its default is the test program's status.
FOUND = 86


def output_within(command: list[str], environment: dict, limit: float) -> tuple[int, str]:
    """Exit status and output. After `limit` seconds the status is 124 and the whole process group
    is killed: compute-sanitizer starts the tests as its child, which would keep the GPU busy."""
    with subprocess.Popen(
        command,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    ) as process:
        try:
            output, _ = process.communicate(timeout=limit)
            return process.returncode, output
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            output, _ = process.communicate()
            return 124, output


def run_group(tool: str, group: Group, tests: Path, limit: float) -> dict:
    command = ["compute-sanitizer", "--tool", tool, "--error-exitcode", str(FOUND)]
    if tool == "memcheck":
        command += ["--leak-check", "full"]
    command += [str(tests), f"--gtest_filter={group.tests}"]
    began = time.monotonic()
    status, output = output_within(command, os.environ | {"SONICMOE_FILTER": group.cases}, limit)
    found = re.findall(r"(?:ERROR SUMMARY|RACECHECK SUMMARY): (\d+)", output)
    passed = re.search(r"\[  PASSED  \] (\d+) tests?", output)
    row = {
        "tool": tool,
        "tests": group.tests,
        "cases": group.cases,
        "passed": int(passed.group(1)) if passed else 0,
        "findings": int(found[-1]) if found else None,
        "status": status,
        "seconds": round(time.monotonic() - began, 1),
    }
    if not clean(row):
        print(output[-4000:])
    return row


def clean(row: dict) -> bool:
    return row["status"] == 0 and row["findings"] == 0 and row["passed"] > 0


def output_of(*command: str) -> str:
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    return done.stdout.strip()


def record(rows: list[dict]) -> dict:
    name, driver = output_of(
        "nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader", "--id=0"
    ).split(", ")
    version = re.search(r"Version ([\d.]+)", output_of("compute-sanitizer", "--version"))
    return {
        "device": name,
        "driver": driver,
        "compute_sanitizer": version.group(1) if version else "unknown",
        "commit": os.environ.get("SONICMOE_COMMIT")
        or output_of("git", "rev-parse", "--short", "HEAD"),
        "date": datetime.date.today().isoformat(),
        "rows": rows,
    }


def main(arguments):
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--tests", type=Path, default=ROOT / "build/release/sonicmoe_cuda_tests")
    parser.add_argument("--out", type=Path, help="write the record here")
    parser.add_argument("--tools", nargs="+", choices=TOOLS, default=TOOLS)
    parser.add_argument("--limit", type=float, default=300.0, help="seconds of one run at most")
    options = parser.parse_args(arguments)
    if shutil.which("compute-sanitizer") is None:
        parser.exit(2, "compute-sanitizer is not on PATH; it comes with the CUDA toolkit\n")
    if not options.tests.exists():
        parser.exit(2, f"{options.tests} does not exist; `make build` makes it where nvcc is\n")
    rows = []
    for tool in options.tools:
        for group in (group for group in GROUPS if tool in group.tools):
            row = run_group(tool, group, options.tests, options.limit)
            rows.append(row)
            verdict = "clean" if clean(row) else "FINDINGS"
            name = f"{group.tests} {group.cases}".strip()
            print(f"{verdict:8s} {tool:10s} {name:40s} {row['seconds']:6.1f} s", flush=True)
            if options.out:
                options.out.write_text(json.dumps(record(rows), indent=1) + "\n", encoding="utf-8")
    dirty = [row for row in rows if not clean(row)]
    print(f"{len(rows)} runs, {len(dirty)} with findings")
    return 1 if dirty else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
