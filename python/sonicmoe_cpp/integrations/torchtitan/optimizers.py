"""An override for a torchtitan 0.3 job: under FSDP2, experts in fp8 keep their quantised weights
between micro-batches.

    --override.imports sonicmoe_cpp.integrations.torchtitan.optimizers.share_fp8_weights ...

It replaces the container of optimizers, because torchtitan's trainer builds this container after
fully_shard and gives it the model. It is not in overrides.py: with a torch older than torchtitan
requires, torchtitan's layers can be imported, but its trainer cannot.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from .._release import needs

with needs("torchtitan.optimizers", "torchtitan", "0.3"):
    from torchtitan.components.optimizer import OptimizersContainer
    from torchtitan.config.override import derive, override

from ... import fp8


class SonicOptimizers(OptimizersContainer):
    """torchtitan's optimizers. When they are built, it calls share_fp8_weights() for the model."""

    @dataclass(kw_only=True, slots=True)
    class Config(OptimizersContainer.Config):
        pass

    def __init__(self, config: Config, *, model_parts: list[nn.Module]):
        super().__init__(config, model_parts=model_parts)
        for part in model_parts:
            fp8.share_fp8_weights(part)


@override(target=OptimizersContainer.Config, description="keeps quantised weights under FSDP2")
def share_fp8_weights(config: OptimizersContainer.Config) -> OptimizersContainer.Config:
    if type(config) is not OptimizersContainer.Config:
        raise NotImplementedError(
            f"share_fp8_weights replaces OptimizersContainer.Config, not "
            f"{type(config).__qualname__}: call sonicmoe_cpp.share_fp8_weights(model) after "
            "fully_shard"
        )
    return derive(config, SonicOptimizers.Config)
