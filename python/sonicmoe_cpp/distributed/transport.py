"""How the ranks of expert parallelism compute a layer together, and how rows travel between them.

A token's row is sent once to each rank that holds at least one of the token's experts. Each of
these ranks sends one row back, the sum over its experts. The token's rank adds these rows in the
order of the ranks. Let D be the 0/1 matrix that maps tokens to rows sent. Then

    dispatch = D      x -> rows, and in backward dO -> rows
    combine  = D^T    rows -> O, and in backward dX of the rows -> dX
"""

from __future__ import annotations

import functools
import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterable
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from .. import _checks
from .._call import NEEDS, Call, Options, Tensors, score_dtype
from .._checks import FLOATS
from .._names import ACTIVATION, FORM, LAYOUT, PRECISION
from . import own_experts
from ._group import BACKWARD, FORWARD, Group, from_host
from ._memory import number_of

TRANSPORTS = ("auto", "all_to_all", "peer")
# Names of the values that ranks compare in every forward; see compared().
COMPARED = (
    *("the layer", "d", "the experts of a rank", "the dtype", "the graph for gradients"),
    *("activation", "gate_layout", "n", "precision", "alpha or limit of activation"),
)


# A bit beside those of NEEDS: in backward this rank needs rows of x that it has not kept.
AGAIN = 1 << 40


class Routes(NamedTuple):
    """The rows and pairs that a call sends and receives, with W ranks. Sent rows and pairs are
    ordered by destination rank, received rows and pairs by source rank; within a rank they are
    ordered by token."""

    sent_rows: list[int]  # (W,) rows sent to each rank
    received_rows: list[int]  # (W,) rows received from each rank
    sent_pairs: list[int]  # (W,) pairs sent to each rank
    received_pairs: list[int]  # (W,) pairs received from each rank
    needs: int  # bits of NEEDS and AGAIN: what at least one rank needs
    call: int  # Group.calls
    precision: int  # of PRECISION: what the ranks have chosen
    token: Tensor  # (rows sent,) int64: the token of each row
    slot: Tensor  # (pairs sent,) int64: the position of each pair in the caller's list
    row: Tensor  # (pairs received,) int32: the received row of each pair
    expert: Tensor  # (pairs received,) int32: index among this rank's experts

    def tensors(self) -> tuple:
        return self[7:]

    def numbers(self) -> tuple:
        """The other fields, flattened to one tuple of int."""
        return (*itertools.chain(*self[:4]), *self[4:7])

    @classmethod
    def of(cls, numbers: tuple, tensors: tuple) -> Routes:
        *counts, needs, call, precision = numbers
        size = len(counts) // 4
        return cls(
            *(counts[i * size : (i + 1) * size] for i in range(4)), needs, call, precision, *tensors
        )


class Facts(NamedTuple):
    """The sizes of a call on this rank, and the gradients that this rank needs."""

    layer: int  # number of the layer in the model, 0 if it has none
    experts: int  # on each rank, E/W
    tokens: int  # T of this rank
    hidden: int
    dtype: torch.dtype
    needs: int  # bits of NEEDS and AGAIN
    style: int  # of style_of()
    precision: int  # of PRECISION, if the ranks choose fp8
    slots: int  # this rank's part of the row capacity of all ranks together
    least: int  # Fp8.least

    def compared(self) -> tuple:
        """The numbers of which compared() makes the values of COMPARED."""
        dtype = FLOATS.index(self.dtype)
        return self.layer, self.hidden, self.experts, dtype, self.needs, self.style

    @classmethod
    def of(cls, call: Call, layer: int, needs: int, rank: int) -> Facts:
        x, index = call.tensors.x, call.tensors.index
        experts, _, width = call.tensors.w_down.shape
        least, lists = (call.fp8.least, call.fp8.lists) if call.fp8 else (0, 1)
        slots, more = divmod(index.numel(), lists)
        style = style_of(call.options, width, least > 0)
        sizes = layer, experts, x.shape[0], x.shape[1], x.dtype
        return cls(*sizes, needs, style, call.options.precision, slots + (rank < more), least)


