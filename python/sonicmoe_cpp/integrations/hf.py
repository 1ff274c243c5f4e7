"""Experts of Hugging Face transformers 5: experts_implementation="sonicmoe_cpp".

    from sonicmoe_cpp.integrations import hf
    hf.register()
    model = AutoModelForCausalLM.from_pretrained(name, experts_implementation="sonicmoe_cpp")

docs/huggingface.md lists the supported models. The model's own weights are used without a copy.
"""

from __future__ import annotations

import functools
import re
import warnings
from importlib import metadata
from typing import NamedTuple

from torch import nn

from ._hf_adopted import adopt_classes, belongs, is_too_old
from ._hf_experts import (
    Plan,
    experts_forward,
    experts_of,
    plan_of,
    set_fake_quantize,
    set_precision,
)
from ._hf_lora import add_lora, adopt_factors, save_factors_of_parts
from ._hf_quantize import (
    experts_config,
    keep_mxfp4,
    quantize_experts,
    set_packed,
    unpack_experts,
)

__all__ = [
    "NAME",
    "Plan",
    "Support",
    "add_lora",
    "experts_config",
    "experts_forward",
    "keep_mxfp4",
    "plan_of",
    "quantize_experts",
    "register",
    "set_fake_quantize",
    "set_packed",
    "set_precision",
    "supports",
    "unpack_experts",
]

NAME = "sonicmoe_cpp"
OLDEST = (5, 7)
_NEEDS = "sonicmoe_cpp.integrations.hf needs transformers 5.7 or later"
# The names by which configs give the number of experts.
_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")


def _interfaces() -> list:
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    try:
        from transformers.integrations.finegrained_fp8 import ALL_FP8_EXPERTS_FUNCTIONS
    except ImportError:  # releases without an interface for FP8 experts
        return [ALL_EXPERTS_FUNCTIONS]
    # FP8 experts look up implementations in their own interface. The function is registered there
    # too, so that plan_of() refuses FP8 experts with an error that names the reason.
    return [ALL_EXPERTS_FUNCTIONS, ALL_FP8_EXPERTS_FUNCTIONS]


def register(name: str = NAME) -> str:
    """Makes `experts_implementation=name` known to transformers; returns the name.

    A second call changes nothing. The name "sonicmoe" replaces transformers' own implementation.
    The classes of Step-3.7, LongCat-Flash and Llama 4, which do not ask for an implementation, ask
    for this one. If a model gets this name but its experts cannot be replaced, there is a warning.
    Raises ImportError without transformers 5.7 or later.
    """
    try:
        version = metadata.version("transformers")
        interfaces = _interfaces()
    except (ImportError, metadata.PackageNotFoundError) as error:
        raise ImportError(f"{_NEEDS}: {error}") from error
    if tuple(map(int, re.findall(r"\d+", version)[:2])) < OLDEST:  # also of 5.10rc1
        raise ImportError(f"{_NEEDS}: {version} is installed, which knows only its own experts")
    for interface in interfaces:
        interface.register(name, experts_forward)
    adopt_classes()
    _watch_models()
    adopt_factors()
    save_factors_of_parts()
    return name


def _count_of_experts(config) -> int:
    if not getattr(config, "is_moe", True):
        return 0
    parts = (config, getattr(config, "ffn_config", None))
    counts = [getattr(part, name, None) for part in parts for name in _COUNTS]
    return max((c for c in counts if isinstance(c, int)), default=0)


def never_asks(model: nn.Module) -> bool:
    """Whether a transformers model has experts that another implementation cannot compute."""
    config = getattr(model, "config", None)
    can_choose = getattr(model, "_can_set_experts_implementation", None)
    if can_choose is None or _count_of_experts(config) <= 1:
        return False
    return not can_choose() or is_too_old(model)


# Names of classes that compute experts, in models that never ask.
_OWN = re.compile(r"Experts?$|Expert|MoE|Moe|MoeSparse|SparseMLP")


def _own_experts(model: nn.Module) -> list[str]:
    """Names of the classes that compute a model's experts: innermost modules with such a name."""
    from transformers import PreTrainedModel

    def fits(module):
        return not isinstance(module, PreTrainedModel) and _OWN.search(type(module).__name__)

    found = (m for m in model.modules() if fits(m) and not any(map(fits, list(m.modules())[1:])))
    return list(dict.fromkeys(type(m).__name__ for m in found))


def _watch_models() -> None:
    """Wraps the method of PreTrainedModel that every model calls with the implementation's name:
    when the model is built, and in set_experts_implementation. No other method gets both the model
    and the name."""
    from transformers import PreTrainedModel

    check = PreTrainedModel.get_correct_experts_implementation
    if hasattr(check, "_sonicmoe_cpp_warns"):
        return

    @functools.wraps(check)
    def checked(self, requested_experts):
        from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

        adopt_classes()
        ours = ALL_EXPERTS_FUNCTIONS.get(requested_experts, None) is experts_forward
        if ours and never_asks(self):
            own = ", ".join(_own_experts(self))
            warnings.warn(
                f'experts_implementation="{requested_experts}" has no effect on '
                f"{type(self).__name__}: "
                + (
                    "it was built before hf.register()"
                    if is_too_old(self)
                    else "transformers does not let its experts be replaced"
                )
                + (f" ({own})" if own else ""),
                stacklevel=3,
            )
        if belongs(self) and requested_experts in (None, "grouped_mm"):
            if requested_experts is not None:
                raise ValueError(f"{type(self).__name__} has no experts for grouped_mm")
            requested_experts = "eager"  # the default, which its class would not know
        return check(self, requested_experts)

    checked._sonicmoe_cpp_warns = True
    PreTrainedModel.get_correct_experts_implementation = checked


class Support(NamedTuple):
    """The result of supports(); true if this library can compute all experts of the model."""

    served: dict[str, Plan]  # by the module's name
    refused: dict[str, str]  # by the module's name: the reason
    never_asked: list[str]  # names of the models whose experts cannot be replaced
    own_experts: list[str]  # names of the classes that compute these models' experts

    def __bool__(self) -> bool:
        return bool(self.served) and not self.refused and not self.never_asked


def supports(model: nn.Module) -> Support:
    """Finds which experts modules of `model` this library can compute; does not run the model."""
    served, refused = {}, {}
    for name, module in experts_of(model).items():
        try:
            served[name] = plan_of(module)
        except (NotImplementedError, RuntimeError) as error:
            refused[name] = str(error)
    models = {name: m for name, m in model.named_modules() if never_asks(m)}
    own = dict.fromkeys(kind for m in models.values() for kind in _own_experts(m))
    names = [name or type(m).__name__ for name, m in models.items()]
    return Support(served, refused, names, list(own))
