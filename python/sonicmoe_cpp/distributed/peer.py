"""Expert parallelism over peer memory: the GPUs of one host write rows into each other's memory
while products are computed. Python calls the exchange of include/sonicmoe/exchange.h."""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from .. import _autograd, _checks, _ops
from .._call import NEEDS, NO_FACTORS, Call
from .._names import PRECISION
from ._group import FORWARD, RESET, Group, group_of
from ._health import ExpertParallelError
from .buffers import DTYPES, PeerBuffers, Shape, not_in_a_graph
from .own_experts import ALL_NEEDS
from .transport import (
    COMPARED,
    AllToAll,
    Facts,
    Forward,
    Transport,
    chosen_precision,
    compared,
)

# The library's fault message ends with advice for C++ callers. ADVICE replaces it.
_ADVICE = re.compile(r"\. The outputs of this step are not valid; exchange_reset .*", re.DOTALL)
ADVICE = (
    "The outputs of this step are not valid. If all ranks still run, reset_exchange() on all of "
    "them makes the group usable again; else start the processes again from a checkpoint"
)
_RANK = re.compile(r"\brank (\d+)")
ROUTED = -1  # as a number of rows: exactly the rows that are routed to this rank
# The exchange requires all ranks to ask for the same gradients among dx and dweights. So each rank
# always asks for both.
_ALWAYS = NEEDS["x"] | NEEDS["weights"]


def served(x: Tensor) -> bool:
    return x.is_cuda and x.dtype in DTYPES


class Limits(NamedTuple):
    """A layer's limits for its transport."""

    timeout: float
    max_tokens: int | None = None  # the largest T of one rank in any call
    capacity: float | None = None  # rows for a rank's experts / (max_tokens * top_k)
    top_k: int = 0  # K of a module that routes by lists of pairs; 0: not known
    keep_rows: bool = False  # of x that other ranks have sent

    def check(self) -> None:
        _checks.number("timeout", self.timeout)
        if not 0 < self.timeout < float("inf"):
            raise ValueError(f"timeout is {self.timeout}, must be a positive number of seconds")
        if self.max_tokens is not None:
            _checks.integer("max_tokens", self.max_tokens)
            if self.max_tokens < 1:
                raise ValueError(f"max_tokens is {self.max_tokens}, must be at least 1")
        if self.capacity is not None:
            _checks.finite("capacity", self.capacity)
            if self.max_tokens is None:
                raise ValueError("capacity is given without max_tokens, must come with it")
            if self.capacity <= 0:
                raise ValueError(f"capacity is {self.capacity}, must be positive")

    def numbers(self) -> list[float]:
        """The limits as an argument of operators; of_numbers() converts them back."""
        limits = (self.max_tokens or 0, self.capacity or 0, self.top_k, self.keep_rows)
        return [float(self.timeout), *map(float, limits)]

    @classmethod
    def of_numbers(cls, numbers: list[float]) -> Limits:
        timeout, max_tokens, capacity, top_k, keep_rows = numbers
        limits = (int(max_tokens) or None, capacity or None, int(top_k), bool(keep_rows))
        return cls(timeout, *limits)


