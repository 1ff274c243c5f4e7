"""The symmetric buffers and the exchanges that the layers of a group share."""

from __future__ import annotations

import warnings
from typing import NamedTuple

import torch
from torch import Tensor

from .. import _ops
from . import _memory
from ._group import CHOICE, Group

DTYPES = (torch.bfloat16, torch.float16)
GROWTH = 1.5  # a size of an exchange that is too small is multiplied at least by this factor
# The state of a rank, as a number that it sends to the other ranks.
OK, NO_EXCHANGE, NOT_REACHED, NO_MEMORY, NOT_MAPPED = range(5)
PROBLEMS = {
    NO_EXCHANGE: "has a library whose CUDA backend does not serve it",
    NOT_REACHED: "has a GPU that cannot access the others' memory",
    NO_MEMORY: "has not enough device memory for its buffer",
    NOT_MAPPED: "cannot map the others' buffers",
}
_LONGEST_MS = 1 << 32  # milliseconds; src/core/checks_exchange.cc refuses more
# The objects that keep the buffers of every exchange mapped. An exchange is never closed: other
# ranks and CUDA graphs may still write its memory when its group is gone.
_mapped: list = []


def is_capturing() -> bool:
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


def not_in_a_graph(what: str) -> None:
    if is_capturing():
        raise RuntimeError(
            f"{what}, which a CUDA graph cannot hold: give max_tokens and capacity, route by ids, "
            "and run one step before the capture"
        )


class Shape(NamedTuple):
    """The largest sizes of a step that an exchange can serve (ExchangeShape in exchange.h)."""

    max_tokens: int
    max_slots: int
    hidden: int

    def holds(self, other: Shape) -> bool:
        return all(have >= want for have, want in zip(self, other, strict=True))

    def grown(self, other: Shape) -> Shape:
        """A shape that holds both. A size that is too small grows at least by the factor GROWTH."""
        sizes = zip(self, other, strict=True)
        return Shape(
            *(max(want, int(GROWTH * have)) if want > have else have for have, want in sizes)
        )