def chosen_precision(precision: int, slots: Iterable[int], least: Iterable[int]) -> int:
    """The precision that the ranks choose, as the layer of one process with all their experts and
    rows does. The ranks give `slots` and `least` of Facts."""
    return precision if sum(slots) >= sum(least) else PRECISION["tensors"]


class Forward(NamedTuple):
    """The result of a forward: its output and, if gradients are recorded, the state that backward
    needs in addition to the arguments."""

    out: Tensor
    kept: tuple = ()  # state in tensors
    host: tuple = ()  # state in int


Result = TypeVar("Result")
# A step in parts: begin runs to the first yield, compute to the second, finish to the end.
Parts = Generator[None, None, Result]


def finished(parts: Parts[Result]) -> Result:
    """Runs the parts of a step that are left, and returns its result."""
    while True:
        try:
            next(parts)
        except StopIteration as end:
            return end.value


class Transport(ABC):
    """Computes the layer together with the other ranks of `group`.

    The layer is deterministic and batch-invariant, so no result depends on the order in which rows
    arrive. Two transports may order an expert's rows differently. Then their weight gradients,
    which are sums over these rows, differ by rounding.
    """

    name: str  # one of TRANSPORTS
    group: Group
    timeout: float

    def limits_as_numbers(self) -> list[float]:
        """As Limits.numbers() of peer.py, for operators."""
        return [self.timeout, 0.0, 0.0, 0.0, 0.0]

    @abstractmethod
    def check(self) -> None:
        """Raises if an earlier step has failed, without waiting for the device."""

    def __deepcopy__(self, _memo) -> Transport:
        return self

    def __reduce__(self):
        raise TypeError(
            "an ExpertParallelMoE belongs to its group of processes and cannot be pickled: save "
            "its state_dict() instead"
        )

    def refuse(self, call: Call) -> None:  # noqa: B027
        """Raises if this transport does not serve the call. Called before the first exchange of a
        call, so that an argument that all ranks refuse does not break the group."""

    def chosen(self, call: Call, layer: int, needs: int) -> Transport:
        """The transport that serves a call like this: this transport, or the choice of "auto". All
        ranks call it at the same point of a forward."""
        return self

    @abstractmethod
    def forward_parts(self, call: Call, layer: int, needs: int) -> Parts[Forward]:
        """Computes the output for this rank's tokens. The call has the form "ids" or "pairs": this
        rank's tokens, expert ids in [0, E), and the weights of this rank's experts. `layer` is the
        layer's number in the model, and `needs` are the bits of the gradients that this rank
        needs. Begin sends rows of x, compute sends partial sums."""

    @abstractmethod
    def backward_parts(self, dout: Tensor, call: Call, given: Forward, needs: int) -> Parts[dict]:
        """The gradients by name, those in `needs`. A gradient that was added to a main gradient is
        None. `given` is the result of forward; `given.out` is not read. Begin sends rows of dO and
        x, compute sends dX."""

    def forward(self, call: Call, layer: int, needs: int) -> Forward:
        return finished(self.forward_parts(call, layer, needs))

    def backward(self, dout: Tensor, call: Call, given: Forward, needs: int) -> dict:
        return finished(self.backward_parts(dout, call, given, needs))


def as_pairs(tensors: Tensors) -> Tensors:
    """The tensors of the form "pairs" for those of "ids" or "pairs"."""
    if tensors.second is not None:
        return tensors
    index = tensors.index
    token = torch.arange(index.shape[0], device=index.device).unsqueeze(1).expand(index.shape)
    return tensors._replace(
        index=token.reshape(-1), second=index.reshape(-1), weights=tensors.weights.reshape(-1)
    )


def _of_rows(call: Call, rows: Tensor, routes: Routes, weights: Tensor) -> Call:
    """The call of the layer of one process on rows that this rank has received."""
    local = call.tensors._replace(x=rows, index=routes.row, second=routes.expert, weights=weights)
    options = call.options._replace(form=FORM["pairs"], precision=routes.precision)
    return call._replace(tensors=local, options=options)


