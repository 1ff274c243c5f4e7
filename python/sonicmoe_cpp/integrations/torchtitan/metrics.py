"""Adds the load of the experts to torchtitan 0.3's metrics."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchtitan.components.metrics import MetricsProcessor
from torchtitan.components.optimizer import register_moe_load_balancing_hook
from torchtitan.tools.logging import logger

from .._recognise import local


class ExpertLoad:
    """Tokens by layer and expert since the last take(). collect() runs before every optimizer step,
    because torchtitan resets its own counts in the step."""

    def __init__(self, model_parts: list[nn.Module]):
        layers = [block for part in model_parts for block in part.layers.values()]
        self.layers = [block.moe for block in layers if block.moe_enabled]
        self.balanced = [moe.load_balance_coeff is not None for moe in self.layers]
        self.counts: Tensor | None = None

    @torch.no_grad()
    def collect(self) -> None:
        now = torch.stack([local(moe.tokens_per_expert_E) for moe in self.layers])
        self.counts = now.clone() if self.counts is None else self.counts + now
        for moe, balanced in zip(self.layers, self.balanced, strict=True):
            if not balanced:  # otherwise torchtitan still needs the counts, and resets them itself
                local(moe.tokens_per_expert_E).zero_()

    def take(self, mesh) -> Tensor:
        """(layers, E): the tokens of each expert divided by the mean of its layer."""
        counts, self.counts = self.counts, None
        if mesh is not None:
            dist.all_reduce(counts, group=mesh.get_group())
        return counts / counts.mean(-1, keepdim=True).clamp(min=1)


def register_hooks(optimizers, model_parts, parallel_dims) -> None:
    """The post_optimizer_build_fn of a model. Registers two hooks of the optimizer's step: one
    collects the load of the experts, the next is torchtitan's load balancing."""
    optimizers.expert_load = load = ExpertLoad(model_parts)
    optimizers.register_step_pre_hook(lambda *arguments, **keywords: load.collect())
    register_moe_load_balancing_hook(optimizers, model_parts, parallel_dims)


class SonicMetrics(MetricsProcessor):
    """Adds experts/max_load/LAYER: the largest number of tokens of an expert since the last report,
    divided by the mean of the layer; LAYER counts layers with MoE from 0. experts/max_load is the
    maximum over layers, experts/min_load the minimum over layers of the smallest number divided by
    the mean."""

    @dataclass(kw_only=True, slots=True)
    class Config(MetricsProcessor.Config):
        pass

    def log(
        self,
        step: int,
        global_avg_loss: float,
        global_max_loss: float,
        grad_norm: float,
        extra_metrics: dict | None = None,
    ) -> None:
        extra = dict(extra_metrics or {})
        load = getattr(self.optimizers, "expert_load", None)
        if load is not None and load.counts is not None:
            share = load.take(self.parallel_dims.get_optional_mesh("loss")).cpu()
            most, least = share.amax(-1), share.amin(-1)
            extra["experts/max_load"] = most.max().item()
            extra["experts/min_load"] = least.min().item()
            for layer, value in enumerate(most.tolist()):
                extra[f"experts/max_load/{layer}"] = value
            logger.info(
                f"step: {step:2}  experts' load over the mean: at most "
                f"{extra['experts/max_load']:.2f}, at least {extra['experts/min_load']:.2f}"
            )
        super().log(step, global_avg_loss, global_max_loss, grad_norm, extra)
