"""Exchanges among the ranks of a process group that end: with data, or with a sentence."""

from __future__ import annotations

import contextlib
import math
import time
import weakref
from collections.abc import Iterator
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

# Activation checkpointing ends a recomputation by it, on all ranks at the same place.
from torch.utils.checkpoint import _StopRecomputationError

from ._peers import FOR_GOOD, ExpertParallelError, Peers

# Seconds between two looks at a collective that has not ended: Ctrl-C acts between them.
SLICE = 0.25
# Seconds after which a rank tells the others that it waits, and between its questions about them.
PATIENCE = 1.0
# What ranks tell each other in read(), and how many numbers at most.
FORWARD, BACKWARD, ROUTING, GRADIENTS, CHOICE, RESET = range(6)
READS = (
    "forward",
    "backward",
    "routing",
    "sum of gradients",
    "choice of a transport",
    "reset of the exchange",
)
WIDTH = 8


def from_host(numbers: list, device: torch.device) -> Tensor:
    """int64 numbers, for which the host does not wait: from memory that is not pinned, it would
    wait until the device has done all work queued before."""
    pinned = device.type == "cuda"
    values = torch.tensor(numbers, dtype=torch.int64, pin_memory=pinned)
    return values.to(device, non_blocking=True)


class Group:
    """The ranks that share the experts. Every rank makes the same calls in the same order; `calls`
    and `exchanges` count them, so that ranks that do not are found out."""

    def __init__(self, group: dist.ProcessGroup):
        # Not the group itself: this object is found by it, and must not keep it.
        self._group = weakref.ref(group)
        self.rank, self.size = group.rank(), group.size()
        self.calls = self.exchanges = 0
        self.layers = 0
        self._served: set[str] = set()  # kinds of devices
        self.name = group.group_name
        self._inside = False
        self.broken: str | None = None
        self.memory: dict = {}  # by dtype: PeerBuffers, which the group's layers share
        self.peers = Peers(group)

    def __deepcopy__(self, _memo) -> Group:
        return self

    def process_group(self) -> dist.ProcessGroup:
        group = self._group()
        if group is None:  # torch takes None for all ranks
            raise ExpertParallelError("the process group of this layer has been destroyed")
        return group

    def check_device(self, name: str, device: torch.device) -> None:
        """Refuses tensors that the group cannot exchange."""
        if device.type in self._served:
            return
        group = self.process_group()
        try:
            group._get_backend(device)
        except RuntimeError:
            raise ValueError(
                f"{name} is on {device}, for which the process group has no backend: use another "
                'device, or init_process_group("cpu:gloo,cuda:nccl")'
            ) from None
        self._served.add(device.type)

    def next_layer(self) -> int:
        """The number of a module: ranks that call another one are found out by it."""
        self.layers += 1
        return self.layers

    # ---- faults ----------------------------------------------------------------------------------

    @property
    def moment(self) -> int:
        """Grows when a call begins and when it ends. What a rank raises before the first exchange
        of a call concerns those that wait in this call, and not a backward after it: there all
        ranks have raised."""
        return 2 * self.calls + (0 if self._inside else 1)

    @property
    def moment_before(self) -> int:
        """The moment in the last call that has returned: what it enqueued may fail later."""
        return 2 * (self.calls - (1 if self._inside else 0))

    @contextlib.contextmanager
    def call(self) -> Iterator[None]:
        """A call of the layer. Calls inside of it are parts of it."""
        if self._inside:
            yield
            return
        self.calls += 1
        self._inside = True
        try:
            with self.guarded():
                yield
        finally:
            self._inside = False

    @contextlib.contextmanager
    def guarded(self) -> Iterator[None]:
        """The ranks that wait for this one are told what raises in here. Where it raises after an
        exchange, others are in the middle of a call that this one leaves: the group is broken."""
        if self.broken is not None:
            raise ExpertParallelError(
                f"the process group has been broken since an earlier call ({self.broken}): start "
                "the processes again from a checkpoint"
            )
        before = self.exchanges
        try:
            yield
        except (ExpertParallelError, _StopRecomputationError):
            raise
        except BaseException as error:
            sentence = f"{type(error).__name__}: {error}".splitlines()[0][:500].rstrip(": ")
            left = self.exchanges != before
            self.peers.failed(FOR_GOOD if left else self.moment, sentence)
            if left and self.broken is None:
                self.broken = sentence
                self._abort()
                self.peers.let_others_read()
            raise

    def _fail(self, sentence: str) -> None:
        self.broken = f"expert parallelism, call {self.calls} on rank {self.peers.me}: {sentence}"
        self.peers.failed(FOR_GOOD, sentence)
        self._abort()
        self.peers.let_others_read()
        raise ExpertParallelError(self.broken) from None

    def _abort(self) -> None:
        """Ends pending collectives, which would keep this process from ending."""
        group = self._group()
        if group is not None:
            with contextlib.suppress(RuntimeError):
                group.abort()

    def _wait(
        self, work: dist.Work, device: torch.device, timeout: float, moment: int | None = None
    ) -> None:
        """Until the collective has ended here; on CUDA also the stream waits for it. What failed
        before `moment` (by default this one) does not keep the others from coming."""
        moment = self.moment if moment is None else moment
        began = time.monotonic()
        patience = min(PATIENCE, timeout / 4)
        asked = 0  # how often
        while not self._ended(work, device, min(SLICE, timeout)):
            waited = time.monotonic() - began
            if waited < (asked + 1) * patience:
                continue
            if asked == 0:
                self.peers.waits(self.exchanges)
            asked += 1
            problem = self.peers.problem(moment)
            if problem is not None:
                # A rank that ended after this collective has sent all that it had to send.
                if self._ended(work, device, min(SLICE, timeout)):
                    break
                self._fail(problem)
            if waited > timeout:
                self._fail(f"{self.peers.absent(self.exchanges)} within {timeout:g} s")
        if device.type == "cuda":
            self._complete(work)

    def _ended(self, work: dist.Work, device: torch.device, seconds: float) -> bool:
        """Whether the collective ends within this time."""
        try:
            if device.type == "cuda":
                return _polled(work, seconds)
            work.wait(timedelta(seconds=seconds))
        except RuntimeError:
            if not work.is_completed():
                return False
            self._complete(work)
        return True

    def _complete(self, work: dist.Work) -> None:
        """What has ended may have failed."""
        try:
            work.wait()
        except RuntimeError as error:
            self._transport_failed(error)

    def _transport_failed(self, error: RuntimeError) -> None:
        reason = str(error).splitlines()[0][:200]
        self._fail(self.peers.cause(self.moment) or f"the transport failed: {reason}")

    # ---- exchanges -------------------------------------------------------------------------------

    def _launch(self, collective, *arguments) -> dist.Work:
        group = self.process_group()
        self.exchanges += 1
        try:
            return collective(*arguments, group=group, async_op=True)
        except RuntimeError as error:
            self._transport_failed(error)
            raise

    def _finish(self, work: dist.Work, device: torch.device, timeout: float) -> None:
        """On CUDA only the stream waits, and NCCL's own time limit holds."""
        if device.type == "cuda":
            self._complete(work)
        else:
            self._wait(work, device, timeout)

    def all_to_all(
        self, rows: Tensor, sent: list[int], received: list[int], timeout: float
    ) -> Tensor:
        """The rows that the others send here, by rank; `rows` lie by the rank that they go to."""
        size = math.prod(rows.shape[1:])
        data = rows.contiguous().view(rows.shape[0], size).view(torch.uint8)
        found = rows.new_empty((sum(received), *rows.shape[1:]))
        into = found.view(found.shape[0], size).view(torch.uint8)
        work = self._launch(dist.all_to_all_single, into, data, received, sent)
        self._finish(work, rows.device, timeout)
        return found

    def all_gather(self, values: Tensor, timeout: float) -> Tensor:
        """(W, ...) from the values (...) of every rank, which have one shape."""
        found = values.new_empty((self.size, *values.shape))
        work = self._launch(dist.all_gather, list(found.unbind()), values.detach().contiguous())
        self._finish(work, values.device, timeout)
        return found

    def read(self, what: int, values: Tensor, timeout: float) -> tuple[list, list]:
        """Row r of `values` (W, at most WIDTH) goes to rank r. Gives the rows sent and received as
        lists: the host waits, within the time limit also on CUDA. Ranks must all read the same
        `what` in the same call; messages have one size, so that those that do not find out. A reset
        may be another call on each rank."""
        call = 0 if what == RESET else self.calls
        head = from_host([what, call], values.device).expand(self.size, -1)
        values = torch.nn.functional.pad(values, (0, WIDTH - values.shape[1]))
        message = torch.cat((head, values), 1)
        found = torch.empty_like(message)
        work = self._launch(dist.all_to_all_single, found, message)
        # A rank that has raised the fault comes to the reset, whatever its call was.
        moment = FOR_GOOD if what == RESET else self.moment
        self._wait(work, values.device, timeout, moment)
        sent, received = torch.stack((message, found)).tolist()
        if not self.peers.processes:
            self.peers.remember_processes()
        names = [(_place(*row[:2]),) for row in received]
        self.agree(("it",), (_place(what, call),), names)
        return [row[2:] for row in sent], [row[2:] for row in received]

    def read_all(self, what: int, values: list[int], device, timeout: float) -> list[list[int]]:
        """The values of every rank, as read()."""
        mine = from_host(values, device).expand(self.size, -1)
        return self.read(what, mine, timeout)[1]

    def agree(self, names: tuple[str, ...], mine: tuple, of_ranks: list) -> None:
        """Refuses ranks that have other values than this one."""
        for rank, theirs in zip(self.peers.ranks, of_ranks, strict=True):
            for name, own, other in zip(names, mine, theirs, strict=True):
                if own != other:
                    self._fail(
                        f"all ranks must make the same calls, but {name} is {other} on rank {rank} "
                        f"and {own} on rank {self.peers.me}"
                    )


