#!/usr/bin/env python3
"""Runs the device tests under compute-sanitizer's four tools on this machine's GPU.

    python tools/sanitize_gpu.py [--tests build/release/sonicmoe_cuda_tests] [--out RECORD.json]
    python tools/sanitize_gpu.py --engines portable --jobs 4 --racecheck-tests PROGRAM

memcheck finds accesses out of bounds and leaks, racecheck hazards in shared memory, initcheck reads
of uninitialised global memory, synccheck invalid barriers. Every tool runs every group of tests
below. Exits with 1 on a finding, a failed test, a hang, or if no test ran. Needs compute-sanitizer
(part of the CUDA toolkit) on PATH; takes about ten minutes one run after the other. Run again with
the same --out to do what is missing: clean runs of the same test program and device are not
repeated.

Racecheck does not see that the mbarriers of the portable engine order accesses. So it runs that
engine only with --racecheck-tests: the tests of a build with CUDAFLAGS=-DSONICMOE_RACECHECK, whose
threads also meet at __syncthreads().
"""

from __future__ import annotations

import argparse
import datetime
import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TOOLS = ("memcheck", "racecheck", "initcheck", "synccheck")
WITHOUT_RACECHECK = ("memcheck", "initcheck", "synccheck")
ENGINES = ("hopper", "portable")
HARNESS = "Each/Cuda.PassesTheHarness/{engine}"


@dataclass(frozen=True)
class Group:
    tests: str  # GoogleTest filter
    cases: str = ""  # part of the names of the harness's cases
    tools: tuple[str, ...] = TOOLS


