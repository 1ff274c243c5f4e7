"""Routing by top-k, token rounding and expert choice, and the router's losses."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from . import _autograd, _checks
from ._call import score_dtype
from ._checks import Facts
from ._names import ROUNDING, SCORE

SCORES = tuple(SCORE)
MODES = tuple(ROUNDING)


class Pairs(NamedTuple):
    """A list of (token, expert, weight), sorted by (expert, token). The rows of expert e are
    offsets[e]:offsets[e+1].

    The capacity C does not depend on the values, so it is known without waiting for the device.
    Rows from offsets[E] on are unused: token -1, expert E, weight 0.
    """

    token: Tensor  # (C,) int32
    expert: Tensor  # (C,) int32
    weight: Tensor  # (C,) fp32, fp64 for fp64 logits
    offsets: Tensor  # (E+1,) int64

    def trimmed(self) -> Pairs:
        """The pairs without the unused rows. No other routing function waits for the device."""
        used = int(self.offsets[-1])
        return Pairs(self.token[:used], self.expert[:used], self.weight[:used], self.offsets)


def _pairs(weight, token, expert, offsets) -> Pairs:
    """Pairs of an operator's results, of which the weight is the first."""
    return Pairs(token, expert, weight, offsets)


def _check_logits(logits: Facts | Tensor) -> None:
    _checks.dtype("logits", logits)
    _checks.supported(logits.device)
    _checks.shape("logits", logits, "(T, E)", (None, None))


@_checks.remembered
def _rule(logits: tuple, k, score, renormalize, scale, n_group, topk_group) -> tuple:
    """Checks k and the arguments after k of a routing operator, and returns them as the operator
    takes them. `logits` is a plain tuple of Facts, as in _checks.keys()."""
    logits = Facts(*logits)
    _check_logits(logits)
    _checks.integer("k", k)
    experts = logits.shape[1]
    if not 1 <= k <= experts:
        raise ValueError(f"k is {k}, must be from 1 to E = {experts}")
    _checks.number("scale", scale)
    _checks.one_of("score", score, SCORES)
    if (n_group is None) != (topk_group is None):
        raise ValueError("n_group and topk_group must be given together")
    if n_group is not None:
        _checks.integer("n_group", n_group)
        _checks.integer("topk_group", topk_group)
    return (k, SCORE[score], bool(renormalize), float(scale), n_group or 0, topk_group or 0)


def _router_options(logits, k, score, renormalize, bias, scale, n_group, topk_group) -> tuple:
    """The arguments that every routing operator takes, checked."""
    _checks.tensor("logits", logits)
    facts = (logits.dtype, logits.device, logits.shape)
    rule = _rule(facts, k, score, renormalize, scale, n_group, topk_group)
    if bias is not None:
        _checks.tensor("bias", bias)
        _checks.dtype("bias", bias, (torch.float32,))
        _checks.shape("bias", bias, "(E,)", (logits.shape[1],))
        _checks.on_device("bias", bias, logits)
        bias = bias.detach()
    return (logits, bias, *rule)


def route(
    logits: Tensor,
    k: int,
    *,
    score: str = "softmax_after_topk",
    renormalize: bool = False,
    bias: Tensor | None = None,
    scale: float = 1.0,
    n_group: int | None = None,
    topk_group: int | None = None,
) -> tuple[Tensor, Tensor]:
    """The k best experts of every token, best first: ids (T, k) int64 and weights (T, k) fp32 (fp64
    for fp64 logits).

    The weights are differentiable in logits (T, E). Of experts that rank equally, the lower id is
    chosen. If only -inf or NaN remain, a slot has id -1 and weight 0. `bias` (E,) fp32 changes only
    the selection; it needs score="sigmoid" or "sqrt_softplus", which is sqrt(softplus(logit)) as in
    DeepSeek-V4. Errors are as in moe(); CUDA takes E <= 1024, k <= 32.
    """
    options = _router_options(logits, k, score, renormalize, bias, scale, n_group, topk_group)
    weights, ids = _autograd.call("route", *options)
    return ids, weights


