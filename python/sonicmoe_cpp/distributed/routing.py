"""Routing that looks at the tokens of all ranks: token rounding, expert choice, losses.

Token rounding and expert choice rank an expert's tokens among those of the whole group, as one
process would. So every rank gets the logits of all of them and computes the whole list; it keeps
its own tokens' part. Ranks that rounded on their own would add up to W tiles of padding an expert
instead of one, and would choose other rows than one process.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from .. import _ops
from ..routing import Pairs, loss_sums, losses_of_sums
from ._group import ROUTING, Group


class AllTokens:
    """The tokens of all ranks: how many each has, and a number that rank 0 gives. Making it, the
    host waits for the other ranks."""

    def __init__(self, group: Group, tokens: int, number: int, device, timeout: float):
        self.group, self.timeout = group, timeout
        found = group.read_all(ROUTING, [tokens, number], device, timeout)
        self.tokens = [row[0] for row in found]
        self.number = found[0][1]
        self.total = sum(self.tokens)

    def pairs(self, logits: Tensor, rule: Callable[[Tensor], Pairs]) -> Pairs:
        """This rank's part of rule(logits of all ranks), in which other tokens are -1 and their
        expert E; differentiable in this rank's logits."""
        size, rank = self.group.size, self.group.rank
        own, begin = self.tokens[rank], sum(self.tokens[:rank])
        copies = logits.detach().repeat(size, 1)
        everyone = self.group.all_to_all(copies, [own] * size, self.tokens, self.timeout)
        before, _, after = everyone.split([begin, own, self.total - begin - own])
        pairs = rule(torch.cat((before, logits, after)))
        here = (pairs.token >= begin) & (pairs.token < begin + own)
        return pairs._replace(
            token=torch.where(here, pairs.token - begin, -1),
            expert=torch.where(here, pairs.expert, logits.shape[1]),
        )


def group_losses(
    group: Group,
    logits: Tensor,
    counts: Tensor,
    slots: int | None,
    score: str,
    padding: Tensor | None,
    timeout: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """(load_balancing, z, counts) over all ranks' tokens. counts (E,) are this rank's rows by
    expert; shares are parts of `slots` times the tokens, or (None) of the rows.

    The gradient on a rank is that of the one loss in this rank's logits: ranks' gradients add up
    to those of one process.
    """
    tokens, p, z = (t.double() for t in loss_sums(logits, score, padding))
    mine = torch.cat((counts.double(), tokens.view(1), p, z.view(1)))
    if torch.compiler.is_compiling():
        of_ranks = _ops.ops.expert_parallel_all_gather(mine.detach(), group.name, timeout)
    else:
        of_ranks = group.all_gather(mine, timeout)
    total = of_ranks[0]
    for other in of_ranks[1:]:
        total = total + other
    total = total + (mine - mine.detach())
    experts = logits.shape[1]
    counts, tokens, p, z = total.split([experts, 1, experts, 1])
    rows = counts.sum() if slots is None else tokens * slots
    shares = counts.detach() / rows.clamp(min=1)
    losses = losses_of_sums(shares, tokens, p, z)
    load_balancing, z = (t.reshape(()).to(_ops.score_dtype(logits)) for t in losses)
    return load_balancing, z, counts.detach().long()
