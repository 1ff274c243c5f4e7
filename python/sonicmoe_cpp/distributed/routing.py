"""Routing that depends on the tokens of all ranks: token rounding, expert choice, losses.

Token rounding and expert choice compare an expert's tokens over the whole group, as one process
does. So every rank gets the logits of all ranks, computes the whole list, and keeps the part of its
own tokens. If each rank rounded only its own tokens, an expert could have up to W partial tiles,
and the chosen rows would differ from the rows that one process chooses.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from .. import _ops
from .._call import score_dtype
from ..routing import Pairs, counted, loss_sums, losses_of_sums, sequence_sums
from ._group import ROUTING, Group


class AllTokens:
    """The number of tokens on each rank, and a number (a seed) that all ranks take from rank 0. The
    constructor waits for the other ranks."""

    def __init__(self, group: Group, tokens: int, number: int, device, timeout: float):
        self.group, self.timeout = group, timeout
        found = group.read_all(ROUTING, [tokens, number], device, timeout)
        self.tokens = [row[0] for row in found]
        self.number = found[0][1]
        self.total = sum(self.tokens)

    def pairs(self, logits: Tensor, rule: Callable[[Tensor], Pairs]) -> Pairs:
        """Computes rule(logits of all ranks) and makes the pairs of other ranks' tokens empty
        (token -1, expert E). Differentiable in this rank's logits."""
        size, rank = self.group.size, self.group.rank
        own, begin = self.tokens[rank], sum(self.tokens[:rank])
        copies = logits.detach().repeat(size, 1)
        everyone = self.group.send(copies, [own] * size, self.tokens, self.timeout)()
        before, _, after = everyone.split([begin, own, self.total - begin - own])
        return _own(rule(torch.cat((before, logits, after))), begin, logits)


def _own(pairs: Pairs, begin: int, logits: Tensor) -> Pairs:
    """Keeps this rank's part of `pairs`, which are of all ranks' tokens; this rank's tokens begin
    at `begin`. In the pairs of other ranks' tokens the token becomes -1 and the expert E."""
    here = (pairs.token >= begin) & (pairs.token < begin + logits.shape[0])
    return pairs._replace(
        token=torch.where(here, pairs.token - begin, -1),
        expert=torch.where(here, pairs.expert, logits.shape[1]),
    )


def _gathered(group: Group, values: Tensor, timeout: float) -> Tensor:
    """(W, ...) from every rank's values (...); as one operator in compiled code."""
    if torch.compiler.is_compiling():
        return _ops.ops.expert_parallel_all_gather(values.detach(), group.name, timeout)
    return group.gather_losses(values, timeout)


def pairs_of_equal_ranks(
    group: Group, logits: Tensor, rule: Callable[[Tensor], Pairs], timeout: float
) -> Pairs:
    """As AllTokens.pairs, for ranks that all have the same number of tokens. So the ranks need not
    exchange their sizes, and torch.compile sees one graph."""
    everyone = _gathered(group, logits, timeout)
    before, after = everyone[: group.rank].flatten(0, 1), everyone[group.rank + 1 :].flatten(0, 1)
    pairs = rule(torch.cat((before, logits, after)))
    return _own(pairs, group.rank * logits.shape[0], logits)


def _total(group: Group, mine: Tensor, timeout: float) -> Tensor:
    """The sum of the ranks' values. Its gradient is that of this rank's values."""
    total, *others = _gathered(group, mine, timeout).unbind()
    for other in others:
        total = total + other
    return total + (mine - mine.detach())


def group_sequence_losses(
    group: Group,
    logits: Tensor,
    ids: Tensor,
    score: str,
    padding: Tensor | None,
    shape: tuple,
    timeout: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """As group_losses() for sequence-wise balance: the mean over the sequences of all ranks.
    `shape` is the shape of this rank's tokens."""
    experts = logits.shape[1]
    sums = sequence_sums(logits, ids, score, padding, shape)
    counts = counted(ids.flatten(), experts)
    mine = torch.cat((counts.double(), torch.stack([t.double() for t in sums])))
    counts, (sequences, balance, tokens, z) = _total(group, mine, timeout).split([experts, 4])
    losses = balance / sequences.clamp(min=1), z / tokens.clamp(min=1)
    load_balancing, z = (t.to(score_dtype(logits)) for t in losses)
    return load_balancing, z, counts.detach().long()


def group_losses(
    group: Group,
    logits: Tensor,
    counts: Tensor,
    slots: int | None,
    score: str,
    padding: Tensor | None,
    timeout: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns (load_balancing, z, counts) over all ranks' tokens. The argument counts (E,) has the
    number of rows that this rank's tokens give to each expert. An expert's share is its fraction of
    all rows, which are `slots` rows a token, or the actual rows if `slots` is None.

    On each rank the gradient of a loss is taken with respect to this rank's logits. Together the
    ranks have the gradient of one process.
    """
    tokens, p, z = (t.double() for t in loss_sums(logits, score, padding))
    mine = torch.cat((counts.double(), tokens.view(1), p, z.view(1)))
    experts = logits.shape[1]
    counts, tokens, p, z = _total(group, mine, timeout).split([experts, 1, experts, 1])
    rows = counts.sum() if slots is None else tokens * slots
    shares = counts.detach() / rows.clamp(min=1)
    losses = losses_of_sums(shares, tokens, p, z)
    load_balancing, z = (t.reshape(()).to(score_dtype(logits)) for t in losses)
    return load_balancing, z, counts.detach().long()
