#!/usr/bin/env python3
"""Measures tokens a second of training the paper's models with FSDP2 on all GPUs of this machine,
with this library's experts and with torchtitan's own in the same training program.

    python benchmarks/training.py                                   7B-n256 and 1.4B-n256, to
                                                                    training.json
    python benchmarks/training.py --curve 300 --models 1.4B-n256    losses of three runs of 300
                                                                    steps, to training_curves.json

A step is forward, backward, gradient clipping and AdamW. Products are in bf16; parameters,
gradients and optimizer states are in fp32 and sharded. Each measurement is a process of its own
under torchrun, with one policy of activation checkpointing. On several GPUs this library's experts
are measured twice: sharded by FSDP2 like all other parameters, and divided over the GPUs (expert
parallelism). The fastest of each kind are "ours" and "titan" in the record, which is written after
every measurement. No measurement starts later than --budget seconds after the start. The exit code
is 1 if a model lacks one of the kinds of --experts.

It imports only layers of torchtitan 0.3.0, so torch 2.11 is enough.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import h200

HERE = Path(__file__).parent
PEAK = 989e12  # bf16 on an H100 or H200, without sparsity
DAY = 86400
MEMORY = "out of memory"
MEASURED = ("date", "commit", "driver")  # facts that each row of the record has for itself
SMALL_GIB = 100  # of device memory
# Policies to measure, by model and by whether the device has less than SMALL_GIB. They are the
# policies that fit and may be the fastest. On a small device "attention" is measured for both kinds
# of experts, because with it both keep the same tensors.
POLICIES = {
    ("7B", True): {"ours": ["attention+H", "attention"], "titan": ["selective", "attention"]},
    # torchtitan's own experts would keep about 2 GB more a layer (an estimate), too much.
    ("7B", False): {"ours": ["none"], "titan": ["attention"]},
    ("1.4B", True): {"ours": ["none"], "titan": ["none", "selective"]},
    ("1.4B", False): {"ours": ["none"], "titan": ["none"]},
}

KINDS = ("ours", "titan")  # of experts

# How this library's experts are shared among several GPUs; training_bench/worker.py explains.
PARALLEL = ("fsdp", "ep", "ep-gathered")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--models", nargs="+", default=["7B-n256", "1.4B-n256"])
    parser.add_argument("--gpus", type=int, default=0, help="0: all; 1: one program a GPU")
    parser.add_argument("--tokens", type=int, default=32768, help="tokens of a GPU in a step")
    parser.add_argument("--micro-batches", type=int, default=1, help="before each optimizer step")
    parser.add_argument(
        "--capacity", type=float, default=0, help="of divided experts; 0: the host waits for rows"
    )
    parser.add_argument(
        "--keep-rows", type=int, default=0, help="1: divided experts keep the rows of x"
    )
    parser.add_argument("--settle", type=int, default=0, help="first steps, to balance the routing")
    parser.add_argument("--warm-up", type=int, default=20, help="of the learning rate, in steps")
    parser.add_argument("--reduce", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--sequence", type=int, default=4096)
    parser.add_argument("--steps", type=int, default=12, help="measured steps, after others")
    parser.add_argument("--text", default="", help="file of tokens (.npy); default: random")
    parser.add_argument("--policies", nargs="+", help="activation checkpointing; default: POLICIES")
    parser.add_argument("--parallel", nargs="+", choices=PARALLEL, default=["fsdp", "ep"])
    parser.add_argument("--experts", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--eager", action="store_true", help="blocks without torch.compile")
    parser.add_argument("--curve", type=int, default=0, help="record losses of this many steps")
    parser.add_argument("--budget", type=float, default=460, help="seconds: no run starts later")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--out", help="default: training.json of results/h100, or the curves'")
    options = parser.parse_args()
    name = "training_curves.json" if options.curve else "training.json"
    options.out = options.out or str(HERE / "results/h100" / name)
    return options


def machine(options) -> dict:
    import torch

    found = {"torch": torch.__version__, "date": time.strftime("%Y-%m-%d"), "commit": h200.commit()}
    if options.device == "cpu":
        return found | {"device": "cpu", "driver": "none", "gpus": options.gpus or 1, "gib": 0.0}
    properties = torch.cuda.get_device_properties(0)
    count = options.gpus or torch.cuda.device_count()
    gib = properties.total_memory / (1 << 30)
    found |= {"device": properties.name, "driver": h200.driver()}
    return found | {"gpus": count, "gib": round(gib, 1)}


def places(options) -> queue.Queue[str | None]:
    """Values of CUDA_VISIBLE_DEVICES for programs that run at the same time: with --gpus 1 one
    value for each GPU; otherwise the single value None, which does not restrict the program."""
    free: queue.Queue[str | None] = queue.Queue()
    if options.device == "cuda" and options.gpus == 1:
        import torch

        for device in range(torch.cuda.device_count()):
            free.put(str(device))
    else:
        free.put(None)
    return free


class Run(NamedTuple):
    """One program; the fields are options of training_bench/worker.py."""

    model: str
    experts: str
    policy: str
    parallel: str
    steps: int
    compile: int


class Driver:
    def __init__(self, options):
        self.options, self.began = options, time.monotonic()
        self.machine = machine(options)
        self.places = places(options)
        self.pool = ThreadPoolExecutor(self.places.qsize())

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
        given |= {"micro-batches": options.micro_batches, "reduce": options.reduce}
        given |= {"settle": options.settle, "warm-up": options.warm_up}
        given |= {"capacity": options.capacity, "keep-rows": options.keep_rows}
        return [sys.executable, *torchrun, *(f"--{name}={value}" for name, value in given.items())]

    def run(self, run: Run) -> dict | str:
        """The result of one program, or the reason why there is none."""
        place = self.places.get()
        try:
            return self.run_at(place, run)
        finally:
            self.places.put(place)

    def run_at(self, place: str | None, run: Run) -> dict | str:
        environment = os.environ | {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
        environment["PYTHONPATH"] = os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")])
        environment.setdefault("NCCL_NVLS_ENABLE", "0")
        if place is not None:
            environment["CUDA_VISIBLE_DEVICES"] = place
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

    def parallel(self, experts: str) -> list[str]:
        return self.options.parallel if experts == "ours" and self.machine["gpus"] > 1 else ["fsdp"]

    def measure(self, run: Run) -> dict | None:
        """Measures with compiled blocks. If that fails for another reason than memory, measures
        eagerly."""
        for compiled in (0,) if self.options.eager else (1, 0):
            if self.left() < 30:
                print(f"{' '.join(map(str, run))}: no time left", flush=True)
                return None
            found = self.run(run._replace(compile=compiled))
            if isinstance(found, dict):
                return self.described(found)
            if found == MEMORY:
                return None
        return None

    def first(self, model: str, experts: str, steps: int) -> dict | None:
        """The measurement of the first policy that fits."""
        runs = (Run(model, experts, p, "fsdp", steps, 1) for p in self.policies(model, experts))
        found = map(self.measure, runs)
        return next((f for f in found if f is not None), None)

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


def speed(found: dict | None) -> float:
    return found["tokens_per_s"] if found else 0


def measured_before(options, found: dict) -> list[dict]:
    """The rows to keep of an earlier record at --out: those of the same device that this run does
    not measure again."""
    path = Path(options.out)
    old = json.loads(path.read_text()) if path.exists() else {}
    if old.get("device") != found["device"]:
        return []
    facts = described_by(options)
    again = [{"model": model, "gpus": found["gpus"]} | facts for model in options.models]
    kept = [row for row in old["rows"] if not any(a.items() <= row.items() for a in again)]
    facts = {name: old[name] for name in MEASURED if name in old}
    return [facts | row for row in kept]


def described_by(options) -> dict:
    """The settings that all rows of a call have in common."""
    facts = {"tokens_per_gpu": options.tokens, "sequence": options.sequence}
    facts |= {"micro_batches": options.micro_batches, "reduce": options.reduce}
    facts |= {"capacity": options.capacity, "keep_rows": options.keep_rows}
    return facts | {"settle": options.settle, "warm_up": options.warm_up}


def rates(driver: Driver) -> bool:
    """Writes the record and returns whether it is complete."""
    options = driver.options
    record = driver.machine | {"rows": measured_before(options, driver.machine)}
    for model in options.models:
        row = {"model": model, "gpus": driver.machine["gpus"]}
        row |= described_by(options) | {name: record[name] for name in MEASURED}
        row["others"] = []
        record["rows"].append(row)
        runs = [
            Run(model, kind, policy, parallel, options.steps, 1)
            for kind in options.experts
            for policy in driver.policies(model, kind)
            for parallel in driver.parallel(kind)
        ]
        todo = [(run.experts, driver.pool.submit(driver.measure, run)) for run in runs]
        for kind, future in todo:
            slower, row[kind] = sorted([future.result(), row.get(kind)], key=speed)
            row["others"] += [{"experts": kind} | slower] if slower else []
            driver.write(record)
    measured = record["rows"][-len(options.models) :]
    return all(row.get(kind) for row in measured for kind in options.experts)


def curves(driver: Driver) -> bool:
    """Writes the losses of one run with our experts and of two with torchtitan's own: the
    difference of these two is the noise between equal runs. Returns whether the record is complete.
    """
    options = driver.options
    record = driver.machine | {"steps": options.curve, "text": bool(options.text), "curves": []}
    kinds = {"ours": "ours", "titan": "titan", "titan_again": "titan"}
    for model in options.models:
        row = {"model": model, "tokens_per_gpu": options.tokens}
        record["curves"].append(row)
        futures = {
            name: driver.pool.submit(driver.first, model, kind, options.curve)
            for name, kind in kinds.items()
        }
        for name, future in futures.items():
            found = future.result()
            row[name] = None if found is None else found["losses"]
            driver.write(record)
    return all(None not in row.values() for row in record["curves"])


def main() -> int:
    driver = Driver(arguments())
    complete = (curves if driver.options.curve else rates)(driver)
    return 0 if complete else 1


if __name__ == "__main__":
    sys.exit(main())
