"""Collectives among the ranks of a process group. Each collective ends: with data, or with an
ExpertParallelError whose message names the rank that is missing."""

from __future__ import annotations

import contextlib
import math
import time
import weakref
from collections.abc import Callable, Iterator
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

# Activation checkpointing raises this error to end a recomputation, at the same place on all ranks.
from torch.utils.checkpoint import _StopRecomputationError

from ._health import FOR_GOOD, ExpertParallelError, RankHealth

# A rank waits for a collective in intervals of SLICE seconds; Ctrl-C acts between them.
SLICE = 0.25
# A rank that has waited for PATIENCE seconds writes to the store that it waits. From then on it
# asks about the other ranks every PATIENCE seconds.
PATIENCE = 1.0
# The purposes of read(). WIDTH is the largest number of values that a rank sends to another rank in
# one read().
FORWARD, BACKWARD, ROUTING, GRADIENTS, CHOICE, RESET, MEETING, LOSSES = range(8)
READS = (
    "forward",
    "backward",
    "routing",
    "sum of gradients",
    "choice of a transport",
    "reset of the exchange",
    "first exchange",
    "sums of the losses",
)
# In these the number of the call may differ between ranks: after a fault, and because in a compiled
# module only the layer itself is a call.
NOT_NUMBERED = (RESET, MEETING, LOSSES)
WIDTH = 10
# In the first EARLY collectives of a group the host waits, with a time limit. CUDA loads a kernel
# when it is first called, and then the host may wait for the device without a limit: for ever, if a
# collective there waits for a lost rank.
EARLY = 32
NOT_FINISHED = (
    "a step of this group has begun and is not finished: call finish() before the next call of the "
    "group, or reset_exchange() on all ranks if what begin() returned is lost"
)
NO_LONGER = "this step has been given up by reset_exchange(), must begin again"


def from_host(numbers: list, device: torch.device) -> Tensor:
    """An int64 tensor on `device`. The numbers are copied from pinned memory. From other memory the
    host would wait until the device has done all work that is queued."""
    pinned = device.type == "cuda"
    values = torch.tensor(numbers, dtype=torch.int64, device="cpu", pin_memory=pinned)
    return values.to(device, non_blocking=True)


