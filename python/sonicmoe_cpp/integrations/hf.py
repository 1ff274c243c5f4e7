"""Experts of Hugging Face transformers 5: experts_implementation="sonicmoe_cpp".

    from sonicmoe_cpp.integrations import hf
    hf.register()
    model = AutoModelForCausalLM.from_pretrained(name, experts_implementation="sonicmoe_cpp")

docs/huggingface.md has what is supported. The model's own weights are used as they lie.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from .. import _ops
from ..layer import LAYOUTS, Activation, moe
from . import _recognise
from ._recognise import local

NAME = "sonicmoe_cpp"


def register(name: str = NAME) -> str:
    """Makes `experts_implementation=name` known to transformers; returns the name.

    Registering again does no harm, and registering as "sonicmoe" replaces transformers' own.
    """
    try:
        from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
    except ImportError as error:
        raise ImportError(
            "sonicmoe_cpp.integrations.hf needs transformers 5.0 or later, whose experts can be "
            "replaced (pip install 'transformers>=5'): " + str(error)
        ) from error
    ALL_EXPERTS_FUNCTIONS.register(name, experts_forward)
    return name


class Plan(NamedTuple):
    """How a module's experts are computed."""

    activation: Activation
    gate_layout: str


def _join(gate: Tensor, up: Tensor, layout: str) -> Tensor:
    if layout == "interleaved":
        return torch.stack([gate, up], dim=-1).flatten(-2)
    return torch.cat([gate, up], dim=-1)


def _name_of_activation(module: nn.Module) -> str:
    function = getattr(module, "act_fn", None)
    if function is None:
        return "its own _apply_gate"
    return getattr(function, "__name__", type(function).__name__)


def _recognise_plan(module: nn.Module) -> Plan | None:
    if not getattr(module, "has_gate", True):
        activation = _recognise.ungated(module.act_fn)
        if activation is not None:
            return Plan(activation, "concatenated")
    else:
        # The flag is a promise, _apply_gate is what the model was trained with: the latter decides.
        for layout in LAYOUTS if getattr(module, "is_concatenated", True) else LAYOUTS[::-1]:

            def apply(gate, up, layout=layout):
                return module._apply_gate(_join(gate, up, layout))

            activation = _recognise.gated(apply)
            if activation is not None:
                return Plan(activation, layout)
    return None


def _refusal(module: nn.Module) -> NotImplementedError:
    supported = ", ".join(_ops.GATED if getattr(module, "has_gate", True) else _ops.UNGATED)
    return NotImplementedError(
        f"the activation of {type(module).__name__} ({_name_of_activation(module)}) is none that "
        f"sonicmoe_cpp computes ({supported}): use another experts_implementation for this model"
    )


def _facts(module: nn.Module) -> tuple:
    numbers = {k: v for k, v in vars(module).items() if isinstance(v, (bool, int, float))}
    return getattr(module, "act_fn", None), type(module), numbers


@_recognise.once_a_module(_facts)
def plan_of(module: nn.Module) -> Plan:
    """The activation and layout of an experts module."""
    try:
        plan = _recognise_plan(module)
    except Exception as error:  # whatever a foreign function raises on fp64 rows of the CPU
        raise _refusal(module) from error
    if plan is None:
        raise _refusal(module)
    return plan


def _weights_of_slots(weights: Tensor, ids: Tensor) -> Tensor:
    """(T, K). Routers of transformers 5.0 may give the weights of all experts, (T, E)."""
    if weights.shape == ids.shape:
        return weights
    return weights.gather(1, ids.clamp(0, weights.shape[1] - 1))


def experts_forward(
    self: nn.Module, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Tensor:
    """transformers' interface: (T, d), (T, K), (T, K) -> (T, d) in the dtype of hidden_states.

    Ids outside of the module's experts are empty slots, as expert parallelism makes them.
    """
    if getattr(self, "has_post_expert_norm", False):
        raise NotImplementedError(
            f"{type(self).__name__} normalises every expert's output (has_post_expert_norm), which "
            "sonicmoe_cpp does not compute: use another experts_implementation for this model"
        )
    plan = plan_of(self)
    up = "gate_up_proj" if getattr(self, "has_gate", True) else "up_proj"
    w_up, w_down = local(getattr(self, up)), local(self.down_proj)
    b_up = b_down = None
    if self.has_bias:
        b_up, b_down = local(getattr(self, f"{up}_bias")), local(self.down_proj_bias)
        b_up, b_down = b_up.to(w_up.dtype), b_down.to(w_up.dtype)
    if self.is_transposed:
        w_up, w_down = w_up.transpose(1, 2), w_down.transpose(1, 2)
    x = hidden_states
    if not torch.is_autocast_enabled(x.device.type):
        x = x.to(w_up.dtype)
    out = moe(
        x,
        top_k_index,
        _weights_of_slots(top_k_weights, top_k_index),
        w_up,
        w_down,
        b_up=b_up,
        b_down=b_down,
        activation=plan.activation,
        gate_layout=plan.gate_layout,
    )
    return out.to(hidden_states.dtype)
