"""Expert parallelism: the experts of a layer divided among processes (docs/distributed.md)."""

from .. import _library

if _library.PROBLEM is not None:
    raise ImportError(_library.PROBLEM)

from . import _compiled as _compiled
from ._health import ExpertParallelError
from .clip import clip_grad_norm_
from .layer import moe_expert_parallel, moe_pairs_expert_parallel
from .module import ExpertParallelMoE
from .peer import check_exchange, reset_exchange

__all__ = [
    "ExpertParallelError",
    "ExpertParallelMoE",
    "check_exchange",
    "clip_grad_norm_",
    "moe_expert_parallel",
    "moe_pairs_expert_parallel",
    "reset_exchange",
]
