"""Expert parallelism: the experts of a layer divided among processes (docs/distributed.md)."""

from ._peers import ExpertParallelError
from .layer import moe_expert_parallel, moe_pairs_expert_parallel

__all__ = ["ExpertParallelError", "moe_expert_parallel", "moe_pairs_expert_parallel"]