def token_round(
    logits: Tensor,
    k: int,
    *,
    tile: int = 128,
    mode: str = "nearest",
    seed: int | Tensor = 0,
    score: str = "softmax_after_topk",
    renormalize: bool = False,
    bias: Tensor | None = None,
    scale: float = 1.0,
    n_group: int | None = None,
    topk_group: int | None = None,
) -> Pairs:
    """Top-k, then the number of every expert's tokens rounded to a multiple of `tile`, or to T if
    rounding up would exceed T; for training.

    The pairs' weights are differentiable in logits. Only mode="stochastic" uses `seed`: an int from
    0 to 2^64 - 1, or an int64 tensor of one element in host memory. With a tensor, a new seed does
    not recompile a graph. Errors and limits are as in route().
    """
    options = _router_options(logits, k, score, renormalize, bias, scale, n_group, topk_group)
    _checks.integer("tile", tile)
    _checks.one_of("mode", mode, MODES)
    if not isinstance(seed, Tensor):
        seed = torch.full((), _checks.seed("seed", seed), dtype=torch.int64, device="cpu")
    return _pairs(*_autograd.call("token_round", *options, seed, tile, ROUNDING[mode]))


def expert_choice(logits: Tensor, capacity: int) -> Pairs:
    """Every expert takes its `capacity` best tokens (all if T is smaller), ranked by the softmax of
    each token's logits over the experts. C = E * min(capacity, T).

    A pair's weight is its softmax probability, which is differentiable in logits (T, E). Errors are
    as in moe(); CUDA takes E <= 1024.
    """
    _checks.tensor("logits", logits)
    _check_logits(logits)
    _checks.integer("capacity", capacity)
    return _pairs(*_autograd.call("expert_choice", logits, capacity))


def one_or_nan(logits: Tensor) -> Tensor:
    """(T, 1): NaN for a token that has a NaN among its logits, else 1; (1,) for a bias (E,). The
    outputs are multiplied by this factor, because routing treats a NaN as -inf and would hide it.
    """
    return logits.detach().amax(-1, keepdim=True).clamp(1, 1)


def counted(ids: Tensor, experts: int) -> Tensor:
    """(..., E): how often each expert occurs in the last dimension of `ids`, an int64 tensor; ids
    < 0 and ids >= E are not counted."""
    ids = ids.clamp(-1, experts)
    found = torch.zeros((*ids.shape[:-1], experts + 2), dtype=torch.int64, device=ids.device)
    found = found.scatter_add(-1, ids + 1, torch.ones_like(ids))
    return found[..., 1 : experts + 1]


def _log_score(values: Tensor, score: str) -> Tensor:
    """ln(score) of each logit, plus a constant for softmax; finite where the score underflows."""
    if score == "sigmoid":
        return F.logsigmoid(values)
    if score == "sqrt_softplus":  # below -40 it is half the logit to the last bit of fp64
        high = F.softplus(values.clamp(min=-40.0), threshold=40.0).log()
        return 0.5 * torch.where(values < -40.0, values, high)
    return values


def _loss_rows(logits: Tensor, score: str, padding: Tensor | None) -> tuple:
    """(real (T, 1), p (T, E), logsumexp^2 (T, 1)): `real` is 1, and 0 in padding, where the others
    are 0 too. p is the softmax of logits (T, E), or their scores over the sum; padding is (T, 1)
    bool."""
    values = logits.to(score_dtype(logits))
    real = values.new_ones((values.shape[0], 1))
    if padding is not None:  # first, so that a NaN in padding does not reach the gradients
        values, real = values.masked_fill(padding, 0.0), real.masked_fill(padding, 0.0)
    # As a softmax of logarithms, because small scores would underflow.
    p = _log_score(values, score).softmax(-1)
    return real, p * real, values.logsumexp(-1, keepdim=True).square() * real


def loss_sums(logits: Tensor, score: str, padding: Tensor | None) -> tuple:
    """Sums of _loss_rows() over the tokens: (number of tokens (), of p (E,), of logsumexp^2 ())."""
    real, p, z = _loss_rows(logits, score, padding)
    return real.sum(), p.sum(0), z.sum()


def sequence_sums(
    logits: Tensor, ids: Tensor, score: str, padding: Tensor | None, shape: tuple
) -> tuple:
    """Sums for sequence-wise balance (DeepSeek-V3): (number of sequences, their load-balancing
    losses, number of tokens, logsumexp^2), all (). `shape` (..., S) is the shape of the T tokens: S
    tokens are a sequence. A sequence that is all padding does not count."""
    real, p, z = _loss_rows(logits, score, padding)
    tokens = real.view(*shape, 1).sum(-2)
    means = p.view(*shape, p.shape[1]).sum(-2) / tokens.clamp(min=1)
    counts = counted(ids.view(*shape, ids.shape[1]).flatten(-2), p.shape[1])
    shares = counts / (tokens * ids.shape[1]).clamp(min=1)
    return (tokens > 0).sum(), p.shape[1] * (shares * means).sum(), real.sum(), z.sum()