# Together these launch every kind of kernel: all layouts, activations and gradient modes of the
# layer, the grouped GEMMs, routing, rounding, the metadata of every form, the unpacking of
# weights, and expert parallelism over ranks that share the GPU.
GROUPS = (
    Group(HARNESS, "layout"),
    Group(HARNESS, "activation"),
    Group(HARNESS, "grads"),
    Group(HARNESS, "gemm"),
    Group(HARNESS, "pairs"),
    Group(HARNESS, "route"),
    Group(HARNESS, "round"),
    Group("CudaPacked.EveryCode*:Each/CudaPackedLayer.HasTheBits*"),
    # Without racecheck, which takes minutes for these tests; the groups above run the same kernels
    # under racecheck.
    Group("CudaMetadata*", tools=WITHOUT_RACECHECK),
    # Without the test that lets a CUDA call fail on purpose, which memcheck reports.
    Group("Exchange.*-Exchange.AnErrorOfTheCallerStaysTheCallers", tools=WITHOUT_RACECHECK),
    Group("ExchangeInC.*:ExchangeRepeats.OwnRows*:ExchangeHarness.RejectsABrokenExchange"),
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


@dataclass(frozen=True)
class Run:
    tool: str
    tests: str
    cases: str

    def is_of(self, row: dict) -> bool:
        return (self.tool, self.tests, self.cases) == (row["tool"], row["tests"], row["cases"])


def engines_of(tool: str, options) -> tuple[str, ...]:
    if tool == "racecheck" and options.racecheck_tests is None:
        return tuple(engine for engine in options.engines if engine != "portable")
    return tuple(options.engines)


def runs_of(options) -> list[Run]:
    runs = []
    for tool in options.tools:
        for group in GROUPS:
            if tool not in group.tools:
                continue
            engines = engines_of(tool, options)
            if engines and "{engine}" not in group.tests:
                engines = ("",)  # these tests open the GPU with its first engine
            for engine in engines:
                runs.append(Run(tool, group.tests.format(engine=engine), group.cases))
    return runs


def sanitize(run: Run, tests: Path, limit: float) -> dict:
    command = ["compute-sanitizer", "--tool", run.tool, "--error-exitcode", str(FOUND)]
    if run.tool == "memcheck":
        command += ["--leak-check", "full"]
    command += [str(tests), f"--gtest_filter={run.tests}"]
    began = time.monotonic()
    status, output = output_within(command, os.environ | {"SONICMOE_FILTER": run.cases}, limit)
    found = re.findall(r"(?:ERROR SUMMARY|RACECHECK SUMMARY): (\d+)", output)
    passed = re.search(r"\[  PASSED  \] (\d+) tests?", output)
    row = {
        "tool": run.tool,
        "tests": run.tests,
        "cases": run.cases,
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


def sha256(program: Path | None) -> str:
    return hashlib.sha256(program.read_bytes()).hexdigest() if program else ""


def header(tests: Path, racecheck_tests: Path | None) -> dict:
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
        "tests_sha256": sha256(tests),
        "racecheck_tests_sha256": sha256(racecheck_tests),
    }


class Record:
    """The rows so far, and the file they are written to. It keeps the clean rows that an earlier
    run wrote for the same device and test programs. The commit alone would not do: a program that
    was rebuilt from changed files has the same one."""

    KEYS = ("device", "tests_sha256", "racecheck_tests_sha256")

    def __init__(self, path: Path | None, tests: Path, racecheck_tests: Path | None):
        self.path = path
        self.header = header(tests, racecheck_tests) if path else {}
        self.rows: list[dict] = []
        if path and path.exists():
            earlier = json.loads(path.read_text(encoding="utf-8"))
            if all(earlier.get(key) == self.header[key] for key in self.KEYS):
                self.rows = [row for row in earlier["rows"] if clean(row)]

    def has(self, run: Run) -> bool:
        return any(run.is_of(row) for row in self.rows)

    def add(self, row: dict) -> None:
        self.rows.append(row)
        if self.path:
            content = self.header | {"rows": self.rows}
            self.path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def report(row: dict, record: Record) -> None:
    record.add(row)
    verdict = "clean" if clean(row) else "FINDINGS"
    name = f"{row['tests']} {row['cases']}".strip()
    print(f"{verdict:8s} {row['tool']:10s} {name:46s} {row['seconds']:6.1f} s", flush=True)


def main(arguments):
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--tests", type=Path, default=ROOT / "build/release/sonicmoe_cuda_tests")
    parser.add_argument(
        "--racecheck-tests",
        type=Path,
        help="tests of a build for racecheck; without them it leaves out portable",
    )
    parser.add_argument("--out", type=Path, help="write the record here")
    parser.add_argument("--tools", nargs="+", choices=TOOLS, default=TOOLS)
    parser.add_argument("--engines", nargs="+", choices=ENGINES, default=ENGINES)
    parser.add_argument("--jobs", type=int, default=1, help="runs at the same time")
    parser.add_argument("--limit", type=float, default=300.0, help="seconds of one run at most")
    options = parser.parse_args(arguments)
    if shutil.which("compute-sanitizer") is None:
        parser.exit(2, "compute-sanitizer is not on PATH; it comes with the CUDA toolkit\n")
    for tests in (options.tests, options.racecheck_tests):
        if tests is not None and not tests.exists():
            parser.exit(2, f"{tests} does not exist; `make build` makes it where nvcc is\n")
    if options.jobs < 1:
        parser.exit(2, f"jobs is {options.jobs}, must be at least 1\n")
    if not runs_of(options):
        parser.exit(2, "nothing to run: racecheck over portable needs --racecheck-tests\n")
    record = Record(options.out, options.tests, options.racecheck_tests)
    missing = [run for run in runs_of(options) if not record.has(run)]
    programs = {"racecheck": options.racecheck_tests or options.tests}
    with ThreadPoolExecutor(options.jobs) as pool:
        begun = [
            pool.submit(sanitize, run, programs.get(run.tool, options.tests), options.limit)
            for run in missing
        ]
        try:
            for done in as_completed(begun):
                report(done.result(), record)
        finally:  # after Ctrl-C no other run begins
            pool.shutdown(wait=False, cancel_futures=True)
    dirty = [row for row in record.rows if not clean(row)]
    print(f"{len(record.rows)} runs, {len(dirty)} with findings")
    return 1 if dirty else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
