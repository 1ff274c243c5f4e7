#!/usr/bin/env python3
"""Tokens a second of training the paper's models with FSDP2: this library's experts beside
torchtitan's own, in one program, on all GPUs of this machine.

    python benchmarks/training.py                              7B-n256, 1.4B-n256: training.json
    python benchmarks/training.py --curve 300 --models 1.4B-n256    three runs of 300 steps, their
                                                               losses: training_curves.json

Forward, backward, gradient clipping and AdamW in each step; products in bf16; parameters, gradients
and optimizer states in fp32, sharded. Each measurement is a program of its own under torchrun; one
that runs out of memory is repeated with the next policy of activation checkpointing. --budget
seconds after the start no further one begins; what was measured is written after each. Exits with 1
if a measurement is missing.

It needs torchtitan 0.3.0, of which it imports layers only: torch 2.11 is enough.
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
from typing import NamedTuple

HERE = Path(__file__).parent
PEAK = 989e12  # bf16 on an H100 or H200, without sparsity
DAY = 86400
MEMORY = "out of memory"
SMALL_GIB = 100  # of device memory
# What fits, from the fastest on: by model and whether the device is small.
POLICIES = {
    ("7B", True): {"ours": ["selective", "full"], "titan": ["selective", "full"]},
    ("7B", False): {"ours": ["none", "selective"], "titan": ["none", "selective", "full"]},
    ("1.4B", True): {"ours": ["none", "selective"], "titan": ["none", "selective", "full"]},
    ("1.4B", False): {"ours": ["none"], "titan": ["none", "selective"]},
}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--models", nargs="+", default=["7B-n256", "1.4B-n256"])
    parser.add_argument("--gpus", type=int, default=0, help="0: all")
    parser.add_argument("--tokens", type=int, default=16384, help="a GPU and step")
    parser.add_argument("--sequence", type=int, default=4096)
    parser.add_argument("--steps", type=int, default=12, help="measured, after 4")
    parser.add_argument("--text", default="", help="a file of tokens (.npy); without: drawn ones")
    parser.add_argument("--policies", nargs="+", help="of checkpointing, instead of the table's")
    parser.add_argument("--eager", action="store_true", help="blocks without torch.compile")
    parser.add_argument("--curve", type=int, default=0, help="losses of so many steps instead")
    parser.add_argument("--budget", type=float, default=460, help="seconds")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--out", help="default: training.json of results/h200, or the curves'")
    options = parser.parse_args()
    name = "training_curves.json" if options.curve else "training.json"
    options.out = options.out or str(HERE / "results/h200" / name)
    return options


def machine(options) -> dict:
    import torch

    found = {"torch": torch.__version__, "date": time.strftime("%Y-%m-%d")}
    if options.device == "cpu":
        return found | {"device": "cpu", "gpus": options.gpus or 1, "gib": 0.0}
    properties = torch.cuda.get_device_properties(0)
    count = options.gpus or torch.cuda.device_count()
    gib = properties.total_memory / (1 << 30)
    return found | {"device": properties.name, "gpus": count, "gib": round(gib, 1)}


class Run(NamedTuple):
    """One program; the fields are options of training_bench/worker.py."""

    model: str
    experts: str
    policy: str
    steps: int
    compile: int


class Driver:
    def __init__(self, options):
        self.options, self.began = options, time.monotonic()
        self.machine = machine(options)

    def left(self) -> float:
        return self.options.budget - (time.monotonic() - self.began)

    def policies(self, model: str, experts: str) -> list[str]:
        if self.options.policies:
            return self.options.policies
        key = (model.split("-")[0], self.machine["gib"] < SMALL_GIB)
        return POLICIES.get(key, {}).get(experts, ["none"])

    def command(self, run: Run, out: str) -> list[str]:
        options = self.options
        torchrun = ["-m", "torch.distributed.run", "--standalone"]
        torchrun += [f"--nproc-per-node={self.machine['gpus']}", "-m", "training_bench.worker"]
        given = run._asdict() | {"out": out, "device": options.device, "text": options.text}
        given |= {"tokens": options.tokens, "sequence": options.sequence}
        return [sys.executable, *torchrun, *(f"--{name}={value}" for name, value in given.items())]

    def run(self, run: Run) -> dict | str:
        """The result of one program, or what went wrong with it."""
        environment = os.environ | {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
        environment["PYTHONPATH"] = os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")])
        environment.setdefault("NCCL_NVLS_ENABLE", "0")
        with tempfile.TemporaryDirectory() as folder:
            out = f"{folder}/result.json"
            began = time.monotonic()
            process = subprocess.Popen(
                self.command(run, out),
                env=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                start_new_session=True,
            )
            try:
                text, _ = process.communicate(timeout=max(30.0, self.left()))
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                text, _ = process.communicate()
            seconds = time.monotonic() - began
            name = " ".join(map(str, run))
            if not os.path.exists(out):
                why = MEMORY if "OutOfMemoryError" in text else "failed"
                tail = "" if why == MEMORY else f"\n{text[-3000:]}"
                print(f"{name}: {why} after {seconds:.0f} s{tail}", flush=True)
                return why
            with open(out) as file:
                found = json.load(file)
            print(f"{name}: {found['tokens_per_s']:,} tokens/s, {seconds:.0f} s", flush=True)
            return found

    def best(self, model: str, experts: str, steps: int) -> dict | None:
        """Of the first policy that fits; what cannot be compiled runs eagerly."""
        for policy in self.policies(model, experts):
            for compiled in (0,) if self.options.eager else (1, 0):
                if self.left() < 30:
                    print(f"{model} {experts}: no time left", flush=True)
                    return None
                found = self.run(Run(model, experts, policy, steps, compiled))
                if isinstance(found, dict):
                    return self.described(found)
                if found == MEMORY:
                    break
        return None

    def described(self, found: dict) -> dict:
        gpus = self.machine["gpus"]
        rate = found["tokens_per_s"]
        found["mfu"] = round(rate * found.pop("flops_per_token") / (gpus * PEAK), 4)
        found["tokens_per_day_and_gpu"] = round(rate / gpus * DAY)
        return found

    def write(self, record: dict) -> None:
        path = Path(self.options.out)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(record, indent=1) + "\n")


def rates(driver: Driver) -> bool:
    """Writes the record; whether it is complete."""
    options = driver.options
    record = driver.machine | {"rows": []}
    for model in options.models:
        row = {"model": model, "gpus": driver.machine["gpus"]}
        row |= {"tokens_per_gpu": options.tokens, "sequence": options.sequence}
        record["rows"].append(row)
        for experts in ("ours", "titan"):
            row[experts] = driver.best(model, experts, options.steps)
            driver.write(record)
    return all(row[experts] for row in record["rows"] for experts in ("ours", "titan"))


def curves(driver: Driver) -> bool:
    """Writes losses of ours, and of torchtitan's own experts in the same program twice: the
    difference of those two is the noise that a run has by itself. Whether the record is complete.
    """
    options = driver.options
    record = driver.machine | {"steps": options.curve, "text": bool(options.text), "curves": []}
    for model in options.models:
        row = {"model": model, "tokens_per_gpu": options.tokens}
        record["curves"].append(row)
        for name, experts in (("ours", "ours"), ("titan", "titan"), ("titan_again", "titan")):
            found = driver.best(model, experts, options.curve)
            row[name] = None if found is None else found["losses"]
            driver.write(record)
    return all(None not in row.values() for row in record["curves"])


def main() -> int:
    driver = Driver(arguments())
    complete = (curves if driver.options.curve else rates)(driver)
    return 0 if complete else 1


if __name__ == "__main__":
    sys.exit(main())
