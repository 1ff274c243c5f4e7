"""Experts for NeMo AutoModel 0.7, for AutoModel's own dispatchers, parameters and checkpoints.

from sonicmoe_cpp.integrations import nemo_automodel
nemo_automodel.replace()
"""

from __future__ import annotations

import importlib
import inspect

from torch import Tensor, nn

from ..layer import Activation, moe, moe_grouped
from ._grouped import offsets_of
from ._recognise import local
from ._release import needs

MODULE = "nemo_automodel.components.moe.experts"


def _style(experts: nn.Module) -> dict:
    """Activation and layout of gate and up, by the names of AutoModel's MoEConfig."""
    config = experts.config
    name, limit = config.expert_activation, config.activation_limit
    if getattr(experts, "use_mxfp8", False):
        raise NotImplementedError(
            'experts="torch_mm_mxfp8" is set, which sonicmoe_cpp does not compute: use "torch_mm"'
        )
    activations = {"swiglu": "swiglu", "geglu": "geglu_tanh", "relu2": "relu2"}
    if name in activations:
        activation = Activation(activations[name])
    elif name in ("swigluoai", "quick_geglu") and limit > 0:
        activation = Activation("swiglu_oai", alpha=config.activation_alpha, limit=limit)
    else:
        raise NotImplementedError(
            f'expert_activation="{name}" with activation_limit={limit} is not one that '
            "sonicmoe_cpp computes: use AutoModel's own experts for this model"
        )
    if name == "swiglu" and config.swiglu_limit > 0:
        activation = Activation("swiglu_clamped", limit=config.swiglu_limit)
    layout = "interleaved" if name == "quick_geglu" else "concatenated"
    return {"activation": activation, "gate_layout": layout}


def _local_experts(self: nn.Module, x: Tensor, ids: Tensor, weights: Tensor, experts) -> Tensor:
    """This rank's output, which GroupedExperts sums over ranks: fp32 (T, d), or (T, 1, d) if
    GroupedExperts then also sums over slots. `ids` outside of this rank's experts are empty slots.
    """
    w_up, w_down, b_up, b_down = experts
    w_up, w_down = w_up.transpose(1, 2), w_down.transpose(1, 2)
    out = moe(x, ids, weights, w_up, w_down, b_up=b_up, b_down=b_down, **_style(self)).float()
    return out.unsqueeze(1) if self.config.apply_router_weight_after_down else out


def _forward_loop(self, x, weights, indices, token_mask, *local_experts):
    *experts, _, first, _ = local_experts
    ids = indices.masked_fill(~token_mask.unsqueeze(-1), -1) - first
    return _local_experts(self, x, ids, weights, experts)


def _forward_grouped_mm(self, x, token_mask, weights, indices, *local_experts):
    *experts, _, first = local_experts
    ids = indices.masked_fill(~token_mask.unsqueeze(-1), -1) - first
    return _local_experts(self, x, ids, weights, experts)


def _forward(self, x, token_mask, weights, indices):
    """The forward of GroupedExpertsDeepEP. Its dispatcher gives the rows and takes the outputs."""
    rows, counts, probs = self._dispatch_tokens(x, token_mask, weights, indices)

    def get(name: str) -> Tensor | None:
        tensor = local(getattr(self, name))
        return None if tensor is None else tensor.to(rows.dtype)

    w_down = get("down_projs").transpose(1, 2)
    out = moe_grouped(
        rows,
        offsets_of(counts.to(rows.device, non_blocking=True), w_down.shape[0]),
        get("gate_and_up_projs").transpose(1, 2),
        w_down,
        row_weights=probs.squeeze(-1),
        b_up=get("gate_up_proj_bias"),
        b_down=get("down_proj_bias"),
        **_style(self),
    )
    return self.token_dispatcher.token_unpermutation(out)


_LOCAL = ("gate_and_up_projs", "down_projs", "gate_up_proj_bias", "down_proj_bias")
_LOCAL += ("n_local_experts", "experts_start_idx")
# (class, function): the replacement, and the parameters that the replaced function must have.
_SEAM = {
    ("GroupedExperts", "_forward_loop"): (
        _forward_loop,
        ("self", "x", "weights", "indices", "token_mask", *_LOCAL, "experts_end_idx"),
    ),
    ("GroupedExperts", "_forward_grouped_mm"): (
        _forward_grouped_mm,
        ("self", "x", "token_mask", "weights", "indices", *_LOCAL),
    ),
    ("GroupedExpertsDeepEP", "forward"): (
        _forward,
        ("self", "x", "token_mask", "weights", "indices"),
    ),
}


def replace() -> None:
    """Makes AutoModel's GroupedExperts and GroupedExpertsDeepEP use this library, in every model.

    These classes are AutoModel's backends experts="torch", "torch_mm" and "gmm" with every
    dispatcher except "mok". TransformerEngine's experts ("te"), and experts that AutoModel's PEFT
    adapts, do not change. Raises ImportError if another release is installed.
    """
    with needs("nemo_automodel", "nemo-automodel", "0.7"):
        module = importlib.import_module(MODULE)
        for (kind, name), (function, names) in _SEAM.items():
            theirs = getattr(getattr(module, kind, None), name, None)
            if theirs is None:
                raise ImportError(f"{MODULE} has no {kind}.{name}")
            found = tuple(inspect.signature(theirs).parameters)
            if theirs is not function and found != names:
                raise ImportError(
                    f"{kind}.{name} takes {', '.join(found)}, must take {', '.join(names)}"
                )
    for (kind, name), (function, _) in _SEAM.items():  # all of them, or none
        setattr(getattr(module, kind), name, function)
