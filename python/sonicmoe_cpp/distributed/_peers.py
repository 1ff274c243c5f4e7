"""Finds out which other ranks have ended, have failed, or do not come to a collective."""

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

# The seconds for which a rank looks for the cause of an error of the transport. The connections of
# a killed process close a little before the system lists the process as ended.
GRACE = 2.0
# The seconds for which a rank waits for an answer of the store.
ANSWER = 2.0
FOR_GOOD = 2**62  # later than every moment: the failure is permanent
_made: dict[str, itertools.count] = {}  # numbers the groups that have the same name


class ExpertParallelError(RuntimeError):
    """A rank is missing, has failed, or makes another call than the other ranks. The message says
    whether the group can be used again."""


def _this_process() -> dict:
    """Identifies this process, so that other processes on the same machine can see whether it still
    runs. The host is None if the system lists no processes."""
    host = None
    with contextlib.suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        host = f"{boot} {os.readlink('/proc/self/ns/pid')}"
    return {"host": host, "pid": os.getpid(), "start": _state(os.getpid())[1]}


def _state(pid: int) -> tuple[str, str]:
    """(state, start time) of a process as the system lists it; state X if it is not listed."""
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
    """Finds out what happened to the other ranks of a group. Ranks are numbered within the job.

    A rank that has waited for a long time, or has failed, writes this to the group's store. For
    ranks on the same machine the system's list of processes is read too, because the store is lost
    if the process that serves it ends.
    """

    def __init__(self, group: dist.ProcessGroup):
        self.ranks = dist.get_process_group_ranks(group)
        self.me = dist.get_rank()
        # Either torchrun serves the store, or the process of rank 0.
        self.rank_0_holds_store = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
        # A new group must not read the keys of a destroyed group with the same name.
        number = next(_made.setdefault(group.group_name, itertools.count()))
        store = dist.distributed_c10d._get_default_store()
        self.store = dist.PrefixStore(f"sonicmoe_cpp/{group.group_name}/{number}", store)
        self.processes: dict[int, dict] = {}
        self._asking: threading.Thread | None = None
        self.this = _this_process()
        self._write(f"process/{self.me}", self.this)

    def _ask(self, question: Callable):
        """Calls question(), which reads or writes the store. Raises RuntimeError if the store does
        not answer in time. torch's store waits for ever if the process that serves it is stopped,
        or if its node is lost. So a thread calls question(), and no second thread is started while
        the first waits."""
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
        # An error of the store is ignored: if the store is gone, an earlier error is the cause, and
        # the caller must report the earlier error.
        with contextlib.suppress(RuntimeError):
            self._ask(lambda: self.store.set(key, json.dumps(value)))

    def _read(self, key: str):
        return json.loads(self.store.get(key)) if self.store.check([key]) else None

    def others(self) -> list[int]:
        return [rank for rank in self.ranks if rank != self.me]

    def remember_processes(self) -> None:
        """Reads the processes of the other ranks, while the store still exists. After a collective
        all ranks have written their process."""
        unknown = [rank for rank in self.others() if not self.processes.get(rank)]
        with contextlib.suppress(RuntimeError):
            self.processes |= self._ask(lambda: {r: self._read(f"process/{r}") for r in unknown})

    def waits(self, exchange: int) -> None:
        self._write(f"waits/{self.me}", exchange)

    def failed(self, until: int, sentence: str) -> None:
        """Reports a failure to the ranks that wait at the moment `until` (Group.moment) or before.
        If another rank has reported a failure, this failure may be its consequence and is not
        reported."""
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
        """Called after failed(). If this process serves the store, waits until the other ranks have
        had time to read it."""
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
        """The reason why other ranks will not come at this moment or later, as a sentence."""
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
        """As problem(), but repeats the search for GRACE seconds."""
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
