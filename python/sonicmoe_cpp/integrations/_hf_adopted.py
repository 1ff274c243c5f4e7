"""Experts of transformers whose classes never ask for an implementation. hf.register() makes the
classes in KNOWN ask for sonicmoe_cpp; with every other implementation they run as before."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ._hf_experts import TRANSPOSED, experts_forward


def _identity_experts(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor):
    """LongCat-Flash: ids from num_routed_experts on are identity experts. They are empty slots of
    the layer; the sum of their weights times the token is added to its output."""
    out = experts_forward(self, hidden_states, top_k_index, top_k_weights)
    identity = top_k_index >= self.num_routed_experts
    weight = torch.where(identity, top_k_weights, 0).sum(-1, keepdim=True)
    return out + (weight * hidden_states).to(out.dtype)


def _score_on_input(self, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
    """Llama 4: the score multiplies the expert's input, so each choice of a token is a row of its
    own with weight 1. The router's scores of experts that were not chosen are 0."""
    x = hidden_states.reshape(-1, self.hidden_dim)
    router_scores, router_logits = self.router(x)
    scores, ids = router_scores.topk(self.top_k, dim=-1)
    rows = (x.unsqueeze(1) * scores.unsqueeze(-1)).flatten(0, 1)
    ids = ids.reshape(-1, 1)
    routed = self.experts(rows, ids, torch.ones_like(ids, dtype=rows.dtype))
    return self.shared_expert(x) + routed.unflatten(0, scores.shape).sum(1), router_logits


class Known(NamedTuple):
    architecture: str
    experts: str  # the class with the weights, and the parameters of its forward
    parameters: tuple[str, ...]
    compute: Callable  # for (hidden_states, top_k_index, top_k_weights)
    is_transposed: bool = False
    block: str | None = None  # the class that scales its rows by the scores
    compute_block: Callable | None = None


ROUTED = ("self", "hidden_states", "top_k_index", "top_k_weights")
KNOWN = (
    Known("step3p7", "Step3p7Experts", ROUTED, experts_forward),
    Known("longcat_flash", "LongcatFlashExperts", ROUTED, _identity_experts),
    Known(
        "llama4",
        "Llama4TextExperts",
        ("self", "hidden_states"),
        experts_forward,
        is_transposed=True,
        block="Llama4TextMoe",
        compute_block=_score_on_input,
    ),
)
_adopted: set[type] = set()  # of experts
_architectures: set[str] = set()


def _default_gate(self, gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return self.act_fn(gate) * up


def _keep_config(kind: type, is_transposed: bool | None) -> None:
    """Wraps the constructor: instances keep their config, and experts get the flags that
    transformers gives to classes that ask. The flag `is_transposed` is another one, because PEFT
    reads transformers' flag to lay out its factors: its files must not depend on register()."""
    construct = kind.__init__

    @functools.wraps(construct)
    def init(self, config, *arguments, **options):
        construct(self, config, *arguments, **options)
        self.config = config
        if is_transposed is not None:
            self.has_gate, self.has_bias, self.is_concatenated = True, False, True
            self._is_expert_parallel = False
            setattr(self, TRANSPOSED, is_transposed)

    kind.__init__ = init


def _dispatch(kind: type, compute: Callable, arguments: int) -> None:
    """Wraps forward: it calls `compute` if the config names sonicmoe_cpp and this many arguments
    are given."""
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    forward = kind.forward

    @functools.wraps(forward)
    def choose(self, *inputs, **options):
        # An instance that is older than hf.register() has no config.
        name = getattr(getattr(self, "config", None), "_experts_implementation", None) or "eager"
        chosen = ALL_EXPERTS_FUNCTIONS.get_interface(name, forward)
        if chosen is experts_forward and len(inputs) + len(options) == arguments:
            return compute(self, *inputs, **options)
        return forward(self, *inputs, **options)

    kind.forward = choose


def _is_as_known(known: Known, module) -> bool:
    """Whether the installed release has the class as it is known."""
    kind = getattr(module, known.experts, None)
    if kind is None or "@use_experts_implementation" in inspect.getsource(module):
        return False
    if known.block is not None and not hasattr(module, known.block):
        return False
    return tuple(inspect.signature(kind.forward).parameters) == known.parameters


def _adopt(known: Known, module) -> None:
    from transformers import PreTrainedModel

    kind = getattr(module, known.experts)
    if not hasattr(kind, "_apply_gate"):
        kind._apply_gate = _default_gate
    _keep_config(kind, known.is_transposed)
    _dispatch(kind, known.compute, len(ROUTED) - 1)
    if known.block is not None:
        block = getattr(module, known.block)
        _keep_config(block, None)
        _dispatch(block, known.compute_block, 1)
    for model in vars(module).values():
        own = inspect.isclass(model) and model.__module__ == module.__name__
        if own and issubclass(model, PreTrainedModel):
            model._can_set_experts_implementation = classmethod(lambda cls: True)
    _adopted.add(kind)


def adopt_classes() -> None:
    """Makes the known classes ask, as far as their files have been imported."""
    for known in KNOWN:
        name = f"transformers.models.{known.architecture}.modeling_{known.architecture}"
        module = sys.modules.get(name)
        if module is None or known.architecture in _architectures:
            continue
        _architectures.add(known.architecture)
        if _is_as_known(known, module):
            _adopt(known, module)


def belongs(model: nn.Module) -> bool:
    """Whether the model's file has an adopted class."""
    files = {kind.__module__ for kind in _adopted}
    return any(kind.__module__ in files for kind in type(model).__mro__)


def is_too_old(model: nn.Module) -> bool:
    """Whether the model has experts of a class that was adopted after they were built."""
    return any(type(m) in _adopted and not hasattr(m, TRANSPOSED) for m in model.modules())
