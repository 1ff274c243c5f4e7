"""How rows travel between the ranks of expert parallelism.

A token's row goes to a rank at most once, however many of the token's experts live there. The rank
sends one row back, the sum over its experts, and the rows of a token are added in the order of the
ranks. With D the matrix of zeros and ones that takes tokens to the rows sent:

    dispatch = D      x -> rows, and in backward dO -> rows
    combine  = D^T    rows -> O, and in backward dX of the rows -> dX
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import NamedTuple

import torch
from torch import Tensor

from .._checks import names
from .._ops import score_dtype
from ._group import BACKWARD, FORWARD, Group, from_host

TRANSPORTS = ("auto", "all_to_all")
DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
# What ranks compare in every forward.
COMPARED = ("the layer", "d", "the experts of a rank", "the dtype", "the graph for gradients")


class Routes(NamedTuple):
    """What goes where in one call. W ranks; rows and pairs sent lie by the rank that they go to,
    received ones by the rank that they come from; within a rank, by token."""

    sent_rows: list[int]  # (W,) rows that each rank gets from here
    received_rows: list[int]
    sent_pairs: list[int]
    received_pairs: list[int]
    needs: int  # what any rank needs a gradient of, as bits of _ops.NEEDS
    call: int
    token: Tensor  # (rows sent,) int64: the token of each
    slot: Tensor  # (pairs sent,) int64: the slot of each in the caller's list
    row: Tensor  # (pairs received,) int32: the row received that each multiplies
    expert: Tensor  # (pairs received,) int32: its expert, counted from this rank's first


class Facts(NamedTuple):
    """What ranks must have in common, and what this one needs a gradient of."""

    layer: int  # its number in the model, 0 where it has none
    experts: int  # of each rank
    tokens: int
    hidden: int
    dtype: torch.dtype
    needs: int


class Transport(ABC):
    """Moves rows and routing weights between the ranks of `group`.

    Results must not depend on the transport, nor on what arrives first: the layer built on it is
    deterministic and batch-invariant.
    """

    group: Group

    @abstractmethod
    def routes(self, token: Tensor, expert: Tensor, facts: Facts) -> Routes:
        """Begins a call: ranks tell each other how much they send. token (C,) and expert (C,),
        among all experts, are the caller's pairs; a token's stand in the order of their sum."""

    @abstractmethod
    def begin_backward(self, routes: Routes) -> None:
        """Called once before the exchanges of a backward."""

    @abstractmethod
    def dispatch(self, x: Tensor, routes: Routes) -> Tensor:
        """The rows received (sum of received_rows, d), from x (T, d) of all ranks."""

    @abstractmethod
    def combine(self, rows: Tensor, routes: Routes, tokens: int) -> Tensor:
        """(T, d) from rows as dispatch() gave them: their sum by token in fp32 (fp64 for fp64), in
        the order of the ranks, rounded to the dtype."""

    @abstractmethod
    def dispatch_weights(self, weights: Tensor, routes: Routes) -> Tensor:
        """The weights of the pairs received, from the weights (C,) of all ranks' lists."""

    @abstractmethod
    def return_weights(self, gradients: Tensor, routes: Routes, slots: int) -> Tensor:
        """(C,) gradients of the caller's weights; 0 for a pair that went nowhere."""


def _compared(layer, hidden, experts, dtype, needs) -> tuple:
    """The values of COMPARED."""
    recorded = "recorded" if needs else "not recorded"
    return layer, hidden, experts, names([DTYPES[dtype]]), recorded


def _starts(counts: list[int]) -> list[int]:
    """Where the rows of each rank begin."""
    begins = [0]
    for count in counts[:-1]:
        begins.append(begins[-1] + count)
    return begins


class AllToAll(Transport):
    """By torch.distributed's all-to-all: NCCL on GPUs, gloo on CPUs.

    The host reads the numbers of rows once a call, on CUDA after all work queued before. Nothing
    is hidden: products begin when all rows are there.
    """

    def __init__(self, group: Group, timeout: float):
        self.group, self.timeout = group, timeout

    def __deepcopy__(self, _memo) -> AllToAll:
        return self

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
        numbers = self.group.all_to_all(numbers, sent[1], received[1], self.timeout)
        source = received_start.repeat_interleave(pairs, output_size=sum(received[1]))
        row, local = numbers.unbind(1)
        row = row + source.int()
        return Routes(
            *(sent[0], received[0], sent[1], received[1], received[2], self.group.calls),
            *(of_row, slot, row, local.contiguous()),
        )

    def _agree(self, counts: Tensor, facts: Facts) -> tuple[tuple, tuple]:
        """(rows, pairs) sent and (rows, pairs, what any rank needs) received."""
        mine = (facts.layer, facts.hidden, facts.experts, DTYPES.index(facts.dtype), facts.needs)
        head = from_host(mine, counts.device).expand(self.group.size, -1)
        sent, received = self.group.read(FORWARD, torch.cat((counts, head), 1), self.timeout)
        of_ranks = [_compared(*row[2:7]) for row in received]
        self.group.agree(COMPARED, _compared(*mine), of_ranks)
        needs = 0
        for row in received:
            needs |= row[6]
        sent_rows, sent_pairs = ([row[i] for row in sent] for i in (0, 1))
        received_rows, received_pairs = ([row[i] for row in received] for i in (0, 1))
        return (sent_rows, sent_pairs), (received_rows, received_pairs, needs)

    def begin_backward(self, routes: Routes) -> None:
        """On the CPU ranks compare which call it is; on CUDA the host would wait for the device."""
        if not routes.token.is_cuda:
            device = routes.token.device
            found = self.group.read_all(BACKWARD, [routes.call], device, self.timeout)
            of_ranks = [row[:1] for row in found]
            self.group.agree(("the call differentiated",), (routes.call,), of_ranks)

    def dispatch(self, x: Tensor, routes: Routes) -> Tensor:
        rows = x.index_select(0, routes.token)
        return self.group.all_to_all(rows, routes.sent_rows, routes.received_rows, self.timeout)

    def combine(self, rows: Tensor, routes: Routes, tokens: int) -> Tensor:
        back = self.group.all_to_all(rows, routes.received_rows, routes.sent_rows, self.timeout)
        total = back.new_zeros((tokens, back.shape[1]), dtype=score_dtype(back))
        for token, part in zip(
            routes.token.split(routes.sent_rows), back.split(routes.sent_rows), strict=True
        ):
            total.index_add_(0, token, part.to(total.dtype))
        return total.to(back.dtype)

    def dispatch_weights(self, weights: Tensor, routes: Routes) -> Tensor:
        sent = weights.index_select(0, routes.slot)
        return self.group.all_to_all(sent, routes.sent_pairs, routes.received_pairs, self.timeout)

    def return_weights(self, gradients: Tensor, routes: Routes, slots: int) -> Tensor:
        back = self.group.all_to_all(
            gradients, routes.received_pairs, routes.sent_pairs, self.timeout
        )
        found = back.new_zeros(slots)
        found[routes.slot] = back
        return found
