#!/usr/bin/env python3
"""Expert parallelism over peer memory: all cases against one process, ranks that are killed, stall
or raise, and a table of what failed.

    python tests/python/ranks/peer_cases.py               all on two GPUs, two to three minutes
    python tests/python/ranks/peer_cases.py --ranks 4     on four GPUs
    python tests/python/ranks/peer_cases.py --smoke       one step of each kind, 20 seconds
    python tests/python/ranks/peer_cases.py graphs pairs  cases whose names contain one of these

Each part is a group of processes of its own, so that a part that hangs or breaks costs no other
one. A case that takes too long ends its part, with the stack of each rank in the report. On CPUs
(--device cpu) exchange_fake.py stands for the exchange.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent / "support")]
# Before torch: NCCL and torch read them when they start.
os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")

CASE_LIMIT = 40.0  # seconds
SOON = 20.0  # seconds in which a fault must be reported; the time limit is TIMEOUT
TIMEOUT = 5.0
ARENA = {"max_tokens": 60, "capacity": 5.0}
# All streams of a process share one hardware queue: CUDA starts work in the order of the calls.
ONE_QUEUE = (("CUDA_DEVICE_MAX_CONNECTIONS", "1"),)
ORDERS = ("repeats", "steps_in_any_order", "graphs", "beside", "parts_have", "parts_of_two")
SMOKE = ("ids_even", "repeats_have_equal_bits", "all_tokens_to_one_rank", "main_gradients", "way")


class Part(NamedTuple):
    """A group of processes: the function that each rank runs, and the arguments of its layers."""

    name: str
    job: str  # a function of this file
    options: dict
    limit: float  # seconds
    only: tuple = ()  # the cases; none: all
    environ: tuple = ()  # pairs


PARTS = (
    Part("arena", "cases", {"transport": "peer", **ARENA}, 90.0),
    Part("exact", "cases", {"transport": "peer"}, 90.0),
    Part("auto", "cases", {"transport": "auto"}, 90.0),
    Part("one queue", "cases", {"transport": "peer", **ARENA}, 60.0, ORDERS, ONE_QUEUE),
    Part("a rank is killed, sizes read", "killed", {"transport": "peer"}, 40.0),
    Part("a rank is killed, nothing read", "killed", {"transport": "peer", **ARENA}, 40.0),
    Part("a rank stalls", "stalls", {"transport": "peer", **ARENA}, 40.0),
    Part("a rank raises", "raises", {"transport": "peer", **ARENA}, 40.0),
)


# ---- on each rank --------------------------------------------------------------------------------


class Log:
    """A rank's lines for the report, written as they come."""

    def __init__(self, folder: Path, rank: int):
        self.file = (folder / f"{rank}.log").open("a")
        self.trace = (folder / f"{rank}.stack").open("w")

    def __call__(self, name: str, seconds: float | None = None, problem: str | None = None) -> None:
        faulthandler.cancel_dump_traceback_later()
        if seconds is None:
            faulthandler.dump_traceback_later(CASE_LIMIT, exit=True, file=self.trace)
        self.file.write(json.dumps([name, seconds, problem]) + "\n")
        self.file.flush()


def enter(rank: int, size: int, folder: Path):
    """The world of this rank, its log, and the cases asked for."""
    import expert_parallel_base as base
    import expert_parallel_cases
    import expert_parallel_peer
    import torch

    job = json.loads((folder / "job.json").read_text())
    if job["device"] == "cpu":
        import exchange_fake

        exchange_fake.install()
    base.TRANSPORT.update(job["options"] | {"timeout": 20.0})
    cases = expert_parallel_cases.CASES | expert_parallel_peer.PEER_CASES
    for parts in filter(None, (job["parts"], job["only"])):
        cases = {n: c for n, c in cases.items() if any(part in n for part in parts)}
    cases = {n: c for n, c in cases.items() if n not in job["done"]}
    torch.manual_seed(0)
    world = base.World(rank, size, job["device"], folder, saves=True)
    return world, Log(folder, rank), cases


def cases(rank: int, size: int, folder: Path) -> None:
    import expert_parallel_cases

    world, log, chosen = enter(rank, size, folder)
    expert_parallel_cases.run_cases(world, chosen, log)


def steps(folder: Path, rank: int, size: int, spoil) -> None:
    """Runs steps of a layer until one raises. Rank 1 calls spoil(layer) before the last step. A
    rank that raises ends without waiting for the other ranks."""
    import expert_parallel_peer as peer
    import torch
    from sonicmoe_cpp.distributed import check_exchange

    world, log, _ = enter(rank, size, folder)
    log("steps")
    layer = peer.middle(world)
    options = {"timeout": TIMEOUT, "max_tokens": None, "capacity": None}
    if "max_tokens" in peer.TRANSPORT:
        options |= {"max_tokens": peer.MIDDLE[world.device][0], "capacity": 2.0}
    for last in (False, False, False, True):
        began = time.monotonic()
        if last and rank == 1:
            spoil(layer)
        try:
            peer.results(layer, lambda mine: peer.run(mine, **options))
            if world.device == "cuda":
                torch.cuda.synchronize()
            check_exchange()
        finally:
            log("steps", time.monotonic() - began)


def killed(rank: int, size: int, folder: Path) -> None:
    import signal

    steps(folder, rank, size, lambda layer: os.kill(os.getpid(), signal.SIGKILL))


def stalls(rank: int, size: int, folder: Path) -> None:
    steps(folder, rank, size, lambda layer: time.sleep(2 * TIMEOUT))


