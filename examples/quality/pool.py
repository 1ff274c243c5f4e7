"""A queue of runs over the GPUs of a machine: one process a GPU, one run at a time in each."""

import multiprocessing
import os
import queue
import signal
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any

import torch
from lm.errors import UserError

from quality import train, tune
from quality.settings import Job

SLOWER = 1.1  # a run is begun if this many times its expected time is left


@dataclass(frozen=True)
class Task:
    """The arguments of a process."""

    device: str
    text: Path
    out: Path
    deadline: float
    threads: int
    failed: Event  # the pretraining failed: no run that needs it can begin


def expected(job: Job, seen: dict[tuple, float]) -> float:
    """Seconds that a run takes: those of the last run of its kind, or of the longest run; 0 if none
    was seen."""
    kind = (job.study, job.architecture, job.ratio, job.tokens)
    return seen.get(kind, max(seen.values(), default=0.0)) * SLOWER


def await_pretrained(job: Job, place: train.Place, failed: Event) -> bool:
    """Waits for the weights that a run begins with; False if they will not come in time."""
    path = train.pretrained_file(place, job)
    while job.study == "finetune" and not path.exists():
        if failed.is_set() or time.monotonic() > place.deadline:
            return False
        time.sleep(0.2)
    return True


def work(task: Task, jobs: Any, results: Any) -> None:
    """Takes runs until none is left or none fits into the time left. Sends (job, record or a
    sentence on why there is none)."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends the processes
    torch.set_num_threads(task.threads)
    place = train.Place.make(task.device, task.text, task.out, task.deadline)
    seen: dict[tuple, float] = {}
    while True:
        try:
            job = jobs.get(timeout=0.5)
        except queue.Empty:
            break
        if time.monotonic() + expected(job, seen) > task.deadline:
            continue
        if not await_pretrained(job, place, task.failed):
            continue
        began = time.monotonic()
        try:
            found = (tune.tune if job.study == "finetune" else train.train)(job, place)
        except train.OutOfTime:
            continue
        except Exception as error:  # the other runs go on
            if not isinstance(error, UserError):
                traceback.print_exc()
            found = f"{job.name}: {error}"
            if job.study == "pretrain":
                task.failed.set()
        else:
            kind = (job.study, job.architecture, job.ratio, job.tokens)
            seen[kind] = time.monotonic() - began
        results.put((job, found))
    results.put((None, None))


def start(tasks: list[Task], waiting: Any, results: Any) -> list[Any]:
    """Starts a process for each task, each of which sees one GPU."""
    context = multiprocessing.get_context("spawn")
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = visible.split(",") if visible else [str(i) for i in range(len(tasks))]
    processes = []
    for i, task in enumerate(tasks):
        if task.device == "cuda":
            os.environ["CUDA_VISIBLE_DEVICES"] = names[i]
        process = context.Process(target=work, args=(task, waiting, results), daemon=True)
        process.start()
        processes.append(process)
    os.environ.pop("CUDA_VISIBLE_DEVICES", None)
    if visible is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = visible
    return processes


def run(jobs: list[Job], tasks: list[Task], save: Callable[[dict], None]) -> list[str]:
    """Runs the jobs in order, one process for each task; calls save(record) after each run. Returns
    why runs failed."""
    context = multiprocessing.get_context("spawn")
    waiting, results = context.Queue(), context.Queue()
    for job in jobs:
        waiting.put(job)
    processes = start(tasks, waiting, results)
    failures, working = [], len(processes)
    try:
        while working:
            try:
                job, found = results.get(timeout=1.0)
            except queue.Empty:
                if any(process.is_alive() for process in processes):
                    continue
                return [*failures, "a process ended before its runs did"]
            if job is None:
                working -= 1
            elif isinstance(found, str):
                failures.append(found)
                print(found, file=sys.stderr, flush=True)
            else:
                save(found)
    finally:
        for process in processes:
            process.terminate()
    return failures
