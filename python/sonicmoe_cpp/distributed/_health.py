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
from typing import NamedTuple

import torch.distributed as dist

from ._memory import number_of

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


class Process(NamedTuple):
    """Identifies a process, so that other processes on the same machine can see whether it runs."""

    host: int  # a number of the machine and its list of processes; 0 if there is no list
    pid: int
    start: int  # time, in ticks since the machine was started

    @classmethod
    def this(cls) -> Process:
        host = 0
        with contextlib.suppress(OSError):
            boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
            host = number_of(f"{boot} {os.readlink('/proc/self/ns/pid')}")
        return cls(host, os.getpid(), _state(os.getpid())[1])

    @staticmethod
    def now() -> int:
        """The time on the clock of `start`."""
        return int(time.clock_gettime(time.CLOCK_BOOTTIME) * os.sysconf("SC_CLK_TCK"))

    def has_ended(self) -> bool:
        state, start = _state(self.pid)
        return state in "ZX" or start != self.start


def _state(pid: int) -> tuple[str, int]:
    """(state, start time) of a process as the system lists it; state X if it is not listed."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return "X", 0
    return fields[0], int(fields[19])


def _listed(ranks: list) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    return f"ranks {', '.join(map(str, ranks[:-1]))} and {ranks[-1]}"


class RankHealth:
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
        self._name = f"sonicmoe_cpp/{group.group_name}"
        self._met = False
        # A new group must not read the keys of a destroyed group with the same name.
        self._use(f"{next(_made.setdefault(group.group_name, itertools.count()))}")
        self.processes: dict[int, Process] = {}
        self._asking: threading.Thread | None = None
        self.this = Process.this()
        self._write(f"process/{self.me}", [*self.this, Process.now()])

    def _use(self, prefix: str) -> None:
        store = dist.distributed_c10d._get_default_store()
        self.store = dist.PrefixStore(f"{self._name}/{prefix}", store)

    def introduction(self) -> list[int]:
        """The numbers that this rank sends to the others in the group's first exchange."""
        return [int.from_bytes(os.urandom(8), "little") >> 2, *self.this]

    def meet(self, introductions: list[list[int]]) -> None:
        """Gets introduction() of every rank. From now on the group uses keys that no earlier
        process has written: when torchrun starts processes again, the store still has the keys of
        the attempt before, which name failures and processes that have ended."""
        self._met = True
        self._use(str(introductions[0][0]))
        for rank, (_, *process) in zip(self.ranks, introductions, strict=True):
            if rank != self.me:
                self.processes[rank] = Process(*process[:3])

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

    def _is_new(self, host: int, time: int) -> bool:
        """Whether something was written to the store in this attempt: in a group, all processes of
        an attempt are started before one of them writes. Before meet() only what was written on
        this machine is read, because clocks of two machines differ."""
        return host == self.this.host != 0 and time >= self.this.start

    def _remember_processes(self) -> None:
        """Before meet(): reads the processes of the other ranks from the store."""
        unknown = [rank for rank in self.others() if rank not in self.processes]
        with contextlib.suppress(RuntimeError):
            found = self._ask(lambda: {r: self._read(f"process/{r}") for r in unknown})
            for rank, each in found.items():
                if each is not None and self._is_new(each[0], each[-1]):
                    self.processes[rank] = Process(*each[:-1])

    def waits(self, exchange: int, place: str) -> None:
        self._write(f"waits/{self.me}", [exchange, place])

    def failed(self, until: int, sentence: str) -> None:
        """Reports a failure to the ranks that wait at the moment `until` (Group.moment) or before.
        If another rank has reported a failure, this failure may be its consequence and is not
        reported."""
        if self._failure(until) is None:
            failure = {"rank": self.me, "until": until, "sentence": sentence}
            failure["written"] = [self.this.host, Process.now()]
            for key in ("failed", f"failed/{self.me}"):
                self._write(key, failure)

    def _reported(self, key: str = "failed") -> dict | None:
        """The failure that another rank has reported last, as failed() has written it."""
        if self.rank_0_holds_store and 0 in self._ended():
            return None
        with contextlib.suppress(RuntimeError):
            found = self._ask(lambda: self._read(key))
            new = found is not None and (self._met or self._is_new(*found["written"]))
            return found if new and found["rank"] != self.me else None
        return None

    def _failure(self, moment: int) -> str | None:
        found = self._reported()
        if found is None or found["until"] < moment:
            return None
        return f"rank {found['rank']} failed: {found['sentence']}"

    def let_others_read(self) -> None:
        """Called after failed(). If this process serves the store, waits until the other ranks have
        had time to read it."""
        if self.me == 0 and self.rank_0_holds_store:
            time.sleep(GRACE)

    def _ended(self) -> list[int]:
        here = self.this.host
        if here == 0:
            return []
        known = self.processes.items()
        return [rank for rank, each in known if each.host == here and each.has_ended()]

    def problem(self, moment: int) -> str | None:
        """The reason why other ranks will not come at this moment or later, as a sentence."""
        if len(self.processes) < len(self.others()):
            self._remember_processes()
        failure, ended = self._failure(moment), self._ended()
        if failure is not None:
            return failure
        if ended:
            who = [f"{rank} (process {self.processes[rank].pid})" for rank in ended]
            has = "has" if len(who) == 1 else "have"
            return f"{_listed(who)} {has} ended"
        return None

    def cause(self, moment: int) -> str | None:
        """As problem(), but repeats the search for GRACE seconds."""
        until = time.monotonic() + GRACE
        while (found := self.problem(moment)) is None and time.monotonic() < until:
            time.sleep(0.05)
        if found is not None:
            return found
        try:
            missing = self._ask(lambda: [r for r in self.others() if not self._has_begun(r)])
        except RuntimeError:
            if self.me == 0 or not self.rank_0_holds_store:
                return None
            return "rank 0 (the store of the process group does not answer) has ended"
        return f"{_listed(missing)} did not come to the group's first exchange" if missing else None

    def _has_begun(self, rank: int) -> bool:
        """Whether a rank has made its group. One that raised before did not, and named nothing."""
        return self._met or self.store.check([f"process/{rank}"])

    def absent(self, exchange: int, place: str, seconds: float) -> str:
        """Names the ranks that have not come to this exchange in so many seconds, as a sentence."""
        within = f"within {seconds:g} s"
        try:
            waits = self._ask(lambda: {r: self._read(f"waits/{r}") for r in self.others()})
        except RuntimeError:
            who = "rank 0" if self.rank_0_holds_store else "a rank"
            return f"{who} (the store of the process group does not answer) did not come {within}"
        absent = [rank for rank, waiting in waits.items() if not waiting or waiting[0] != exchange]
        if not absent:
            places = {self.me: place} | {rank: waiting[1] for rank, waiting in waits.items()}
            each = ", ".join(f"rank {rank} in {places[rank]}" for rank in self.ranks)
            return f"all ranks wait ({each}), but the exchange did not end {within}"
        # A rank that left a step waits in a collective that does not match, and may hold others.
        last = [f"rank {r} last waited in {waits[r][1]}, " for r in absent if waits[r]]
        also = f" ({''.join(last)}this rank waits in {place})"
        return f"{_listed(absent)} did not come {within}{self._failure_of(absent) or also}"

    def _failure_of(self, absent: list[int]) -> str:
        """What one of the absent ranks has reported, in an earlier call, too: a kernel of that call
        may have failed on that rank alone. Its time limit may end a little later than this rank's.
        """
        until = time.monotonic() + GRACE
        while True:
            for rank in absent:
                if (found := self._reported(f"failed/{rank}")) is not None:
                    return f" (rank {rank} failed before: {found['sentence']})"
            if time.monotonic() > until:
                return ""
            time.sleep(0.05)