class Group:
    """The ranks among which the experts are divided. Every rank must make the same calls in the
    same order. To find ranks that make other calls, `calls` counts the calls of the layer and
    `exchanges` counts the collectives."""

    def __init__(self, group: dist.ProcessGroup):
        # A weak reference: _groups maps the group to this object, which must not keep it alive.
        self._group = weakref.ref(group)
        self.rank, self.size = group.rank(), group.size()
        self.calls = self.exchanges = 0
        self.layers = 0
        self._met = False
        self._place = ""  # describes the current collective
        self._served: set[str] = set()  # device types that the group can exchange
        self.name = group.group_name
        self._inside = False
        # The step that runs in parts (begun.py): between its begin and its finish there is no other
        # collective, so every rank has the same order of them.
        self.step: object | None = None
        self.broken: str | None = None
        self.memory: dict = {}  # by dtype: PeerBuffers, which the group's layers share
        self.health = RankHealth(group)

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
        """A number for a new module. Ranks compare it, to find a rank that calls another module."""
        self.layers += 1
        return self.layers

    # ---- faults ----------------------------------------------------------------------------------

    @property
    def moment(self) -> int:
        """A counter that grows when a call begins and when it ends. A rank that raises before the
        first collective of a call reports the error with this number. The error ends the waits of
        other ranks in the same call. It does not end waits in a later backward: its number is
        larger, because by then every rank has left the call with an error."""
        return 2 * self.calls + (0 if self._inside else 1)

    @property
    def moment_before(self) -> int:
        """The moment of the last call that has returned. Work that it enqueued may fail later."""
        return 2 * (self.calls - (1 if self._inside else 0))

    @contextlib.contextmanager
    def call(self) -> Iterator[None]:
        """Surrounds a call of the layer. Calls inside of it count as parts of it."""
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
    def guarded(self, step: object | None = None) -> Iterator[None]:
        """If an error is raised inside, reports it to the ranks that wait for this rank. If a
        collective has run before the error, or a step has begun, other ranks are in the middle of a
        call that this rank leaves, so the group is broken. `step` is the step in parts to which
        this call belongs."""
        if self.broken is not None:
            raise ExpertParallelError(
                f"the process group has been broken since an earlier call ({self.broken}): start "
                "the processes again from a checkpoint"
            )
        before, begun = self.exchanges, self.step
        try:
            if begun is not step:
                raise RuntimeError(NOT_FINISHED if step is None else NO_LONGER)
            yield
        except (ExpertParallelError, _StopRecomputationError):
            raise
        except BaseException as error:
            sentence = f"{type(error).__name__}: {error}".splitlines()[0][:500].rstrip(": ")
            left = self.exchanges != before or self.step not in (None, begun)
            self.health.failed(FOR_GOOD if left else self.moment, sentence)
            if left and self.broken is None:
                self.broken = sentence
                self._abort()
                self.health.let_others_read()
            raise

    def _fail(self, sentence: str) -> None:
        self.broken = f"expert parallelism, call {self.calls} on rank {self.health.me}: {sentence}"
        self.health.failed(FOR_GOOD, sentence)
        self._abort()
        self.health.let_others_read()
        raise ExpertParallelError(self.broken) from None

    def _abort(self) -> None:
        """Ends pending collectives: a process with pending collectives could not end."""
        group = self._group()
        if group is not None:
            with contextlib.suppress(RuntimeError):
                group.abort()

    def _wait(
        self, work: dist.Work, device: torch.device, timeout: float, moment: int | None = None
    ) -> None:
        """Waits until the collective has ended on this rank; on CUDA the stream waits too. A
        failure of another rank that concerns only moments before `moment` (default: now) is
        ignored, because that rank still comes to this collective."""
        moment = self.moment if moment is None else moment
        began = time.monotonic()
        patience = min(PATIENCE, timeout / 4)
        asked = 0  # the number of times that this rank has asked about the others
        while not self._ended(work, device, min(SLICE, timeout)):
            waited = time.monotonic() - began
            if waited < (asked + 1) * patience:
                continue
            if asked == 0:
                self.health.waits(self.exchanges, self._place)
            asked += 1
            problem = self.health.problem(moment)
            if problem is not None:
                # The rank may have ended after it had sent its part of this collective.
                if self._ended(work, device, min(SLICE, timeout)):
                    break
                self._fail(problem)
            if waited > timeout:
                self._fail(self.health.absent(self.exchanges, self._place, timeout))
        if device.type == "cuda":
            self._complete(work)

    def _ended(self, work: dist.Work, device: torch.device, seconds: float) -> bool:
        """Waits at most `seconds`. Returns whether the collective has ended."""
        try:
            if device.type == "cuda":
                return _polled(work, seconds)
            # In whole milliseconds; gloo would wait 0 ms for ever.
            work.wait(timedelta(milliseconds=max(1, round(1e3 * seconds))))
        except RuntimeError:
            if not work.is_completed():
                return False
            self._complete(work)
        return True

    def _complete(self, work: dist.Work) -> None:
        """Raises if the collective, which has ended, has failed."""
        try:
            work.wait()
        except RuntimeError as error:
            self._transport_failed(error)

    def _transport_failed(self, error: RuntimeError) -> None:
        reason = str(error).splitlines()[0][:200]
        self._fail(self.health.cause(self.moment) or f"the transport failed: {reason}")

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
        """Waits for the collective. On CUDA only the stream waits, so NCCL's time limit applies; in
        the first EARLY collectives the host waits, too."""
        late = self.exchanges > EARLY
        if device.type == "cuda" and (late or torch.cuda.is_current_stream_capturing()):
            self._complete(work)
        else:
            self._wait(work, device, timeout)

    def send(
        self, rows: Tensor, sent: list[int], received: list[int], timeout: float
    ) -> Callable[[], Tensor]:
        """Sends `rows`, which are ordered by destination rank. Returns a function that waits for
        the rows of all ranks and returns them, ordered by source rank."""
        size = math.prod(rows.shape[1:])
        data = rows.contiguous().view(rows.shape[0], size).view(torch.uint8)
        found = rows.new_empty((sum(received), *rows.shape[1:]))
        into = found.view(found.shape[0], size).view(torch.uint8)
        work = self._launch(dist.all_to_all_single, into, data, received, sent)

        sending = [data]  # its memory is read until then

        def wait() -> Tensor:
            self._place = "an exchange of rows"
            self._finish(work, found.device, timeout)
            sending.clear()
            return found

        return wait

    def all_gather(self, values: Tensor, timeout: float) -> Tensor:
        """Gathers the values (...) of all ranks, whose shapes are equal, as (W, ...)."""
        found = values.new_empty((self.size, *values.shape))
        self._place = "an exchange of sums"
        work = self._launch(dist.all_gather, list(found.unbind()), values.detach().contiguous())
        self._finish(work, values.device, timeout)
        return found

    def gather_losses(self, values: Tensor, timeout: float) -> Tensor:
        """As all_gather(). It begins a forward, so on the CPU the ranks first compare their calls.
        On CUDA the host would have to wait for the device; there the ranks compare them next."""
        if values.device.type != "cuda":
            self.read_all(LOSSES, [], values.device, timeout)
        return self.all_gather(values, timeout)

    def read(self, what: int, values: Tensor, timeout: float) -> tuple[list, list]:
        """Sends row r of `values` (W, at most WIDTH columns) to rank r. Returns the rows sent and
        the rows received, as lists. The host waits for them; the time limit holds also on CUDA. All
        ranks must read with the same `what` in the same call. The ranks compare `what` and the
        number of the call; every message has the same size, so even messages of different reads can
        be compared."""
        if not self._met:
            self._met = True
            self.health.meet(
                self.read_all(MEETING, self.health.introduction(), values.device, timeout)
            )
            if values.device.type == "cuda":
                self._connect(values.device, timeout)
        call = 0 if what in NOT_NUMBERED else self.calls
        head = from_host([what, call], values.device).expand(self.size, -1)
        values = torch.nn.functional.pad(values, (0, WIDTH - values.shape[1]))
        message = torch.cat((head, values), 1)
        found = torch.empty_like(message)
        self._place = _place(what, call)
        work = self._launch(dist.all_to_all_single, found, message)
        # A rank that failed in an earlier call still comes to the reset.
        moment = FOR_GOOD if what == RESET else self.moment
        self._wait(work, values.device, timeout, moment)
        sent, received = torch.stack((message, found)).tolist()
        names = [(_place(*row[:2]),) for row in received]
        self.agree(("it",), (_place(what, call),), names)
        return [row[2:] for row in sent], [row[2:] for row in received]

    def _connect(self, device: torch.device, timeout: float) -> None:
        """Gathers a number. NCCL connects the ranks for gathers when the first one runs, and there
        the host would wait without a time limit for a rank that has ended. Here all have come."""
        mine = torch.zeros(1, dtype=torch.int64, device=device)
        found = list(mine.new_empty(self.size, 1).unbind())
        group = self.process_group()
        self._wait(dist.all_gather(found, mine, group=group, async_op=True), device, timeout)

    def read_all(self, what: int, values: list[int], device, timeout: float) -> list[list[int]]:
        """Like read(), but sends equal values to every rank. Returns the values of every rank."""
        mine = from_host(values, device).expand(self.size, -1)
        return self.read(what, mine, timeout)[1]

    def agree(self, names: tuple[str, ...], mine: tuple, of_ranks: list) -> None:
        """Raises if another rank has other values than this rank."""
        for rank, theirs in zip(self.health.ranks, of_ranks, strict=True):
            for name, own, other in zip(names, mine, theirs, strict=True):
                if own != other:
                    self._fail(
                        f"all ranks must make the same calls, but {name} is {other} on rank {rank} "
                        f"and {own} on rank {self.health.me}"
                    )


def _place(what: int, call: int) -> str:
    """Describes a read for an error message."""
    return READS[what] if what in NOT_NUMBERED else f"call {call} in its {READS[what]}"


def _polled(work: dist.Work, seconds: float) -> bool:
    until = time.monotonic() + seconds
    while not work.is_completed():
        if time.monotonic() > until:
            return False
        time.sleep(2e-5)
    return True


_groups: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()


def group_of(group) -> Group:
    """The Group of a process group, or of a DeviceMesh with one dimension. None: all ranks."""
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