class PeerMemory(Transport):
    """Transports rows over peer memory, by one exchange for all layers of the group."""

    name = "peer"

    def __init__(self, group: Group, limits: Limits):
        self.group, self.limits = group, limits
        self.timeout = float(limits.timeout)

    def limits_as_numbers(self) -> list[float]:
        return self.limits.numbers()

    def refuse(self, call: Call) -> None:
        x = call.tensors.x
        self._refuse_tokens(x)
        if not served(x):
            kind = f"{_checks.names([x.dtype])} on {x.device.type}"
            raise NotImplementedError(
                f'transport "peer" serves {_checks.names(DTYPES)} on cuda, and x is {kind}'
            )

    def _refuse_tokens(self, x: Tensor) -> None:
        tokens, most = x.shape[0], self.limits.max_tokens
        if most is not None and tokens > most:
            raise ValueError(
                f"x has {tokens} tokens, must have at most max_tokens, which is {most}"
            )

    # ---- sizes -----------------------------------------------------------------------------------

    def needed(self, call: Call, layer: int, needs: int) -> tuple[Shape, int]:
        """The Shape that this call needs, and its precision: the same on all ranks. Without
        max_tokens, or with a list of pairs, the ranks exchange their sizes, and the host waits for
        them. With max_tokens "auto" supposes that every rank has so many tokens."""
        x, index, second, *_ = call.tensors
        tokens, hidden = x.shape
        most = self.limits.max_tokens
        if most is not None and second is None:
            slots, least = most * index.shape[1], call.fp8.least if call.fp8 else 0
            precision = chosen_precision(call.options.precision, [slots], [least])
            return Shape(most, most * max(1, index.shape[1]), hidden), precision
        not_in_a_graph("without max_tokens, or with a list of pairs, the host reads sizes")
        facts = Facts.of(call, layer, int(needs != 0), self.group.rank)
        mine = facts.compared()
        values = [*mine, tokens, index.numel(), facts.slots, facts.least]
        found = self.group.read_all(FORWARD, values, x.device, self.timeout)
        agreed = [compared(*row[:6]) for row in found]
        self.group.agree(COMPARED, compared(*mine), agreed)
        tokens = most or max(1, *(row[6] for row in found))
        slots, least = ([row[i] for row in found] for i in (8, 9))
        precision = chosen_precision(facts.precision, slots, least)
        return Shape(tokens, max(1, *(row[7] for row in found)), hidden), precision

    def rows(self, needed: Shape, by_pairs: bool) -> int:
        """The row capacity for this rank's experts, or ROUTED."""
        capacity, most, top_k = self.limits.capacity, self.limits.max_tokens, self.limits.top_k
        if capacity is None:
            not_in_a_graph("without capacity the host reads the number of rows")
            return ROUTED
        # A module's list also has the pairs of other ranks' tokens, as empty slots. So the mean
        # number of rows follows from max_tokens and top_k, not from the length of the list.
        mean = most * top_k if by_pairs and top_k else needed.max_slots
        return max(1, math.ceil(capacity * mean))

    def buffers(self, x: Tensor) -> PeerBuffers:
        if x.dtype not in self.group.memory:
            self.group.memory[x.dtype] = PeerBuffers(self.group)
        return self.group.memory[x.dtype]

    # ---- calls -----------------------------------------------------------------------------------

    def _opened(self, call: Call, layer: int, needs: int) -> tuple:
        """Opens an exchange for the call. Returns its number, the row capacity for this rank's
        experts, the call's options with the precision that the ranks choose, and codes."""
        x, second = call.tensors.x, call.tensors.second
        buffers = self.buffers(x)
        needed, precision = self.needed(call, layer, needs)
        codes = None if precision == PRECISION["tensors"] else call.fp8.codes()
        problem = buffers.open(needed, x, self.timeout)
        if problem is not None:
            raise RuntimeError(f'{problem}: use transport="all_to_all"')
        rows = self.rows(needed, second is not None)
        return buffers.number, rows, call.options._replace(precision=precision), codes

    def _kept(self, h, saved, kept_x, codes, number: int, options) -> tuple[tuple, tuple]:
        """Forward.kept and Forward.host."""
        rows = (kept_x,) if self.limits.keep_rows else ()
        return (h, saved, codes, *rows), (number, options.precision)

    def forward(self, call, layer, needs) -> Forward:
        """All parts as one operator, which takes less host time."""
        number, rows, options, codes = self._opened(call, layer, needs)
        factors, keep_rows = call.factors or NO_FACTORS, self.limits.keep_rows
        layer_of = (*call.tensors, *options)
        with self.faults():
            if not needs:
                given = (*layer_of, *factors, number, rows, codes)
                return Forward(_ops.run("exchange_inference", *given))
            given = (*layer_of, *call.main_gradients, *factors, number, rows, keep_rows, codes)
            out, *kept = _ops.run("exchange_forward", *given)
        return Forward(out, *self._kept(*kept, codes, number, options))

    def forward_parts(self, call, layer, needs):
        number, rows, options, codes = self._opened(call, layer, needs)
        x, factors = call.tensors.x, call.factors or NO_FACTORS
        with self.faults():
            given = (*call.tensors, *options, *factors, number, codes)
            out = _ops.run("exchange_begin_forward", *given)
        yield
        with self.faults():
            if needs:
                given = (x, number, rows, self.limits.keep_rows)
                kept = _ops.run("exchange_compute_forward", *given)
            else:
                _ops.run("exchange_compute_inference", x, number, rows)
        yield
        with self.faults():
            _ops.run("exchange_finish", x, number)
        return Forward(out, *self._kept(*kept, codes, number, options)) if needs else Forward(out)

    def _backward_arguments(self, dout, call: Call, given: Forward, needs: int) -> tuple:
        """What launch_gradients() of _autograd.py takes after its first argument."""
        h, saved, codes, *rows = given.kept
        number, precision = given.host
        options = call.options._replace(precision=precision)
        arguments = (dout, *call.tensors, *options, h, saved)
        last = (number, rows[0] if rows else None, codes)
        if call.main_gradients.g_down is None:
            last = (*(call.factors or NO_FACTORS), *last)
        return arguments, needs | _ALWAYS, call.main_gradients, last

    @staticmethod
    def _named(found: list, needs: int) -> dict:
        each = zip(ALL_NEEDS.items(), found, strict=False)  # main gradients come without factors
        return {name: gradient for (name, bit), gradient in each if needs & bit}

    def backward(self, dout, call, given, needs) -> dict:
        """All parts as one operator."""
        arguments = self._backward_arguments(dout, call, given, needs)
        with self.faults():
            found = _autograd.layer_gradients("exchange", *arguments)
        return self._named(found, needs)

    def backward_parts(self, dout, call, given, needs):
        arguments = self._backward_arguments(dout, call, given, needs)
        number, x = given.host[0], call.tensors.x
        with self.faults():
            found = _autograd.launch_gradients("exchange_begin", *arguments)
        yield
        with self.faults():
            _ops.run("exchange_compute_backward", x, number)
        yield
        with self.faults():
            _ops.run("exchange_finish", x, number)
        return self._named(_autograd.gathered(found, call.main_gradients), needs)

    # ---- faults ----------------------------------------------------------------------------------

    @contextlib.contextmanager
    def faults(self) -> Iterator[None]:
        """Turns a fault of the exchange into an ExpertParallelError. After any other error, except
        a refused argument, other ranks may be in the middle of a step that this rank has left:
        incrementing `exchanges` makes Group.guarded() mark the group as broken."""
        try:
            yield
        except (ValueError, TypeError, NotImplementedError):
            raise
        except BaseException as error:
            if isinstance(error, RuntimeError) and _ADVICE.search(str(error)):
                raise self._fault(str(error)) from None
            self.group.exchanges += 1
            raise

    def _fault(self, sentence: str) -> ExpertParallelError:
        health = self.group.health
        sentence = _ADVICE.sub("", sentence)
        # The exchange numbers ranks within the group, RankHealth within the whole job.
        sentence = _RANK.sub(lambda found: f"rank {health.ranks[int(found[1])]}", sentence)
        cause = health.problem(self.group.moment_before)
        sentence += f" ({cause})" if cause else ""
        health.failed(self.group.moment, sentence)
        at = f"expert parallelism, call {self.group.calls} on rank {health.me}"
        return ExpertParallelError(f"{at}: {sentence}. {ADVICE}")

    def check(self) -> None:
        with self.faults():
            for buffers in self.group.memory.values():
                buffers.check()


