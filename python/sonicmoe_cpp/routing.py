"""Who goes to which expert: top-k, token rounding, expert choice, and the router's losses."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from . import _checks, _ops
from ._checks import Facts
from ._names import ROUNDING, SCORE

SCORES = tuple(SCORE)
MODES = tuple(ROUNDING)


class Pairs(NamedTuple):
    """(token, expert, weight) rows sorted by (expert, token); rows of e: offsets[e]:offsets[e+1].

    The shape is a capacity C known without looking at the values. Rows at or past offsets[E] are
    unused: token -1, expert E, weight 0.
    """

    token: Tensor  # (C,) int32
    expert: Tensor  # (C,) int32
    weight: Tensor  # (C,) fp32, fp64 for fp64 logits
    offsets: Tensor  # (E+1,) int64

    def trimmed(self) -> Pairs:
        """Without the unused rows. The only call of this package that waits for the device."""
        used = int(self.offsets[-1])
        return Pairs(self.token[:used], self.expert[:used], self.weight[:used], self.offsets)


def _pairs(weight, token, expert, offsets) -> Pairs:
    """Pairs of an operator's results, which come with the weight first."""
    return Pairs(token, expert, weight, offsets)


def _check_logits(logits: Facts | Tensor) -> None:
    _checks.dtype("logits", logits)
    _checks.supported(logits.device)
    _checks.shape("logits", logits, "(T, E)", (None, None))


@_checks.remembered
def _rule(logits: tuple, k, score, renormalize, scale, n_group, topk_group) -> tuple:
    """k and what follows it among the arguments of a routing operator, checked; logits is a key."""
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
    """The k best experts of every token: ids (T, k) int64 and weights (T, k) fp32, best first.

    Differentiable in logits (T, E) through the weights. Ties go to the lower expert; a slot for
    which no expert is left (-inf, NaN) has id -1 and weight 0. `bias` (E,) fp32 takes part in the
    selection only, and with score="sigmoid" only.
    """
    options = _router_options(logits, k, score, renormalize, bias, scale, n_group, topk_group)
    weights, ids = _ops.route(*options)
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
    """Top-k, then every expert's tokens rounded to a multiple of `tile`; for training.

    Differentiable in logits through the pairs' weights. `seed` decides mode="stochastic" alone: an
    int, or an int64 tensor of one element in host memory (whose changes never recompile).
    """
    options = _router_options(logits, k, score, renormalize, bias, scale, n_group, topk_group)
    _checks.integer("tile", tile)
    _checks.one_of("mode", mode, MODES)
    if not isinstance(seed, Tensor):
        _checks.integer("seed", seed)
        seed = torch.full((), seed, dtype=torch.int64)
    return _pairs(*_ops.call("token_round", *options, seed, tile, ROUNDING[mode]))


def expert_choice(logits: Tensor, capacity: int) -> Pairs:
    """Every expert takes its `capacity` best tokens by softmax over the experts.

    The weight is that probability, differentiable in logits (T, E).
    """
    _checks.tensor("logits", logits)
    _check_logits(logits)
    _checks.integer("capacity", capacity)
    return _pairs(*_ops.call("expert_choice", logits, capacity))


def router_losses(logits: Tensor, ids: Tensor, **options) -> tuple[Tensor, Tensor, Tensor]:
    """(load_balancing, z, tokens_per_expert) of a routing by route(logits, k, **options)."""
    arguments = {"score": "softmax_after_topk", "renormalize": False, "bias": None, "scale": 1.0}
    arguments |= {"n_group": None, "topk_group": None} | options
    packed = _router_options(logits, ids.shape[1], **arguments)
    values, counts = _ops.call("router_losses", ids, *packed)
    load_balancing, z = values.unbind()
    return load_balancing, z, counts
