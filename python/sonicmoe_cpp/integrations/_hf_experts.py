"""Computes transformers' experts modules; hf.py has the functions that users call."""

from __future__ import annotations

import warnings
from typing import NamedTuple

import torch
from torch import Tensor, nn

from .. import _checks
from .._arguments import autocast_dtype
from .._fake import check_format, fake_quantize
from .._names import GATED, UNGATED
from .._weights import LAYOUTS, Activation
from ..fp8 import Fp8Cache, caches_of, check_request, kept_weights
from ..layer import moe
from ..lora import LowRank, lora_moe
from ..packed import PackedWeights
from . import _hf_packed, _recognise
from ._recognise import local

# An attribute of experts: {parameter: [LowRank]}, the active low-rank factors. The lists are empty
# outside of forward.
FACTORS = "_sonicmoe_cpp_factors"
# The norm of every expert's output in experts whose flag has_post_expert_norm is set.
NORM = "post_expert_norm"
# An attribute of experts that _hf_adopted.py makes ask: whether their weights are transposed.
TRANSPOSED = "_sonicmoe_cpp_is_transposed"


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
        # The model was trained with _apply_gate, so _apply_gate determines the layout. The flag
        # is_concatenated may contradict it.
        for layout in LAYOUTS if module.is_concatenated else LAYOUTS[::-1]:

            def apply(gate, up, layout=layout):
                return module._apply_gate(_join(gate, up, layout))

            activation = _recognise.gated(apply)
            if activation is not None:
                return Plan(activation, layout)
    return None


def _refusal(module: nn.Module) -> NotImplementedError:
    supported = ", ".join(GATED if module.has_gate else UNGATED)
    return NotImplementedError(
        f"the activation of {type(module).__name__} ({_name_of_activation(module)}) is not one "
        f"that sonicmoe_cpp computes ({supported}): use another experts_implementation for this "
        "model"
    )


def _quantised(module: nn.Module) -> str | None:
    """The first quantised weight of a module and its dtype or class, None if there is none."""
    for name in (up_name(module), "down_proj"):
        weight = getattr(module, name)
        if _hf_packed.packed_of(module, name) is not None:
            continue
        if _checks.is_wrapped(weight):
            return f"{name} of {type(module).__name__} is quantised ({type(weight).__name__})"
        if weight.dtype not in _checks.FLOATS:
            dtype = _checks.names([weight.dtype])
            return f"{name} of {type(module).__name__} is quantised ({dtype})"
    return None


def _facts(module: nn.Module) -> tuple:
    """A key that identifies a module's activation and whether its weights can be computed with. It
    contains the function _apply_gate of the class and not the class itself, because PEFT makes a
    new class at every call."""
    numbers = {k: v for k, v in vars(module).items() if isinstance(v, (bool, int, float))}
    gate = getattr(type(module), "_apply_gate", type(module))
    return getattr(module, "act_fn", None), gate, numbers, _quantised(module)


def is_experts(module: nn.Module) -> bool:
    """Whether another implementation may compute modules of this kind."""
    asks = hasattr(module, "is_transposed") or hasattr(module, TRANSPOSED)
    return asks and getattr(module, "down_proj", None) is not None


def experts_of(model: nn.Module) -> dict[str, nn.Module]:
    """The modules of a model for which is_experts() holds, by name."""
    return {name: module for name, module in model.named_modules() if is_experts(module)}


def is_computed_here(module: nn.Module) -> bool:
    """Whether transformers computes these experts by experts_forward()."""
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    name = getattr(getattr(module, "config", None), "_experts_implementation", None)
    return name in ALL_EXPERTS_FUNCTIONS and ALL_EXPERTS_FUNCTIONS[name] is experts_forward


def up_name(module: nn.Module) -> str:
    return "gate_up_proj" if module.has_gate else "up_proj"