class RowTransport(Transport):
    """Moves rows and routing weights between the ranks. Each rank runs the layer of one process on
    the rows that it has received."""

    keep_rows: bool  # see ExpertParallelMoE

    def forward_parts(self, call, layer, needs):
        for name, given in zip(own_experts.TENSORS, call.tensors[:4], strict=False):
            if given is not None:
                _checks.memory(name, given)
        x, token, expert, weights, *_ = as_pairs(call.tensors)
        if needs & own_experts.OF_X and not self.keep_rows:
            needs |= AGAIN
        routes = self.routes(token, expert, Facts.of(call, layer, needs, self.group.rank))
        codes = None if routes.precision == PRECISION["tensors"] else call.fp8.codes()
        come = self.dispatch(x, routes), self.dispatch_weights(weights, routes)
        yield
        rows, row_weights = (wait() for wait in come)
        del come  # it holds what was sent
        local = _of_rows(call, rows, routes, row_weights)
        if not routes.needs:
            sums = self.combine(own_experts.inference(local, codes), routes, x.shape[0])
            yield
            return Forward(sums())
        partial, h, saved = own_experts.forward(local, codes)
        sums = self.combine(partial, routes, x.shape[0])
        yield
        out = sums()
        kept = (h, saved, codes, row_weights, *routes.tensors())
        if needs & own_experts.OF_X and not routes.needs & AGAIN:
            kept = (*kept, rows)
        return Forward(out, kept, routes.numbers())

    def backward_parts(self, dout, call, given, needs):
        x, weights = call.tensors.x, call.tensors.weights
        h, saved, codes, row_weights, *rest = given.kept
        for kept in (x, row_weights, *rest):  # read by torch; the library checks the other ones
            _checks.memory("a tensor kept for backward", kept)
        routes = Routes.of(given.host, rest[:4])
        self.begin_backward(routes)
        come = [self.dispatch(dout, routes)]
        if routes.needs & AGAIN:
            come.append(self.dispatch(x, routes))
        yield
        drows, *again = (wait() for wait in come)
        del come
        rows = again[0] if again else rest[4] if len(rest) > 4 else torch.empty_like(drows)
        local = _of_rows(call, rows, routes, row_weights)
        # If any rank needs the gradient of x or of the routing weights, all ranks compute it: the
        # parts of a rank's gradient come from the other ranks.
        shared = routes.needs & (NEEDS["x"] | NEEDS["weights"])
        gradients = own_experts.backward(drows, local, needs | shared, (h, saved), codes)
        come = {}
        if shared & NEEDS["x"]:
            come["x"] = self.combine(gradients["x"], routes, x.shape[0])
        if shared & NEEDS["weights"]:
            come["weights"] = self.return_weights(gradients["weights"], routes, weights.numel())
        yield
        gradients |= {name: wait() for name, wait in come.items()}
        if shared & NEEDS["weights"]:
            gradients["weights"] = gradients["weights"].view(weights.shape)
        wanted = [name for name, bit in own_experts.ALL_NEEDS.items() if needs & bit]
        return {name: gradients[name] for name in wanted}

    @abstractmethod
    def routes(self, token: Tensor, expert: Tensor, facts: Facts) -> Routes:
        """Begins a call: the ranks exchange the numbers of rows and pairs that they send. The
        caller's pairs are token (C,) and expert (C,), with experts in [0, E). A token's pairs are
        summed in the order of the list."""

    @abstractmethod
    def begin_backward(self, routes: Routes) -> None:
        """Called once in a backward, before dispatch()."""

    # These four begin to send, and return a function that waits for what comes and returns it.

    @abstractmethod
    def dispatch(self, x: Tensor, routes: Routes) -> Callable[[], Tensor]:
        """Sends rows of x (T, d). Gives the rows received, (sum of received_rows, d)."""

    @abstractmethod
    def combine(self, rows: Tensor, routes: Routes, tokens: int) -> Callable[[], Tensor]:
        """Sends `rows`, in the order of dispatch()'s result, back to the ranks of their tokens.
        Gives (T, d): for each token the sum of its rows, in fp32 (fp64 for fp64) and in the order
        of the ranks, rounded to the dtype."""

    @abstractmethod
    def dispatch_weights(self, weights: Tensor, routes: Routes) -> Callable[[], Tensor]:
        """Sends the weights (C,) of the caller's pairs. Gives the weights of received pairs."""

    @abstractmethod
    def return_weights(self, gradients: Tensor, routes: Routes, slots: int) -> Callable[[], Tensor]:
        """Sends the gradients of received pairs back. Gives the gradients (C,) of the caller's
        weights, 0 for a pair that was not sent."""