def _place(what: int, call: int) -> str:
    """Where a rank reads."""
    return READS[what] if what == RESET else f"call {call} in its {READS[what]}"


def _polled(work: dist.Work, seconds: float) -> bool:
    until = time.monotonic() + seconds
    while not work.is_completed():
        if time.monotonic() > until:
            return False
        time.sleep(2e-5)
    return True


_groups: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()


def group_of(group) -> Group:
    """The Group of a process group, of a DeviceMesh with one dimension, or (None) of all ranks."""
    if not dist.is_available() or not dist.is_initialized():
        raise ValueError(
            "expert parallelism needs a process group: call torch.distributed.init_process_group "
            "first, or use sonicmoe_cpp.MoE in one process"
        )
    if group is None:
        group = dist.group.WORLD
    elif hasattr(group, "get_group"):
        if group.ndim != 1:
            raise ValueError(
                f"group is a DeviceMesh of {group.ndim} dimensions, must have one: pass the one "
                'over which experts are divided, such as mesh["ep"]'
            )
        group = group.get_group()
    if not isinstance(group, dist.ProcessGroup):
        raise TypeError(
            f"group is {type(group).__name__}, must be a ProcessGroup of which this rank is a "
            "member, a DeviceMesh of one dimension, or None for all ranks"
        )
    if group not in _groups:
        _groups[group] = Group(group)
    return _groups[group]