class Auto(PeerMemory):
    """Uses peer memory if it serves the group, else all-to-all. The ranks decide together, in the
    first call with CUDA tensors of each dtype of DTYPES. Other tensors use all-to-all."""

    name = "auto"

    def __init__(self, group: Group, limits: Limits):
        super().__init__(group, limits)
        self.by_rows = AllToAll(group, self.timeout, limits.keep_rows)

    def refuse(self, call: Call) -> None:
        self._refuse_tokens(call.tensors.x)

    def chosen(self, call, layer, needs) -> Transport:
        x = call.tensors.x
        if not served(x):
            return self.by_rows
        buffers = self.buffers(x)
        if not buffers.decided:
            buffers.open(self.needed(call, layer, needs)[0], x, self.timeout)
        return self if buffers.problem is None else self.by_rows


def _of_group(group, timeout: float) -> tuple[Group, PeerMemory]:
    found = group_of(group)
    return found, PeerMemory(found, Limits(timeout))


def check_exchange(group=None) -> None:
    """Raises ExpertParallelError if a step over peer memory has failed. Every call of a layer over
    peer memory does this check, too. The check does not wait for the device: call
    torch.cuda.synchronize() before it to find faults of the last step."""
    _of_group(group, 1.0)[1].check()


def reset_exchange(group=None, timeout: float = 600.0) -> None:
    """Makes a group usable again after a failed step over peer memory (a rank got more rows than
    its capacity, or came too late). All ranks must still run, and all must call it. The host waits
    for the device, and at most `timeout` seconds for the other ranks. If a rank does not come in
    this time, raises ExpertParallelError."""
    found, _ = _of_group(group, timeout)
    found.step = None
    for buffers in found.memory.values():
        if buffers.like is None:
            continue
        device = buffers.like.device
        torch.cuda.synchronize(device)
        with found.call():
            calls = found.read_all(RESET, [found.calls], device, timeout)
            # A fault may end a different call on each rank. From here on all ranks have the same
            # number of calls again.
            found.calls = max(row[0] for row in calls)
            buffers.reset()
            found.read_all(RESET, [found.calls], device, timeout)
