#!/usr/bin/env python3
"""Compares expert parallelism over the GPUs of this machine with other implementations: ep2.json.

    cmake --build --preset release --target exchange_bench
    python benchmarks/ep2.py                 all layers, less than six minutes on two H200
    python benchmarks/ep2.py --smoke         one layer, few repeats, 20 seconds

Three programs add their results to the record. A program that runs out of --seconds is cut short:

1. ep2_bench/worker.py, one process for each GPU. It times this library's layer through PyTorch over
   peer memory; the same layer alone on one GPU; all-to-all by NCCL, with the library's grouped form
   and with compiled grouped_mm; all-gather and reduce-scatter around the library's layer. Calls are
   interleaved and hot. Before anything is timed, results are compared with this library's. Then it
   measures the memory kept for backward with uneven routings.
2. exchange_bench: the layer in C++ over peer memory, the layer alone, and transfers alone; then the
   same with eight ranks that share the GPUs.
3. ep2_bench/worker.py --rivals nvshmem: torch's all_to_all_vdev_2d, if torch has NVSHMEM. It runs
   in its own processes, because a process can use only one backend of symmetric memory.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import shapes
from ep2_bench.data import refused_by_vdev, shape_of

HERE = Path(__file__).parent
ROOT = HERE.parent
# The layers, and the goals for their time over the layer alone. gpt-oss-20b has few enough experts
# for vdev_2d.
GOAL = {
    "7B-n256": 1.15,
    "30B-n256-T16384": 1.12,
    "qwen3-30b": 1.08,
    "qwen3-235b-T16384": 1.05,
    "gpt-oss-20b-T16384": None,
}
RIVALS = ("nccl_grouped", "nccl_grouped_mm", "gather_scatter", "vdev_2d")
RATES = ("dispatch_gbs", "combine_gbs")
# The measurements that exchange_bench prints for a layer.
OF_CPP = ("alone", "ours", "hidden", "not_overlapped_ms", "dispatch_ms", "combine_ms")
PRETENDED = 8  # ranks that share the GPUs
SPARE = 5.0  # seconds before its time limit at which a worker starts no further layer


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--configs", nargs="+", type=shapes.argument, default=list(GOAL))
    parser.add_argument("--gpus", type=int, default=2)
    parser.add_argument("--bench", default=str(ROOT / "build/release/exchange_bench"))
    parser.add_argument("--seconds", type=float, default=340.0)
    parser.add_argument("--rounds", type=int, default=5, help="bursts of each call")
    parser.add_argument("--smoke", action="store_true")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--out", default=str(HERE / "results/h200/ep2.json"))
    options = parser.parse_args()
    options.burst, options.heat = 100.0, 0.3
    if options.smoke:
        options.configs, options.burst, options.rounds, options.heat = ["7B-n256"], 15.0, 1, 0.05
        options.seconds = min(options.seconds, 60.0)
    if options.device == "cpu":
        options.configs = ["tiny"]
    return options


def header(options) -> dict:
    import torch

    found = {"what": "ep2", "state": "hot", "torch": torch.__version__}
    found["date"] = time.strftime("%Y-%m-%dT%H:%M:%S")
    git = ["git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"]
    found["commit"] = os.environ.get("SONICMOE_COMMIT") or output_of(
        git
    )  # the variable: for a copy without .git
    found["device"] = torch.cuda.get_device_name(0) if options.device == "cuda" else "cpu"
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    if options.device == "cuda":
        found["driver"] = output_of(query).split("\n")[0]
    return found


def output_of(command: list[str]) -> str:
    """The output of a command, or "unknown" if it fails."""
    try:
        found = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return found or "unknown"


def run(command: list[str], seconds: float) -> tuple[str, str]:
    """Runs a program for at most `seconds`. Returns its output, and its problem or ""."""
    environment = dict(os.environ)
    environment["PYTHONPATH"] = os.pathsep.join([str(HERE), environment.get("PYTHONPATH", "")])
    # Without NVLink multicast, which must not be used on machines that are shared with others.
    environment.setdefault("NCCL_NVLS_ENABLE", "0")
    environment.setdefault("NVSHMEM_DISABLE_NVLS", "1")
    environment.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
    process = subprocess.Popen(
        command,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        out, err = process.communicate(timeout=max(seconds, 5.0))
        problem = "" if process.returncode == 0 else f"exit {process.returncode}: {err[-3000:]}"
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        out, err = process.communicate()
        problem = f"it did not end within {seconds:.0f} s: {err[-3000:]}"
    return out, problem


def headline(problem: str) -> str:
    """The part of a problem for the record: the reason that the program gave after "absent: ", or
    else how the program ended. The rest of its output names files of the machine."""
    reason = problem.split("absent: ")[1:]
    return reason[-1].splitlines()[0] if reason else problem.split(":")[0]


def json_lines(text: str) -> list[dict]:
    lines = [line for line in text.splitlines() if line.startswith("{")]
    found = []
    for line in lines:
        try:
            found.append(json.loads(line))
        except json.JSONDecodeError:  # a program that was killed while it wrote
            continue
    return found


class Driver:
    def __init__(self, options):
        self.options, self.began = options, time.monotonic()
        self.record = header(options) | {"gpus": options.gpus, "rows": []}

    def left(self) -> float:
        return self.options.seconds - (time.monotonic() - self.began)

    def write(self) -> None:
        path = Path(self.options.out)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(self.record, indent=1) + "\n")

    def row(self, found: dict) -> dict:
        """The row of the record for the layer of `found`, which is added if it is missing."""
        for row in self.record["rows"]:
            if row["config"] == found["config"]:
                return row
        names = ("config", "T", "d", "n", "E", "K", "ranks")
        self.record["rows"].append({name: found[name] for name in names})
        return self.record["rows"][-1]

    # ---- the programs ----------------------------------------------------------------------------

    def worker(self, rivals: str, configs: list[str], seconds: float) -> tuple[list[dict], str]:
        """Runs worker.py. Returns the lines that it wrote, and its problem or ""."""
        options = self.options
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder) / "lines"
            torchrun = ["-m", "torch.distributed.run", "--standalone"]
            torchrun += [f"--nproc-per-node={options.gpus}", "-m", "ep2_bench.worker"]
            given = {"device": options.device, "burst": options.burst, "rounds": options.rounds}
            given |= {"rivals": rivals, "out": str(out), "until": time.time() + seconds - SPARE}
            command = [sys.executable, *torchrun, "--configs", *configs]
            command += [f"--{name}={value}" for name, value in given.items()]
            _, problem = run(command, seconds)
            return (json_lines(out.read_text()) if out.exists() else []), problem

    def beside_rivals(self, seconds: float) -> None:
        lines, problem = self.worker("torch", self.options.configs, seconds)
        for line in lines:
            if "kept" in line:
                self.record["kept"] = line["kept"]
            elif "late" not in line:
                self.row(line).update(line)
        self.note("worker", problem)

    def bench(self, options: list[str], seconds: float) -> list[dict]:
        """The lines that exchange_bench prints."""
        command = [self.options.bench, "--seconds", str(self.options.heat), *options]
        out, problem = run(command, seconds)
        self.note("exchange_bench", problem)
        return json_lines(out)

    def in_cpp(self, seconds: float) -> None:
        """Runs exchange_bench: adds the layer in C++, over peer memory and alone, to the record's
        rows, and transfers alone to the record."""
        if not Path(self.options.bench).exists():
            return self.note("exchange_bench", "it is not built")
        for line in self.bench(self.options.configs, seconds):
            if "bare" in line:
                bare = self.record.setdefault("bare", {})
                bare[line["bare"]] = {key: line[key] for key in RATES}
            else:
                self.row(line).update({key: line[key] for key in OF_CPP})
        for key in RATES:
            rates = [rates[key] for rates in self.record.get("bare", {}).values()]
            if rates:
                self.record[key] = max(rates)

    def pretended(self, seconds: float) -> None:
        """Runs exchange_bench with eight ranks that share the GPUs, to see how the cost grows with
        the number of ranks. The layer alone shares the GPUs in the same way."""
        if self.options.smoke or not Path(self.options.bench).exists():
            return
        lines = self.bench(["--ranks", str(PRETENDED), self.options.configs[0]], seconds)
        self.record["pretended"] = [line for line in lines if "config" in line]
        self.write()

    def by_nvshmem(self, seconds: float) -> None:
        ranks = self.options.gpus
        served = [c for c in self.options.configs if not refused_by_vdev(shape_of(c).E, ranks)]
        lines, problem = self.worker("nvshmem", served, seconds) if served else ([], "")
        reason = headline(problem) if problem else "no time was left"
        for line in lines:
            if "vdev_2d" in line:
                row = self.row(line)
                row["vdev_2d"] = line["vdev_2d"]
                row["ours_beside_vdev_2d"] = line["ours_torch"]
            elif "absent" in line:
                self.row(line).setdefault("absent", {}).update(line["absent"])
        for row in self.record["rows"]:
            if "vdev_2d" not in row:
                refused = refused_by_vdev(row["E"], ranks)
                row.setdefault("absent", {}).setdefault("vdev_2d", refused or reason)
        self.note("nvshmem", problem)

    def note(self, program: str, problem: str) -> None:
        if problem:
            self.record.setdefault("problems", {})[program] = headline(problem)
            print(f"{program}: {problem}", flush=True)
        self.write()


def total(times: dict) -> float:
    return times["fwd_ms"] + times["bwd_ms"]


def complete(row: dict) -> bool:
    """Whether a row has our times, and for each rival its times or the reason why it is absent."""
    missing = [name for name in RIVALS if name not in row and name not in row.get("absent", {})]
    return not missing and "ours" in row and "ours_torch" in row


def summary(record: dict) -> None:
    for row in record["rows"]:
        text = [f"{row['config']:<18}"]
        if "ours" in row:
            ratio = total(row["ours"]) / total(row["alone"])
            goal = f" (goal {GOAL[row['config']]})" if GOAL.get(row["config"]) else ""
            text.append(f"C++ {total(row['ours']):.2f} ms, {ratio:.3f} of alone{goal}")
        if "ours_torch" in row:
            ours = total(row["ours_torch"])
            text.append(f"torch {ours:.2f} ms, {ours / total(row['alone_torch']):.3f} of alone")
            rivals = {name: total(row[name]) / ours for name in RIVALS if name in row}
            text += [f"{name} {ratio:.2f}x" for name, ratio in rivals.items()]
            for name in ("ours_exact", "ours_all_to_all"):
                text += [f"{name} {total(row[name]) / ours:.2f}x"] if name in row else []
        for name, reason in row.get("absent", {}).items():
            text.append(f"{name} absent: {reason[:60]}")
        print(" | ".join(text), flush=True)
    print(json.dumps({key: record.get(key) for key in ("bare", "kept", "problems")}), flush=True)


def main() -> int:
    options = arguments()
    driver = Driver(options)
    driver.write()
    driver.beside_rivals(0.55 * options.seconds)
    if options.device == "cuda":
        driver.in_cpp(0.5 * driver.left())
        driver.pretended(0.4 * driver.left())
        driver.by_nvshmem(driver.left())
    summary(driver.record)
    whole = driver.record["rows"] and all(map(complete, driver.record["rows"]))
    return 0 if whole and len(driver.record["rows"]) == len(options.configs) else 1


if __name__ == "__main__":
    sys.exit(main())