def raises(rank: int, size: int, folder: Path) -> None:
    def refuse(layer):
        layer.weights = layer.weights[:, :-1]

    steps(folder, rank, size, refuse)


# ---- the driver ----------------------------------------------------------------------------------


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("parts", nargs="*", help="of the cases' names")
    parser.add_argument("--smoke", action="store_true")
    parser.add_argument("--faults", action="store_true", help="only the parts with faults")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--seconds", type=float, default=180.0, help="no part begins after")
    options = parser.parse_args()
    if options.smoke:
        options.parts = list(SMOKE)
    return options


def read_log(folder: Path, rank: int) -> dict[str, tuple]:
    """{case: (seconds, problem)}; (None, None) for a case that has not ended."""
    path = folder / f"{rank}.log"
    lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return {name: (seconds, problem) for name, seconds, problem in lines}


def run_part(part: Part, options, folder: Path, done: list[str]) -> list[dict | None]:
    import worlds

    folder.mkdir()
    job = {"device": options.device, "options": part.options, "parts": options.parts, "done": done}
    job["only"] = part.only
    (folder / "job.json").write_text(json.dumps(job))
    backend = "nccl" if options.device == "cuda" else "gloo"
    try:
        given = (globals()[part.job], options.ranks, folder, part.limit, backend)
        return worlds.run(*given, dict(part.environ))
    except AssertionError as hang:
        return [{"error": str(hang)}] * options.ranks


def unfinished(folder: Path, found: list) -> dict[str, str]:
    """{case that failed: its problem}."""
    problems = {}
    for rank in range(len(found)):
        for name, (seconds, problem) in read_log(folder, rank).items():
            if problem is not None:
                problems.setdefault(name, f"rank {rank}: {problem}")
            elif seconds is None:
                stack = (folder / f"{rank}.stack").read_text()
                problems.setdefault(name, f"rank {rank} did not end it\n{stack}")
        if found[rank] is None or "error" in found[rank]:
            why = "was killed" if found[rank] is None else found[rank].get("traceback")
            why = why or found[rank]["error"]
            problems.setdefault("the processes", f"rank {rank}: {why}")
    return problems


def report(part: Part, name: str, problem: str | None, seconds: float) -> None:
    state = "ok" if problem is None else "FAILED"
    print(f"{state:<7}{part.name}: {name} ({seconds:.1f} s)", flush=True)
    if problem is not None:
        print("    " + "\n    ".join(problem.strip().splitlines()[-25:]), flush=True)


def run_cases_part(part: Part, options, folder: Path, left) -> int:
    """Runs all cases. After a failed case, new processes run the remaining ones. Returns the number
    of failed cases."""
    done, failed = [], 0
    for attempt in range(4):
        here = folder / f"{part.name}-{attempt}".replace(" ", "-")
        began = time.monotonic()
        found = run_part(part, options, here, done)
        problems = unfinished(here, found)
        passed = [n for n, (s, p) in read_log(here, 0).items() if s is not None and p is None]
        passed = [name for name in passed if name not in problems]
        report(part, f"{len(passed)} cases", None, time.monotonic() - began)
        times = sorted(((read_log(here, 0)[n][0], n) for n in passed), reverse=True)
        slowest = ", ".join(f"{name} {seconds:.1f}" for seconds, name in times[:4])
        print(f"       slowest: {slowest}", flush=True)
        for name, problem in problems.items():
            report(part, name, problem, 0.0)
        failed += len(problems)
        done += [*passed, *problems]
        if not problems or not passed or left() < 20:
            break
    return failed


# Parts of the sentence that the other rank raises.
SENTENCES = {
    "killed": ("ExpertParallelError", "rank 1", "has ended"),
    "stalls": ("ExpertParallelError", "rank 1 did not"),
    "raises": ("ExpertParallelError", "rank 1", "ValueError"),
}


def run_fault_part(part: Part, options, folder: Path) -> int:
    began = time.monotonic()
    here = folder / part.name.replace(" ", "-").replace(",", "")
    found = run_part(part, options, here, [])
    sentence = (found[0] or {}).get("error") or f"nothing was raised: {found[0]}"
    seconds = read_log(here, 0).get("steps", (None, None))[0] or 0.0
    wanted, problem = SENTENCES[part.job], None
    if not all(word in sentence for word in wanted):
        problem = f"the other rank must raise a sentence with {wanted}, and: {sentence}"
    elif seconds > SOON:
        problem = f"the other rank raised after {seconds:.1f} s, must within {SOON}: {sentence}"
    report(part, "the other rank raises", problem, time.monotonic() - began)
    if problem is None:
        print(f"       after {seconds:.1f} s: {sentence[:300]}", flush=True)
    return int(problem is not None)


def main() -> int:
    options = arguments()
    began = time.monotonic()

    def left() -> float:
        return options.seconds - (time.monotonic() - began)

    failed, skipped = 0, []
    with tempfile.TemporaryDirectory() as folder:
        for part in PARTS:
            if (part.job != "cases" and options.parts) or (part.job == "cases" and options.faults):
                continue
            if left() <= 0:
                skipped.append(part.name)
            elif part.job == "cases":
                failed += run_cases_part(part, options, Path(folder), left)
            else:
                failed += run_fault_part(part, options, Path(folder))
    for name in skipped:
        print(f"NOT RUN {name}: no time left")
    print(f"{failed} failed, {len(skipped)} not run, {time.monotonic() - began:.0f} s")
    return 1 if failed or skipped else 0


if __name__ == "__main__":
    sys.exit(main())
