#!/usr/bin/env python3
"""Studies of quality and time on the text of make_text.py, on all GPUs of the machine.

    python examples/quality_study.py rounding --text out/text/parts --out out/quality
    python examples/quality_study.py finetune --text out/text/parts --out out/quality
    python examples/quality_study.py rounding finetune --limit 540
    python examples/quality_study.py rounding spread times --others olmoe --begins start,tenth

rounding: what token rounding costs. Models of three architectures are trained with top-K and with
rounding at T_e / tile of 1, 2 and 4, tile 128, with the same seeds and the same order of the text.
spread: what makes runs with top-K differ: other initial weights alone, another order of the text
alone, or neither. It needs the runs with top-K of `rounding`.
times: the time of a step with and without rounding, of wider models after a few steps of training.
finetune: the model of docs/fp8.md is trained on sources and then fine-tuned on documentation: all
weights, the experts, or factors (LoRA) on experts in bf16, NF4 and MXFP4.

A step is one CUDA graph, except with stochastic rounding. Each GPU trains --per-gpu runs at a time:
more than one makes the times useless. A record is appended to OUT/runs.jsonl after every run, and
runs that are recorded there are not repeated: the same command continues. Runs that do not fit into
--limit seconds are left out. OUT/quality.json, quality-*.md and quality-*.png show what there is.
Exit codes: 0 done, 1 a run failed, 2 bad input, 3 --limit came before the end, 130 interrupted.
"""

import argparse
import itertools
import json
import os
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # idle torch threads must not spin

import torch
from lm.config import ROUNDING_MODES, Parser
from lm.device import choose
from lm.errors import UserError, exit_code
from lm.files import claim
from quality import pool, report
from quality.settings import ARCHITECTURES, ROUNDING_BEGINS, SIZES, Job
from quality.text import read_meta
from quality.tune import VARIANTS
from rounding_study import origin

MARKER = ".quality_study"  # this file in the output folder says that a study wrote to it before
STUDIES = ("rounding", "spread", "times", "finetune")
TIMED_RATIO, TIMED_AFTER = 2, 100  # T_e / tile; the steps before times are measured
INTERRUPTED = "interrupted; the same command continues"


def options(argv: list[str]) -> argparse.Namespace:
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("studies", nargs="+", choices=STUDIES)
    parser.add_argument("--text", default="out/text/parts", help="folder that make_text.py wrote")
    parser.add_argument("--out", default="out/quality")
    parser.add_argument("--size", default="0.1b", choices=SIZES, help="of rounding and spread")
    parser.add_argument("--tune-size", default="126m", choices=SIZES)
    parser.add_argument("--times-size", default="wide", choices=SIZES)
    parser.add_argument("--architectures", default="olmoe,qwen3,deepseek")
    parser.add_argument("--modes", default="nearest", help=", ".join(ROUNDING_MODES))
    parser.add_argument(
        "--others",
        help="architectures of spread, and of all modes and beginnings but the first; empty: all",
    )
    parser.add_argument("--ratios", default="1,2,4", help="T_e / tile")
    parser.add_argument("--begins", default="start", help=", ".join(ROUNDING_BEGINS))
    parser.add_argument("--variants", default=",".join(VARIANTS), help="of fine-tuning")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument(
        "--tokens", type=float, default=30e6, help="of each run of rounding and spread"
    )
    parser.add_argument("--pretrain-tokens", type=float, default=60e6)
    parser.add_argument("--tune-tokens", type=float, default=8e6)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--tune-lr", type=float, default=2e-4, help="of weights")
    parser.add_argument("--lora-lr", type=float, default=1e-3, help="of factors")
    parser.add_argument("--gpus", type=int, default=0, help="0: all")
    parser.add_argument("--per-gpu", type=int, default=1, help="runs at a time on each GPU")
    parser.add_argument("--device", default="", help="cuda or cpu")
    parser.add_argument("--eager", action="store_true", help="no torch.compile, no CUDA graphs")
    parser.add_argument("--limit", type=float, default=1e9, help="seconds of this call")
    own = parser.parse_args(argv)
    own.others = own.others or own.architectures
    for name, known in (
        ("architectures", ARCHITECTURES),
        ("others", ARCHITECTURES),
        ("modes", ROUNDING_MODES),
        ("begins", ROUNDING_BEGINS),
        ("variants", VARIANTS),
    ):
        values = list(dict.fromkeys(getattr(own, name).split(",")))
        for value in values:
            if value not in known:
                raise UserError(f"{name} has '{value}'; each must be one of {', '.join(known)}")
        setattr(own, name, values)
    try:
        own.ratios = list(dict.fromkeys(int(r) for r in own.ratios.split(",")))
    except ValueError:
        raise UserError(f"ratios are '{own.ratios}'; they must be integers, as in 1,2,4") from None
    limits = (("seeds", 1, 1000), ("gpus", 0, 1024), ("per_gpu", 1, 64), ("limit", 1, 1e12))
    for name, low, high in limits:
        if not low <= getattr(own, name) <= high:
            raise UserError(f"{name} is {getattr(own, name)}; it must be from {low} to {high:g}")
    if any(ratio < 1 for ratio in own.ratios):
        raise UserError(f"ratios are {own.ratios}; each must be at least 1")
    return own