@functools.cache
def style_of(options: Options, width: int, auto: bool) -> int:
    """The options and n as a number of 63 bits: activation (8), gate layout (2), n (31), precision
    (2), whether it is "auto" (1), and a hash (19) of the activation's parameters."""
    parameters = number_of(f"{float(options.alpha)} {float(options.limit)}") % 2**19
    precision = options.precision | auto << 2
    layer = options.activation | options.gate_layout << 8 | width << 10
    return layer | precision << 41 | parameters << 44


_PRECISIONS = {
    1: '"fp8"',
    2: '"fp8" with keep_h="bf16"',
    5: '"auto"',
    6: '"auto" with keep_h="bf16"',
}


def compared(layer, hidden, experts, dtype, needs, style) -> tuple:
    """The values of COMPARED; dtype is an index of FLOATS."""
    recorded = "recorded" if needs else "not recorded"
    activation = [name for name, number in ACTIVATION.items() if number == style & 0xFF]
    layout = [name for name, number in LAYOUT.items() if number == style >> 8 & 3]
    width, precision = style >> 10 & 0x7FFFFFFF, _PRECISIONS.get(style >> 41 & 7)
    of_style = *activation, *layout, width, precision, f"of hash {style >> 44}"
    return layer, hidden, experts, _checks.names([FLOATS[dtype]]), recorded, *of_style


def _starts(counts: list[int]) -> list[int]:
    """The index at which the rows of each rank begin."""
    begins = [0]
    for count in counts[:-1]:
        begins.append(begins[-1] + count)
    return begins


