"""Experts for prime-rl, over rows that its dispatcher has grouped.

A SonicMoECppExpertCompute is an ExpertCompute of prime-rl. After replace() prime-rl's configuration
can choose it.
"""

from __future__ import annotations

import importlib.util
import sys
import types

import torch
from torch import Tensor, nn

from ..layer import Activation, moe_grouped
from . import _recognise
from ._grouped import offsets_of
from ._recognise import local

# The module that prime-rl imports if its configuration says model.moe.compute.backend = "sonicmoe".
MODULE = "prime_rl.trainer.models.layers.sonic_moe"
SEAM = "SonicMoEExpertCompute"


def _is_gated(experts: nn.Module) -> bool:
    return experts.gate_up_proj is not None or experts.gate_proj is not None


def _facts(experts: nn.Module) -> tuple:
    return experts.activation, _is_gated(experts)


@_recognise.once_a_module("_sonicmoe_cpp_activation", _facts)
def activation_of(experts: nn.Module) -> Activation:
    """The library's activation that `experts.activation.apply(gate, up)` computes."""
    apply = experts.activation.apply
    if _is_gated(experts):
        found = _recognise.gated(apply)
    else:
        found = _recognise.ungated(lambda up: apply(None, up))
    if found is None:
        name = getattr(experts.activation, "__name__", type(experts.activation).__name__)
        raise NotImplementedError(
            f"the experts' activation {name} is not one that sonicmoe_cpp computes: use another "
            "expert backend for this model"
        )
    return found


def _both(b_gate: Tensor | None, b_up: Tensor | None) -> Tensor | None:
    """Joins two biases (E, n), of which one may be missing, to (E, 2n)."""
    if b_gate is None and b_up is None:
        return None
    b_gate = torch.zeros_like(b_up) if b_gate is None else b_gate
    b_up = torch.zeros_like(b_gate) if b_up is None else b_up
    return torch.cat([b_gate, b_up], dim=1)


class SonicMoECppExpertCompute:
    """Computes experts in bf16: gate and up fused or separate, biases, every activation of the
    library.

    The dispatcher applies the scores. Groups may have any size; only the dispatcher uses
    token_group_alignment. Rows past the counts are not read; their outputs are zeros.
    """

    def __init__(self, token_group_alignment: int = 8) -> None:
        self.token_group_alignment = token_group_alignment

    def validate(self, experts: nn.Module) -> None:
        """Refuses experts whose activation the library does not compute."""
        activation_of(experts)

    def __call__(self, experts: nn.Module, x: Tensor, num_tokens_per_expert: Tensor) -> Tensor:
        def get(name: str) -> Tensor | None:
            tensor = local(getattr(experts, name))
            return None if tensor is None else tensor.bfloat16()

        w_up, b_up = get("gate_up_proj"), get("up_proj_bias")
        if w_up is None:
            gate, w_up = get("gate_proj"), get("up_proj")
            w_up = w_up if gate is None else (gate, w_up)
        if _is_gated(experts):
            b_up = _both(get("gate_proj_bias"), b_up)
        w_down = get("down_proj")
        with torch.autocast(x.device.type, enabled=False):
            out = moe_grouped(
                x.bfloat16(),
                offsets_of(num_tokens_per_expert, w_down.shape[0]),
                w_up,
                w_down,
                b_up=b_up,
                b_down=get("down_proj_bias"),
                activation=activation_of(experts),
            )
        return out.type_as(x)


def _refuse_another_prime_rl() -> None:
    """Raises ImportError if prime-rl does not have the module and the class to replace. Reads the
    module's source, because importing the module would need the package sonicmoe."""
    try:
        spec = importlib.util.find_spec(MODULE)
    except ImportError as error:
        problem = str(error)
    else:
        if spec is not None and f"class {SEAM}" in (spec.loader.get_source(MODULE) or ""):
            return
        problem = f"{MODULE} " + ("is missing" if spec is None else f"defines no {SEAM}")
    raise ImportError(
        f"sonicmoe_cpp.integrations.prime_rl.replace() needs a prime-rl whose backend sonicmoe is "
        f"{SEAM} of {MODULE}: {problem}"
    )


def replace() -> None:
    """Makes this library prime-rl's backend "sonicmoe"; the package sonicmoe is then not needed.

    Raises ImportError if prime-rl has no such backend, because prime-rl would never use the
    library.
    """
    if getattr(sys.modules.get(MODULE), SEAM, None) is SonicMoECppExpertCompute:
        return
    _refuse_another_prime_rl()
    module = types.ModuleType(MODULE, "Put here by sonicmoe_cpp.integrations.prime_rl.replace().")
    setattr(module, SEAM, SonicMoECppExpertCompute)
    sys.modules[MODULE] = module