def _refuse_unsupported(module: nn.Module) -> None:
    """Refuses modules that cannot be computed for a reason other than their activation."""
    kind = type(module).__name__
    other = "sonicmoe_cpp does not compute: use another experts_implementation for this model"
    quantised = _quantised(module)
    if quantised is not None:
        raise NotImplementedError(f"{quantised}, which {other}, or load it dequantised")
    if getattr(module, "has_post_expert_norm", False) and not hasattr(module, NORM):
        raise NotImplementedError(
            f"{kind} normalises every expert's output (has_post_expert_norm) without a {NORM}, "
            f"which {other}"
        )


@_recognise.once_a_module("_sonicmoe_cpp_plan", _facts)
def plan_of(module: nn.Module) -> Plan:
    """The activation and layout of an experts module; refuses a module that cannot be computed."""
    _refuse_unsupported(module)
    try:
        plan = _recognise_plan(module)
    except Exception as error:  # a foreign function may raise any error for fp64 rows on the CPU
        raise _refusal(module) from error
    if plan is None:
        raise _refusal(module)
    return plan


def weights_of(module: nn.Module) -> tuple[Tensor | None, ...]:
    """(w_up (E, G*n, d), w_down (E, d, n), b_up, b_down): the weights as views, the biases cast to
    the dtype of w_up. The biases are None if the module has none."""
    up = up_name(module)
    w_up, w_down = (
        weight
        if (weight := _hf_packed.packed_of(module, name)) is not None
        else local(getattr(module, name))
        for name in (up, "down_proj")
    )
    b_up = b_down = None
    if module.has_bias:
        b_up, b_down = local(getattr(module, f"{up}_bias")), local(module.down_proj_bias)
        b_up, b_down = b_up.to(w_up.dtype), b_down.to(w_up.dtype)
    if is_transposed(module):
        w_up, w_down = w_up.mT, w_down.mT
    # LongCat-Flash's gate_up_proj has unused weights for its identity experts.
    w_up = _first(w_up, identity_experts(module))
    return w_up, w_down, b_up, b_down


def is_transposed(module: nn.Module) -> bool:
    """Whether the weights are stored as (E, in, out)."""
    return getattr(module, TRANSPOSED, getattr(module, "is_transposed", False))


def identity_experts(module: nn.Module) -> int:
    return getattr(module, "zero_expert_num", 0)


def _first(of_experts: Tensor, left_out: int) -> Tensor:
    """Without the last `left_out` experts."""
    return of_experts[:-left_out] if left_out else of_experts


class Precision(NamedTuple):
    """The choice of set_precision(), stored on each experts module."""

    precision: str | None
    keep_h: str | None


def set_precision(model: nn.Module, precision: str | None, keep_h: str | None = None) -> None:
    """The precision of all experts of a model, as in sonicmoe_cpp.moe(): "fp8", "auto", or None for
    the weights' dtype. As in MoE, weights are quantised again only after they have changed. Raises
    ValueError if the model has no experts. Experts of another implementation are not computed in
    fp8: for these there is a warning."""
    check_request(precision, keep_h)
    experts = experts_of(model)
    if precision is not None and not experts:
        raise ValueError(
            f'precision is "{precision}", but {type(model).__name__} has no experts that another '
            "implementation may compute"
        )
    other = next((n for n, module in experts.items() if not is_computed_here(module)), None)
    if precision is not None and other is not None:
        warnings.warn(
            f'precision "{precision}" has no effect on {other or "the experts"} until '
            "set_experts_implementation() chooses sonicmoe_cpp",
            stacklevel=2,
        )
    for module in experts.values():
        check_format(getattr(module, "_sonicmoe_cpp_fake_quantize", None), precision)
        chosen = None if precision is None else Precision(precision, keep_h)
        module._sonicmoe_cpp_precision = chosen
        if not caches_of(module):
            module._fp8 = {"experts": Fp8Cache(up_name(module), "down_proj")}
        module._fp8["experts"].forget()