class AllToAll(RowTransport):
    """Sends rows by torch.distributed's all-to-all: NCCL on GPUs, gloo on CPUs.

    In each forward the host reads the numbers of rows; on CUDA it waits until all work queued
    before has run. Communication is not overlapped: products begin when all rows have arrived.
    """

    name = "all_to_all"

    def __init__(self, group: Group, timeout: float, keep_rows: bool = False):
        self.group, self.timeout, self.keep_rows = group, timeout, keep_rows

    def limits_as_numbers(self) -> list[float]:
        return [*super().limits_as_numbers()[:-1], float(self.keep_rows)]

    def check(self) -> None:
        """Does nothing: a failed step raises an error itself, at the latest in the next forward."""

    def routes(self, token: Tensor, expert: Tensor, facts: Facts) -> Routes:
        ranks, tokens = self.group.size, facts.tokens
        token, expert = token.long(), expert.long()
        used = (expert >= 0) & (expert < ranks * facts.experts) & (token >= 0) & (token < tokens)
        owner = torch.div(expert, facts.experts, rounding_mode="floor")
        key = torch.where(used, owner * tokens + token, ranks * tokens)
        key, slot = key.sort(stable=True)
        first = torch.ones_like(key, dtype=torch.bool)
        torch.ne(key[1:], key[:-1], out=first[1:])
        rows = torch.nn.functional.pad((first & (key < ranks * tokens)).cumsum(0), (1, 0))
        bounds = torch.arange(ranks + 1, device=key.device) * tokens
        ends = torch.searchsorted(key, bounds)
        counts = torch.stack((rows[ends].diff(), ends.diff()), 1)
        sent, received = self._agree(counts, facts)

        used = sum(sent[1])
        key, slot, rows = key[:used], slot[:used], rows[1:]
        target = torch.div(key, max(tokens, 1), rounding_mode="floor")
        row = rows[:used] - 1
        of_row = token.new_empty(sum(sent[0]))
        of_row[row] = key - target * tokens
        layout = [_starts(sent[0]), _starts(received[0]), received[1]]
        sent_start, received_start, pairs = from_host(layout, key.device)
        local = expert[slot] - target * facts.experts
        numbers = torch.stack((row - sent_start[target], local), 1).int()
        numbers = self.group.send(numbers, sent[1], received[1], self.timeout)()
        source = received_start.repeat_interleave(pairs, output_size=sum(received[1]))
        row, local = numbers.unbind(1)
        row = row + source.int()
        return Routes(
            *(sent[0], received[0], sent[1], received[1]),
            *(received[2], self.group.calls, received[3]),
            *(of_row, slot, row, local.contiguous()),
        )

    def _agree(self, counts: Tensor, facts: Facts) -> tuple[tuple, tuple]:
        """Exchanges `counts` and compares `facts`. Returns the numbers (rows, pairs) sent to each
        rank, and (rows, pairs, needs, precision): the numbers received from each rank, the bits of
        the gradients that at least one rank needs, and the precision that the ranks choose."""
        mine = facts.compared()
        numbers = (*mine, facts.slots, facts.least)
        head = from_host(numbers, counts.device).expand(self.group.size, -1)
        sent, received = self.group.read(FORWARD, torch.cat((counts, head), 1), self.timeout)
        of_ranks = [compared(*row[2:8]) for row in received]
        self.group.agree(COMPARED, compared(*mine), of_ranks)
        needs = 0
        for row in received:
            needs |= row[6]
        sent_rows, sent_pairs = ([row[i] for row in sent] for i in (0, 1))
        received_rows, received_pairs = ([row[i] for row in received] for i in (0, 1))
        slots, least = ([row[i] for row in received] for i in (8, 9))
        precision = chosen_precision(facts.precision, slots, least)
        return (sent_rows, sent_pairs), (received_rows, received_pairs, needs, precision)

    def begin_backward(self, routes: Routes) -> None:
        """On the CPU the ranks check that they differentiate the same call. On CUDA they do not,
        because the host would have to wait for the device."""
        if not routes.token.is_cuda:
            device = routes.token.device
            found = self.group.read_all(BACKWARD, [routes.call], device, self.timeout)
            of_ranks = [row[:1] for row in found]
            self.group.agree(("the call differentiated",), (routes.call,), of_ranks)

    def dispatch(self, x: Tensor, routes: Routes) -> Callable[[], Tensor]:
        rows = x.index_select(0, routes.token)
        return self.group.send(rows, routes.sent_rows, routes.received_rows, self.timeout)

    def combine(self, rows: Tensor, routes: Routes, tokens: int) -> Callable[[], Tensor]:
        come = self.group.send(rows, routes.received_rows, routes.sent_rows, self.timeout)

        def total() -> Tensor:
            back, sizes = come(), routes.sent_rows
            total = back.new_zeros((tokens, back.shape[1]), dtype=score_dtype(back))
            for token, part in zip(routes.token.split(sizes), back.split(sizes), strict=True):
                total.index_add_(0, token, part.to(total.dtype))
            return total.to(back.dtype)

        return total

    def dispatch_weights(self, weights: Tensor, routes: Routes) -> Callable[[], Tensor]:
        sent = weights.index_select(0, routes.slot)
        return self.group.send(sent, routes.sent_pairs, routes.received_pairs, self.timeout)

    def return_weights(self, gradients: Tensor, routes: Routes, slots: int) -> Callable[[], Tensor]:
        sizes = routes.received_pairs, routes.sent_pairs
        come = self.group.send(gradients, *sizes, self.timeout)

        def found() -> Tensor:
            back = come()
            found = back.new_zeros(slots)
            found[routes.slot] = back
            return found

        return found
