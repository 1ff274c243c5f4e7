"""The processes of the other ranks: which of them have ended, failed, or do not come."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import queue
import threading
import time
from collections.abc import Callable
from pathlib import Path

import torch.distributed as dist

# How long a rank looks for the cause of an error of the transport. A process that is killed closes
# its connections a moment before the system lists it as ended.
GRACE = 2.0
# How long a rank waits for an answer of the store.
ANSWER = 2.0
FOR_GOOD = 2**62  # a moment that is never over
_made: dict[str, itertools.count] = {}  # how often, by the name of the group


class ExpertParallelError(RuntimeError):
    """A rank is missing, has failed or calls something else; its group cannot be used again."""


def _this_process() -> dict:
    """What tells whether this process runs, for others on the same machine. The host is None where
    the system lists no processes."""
    host = None
    with contextlib.suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        host = f"{boot} {os.readlink('/proc/self/ns/pid')}"
    return {"host": host, "pid": os.getpid(), "start": _state(os.getpid())[1]}


def _state(pid: int) -> tuple[str, str]:
    """(state, start time) of a process as the system lists them; state X where it lists none."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return "X", ""
    return fields[0], fields[19]


def _listed(ranks: list) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    return f"ranks {', '.join(map(str, ranks[:-1]))} and {ranks[-1]}"


class Peers:
    """Asks about the other ranks of a group, whose numbers are those of the whole job.

    A rank that waits for long or fails writes this into the group's store; ranks on the same
    machine are also looked up among its processes, because the store ends with the process that
    holds it.
    """

    def __init__(self, group: dist.ProcessGroup):
        self.ranks = dist.get_process_group_ranks(group)
        self.me = dist.get_rank()
        # Where torchrun does not hold the store, the process of rank 0 does.
        self.rank_0_holds_store = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
        # A group that is made after one of its name was destroyed must not read what that one left.
        number = next(_made.setdefault(group.group_name, itertools.count()))
        store = dist.distributed_c10d._get_default_store()
        self.store = dist.PrefixStore(f"sonicmoe_cpp/{group.group_name}/{number}", store)
        self.processes: dict[int, dict] = {}
        self._asking: threading.Thread | None = None
        self.this = _this_process()
        self._write(f"process/{self.me}", self.this)

    def _ask(self, question: Callable):
        """question() of the store; RuntimeError where there is no answer in time. torch's store
        waits for ever if the process that holds it is stopped, or if its node is lost: so a thread
        asks, and while it waits, no other one is started."""
        answers: queue.SimpleQueue = queue.SimpleQueue()

        def answer() -> None:
            try:
                answers.put((question(), None))
            except RuntimeError as error:
                answers.put((None, error))

        silent = RuntimeError("the store of the process group does not answer")
        if self._asking is not None and self._asking.is_alive():
            raise silent
        self._asking = threading.Thread(target=answer, daemon=True)
        self._asking.start()
        try:
            found, error = answers.get(timeout=ANSWER)
        except queue.Empty:
            raise silent from None
        self._asking.join()
        if error is not None:
            raise error
        return found

    def _write(self, key: str, value) -> None:
        # A store that is gone is a consequence: its cause is what has to be reported.
        with contextlib.suppress(RuntimeError):
            self._ask(lambda: self.store.set(key, json.dumps(value)))

    def _read(self, key: str):
        return json.loads(self.store.get(key)) if self.store.check([key]) else None

    def others(self) -> list[int]:
        return [rank for rank in self.ranks if rank != self.me]

    def remember_processes(self) -> None:
        """Reads who they are while the store is there: after an exchange all have written it."""
        unknown = [rank for rank in self.others() if not self.processes.get(rank)]
        with contextlib.suppress(RuntimeError):
            self.processes |= self._ask(lambda: {r: self._read(f"process/{r}") for r in unknown})

    def waits(self, exchange: int) -> None:
        self._write(f"waits/{self.me}", exchange)

    def failed(self, until: int, sentence: str) -> None:
        """Tells the others that wait at this moment or before (Group.moment), unless one that
        failed earlier has: this may be a consequence."""
        if self._failure(until) is None:
            self._write("failed", {"rank": self.me, "until": until, "sentence": sentence})

    def _failure(self, moment: int) -> str | None:
        if self.rank_0_holds_store and 0 in self._ended():
            return None
        with contextlib.suppress(RuntimeError):
            found = self._ask(lambda: self._read("failed"))
            if found is not None and found["until"] >= moment and found["rank"] != self.me:
                return f"rank {found['rank']} failed: {found['sentence']}"
        return None

    def let_others_read(self) -> None:
        """Keeps the store for a moment, after failed()."""
        if self.me == 0 and self.rank_0_holds_store:
            time.sleep(GRACE)

    def _ended(self) -> list[int]:
        here = self.this["host"]
        if here is None:
            return []
        return [
            rank
            for rank, process in self.processes.items()
            if process is not None
            and process["host"] == here
            and (_state(process["pid"])[0] in "ZX" or _state(process["pid"])[1] != process["start"])
        ]

    def problem(self, moment: int) -> str | None:
        """What keeps the others from coming at this moment or later, as a sentence."""
        if not all(self.processes.get(rank) for rank in self.others()):
            self.remember_processes()
        failure, ended = self._failure(moment), self._ended()
        if failure is not None:
            return failure
        if ended:
            who = [f"{rank} (process {self.processes[rank]['pid']})" for rank in ended]
            has = "has" if len(who) == 1 else "have"
            return f"{_listed(who)} {has} ended"
        return None

    def cause(self, moment: int) -> str | None:
        """problem(), looked for until the grace is over."""
        until = time.monotonic() + GRACE
        while (found := self.problem(moment)) is None and time.monotonic() < until:
            time.sleep(0.05)
        return found

    def absent(self, exchange: int) -> str:
        """The ranks that have not come to this exchange, as the beginning of a sentence."""
        try:
            waits = self._ask(lambda: {r: self._read(f"waits/{r}") for r in self.others()})
        except RuntimeError:
            who = "rank 0" if self.rank_0_holds_store else "a rank"
            return f"{who} (the store of the process group does not answer) did not come"
        absent = [rank for rank, waiting in waits.items() if waiting != exchange]
        if not absent:
            return "all ranks came, but the exchange did not end"
        return f"{_listed(absent)} did not come"
