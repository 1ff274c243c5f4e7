"""Overrides for a torchtitan 0.3 job: name them in override.imports.

    --override.imports sonicmoe_cpp.integrations.torchtitan.overrides.routed_experts

routed_experts    dispatch, experts and combine in one operator
grouped_experts   the experts alone, behind any dispatcher
router            scores, choice and renormalisation in one operator
token_rounding    router and experts, with every expert's tokens rounded to a tile; use it in place
                  of the three overrides above
selective_ac      selective checkpointing also keeps the results of the layer's forward
"""

from __future__ import annotations

import sys

from .._release import needs

with needs("torchtitan.overrides", "torchtitan", "0.3"):
    from torchtitan.config.override import derive, override
    from torchtitan.distributed.activation_checkpoint import SelectiveAC
    from torchtitan.models.common.moe import (
        GroupedExperts,
        MoE,
        RoutedExperts,
        TokenChoiceTopKRouter,
    )

from ..._checks import integer, one_of
from ...distributed.layer import TIMEOUT
from ...distributed.peer import Limits
from ...distributed.transport import TRANSPORTS
from ...fp8 import check_request
from ...routing import MODES
from .modules import (
    SonicGroupedExperts,
    SonicRoundedMoE,
    SonicRoutedExperts,
    SonicRouter,
    SonicSelectiveAC,
)

_EXPERTS = {GroupedExperts.Config: SonicGroupedExperts.Config}
_ROUTED = {RoutedExperts.Config: SonicRoutedExperts.Config}
_ROUTERS = {TokenChoiceTopKRouter.Config: SonicRouter.Config}
_LAYERS = {MoE.Config: SonicRoundedMoE.Config}


def _gpt_oss() -> tuple[dict, dict]:
    """Replacements of gpt-oss's experts and layers, if the job has imported that model. It is not
    imported here: with a torch older than torchtitan requires, torchtitan's layers can be imported,
    but this model cannot."""
    if "torchtitan.models.gpt_oss.moe" not in sys.modules:
        return {}, {}
    from . import gpt_oss

    return gpt_oss.EXPERTS, gpt_oss.LAYERS


def _served(config, replacements: dict, **deltas):
    """The replacement of `config` by its exact class: a subclass may compute something else."""
    replacement = replacements.get(type(config))
    if replacement is None:
        known = " and ".join(c.__qualname__ for c in replacements)
        raise NotImplementedError(
            f"sonicmoe_cpp does not know what {type(config).__qualname__} computes: it takes the "
            f"place of {known} only"
        )
    return derive(config, replacement, **deltas)


@override(target=GroupedExperts.Config, description="experts of sonicmoe_cpp")
def grouped_experts(
    config: GroupedExperts.Config, precision: str | None = None
) -> GroupedExperts.Config:
    """precision: "fp8" or "auto", as in sonicmoe_cpp.moe()."""
    check_request(precision, None)
    return _served(config, _EXPERTS | _gpt_oss()[0], precision=precision)


def _check_transport(transport: str | None, limits: Limits) -> None:
    if transport is None:
        if limits != Limits(TIMEOUT):
            raise ValueError(
                f"timeout is {limits.timeout}, max_tokens is {limits.max_tokens} and capacity is "
                f"{limits.capacity} without transport, must come with one of {TRANSPORTS}"
            )
        return
    one_of("transport", transport, TRANSPORTS)
    limits.check()


@override(target=RoutedExperts.Config, description="fused experts of sonicmoe_cpp")
def routed_experts(
    config: RoutedExperts.Config,
    precision: str | None = None,
    transport: str | None = None,
    timeout: float = TIMEOUT,
    max_tokens: int | None = None,
    capacity: float | None = None,
) -> RoutedExperts.Config:
    """transport: how rows travel under expert parallelism, as in
    sonicmoe_cpp.distributed.ExpertParallelMoE, with timeout, max_tokens and capacity. None:
    torchtitan's dispatcher moves them."""
    limits = {"timeout": timeout, "max_tokens": max_tokens, "capacity": capacity}
    _check_transport(transport, Limits(**limits))
    experts = grouped_experts(config.inner_experts, precision)
    return _served(config, _ROUTED, inner_experts=experts, transport=transport, **limits)


@override(target=TokenChoiceTopKRouter.Config, description="router of sonicmoe_cpp")
def router(config: TokenChoiceTopKRouter.Config) -> TokenChoiceTopKRouter.Config:
    return _served(config, _ROUTERS)


@override(target=MoE.Config, description="token rounding of sonicmoe_cpp")
def token_rounding(
    config: MoE.Config,
    tile: int = 128,
    rounding: str = "nearest",
    precision: str | None = None,
    **exchange,
) -> MoE.Config:
    """Token rounding in training. Refuses stochastic rounding, because a CUDA graph of a step would
    use the same random numbers in every step. exchange: transport and its limits, as in
    routed_experts()."""
    integer("tile", tile)
    one_of("rounding", rounding, [mode for mode in MODES if mode != "stochastic"])
    parts = {"router": router(config.router)}
    parts["routed_experts"] = routed_experts(config.routed_experts, precision, **exchange)
    return _served(config, _LAYERS | _gpt_oss()[1], tile=tile, rounding=rounding, **parts)


@override(target=SelectiveAC.Config, description="keeps the layer's H")
def selective_ac(config: SelectiveAC.Config) -> SelectiveAC.Config:
    return derive(config, SonicSelectiveAC.Config)