class PeerBuffers:
    """The exchanges of a group for one dtype.

    The first call opens an exchange for its sizes; a call with larger sizes opens a larger one.
    Earlier exchanges stay open, because a backward uses the exchange of its forward. A call uses
    the smallest exchange that holds its sizes: copy engines send partial sums of as many tokens as
    the exchange has room for.
    """

    def __init__(self, group: Group):
        self.group = group
        self.decided = False
        self.problem: str | None = None  # why no exchange can be opened
        self.like: Tensor | None = None  # an empty tensor of the dtype and GPU
        self.way: str | None = None  # how the last buffers were mapped
        self.opened: dict[int, Shape] = {}  # the exchanges by number, each larger than those before
        self.number = -1  # of the exchange that the last open() has chosen

    def open(self, needed: Shape, x: Tensor, timeout: float) -> str | None:
        """Chooses the exchange for the shape `needed`, which is the same on all ranks. Opens one if
        none is large enough. If that fails, returns the reason."""
        for number, shape in self.opened.items():
            if shape.holds(needed):
                self.number = number
                return None
        if self.decided and self.problem is not None:
            return self.problem
        not_in_a_graph("the first call with such sizes opens an exchange")
        self.like = x.detach().new_empty((0,))
        largest = next(reversed(self.opened.values()), None)
        shape = needed if largest is None else largest.grown(needed)
        problem = self._open(shape, timeout)
        if problem is not None and not self.decided:
            self.problem = problem
        self.decided = True
        return problem

    def check(self) -> None:
        for number in self.opened:
            _ops.run("exchange_check", self.like, number)

    def reset(self) -> None:
        for number in self.opened:
            _ops.run("exchange_reset", self.like, number)

    # ---- opening ---------------------------------------------------------------------------------

    def _open(self, shape: Shape, timeout: float) -> str | None:
        """Opens an exchange of this shape by the first of _memory.WAYS that works. Returns None, or
        the reason why no exchange can be opened, which is the same on all ranks."""
        size, code = self._bytes(shape)
        facts = self._facts(code, timeout)
        first = next((rank for rank, row in enumerate(facts) if row[0] != OK), None)
        if first is not None:
            return self._sentence(first, facts[first][0])
        if len({row[1] for row in facts}) > 1:
            return "peer memory cannot be used: the ranks are not on one host"
        if len({row[2] for row in facts}) < len(facts):
            return "peer memory cannot be used: two ranks have the same GPU"
        reached = _memory.reaches(self.like.device, [row[2] for row in facts])
        problem = self._agreed(OK if reached else NOT_REACHED, timeout)
        if problem is not None:
            return problem
        for bit, way in enumerate(_memory.WAYS):
            if all(row[3] >> bit & 1 for row in facts):
                problem = self._open_by(way, shape, size, timeout)
                if problem is None:
                    return None
        return problem or "peer memory cannot be used: the ranks have no way to map it in common"

    def _bytes(self, shape: Shape) -> tuple[int, int]:
        """The bytes of a buffer for `shape`, and OK or the number of a problem."""
        try:
            return _ops.run("exchange_bytes", self.like, self.group.size, *shape), OK
        except NotImplementedError:
            return 0, NO_EXCHANGE

    def _facts(self, code: int, timeout: float) -> list[list[int]]:
        """[problem, host, GPU, bits of the available ways to map memory] of every rank."""
        device = self.like.device
        ways = sum(1 << bit for bit, way in enumerate(_memory.WAYS) if way.is_available())
        mine = [code, _memory.host_number(), _memory.gpu_number(device.index), ways]
        return self.group.read_all(CHOICE, mine, device, timeout)

    def _agreed(self, code: int, timeout: float) -> str | None:
        """Sends this rank's `code` to all ranks and waits for the codes of all ranks. Returns None,
        or a sentence about the first rank with a problem, which is the same on all ranks."""
        found = self.group.read_all(CHOICE, [code], self.like.device, timeout)
        for rank, (theirs, *_) in enumerate(found):
            if theirs != OK:
                return self._sentence(rank, theirs)
        return None

    def _sentence(self, rank: int, code: int) -> str:
        who = self.group.health.ranks[rank]
        return f"peer memory cannot be used: rank {who} {PROBLEMS[code]}"

    def _explain(self, way, error: Exception) -> None:
        """Warns of the error on this rank. The other ranks get only the number of the problem."""
        reason = f"{type(error).__name__}: {error}".splitlines()[0][:300]
        text = f"{way.name} cannot be used on rank {self.group.health.me}: {reason}"
        warnings.warn(text, RuntimeWarning, stacklevel=2)

    def _open_by(self, way, shape: Shape, size: int, timeout: float) -> str | None:
        """Allocates and maps the buffers, of `size` bytes, by one way, and opens the exchange.
        Returns as _open()."""
        device, memory, code = self.like.device, None, OK
        try:
            memory = way.allocate(size + _memory.ALIGNMENT, device)
        except RuntimeError as error:  # includes out of memory
            code = NO_MEMORY
            self._explain(way, error)
        problem = self._agreed(code, timeout)
        if problem is not None:
            return problem
        number = keeps = None
        try:
            with torch.cuda.device_of(memory):  # torch exchanges objects by the current GPU
                addresses, keeps = way.addresses(memory, self.group.process_group())
            addresses = _memory.aligned(addresses, memory.data_ptr())
            limit = min(max(1, round(1e3 * timeout)), _LONGEST_MS)
            number = _ops.run(
                "exchange_open",
                *(self.like, self.group.size, *shape),
                *(torch.tensor(addresses, device="cpu"), size, self.group.rank, limit, 0),
            )
        except (RuntimeError, ValueError, OSError) as error:
            code = NOT_MAPPED
            self._explain(way, error)
        # This is a barrier too: no step may begin before all ranks have opened the exchange.
        problem = self._agreed(code, timeout)
        if problem is None:
            self.way = way.name
            self.opened[number] = shape
            self.number = number
            _mapped.append((memory, keeps))
        return problem