def set_fake_quantize(model: nn.Module, format: str | None) -> None:
    """The format to whose values the weights of all experts of a model are rounded in every call
    (sonicmoe_cpp.fake_quantize()), or None. Raises ValueError if the model has no experts, or if
    their precision is set. Call it after set_experts_implementation(): experts of another
    implementation are refused."""
    experts = experts_of(model)
    if not experts:
        raise ValueError(
            f"{type(model).__name__} has no experts that another implementation may compute"
        )
    for name, module in experts.items():
        check_format(format, _chosen(module).precision)
        if format is not None and _hf_packed.packed_of(module, "down_proj") is not None:
            raise ValueError(f"{name or 'the module'} is packed, must be unpacked to be trained")
        if format is not None and not is_computed_here(module):
            raise ValueError(
                f"{name or 'the module'} is not computed by sonicmoe_cpp: choose it by "
                "set_experts_implementation() first"
            )
    for module in experts.values():
        module._sonicmoe_cpp_fake_quantize = format


def _chosen(module: nn.Module) -> Precision:
    return getattr(module, "_sonicmoe_cpp_precision", None) or Precision(None, None)


def _fake_quantised(module: nn.Module, weights: tuple) -> tuple:
    format = getattr(module, "_sonicmoe_cpp_fake_quantize", None)
    return weights if format is None else tuple(fake_quantize(w, format) for w in weights)


def _precision_of(module: nn.Module, weights: tuple, plan: Plan) -> dict:
    """The options of moe() for the precision of a module's experts."""
    chosen = getattr(module, "_sonicmoe_cpp_precision", None)
    if chosen is None:
        return {}
    options = {"precision": chosen.precision, "keep_h": chosen.keep_h}
    if isinstance(weights[0], PackedWeights):
        return options
    dtype = autocast_dtype(weights[0]) or weights[0].dtype
    style = {"activation": plan.activation, "gate_layout": plan.gate_layout}
    return options | kept_weights(module, "experts", weights, dtype, style)


def _active_factors(module: nn.Module) -> dict[str, LowRank]:
    stacks = module.__dict__.get(FACTORS, {})
    found = {name: stacks.get(name) for name in (up_name(module), "down_proj")}
    return {name: stack[-1] for name, stack in found.items() if stack}


def _low_rank(module: nn.Module, factors: dict, weights: tuple, plan: Plan) -> dict:
    """The options of lora_moe() for the active factors of a module's experts."""
    terms = {"up": factors.get(up_name(module)), "down": factors.get("down_proj")}
    identity = identity_experts(module)
    if identity and terms["up"] is not None:
        a, b, scale = terms["up"]
        terms["up"] = LowRank(_first(a, identity), _first(b, identity), scale)
    return terms | _precision_of(module, weights, plan)


def experts_forward(
    self: nn.Module, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Tensor:
    """transformers' interface: (T, d), (T, K), (T, K) -> (T, d) in the dtype of hidden_states.

    Ids outside of the module's experts are empty slots; expert parallelism makes such ids.
    """
    if not getattr(self, "has_post_expert_norm", False):
        return _compute(self, hidden_states, top_k_index, top_k_weights)
    # The norm needs each expert's output: each choice of a token is a row of its own.
    k = top_k_index.shape[1]
    rows = hidden_states.unsqueeze(1).expand(-1, k, -1).flatten(0, 1)
    ids = top_k_index.reshape(-1, 1)
    out = _compute(self, rows, ids, torch.ones_like(ids, dtype=top_k_weights.dtype))
    out = getattr(self, NORM)(out).unflatten(0, top_k_index.shape)
    return (out * top_k_weights.unsqueeze(-1)).sum(1).to(hidden_states.dtype)


def _compute(self: nn.Module, hidden_states: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    plan = plan_of(self)
    w_up, w_down, b_up, b_down = weights_of(self)
    w_up, w_down = _fake_quantised(self, (w_up, w_down))
    x = hidden_states
    if autocast_dtype(x) is None:
        x = x.to(w_up.dtype)
    factors = _active_factors(self)
    if factors:
        compute, others = lora_moe, _low_rank(self, factors, (w_up, w_down), plan)
    else:
        compute, others = moe, _precision_of(self, (w_up, w_down), plan)
    out = compute(
        x,
        ids,
        weights,
        w_up,
        w_down,
        b_up=b_up,
        b_down=b_down,
        activation=plan.activation,
        gate_layout=plan.gate_layout,
        **others,
    )
    return out.to(hidden_states.dtype)
