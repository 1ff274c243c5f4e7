#!/usr/bin/env python3
"""Measures what token rounding costs in quality: trains the same model on the same text with top-K
routing and with each rounding mode, several seeds each, and evaluates all with top-K.

    python examples/rounding_study.py --out out/study                3 seeds, nearest, up and down
    python examples/rounding_study.py --jobs 8 --steps 400           eight runs at a time
    python examples/rounding_study.py --modes nearest,balanced --ratios 1,2,4

Any setting of train_lm.py is a flag here too. A study that was interrupted continues where it
stopped: finished runs are read from --out, begun ones go on from their last checkpoint. Writes
study.json, study.md and study.png. Exit codes: 0 done, 1 a run that diverged or failed, 2
bad input or a disk that cannot be written, 130 interrupted.
"""

import argparse
import json
import multiprocessing
import os
import signal
import subprocess
import sys
from dataclasses import dataclass
from datetime import date
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # idle torch threads must not spin

import torch
from lm import study
from lm.config import ROUNDING_MODES, Config, Parser, parse
from lm.data import Corpus, load_corpus
from lm.device import startable_threads
from lm.errors import UserError, exit_code
from lm.files import claim
from lm.trainer import Run, StopSignal
from tqdm import tqdm

INTERRUPTED = "interrupted; the same command continues"
MARKER = ".rounding_study"  # this file in the output folder says that a study wrote to it before
FILES = ("study.json", "study.md", "study.png")


@dataclass(frozen=True)
class Job:
    """The arguments of a process that trains one run."""

    case: study.Case
    config: Config
    out: Path


@dataclass(frozen=True)
class Worker:
    """The data that each process of the pool gets at its start."""

    corpus: Corpus
    threads: int
    stop: Event


_worker: Worker


def begin_worker(worker: Worker) -> None:
    global _worker
    _worker = worker
    # Ctrl-C reaches every process of the terminal. Workers ignore it and stop only by the parent's
    # event.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(startable_threads(worker.threads))


def run_job(job: Job) -> study.Case | None:
    """Trains one run and saves its result; None if it was interrupted before its end."""
    config = job.case.config(job.config)
    routing = "rounded" if job.case.ratio else "topk"
    run = Run(routing, config, _worker.corpus, job.out / "checkpoints" / job.case.name)
    run.restore()
    if not run.train(_worker.stop.is_set):
        return None
    result = {
        "val_loss": run.final_loss(),
        "tile": config.tile,
        "train_seconds": run.history.seconds,
        "text": _worker.corpus.digest(),
        "settings": study.settings(job.config),
    }
    study.save_result(job.out, job.case, result)
    return job.case


def parse_arguments(argv: list[str]) -> tuple[argparse.Namespace, Config]:
    parser = Parser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--modes", default="nearest,up,down", help=", ".join(ROUNDING_MODES))
    parser.add_argument("--ratios", default="1,2,4", help="T_e / tile, the tile follows from it")
    parser.add_argument("--seeds", type=int, default=3, help="seeds of each")
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time")
    own, rest = parser.parse_known_args(argv)
    own.modes = list(dict.fromkeys(own.modes.split(",")))
    for mode in own.modes:
        if mode not in ROUNDING_MODES:
            raise UserError(f"mode is '{mode}'; it must be one of {', '.join(ROUNDING_MODES)}")
    try:
        own.ratios = list(dict.fromkeys(int(r) for r in own.ratios.split(",")))
    except ValueError:
        raise UserError(f"ratios are '{own.ratios}'; they must be integers, as in 1,2,4") from None
    for name, most in (("seeds", 1000), ("jobs", 256)):
        if not 1 <= getattr(own, name) <= most:
            raise UserError(f"{name} is {getattr(own, name)}; it must be from 1 to {most}")
    return own, parse(["--out", "out/study", *rest]).config


def train_missing(own: argparse.Namespace, config: Config, planned: list[study.Case]) -> bool:
    """Trains the runs that have no result yet; False if it was interrupted."""
    out = Path(config.out)
    found = {case: study.load_result(out, case, config) for case in planned}
    jobs = [Job(case, config, out) for case, result in found.items() if result is None]
    if not jobs:
        return True
    corpus = load_corpus(config)
    if {result["text"] for result in found.values() if result} - {corpus.digest()}:
        raise UserError(f"the runs in {out} were trained on other text than is here now")
    threads = max(1, (config.threads or len(os.sched_getaffinity(0))) // own.jobs)
    context = multiprocessing.get_context("spawn")  # a forked process could not use the GPU
    worker = Worker(corpus, threads, context.Event())
    with (
        StopSignal() as stop,
        context.Pool(min(own.jobs, len(jobs)), begin_worker, (worker,)) as pool,
        tqdm(total=len(planned), initial=len(planned) - len(jobs), unit="run", disable=None) as bar,
    ):
        failure: UserError | None = None
        running = [pool.apply_async(run_job, (job,)) for job in jobs]
        for result in running:
            while not result.ready():
                result.wait(0.2)
                if stop():
                    worker.stop.set()  # every process saves its run and starts no other
            try:
                trained = result.get()
            except UserError as error:
                worker.stop.set()  # the other runs are saved, then the study ends
                failure = failure or error
                continue
            if trained is not None:
                bar.update()
                if bar.disable:  # no terminal
                    finished = sum(r.ready() for r in running) + len(planned) - len(jobs)
                    print(f"{finished} of {len(planned)} runs", file=sys.stderr, flush=True)
    if failure:
        raise failure
    return not stop()


def origin(config: Config) -> dict[str, str]:
    """Device, versions and date of a study. SONICMOE_COMMIT names the commit if there is no git
    history."""
    command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short", "HEAD"]
    commit = os.environ.get("SONICMOE_COMMIT")
    if commit is None:
        found = subprocess.run(command, capture_output=True, text=True, check=False)
        commit = found.stdout.strip() or "unknown"
    device = torch.cuda.get_device_name() if config.device == "cuda" else "cpu"
    today = date.today().isoformat()
    return {"device": device, "torch": torch.__version__, "commit": commit, "date": today}


def write_report(config: Config, results: list[dict[str, Any]]) -> None:
    out = Path(config.out)
    rows = study.summarise(results)
    document = origin(config) | {"settings": study.settings(config)}
    document |= {"rows": rows, "runs": results}
    texts = json.dumps(document, indent=1) + "\n", study.table(rows) + "\n"
    contents = *(text.encode(errors="surrogateescape") for text in texts), study.plot(rows)
    study.write_report(out, dict(zip(FILES, contents, strict=True)))
    print(study.table(rows))


def run_study(argv: list[str]) -> int:
    own, config = parse_arguments(argv)
    out = Path(config.out)
    planned = study.cases(config, own.modes, own.ratios, own.seeds)
    claim(out, MARKER)
    complete = train_missing(own, config, planned)
    found = [study.load_result(out, case, config) for case in planned]
    results = [result for result in found if result is not None]
    if results:
        write_report(config, results)
    if not complete:
        print(INTERRUPTED, file=sys.stderr)
    return 0 if complete else 130


def main(argv: list[str]) -> int:
    return exit_code(lambda: run_study(argv), INTERRUPTED)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