def sequence_losses(
    logits: Tensor, ids: Tensor, score: str, padding: Tensor | None, shape: tuple
) -> tuple:
    """(load_balancing, z, tokens_per_expert) of sequence-wise balance; as sequence_sums()."""
    sequences, balance, tokens, z = sequence_sums(logits, ids, score, padding, shape)
    counts = counted(ids.flatten(), logits.shape[1])
    return balance / sequences.clamp(min=1), z / tokens.clamp(min=1), counts


def losses_of_sums(shares: Tensor, tokens: Tensor, p: Tensor, z: Tensor) -> tuple[Tensor, Tensor]:
    """(load_balancing, z) from the results of loss_sums(). shares (E,): the fraction of all rows
    that each expert has."""
    tokens = tokens.clamp(min=1)
    return shares.shape[0] * (shares * p / tokens).sum(), z / tokens


def plain_losses(logits: Tensor, shares: Tensor, score: str, padding: Tensor | None):
    """(load_balancing, z) in PyTorch, for two cases that the operator does not serve: padding, and
    rows that top-k did not choose."""
    return losses_of_sums(shares, *loss_sums(logits, score, padding))


def router_losses(
    logits: Tensor,
    ids: Tensor,
    *,
    score: str = "softmax_after_topk",
    padding: Tensor | None = None,
    sequences: int | None = None,
    **options,
) -> tuple[Tensor, Tensor, Tensor]:
    """(load_balancing, z, tokens_per_expert) for the ids (T, K) that route(logits, K, ...) gave.

    load_balancing = E * sum_e (count_e / (T*K)) * mean_t p[t, e], where p is the softmax over all
    experts. For score="sigmoid" and "sqrt_softplus" it is the score divided by the token's sum of
    scores, as in DeepSeek-V3. It is 1 for a balanced router.
    z = mean_t logsumexp(logits[t])^2. Both are () fp32 (fp64 for fp64 logits) and differentiable in
    logits. tokens_per_expert is (E,) int64. `options` are the other arguments of route(). An id < 0
    or >= E is an empty slot, which is not counted.

    transformers' load_balancing_loss_func divides the counts by T instead of T*K, so it is K times
    load_balancing: multiply its coefficient (router_aux_loss_coef) by K to use it here.

    padding (T,) bool: tokens that are not counted; their ids must be -1.
    sequences: S sequences of T/S consecutive tokens. load_balancing is then the mean of the
    sequences' own, as the sequence-wise loss of DeepSeek-V3; a sequence of padding alone does not
    count.
    """
    _checks.tensor("logits", logits)
    _checks.shape("logits", logits, "(T, E)", (None, None))
    _checks.tensor("ids", ids)
    _checks.dtype("ids", ids, (torch.int64,))
    _checks.shape("ids", ids, "(T, K)", (logits.shape[0], None))
    arguments = {"renormalize": False, "bias": None, "scale": 1.0, "n_group": None}
    arguments |= {"topk_group": None, "score": score} | options
    packed = _router_options(logits, ids.shape[1], **arguments)
    if sequences is not None:
        _checks.integer("sequences", sequences)
        if sequences < 1 or logits.shape[0] % sequences:
            raise ValueError(
                f"sequences is {sequences}, must be a positive divisor of T = {logits.shape[0]}"
            )
    if padding is not None:
        _checks.tensor("padding", padding)
        _checks.dtype("padding", padding, (torch.bool,))
        _checks.shape("padding", padding, "(T,)", (logits.shape[0],))
        padding = padding[:, None]
    if sequences is not None:
        shape = (sequences, logits.shape[0] // sequences)
        return sequence_losses(logits, ids, score, padding, shape)
    if padding is None:
        values, counts = _autograd.call("router_losses", ids, *packed)
        load_balancing, z = values.unbind()
        return load_balancing, z, counts
    counts = counted(ids.flatten(), logits.shape[1])
    slots = ((~padding).sum() * ids.shape[1]).clamp(min=1)
    return *plain_losses(logits, counts / slots, score, padding), counts
