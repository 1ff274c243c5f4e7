"""A queue of runs over the GPUs of a machine: processes with one GPU and one run at a time each."""

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
from quality.model import EAGER, compiled
from quality.settings import Job

TRAINERS = {"finetune": tune.tune, "times": train.measure}  # of the other studies: train.train
SLOWER = 1.3  # a run is begun if this many times its expected time of training is left


@dataclass(frozen=True)
class Task:
    """The arguments of a process."""

    device: str
    text: Path
    out: Path
    deadline: float
    threads: int
    eager: bool  # the dense parts are not compiled, and steps are no CUDA graphs
    failed: Event  # the pretraining failed: no run that needs it can begin


def kind(job: Job) -> tuple:
    """Runs of one kind take as long as each other."""
    return job.study, job.architecture, job.ratio, job.mode, job.size, job.tokens


def expected(job: Job, seen: dict[tuple, float]) -> float:
    """Seconds that a run takes: those of the last run of its kind, or of the shortest run of the
    same size and length; 0 if none was seen."""
    own = job.size, job.tokens
    alike = (seconds for of, seconds in seen.items() if of[-2:] == own)
    return seen.get(kind(job), min(alike, default=0.0)) * SLOWER


def await_pretrained(job: Job, place: train.Place, failed: Event) -> bool:
    """Waits for the weights that a run begins with; False if they will not come in time."""
    path = train.pretrained_file(place, job)
    while job.study == "finetune" and not path.exists():
        if failed.is_set() or time.monotonic() > place.deadline:
            return False
        time.sleep(0.2)
    return True


def usable(place: train.Place) -> bool:
    """Whether the device still computes: after some errors every call of a process fails, and it
    would take all runs that are left."""
    try:
        place.wait()
        return bool(torch.ones(1, device=place.device).item())
    except RuntimeError:
        return False


def work(task: Task, jobs: Any, results: Any) -> None:
    """Takes runs until none is left or none fits into the time left. Sends (job, record or a
    sentence on why there is none)."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends the processes
    torch.set_num_threads(task.threads)
    parts = EAGER if task.eager or task.device == "cpu" else compiled()
    device = torch.device(task.device)
    place = train.Place(device, task.text, task.out, task.deadline, parts, not task.eager)
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
        try:
            found = TRAINERS.get(job.study, train.train)(job, place)
        except train.OutOfTime:
            continue
        except Exception as error:  # the other runs go on
            if not isinstance(error, UserError):
                traceback.print_exc()
            found = f"{job.name}: {error}"
            if job.study == "pretrain":
                task.failed.set()
            if not usable(place):
                results.put((job, f"{job.name}: the process ends, because its GPU has failed"))
                break
        else:
            seen[kind(job)] = found["seconds"]
        results.put((job, found))
    results.put((None, None))


def start(tasks: list[Task], gpus: int, waiting: Any, results: Any) -> list[Any]:
    """Starts a process for each task; each sees one GPU, in turn."""
    context = multiprocessing.get_context("spawn")
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = visible.split(",") if visible else [str(i) for i in range(gpus)]
    processes = []
    for i, task in enumerate(tasks):
        if task.device == "cuda":
            os.environ["CUDA_VISIBLE_DEVICES"] = names[i % gpus]
        process = context.Process(target=work, args=(task, waiting, results))
        process.start()
        processes.append(process)
    os.environ.pop("CUDA_VISIBLE_DEVICES", None)
    if visible is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = visible
    return processes


def run(jobs: list[Job], tasks: list[Task], gpus: int, save: Callable[[dict], None]) -> list[str]:
    """Runs the jobs in order, one process for each task, on so many GPUs; calls save(record) after
    each run. Returns why runs failed."""
    context = multiprocessing.get_context("spawn")
    waiting, results = context.Queue(), context.Queue()
    for job in jobs:
        waiting.put(job)
    processes = start(tasks, gpus, waiting, results)
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
