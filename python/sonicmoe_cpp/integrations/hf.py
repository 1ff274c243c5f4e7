"""Experts of Hugging Face transformers 5: experts_implementation="sonicmoe_cpp".

    from sonicmoe_cpp.integrations import hf
    hf.register()
    model = AutoModelForCausalLM.from_pretrained(name, experts_implementation="sonicmoe_cpp")

docs/huggingface.md has what is supported. The model's own weights are used as they lie.
"""

from __future__ import annotations

import re
from importlib import metadata
from typing import NamedTuple

import torch
from torch import Tensor, nn

from .. import _ops
from ..layer import LAYOUTS, Activation, autocast_dtype, moe
from ..lora import lora_moe, new_factors
from . import _recognise
from ._recognise import local

NAME = "sonicmoe_cpp"
OLDEST = (5, 7)
_NEEDS = "sonicmoe_cpp.integrations.hf needs transformers 5.7 or later"


def _interface():
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    return ALL_EXPERTS_FUNCTIONS


def register(name: str = NAME) -> str:
    """Makes `experts_implementation=name` known to transformers; returns the name.

    Registering again does no harm, and registering as "sonicmoe" replaces transformers' own.
    """
    try:
        version = metadata.version("transformers")
        interface = _interface()
    except (ImportError, metadata.PackageNotFoundError) as error:
        raise ImportError(f"{_NEEDS}: {error}") from error
    if tuple(map(int, re.findall(r"\d+", version)[:2])) < OLDEST:  # also of 5.10rc1
        raise ImportError(f"{_NEEDS}: {version} is installed, which knows only its own experts")
    interface.register(name, experts_forward)
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
    if not module.has_gate:
        activation = _recognise.ungated(module.act_fn)
        if activation is not None:
            return Plan(activation, "concatenated")
    else:
        # The flag is a promise, _apply_gate is what the model was trained with: the latter decides.
        for layout in LAYOUTS if module.is_concatenated else LAYOUTS[::-1]:

            def apply(gate, up, layout=layout):
                return module._apply_gate(_join(gate, up, layout))

            activation = _recognise.gated(apply)
            if activation is not None:
                return Plan(activation, layout)
    return None


def _refusal(module: nn.Module) -> NotImplementedError:
    supported = ", ".join(_ops.GATED if module.has_gate else _ops.UNGATED)
    return NotImplementedError(
        f"the activation of {type(module).__name__} ({_name_of_activation(module)}) is none that "
        f"sonicmoe_cpp computes ({supported}): use another experts_implementation for this model"
    )


def _facts(module: nn.Module) -> tuple:
    numbers = {k: v for k, v in vars(module).items() if isinstance(v, (bool, int, float))}
    return getattr(module, "act_fn", None), type(module), numbers


@_recognise.once_a_module("_sonicmoe_cpp_plan", _facts)
def plan_of(module: nn.Module) -> Plan:
    """The activation and layout of an experts module."""
    try:
        plan = _recognise_plan(module)
    except Exception as error:  # whatever a foreign function raises on fp64 rows of the CPU
        raise _refusal(module) from error
    if plan is None:
        raise _refusal(module)
    return plan


def _weights(module: nn.Module) -> tuple[Tensor | None, ...]:
    """(w_up (E, G*n, d), w_down (E, d, n), b_up, b_down) as they lie, one dtype."""
    up = "gate_up_proj" if module.has_gate else "up_proj"
    w_up, w_down = local(getattr(module, up)), local(module.down_proj)
    b_up = b_down = None
    if module.has_bias:
        b_up, b_down = local(getattr(module, f"{up}_bias")), local(module.down_proj_bias)
        b_up, b_down = b_up.to(w_up.dtype), b_down.to(w_up.dtype)
    if module.is_transposed:
        w_up, w_down = w_up.transpose(1, 2), w_down.transpose(1, 2)
    return w_up, w_down, b_up, b_down


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
    w_up, w_down, b_up, b_down = _weights(self)
    x = hidden_states
    if autocast_dtype(x) is None:
        x = x.to(w_up.dtype)
    lora = getattr(self, "lora", None)
    compute, factors = (moe, {}) if lora is None else (lora_moe, lora.factors())
    out = compute(
        x,
        top_k_index,
        top_k_weights,
        w_up,
        w_down,
        b_up=b_up,
        b_down=b_down,
        activation=plan.activation,
        gate_layout=plan.gate_layout,
        **factors,
    )
    return out.to(hidden_states.dtype)


def _check_implementation(module: nn.Module, _arguments) -> None:
    name = module.config._experts_implementation
    if name not in _interface() or _interface()[name] is not experts_forward:
        raise RuntimeError(
            f'experts_implementation is "{name}", which leaves out the low-rank factors of '
            f'{type(module).__name__}: must be "{NAME}"'
        )


def add_lora(model: nn.Module, rank: int, alpha: float, *, dtype=None) -> list[str]:
    """Freezes every experts module of `model` and trains low-rank factors beside it.

    The factors are parameters of the experts: lora.up_a, lora.up_b, lora.down_a, lora.down_b, with
    scale = alpha / rank. What else is trained stays as it is. Returns the modules' names. The model
    must run with this experts_implementation.
    """
    found = {
        name: module
        for name, module in model.named_modules()
        if hasattr(module, "is_transposed") and hasattr(module, "down_proj")
    }
    if not found:
        raise ValueError(f"{type(model).__name__} has no experts that transformers can replace")
    factors = [new_factors(m, _weights(m)[:2], rank, alpha, dtype) for m in found.values()]
    for module, lora in zip(found.values(), factors, strict=True):
        for parameter in module.parameters(recurse=False):
            parameter.requires_grad_(False)
        module.lora = lora
        module.register_forward_pre_hook(_check_implementation)
    return list(found)
