"""Expert parallelism: the experts of a layer divided among processes (docs/distributed.md)."""

from . import _compiled as _compiled
from ._peers import ExpertParallelError
from .clip import clip_grad_norm_
from .layer import moe_expert_parallel, moe_pairs_expert_parallel
from .module import ExpertParallelMoE

__all__ = [
    "ExpertParallelError",
    "ExpertParallelMoE",
    "clip_grad_norm_",
    "moe_expert_parallel",
    "moe_pairs_expert_parallel",
]
