"""The functions of sonicmoe, computed by this library.

Weights are w1 (I or 2I, H, E) and w2 (H, I, E), views by stride of tensors (E, ...). Gate and up
rows alternate unless concat_layout is set. `stream_id` is ignored: work goes to torch's stream.
"""

from __future__ import annotations

import contextlib

import torch
import torch.nn.functional as F
from torch import Tensor

from .... import _checks
from ...._names import GATED
from ....layer import moe, moe_pairs
from ....routing import route
from ..count_cumsum import count_cumsum, frequency
from ..enums import ActivationType, activation, is_glu
from .utils import enable_quack_gemm, is_using_quack_gemm

__all__ = [
    "ActivationType",
    "count_cumsum",
    "enable_quack_gemm",
    "is_glu",
    "is_using_quack_gemm",
    "moe_TC_softmax_topk_layer",
    "moe_general_routing_inputs",
]


def _experts(x, w1, b1, w2, b2, kind, concat_layout) -> dict:
    """Weights and options as this library's layer takes them; x is (T, H)."""
    name, hidden = activation(kind), x.shape[-1]
    for what, value in (("w1", w1), ("w2", w2)):
        _checks.tensor(what, value)
    _checks.shape("w2", w2, "(H, I, E)", (hidden, None, None))
    _, width, experts = w2.shape
    rows, meaning = (2 * width, "2I") if name in GATED else (width, "I")
    _checks.shape("w1", w1, f"({meaning}, H, E)", (rows, hidden, experts))
    if (b1 is None) != (b2 is None):
        given, missing = ("b1", "b2") if b2 is None else ("b2", "b1")
        raise ValueError(f"{given} is given but {missing} is None, must be both or neither")
    return {
        "w_up": w1.permute(2, 0, 1),
        "w_down": w2.permute(2, 0, 1),
        "b_up": b1,
        "b_down": b2,
        "activation": name,
        "gate_layout": "concatenated" if concat_layout else "interleaved",
    }


@contextlib.contextmanager
def _as_sonicmoe(device: torch.device, is_inference_mode_enabled: bool):
    """Inside this context calls behave like sonicmoe's kernels: they ignore autocast, and in
    inference mode they keep nothing for backward."""
    with torch.autocast(device.type, enabled=False):
        if is_inference_mode_enabled:
            with torch.no_grad():
                yield
        else:
            yield


def moe_TC_softmax_topk_layer(
    x: Tensor,
    router_w: Tensor,
    w1: Tensor,
    b1: Tensor | None,
    w2: Tensor,
    b2: Tensor | None,
    K: int,
    stream_id: int | None = None,
    activation_type: ActivationType | str = ActivationType.SWIGLU,
    is_inference_mode_enabled: bool = False,
    is_softmax_over_topk: bool = True,
    norm_topk_probs: bool = False,
    concat_layout: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Router and experts: (o (T, H), router_logits (T, E), expert_frequency (E,) int32).

    is_softmax_over_topk=False takes the softmax over all experts before the choice; norm_topk_probs
    then makes the probabilities of the chosen experts sum to 1.
    """
    experts = _experts(x, w1, b1, w2, b2, activation_type, concat_layout)
    logits = F.linear(x, router_w)
    rule = {"score": "softmax_after_topk"}
    if not is_softmax_over_topk:
        rule = {"score": "softmax_before_topk", "renormalize": norm_topk_probs}
    with _as_sonicmoe(x.device, is_inference_mode_enabled):
        ids, weights = route(logits, K, **rule)
        out = moe(x, ids, weights, **experts)
    return out, logits, frequency(ids, router_w.shape[0])


def moe_general_routing_inputs(
    x: Tensor,
    router_scores: Tensor,
    token_indices: Tensor,
    expert_indices: Tensor,
    w1: Tensor,
    b1: Tensor | None,
    w2: Tensor,
    b2: Tensor | None,
    E: int,
    stream_id: int | None = None,
    activation_type: ActivationType | str = ActivationType.SWIGLU,
    is_inference_mode_enabled: bool = False,
    concat_layout: bool = False,
) -> tuple[Tensor, Tensor]:
    """The experts over (token, expert, score) lists: (o (T, H), expert_frequency (E,) int32).

    The lists may come in any order; entries whose expert is outside of [0, E) are skipped.
    """
    experts = _experts(x, w1, b1, w2, b2, activation_type, concat_layout)
    if w2.shape[2] != E:
        raise ValueError(f"E is {E}, must be the number of experts in w2 (H, I, E) = {w2.shape[2]}")
    pairs = (token_indices, expert_indices, router_scores)
    with _as_sonicmoe(x.device, is_inference_mode_enabled):
        out = moe_pairs(x, pairs, **experts)
    return out, frequency(expert_indices, E)
