#!/usr/bin/env python3
"""Measures how one layer and how training scale over the GPUs of this machine: scaling.json.

    python benchmarks/scaling.py layers      the layer under expert parallelism, beside NCCL
    python benchmarks/scaling.py fp8         the layer in fp8 and in bf16, over most GPUs and alone
    python benchmarks/scaling.py training    tokens a day of the 7B model

Each command ends within --seconds (less than ten minutes) and needs no supervision. It measures
with 2, 4, ... GPUs (training also with 1), the largest number first, and writes the record after
each measurement. Layers over the most GPUs are also written to ranks.json beside the record. A
later call with the same device, commit and torch measures only what the record lacks; --again
measures all.

Layers are forward and backward through PyTorch with 8192 tokens on each rank. Each row has the time
of the same layer alone on one GPU, with as many routed rows and without communication. Training is
FSDP2 alone ("fsdp"), and FSDP2 with the experts divided over the ranks ("ep"). Each GPU has
--tokens tokens ("weak"), or all GPUs together have the same number of tokens for every number of
GPUs: one sequence a GPU with the most GPUs ("strong").
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

import ep2
import shapes
from training import DAY, MEMORY, PEAK

HERE = Path(__file__).parent
LAYERS = ("qwen3-235b-T8192", "qwen3-30b-T8192", "7B-n256-T8192", "30B-n256-T8192")
# With eight ranks: time over the layer alone.
OVER_ALONE = {"qwen3-235b-T8192": 1.12, "qwen3-30b-T8192": 1.25}
OVER_RIVALS = 1.25
# Pairs of names in rivals.in_fp8(): bf16, fp8.
FP8_OVER = {
    "peer memory": ("ours_torch", "ours_fp8"),
    "all-to-all": ("ours_all_to_all", "fp8_all_to_all"),
    "alone": ("alone_torch", "alone_fp8"),
}
OF_FP8 = [name for pair in FP8_OVER.values() for name in pair]
SCALING = ("weak", "strong")
FACTS = ("model", "sequence", "policy", "settle", "warm_up")  # options that a row of training has
# As in training.py. Memory that peers map may not come from expandable segments.
EXPANDABLE = {"fsdp": ["env", "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"], "ep": []}
START = 30.0  # seconds that a measurement of training takes at least


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("what", choices=("layers", "fp8", "training", "summary"))
    parser.add_argument("--ranks", nargs="+", type=int, help="default: 1, 2, 4, ... GPUs")
    parser.add_argument("--layers", nargs="+", type=shapes.argument, default=list(LAYERS))
    parser.add_argument("--model", default="7B-n256")
    parser.add_argument("--scaling", nargs="+", choices=SCALING, default=list(SCALING))
    parser.add_argument("--tokens", type=int, default=16384, help="of a GPU in a step (weak)")
    parser.add_argument("--sequence", type=int, default=4096)
    parser.add_argument("--steps", type=int, default=8, help="measured steps of training")
    parser.add_argument(
        "--settle", type=int, default=20, help="first steps, to balance the routing"
    )
    parser.add_argument("--warm-up", type=int, default=2000, help="of the learning rate, in steps")
    parser.add_argument("--policy", default="attention", help="of activation checkpointing")
    parser.add_argument("--eager", action="store_true", help="training without torch.compile")
    parser.add_argument("--seconds", type=float, default=560.0)
    parser.add_argument("--again", action="store_true", help="measure what the record has too")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--out", default=str(HERE / "results/h200/scaling.json"))
    options = parser.parse_args()
    options.burst, options.rounds = 60.0, 3
    if options.ranks is None and options.what != "summary":
        options.ranks = counts(options.device)
    return options


def counts(device: str) -> list[int]:
    """1, 2, 4, ... up to the number of GPUs."""
    import torch

    most = torch.cuda.device_count() if device == "cuda" else 2
    return [2**i for i in range(most.bit_length()) if 2**i <= most]


class Part(NamedTuple):
    """A measurement of training."""

    ranks: int
    scaling: str  # "weak" or "strong"
    parallel: str  # "fsdp" or "ep"
    tokens_per_gpu: int


def parts(options) -> list[Part]:
    """The measurements of training, the most important first."""
    most, found = max(options.ranks), []
    for scaling in options.scaling:
        for ranks in sorted(options.ranks, reverse=True):
            tokens = options.tokens if scaling == "weak" else options.sequence * most // ranks
            for parallel in ("fsdp", "ep"):
                if ranks > 1 or parallel == "fsdp":
                    found.append(Part(ranks, scaling, parallel, tokens))
    return found


class Driver(ep2.Driver):
    def __init__(self, options):
        self.options, self.began = options, time.monotonic()
        self.record = ep2.header(options) | {"what": "scaling"}
        self.record |= {"layers": [], "training": [], "problems": {}} | self.before()

    def before(self) -> dict:
        """The rows of an earlier record with the same device, commit and torch."""
        path = Path(self.options.out)
        old = json.loads(path.read_text()) if path.exists() and not self.options.again else {}
        if any(old.get(key) != self.record[key] for key in ("device", "commit", "torch")):
            return {}
        return {name: old[name] for name in ("layers", "fp8", "training") if name in old}

    def missing(self, problem: str, name: str) -> None:
        self.record["problems"][name] = ep2.headline(problem)
        print(f"{name}: {problem}", flush=True)
        self.write()

    # ---- layers ----------------------------------------------------------------------------------

    def layers(self) -> bool:
        whole = True
        groups = sorted((ranks for ranks in self.options.ranks if ranks > 1), reverse=True)
        for i, ranks in enumerate(groups):
            have = {row["config"] for row in self.record["layers"] if row["ranks"] == ranks}
            todo = [name for name in self.options.layers if name not in have]
            if todo:
                whole &= self.layers_over(ranks, todo, self.left() / (len(groups) - i))
        return whole

    def layers_over(self, ranks: int, configs: list[str], seconds: float) -> bool:
        """Measures the layers `configs` over `ranks` GPUs. Returns whether all were measured."""
        self.options.gpus = ranks
        lines, problem = self.worker("torch", configs, seconds)
        rows = [line for line in lines if "ours_torch" in line]
        for row in rows:
            self.record["layers"].append(row)
        if problem or len(rows) < len(configs):
            self.missing(problem or "no time was left for all layers", f"layers over {ranks} ranks")
        self.write()
        self.write_ranks()
        return len(rows) == len(configs)

    def write_ranks(self) -> None:
        """Writes ranks.json: the layers over the most GPUs, each way with forward and backward."""
        most = max(self.options.ranks)
        rows = [ranks_row(row) for row in self.record["layers"] if row["ranks"] == most]
        kept = {key: self.record[key] for key in ("device", "torch", "date", "commit")}
        path = Path(self.options.out).with_name("ranks.json")
        path.write_text(json.dumps(kept | {"rows": rows}, indent=1) + "\n")

    def fp8(self) -> bool:
        """Measures layers in bf16 and in fp8, over the most GPUs."""
        self.options.gpus = max(self.options.ranks)
        lines, problem = self.worker("fp8", self.options.layers, self.left())
        self.record["fp8"] = [line for line in lines if "ours_fp8" in line]
        if problem or len(self.record["fp8"]) < len(self.options.layers):
            self.missing(problem or f"no time was left, or wrong results: {lines}", "fp8")
        self.write()
        return len(self.record["fp8"]) == len(self.options.layers)

    # ---- training --------------------------------------------------------------------------------

    def training(self) -> bool:
        whole = True
        for part in parts(self.options):
            name = " ".join(map(str, part))
            facts = part._asdict() | {name: getattr(self.options, name) for name in FACTS}
            if any(facts.items() <= row.items() for row in self.record["training"]):
                continue
            if self.left() < START:
                self.missing("no time was left", name)
                whole = False
                continue
            found = self.train(part, name)
            whole &= found is not None
            if found is not None:
                self.record["training"].append(facts | found)
                print(f"{name}: {speed(found)}", flush=True)
            self.write()
        return whole

    def train(self, part: Part, name: str) -> dict | None:
        """The result, or {"absent": MEMORY} if the run does not fit into memory; None if it failed
        for another reason."""
        options = self.options
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder) / "result.json"
            torchrun = ["-m", "torch.distributed.run", "--standalone"]
            torchrun += [f"--nproc-per-node={part.ranks}", "-m", "training_bench.worker"]
            given = {name: getattr(options, name) for name in FACTS} | {"experts": "ours"}
            given |= {"tokens": part.tokens_per_gpu, "parallel": part.parallel}
            given |= {"device": options.device, "compile": int(not options.eager), "out": out}
            given |= {"steps": options.steps}
            named = (f"--{name.replace('_', '-')}={value}" for name, value in given.items())
            command = [sys.executable, *torchrun, *named]
            command = [*EXPANDABLE[part.parallel], *command]
            _, problem = ep2.run(command, self.left())
            if "OutOfMemoryError" in problem:
                return {"absent": MEMORY}
            if not out.exists():
                self.missing(problem, name)
                return None
            found = json.loads(out.read_text())
        rate = found["tokens_per_s"]
        return {
            "tokens_per_s": rate,
            "tokens_per_day_and_gpu": round(rate / part.ranks * DAY),
            "mfu": round(rate * found["flops_per_token"] / (part.ranks * PEAK), 4),
            "peak_gib": found["peak_gib"],
            "losses": found["losses"],
            "expert_norms": found["expert_norms"],
        }


def ranks_row(row: dict) -> dict:
    """A row of ranks.json from one of the record."""
    names = {"alone_torch": "alone", "ours_torch": "ours"}
    return {names.get(key, key): value for key, value in row.items()}


def speed(found: dict) -> str:
    if "absent" in found:
        return found["absent"]
    a_day = found["tokens_per_day_and_gpu"] / 1e9
    return f"{found['tokens_per_s']:,} tokens/s, {a_day:.2f} billion a day and GPU"


def best_rival(row: dict) -> float:
    """The time of the fastest other implementation."""
    return min((ep2.total(row[name]) for name in ep2.RIVALS if name in row), default=float("nan"))


def summary(record: dict) -> list[str]:
    """A line for each row, with its goals."""
    lines = []
    for row in record["layers"]:
        ours, alone = ep2.total(row["ours_torch"]), ep2.total(row["alone_torch"])
        name, eight = row["config"], row["ranks"] == 8
        line = f"{name} over {row['ranks']}: {ours:.2f} ms, {ours / alone:.3f} of alone"
        line += f" (goal {OVER_ALONE[name]})" if eight and name in OVER_ALONE else ""
        line += f", others {best_rival(row) / ours:.2f} times ours"
        lines.append(line + (f" (goal {OVER_RIVALS})" if eight else ""))
    for row in record.get("fp8", []):
        times = {name: ep2.total(row[name]) for name in OF_FP8}
        ratios = [f"{ways}: {times[a] / times[b]:.3f}" for ways, (a, b) in FP8_OVER.items()]
        line = f"{row['config']} over {row['ranks']}, fp8's speed over bf16: {', '.join(ratios)}"
        lines.append(f"{line} ({', '.join(f'{n} {ms:.2f} ms' for n, ms in times.items())})")
    for row in record["training"]:
        what = f"{row['model']} {row['scaling']} {row['parallel']} over {row['ranks']}"
        lines.append(f"{what}: {speed(row)}")
    return lines


def main() -> int:
    options = arguments()
    if options.what == "summary":
        print("\n".join(summary(json.loads(Path(options.out).read_text()))))
        return 0
    driver = Driver(options)
    whole = getattr(driver, options.what)()
    print("\n".join(summary(driver.record)), flush=True)
    return 0 if whole else 1


if __name__ == "__main__":
    sys.exit(main())