def plan(own: argparse.Namespace) -> list[Job]:
    """The runs in the order in which they begin, so that a study that stops early can be compared:
    pretraining; times; seed by seed top-K, the first mode of rounding, and fine-tuning; the spread;
    then the other modes, and other beginnings of the first mode."""
    jobs = []
    if "finetune" in own.studies:
        jobs.append(Job("pretrain", **tuned(own), seed=0, tokens=own.pretrain_tokens, lr=own.lr))
    first = own.begins[0], own.modes[0]
    if "times" in own.studies:
        jobs += [times_of(own, name, first) for name in own.architectures]
    for seed in range(own.seeds):
        if "rounding" in own.studies:
            for name in own.architectures:
                jobs += [rounding(own, name, seed, first, ratio) for ratio in (0, *own.ratios)]
        if "finetune" in own.studies:
            for variant in own.variants:
                lr = own.lora_lr if variant.startswith("lora") else own.tune_lr
                given = tuned(own) | {"seed": seed, "tokens": own.tune_tokens, "lr": lr}
                jobs.append(Job("finetune", **given, variant=variant))
    if "spread" in own.studies:
        for i, name in itertools.product(range(1, own.seeds), own.others):
            topk = replace(rounding(own, name, 0, first, 0), study="spread")
            jobs += [replace(topk, order=i), replace(topk, seed=i, order=0), replace(topk, again=i)]
    if "rounding" in own.studies:
        kinds = [(first[0], mode) for mode in own.modes[1:]]
        kinds += [(begin, first[1]) for begin in own.begins[1:]]
        seeds = range(own.seeds)
        for ratio, kind, seed, name in itertools.product(own.ratios, kinds, seeds, own.others):
            jobs.append(rounding(own, name, seed, kind, ratio))
    return [job.check() for job in jobs]


def tuned(own: argparse.Namespace) -> dict[str, str]:
    return {"architecture": "fp8-study", "size": own.tune_size}


def rounding(
    own: argparse.Namespace, architecture: str, seed: int, kind: tuple[str, str], ratio: int
) -> Job:
    """A run with rounding of `kind` (begin, mode), or with top-K if ratio is 0. The time of a step
    is measured once for each architecture, at two tiles."""
    job = Job("rounding", architecture, own.size, seed, own.tokens, own.lr)
    if not ratio:
        return job
    timed = (seed, ratio) == (0, TIMED_RATIO) and kind == (own.begins[0], own.modes[0])
    return replace(job, begin=kind[0], mode=kind[1], ratio=ratio, timed=timed)


def times_of(own: argparse.Namespace, architecture: str, kind: tuple[str, str]) -> Job:
    size = SIZES[own.times_size]
    tokens = TIMED_AFTER * size.batch * size.context
    job = Job("times", architecture, own.times_size, 0, tokens, own.lr)
    return replace(job, begin=kind[0], mode=kind[1], ratio=TIMED_RATIO, timed=True)


def read_records(path: Path) -> list[dict[str, Any]]:
    if not path.exists():
        return []
    try:
        return [json.loads(line) for line in path.read_text().splitlines()]
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read: {error}; move it elsewhere") from error


def missing(jobs: list[Job], records: list[dict[str, Any]], out: Path) -> list[Job]:
    """The runs that have no record. A record of the same name and other settings is refused."""
    recorded = {record["name"]: record["settings"] for record in records}
    for job in jobs:
        if recorded.get(job.name, job.settings()) != job.settings():
            raise UserError(f"{out} has {job.name} with other settings; choose another --out")
    left = [job for job in jobs if job.name not in recorded]
    # The weights of a recorded pretraining may have stayed on another machine.
    for job in jobs:
        file = out / f"pretrained-{job.architecture}-{job.size}.pt"
        needed = any(j.study == "finetune" for j in left)
        if job.study == "pretrain" and job not in left and needed and not file.exists():
            left.insert(0, job)
    return left


def run_studies(argv: list[str]) -> int:
    began = time.monotonic()
    own = options(argv)
    jobs = plan(own)
    device = choose(own.device).name
    if "times" in own.studies and device != "cuda":
        raise UserError(f"times cannot be measured on device {device}; they need cuda")
    out, folder = Path(own.out), Path(own.text)
    tokens = read_meta(folder)["tokens"]
    claim(out, MARKER)
    path = out / "runs.jsonl"
    records = read_records(path)
    if any(record["text"] != tokens for record in records):
        raise UserError(f"{path} has runs on other text than {folder}; choose another --out")
    left = missing(jobs, records, out)
    gpus = (own.gpus or torch.cuda.device_count()) if device == "cuda" else max(1, own.gpus)
    gpus = max(1, gpus)
    count = max(1, min(gpus * own.per_gpu, len(left)))
    threads = max(1, len(os.sched_getaffinity(0)) // count)
    failed = torch.multiprocessing.get_context("spawn").Event()
    task = pool.Task(device, folder, out, began + own.limit, threads, own.eager, failed)
    facts = origin(argparse.Namespace(device=device))

    def save(record: dict[str, Any]) -> None:
        with open(path, "a") as file:
            file.write(json.dumps(record | facts) + "\n")
        seconds = time.monotonic() - began
        loss = f"validation {record['val_loss']:.4f}, " if "val_loss" in record else ""
        rate = f"{record['tokens_per_s']:,} tokens/s"
        print(f"{seconds:5.0f} s  {record['name']}: {loss}{rate}", flush=True)

    failures = pool.run(left, [task] * count, gpus, save) if left else []
    records = read_records(path)
    report.write(out, records)
    if failures:
        return 1
    unfinished = len(missing(jobs, records, out))
    if unfinished:
        print(f"{unfinished} of {len(jobs)} runs are left; the same command continues")
    return 3 if unfinished else 0


if __name__ == "__main__":
    sys.exit(exit_code(lambda: run_studies(sys.argv[1:]), INTERRUPTED))
