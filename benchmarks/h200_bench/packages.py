"""Layers of other installed packages: make(shape) gives a function (x, logits, w_up, w_down) ->
out.

Each calls its package's public functions, without copying the weights where the package allows it.
"""

from __future__ import annotations

import importlib.util
import types

import torch

from .deepgemm import deepgemm_layer
from .pieces import swiglu, topk_softmax


def transformers_layer(shape):
    """The grouped_mm experts of Hugging Face transformers 5, called as in its models."""
    from transformers.integrations.moe import grouped_mm_experts_forward

    experts = types.SimpleNamespace(
        num_experts=shape.E,
        has_gate=True,
        has_bias=False,
        has_post_expert_norm=False,
        is_transposed=False,
        is_concatenated=True,
        _is_expert_parallel=False,
        _apply_gate=swiglu,
    )

    def layer(x, logits, w_up, w_down):
        experts.gate_up_proj, experts.down_proj = w_up, w_down
        ids, weights = topk_softmax(logits, shape.K)
        return grouped_mm_experts_forward(experts, x, ids, weights.to(x.dtype))

    return layer


def sonicmoe_layer(shape):
    """The package sonicmoe (github.com/Dao-AILab/sonic-moe), on lists of routed pairs."""
    from sonicmoe.enums import ActivationType
    from sonicmoe.functional import moe_general_routing_inputs

    def layer(x, logits, w_up, w_down):
        ids, weights = topk_softmax(logits, shape.K)
        token = torch.arange(shape.T, device=x.device, dtype=torch.int32)
        out, _ = moe_general_routing_inputs(
            x,
            weights.flatten(),
            token.repeat_interleave(shape.K),
            ids.flatten().to(torch.int32),
            w_up.permute(1, 2, 0),
            None,
            w_down.permute(1, 2, 0),
            None,
            shape.E,
            None,
            ActivationType.SWIGLU,
            concat_layout=True,
        )
        return out

    return layer


def scattermoe_layer(shape):
    """The grouped products of the package scattermoe (github.com/shawntan/scattermoe) around a
    SwiGLU: its own layer takes the gate as the second half."""
    from scattermoe.parallel_experts import flatten_sort_count, parallel_linear

    def layer(x, logits, w_up, w_down):
        ids, weights = topk_softmax(logits, shape.K)
        order = flatten_sort_count(ids, num_experts=shape.E)  # experts, pairs, ends of experts
        up, down = w_up.transpose(1, 2), w_down.transpose(1, 2)
        h = parallel_linear(x, up, shape.K, *order, grouped_out=True)
        return parallel_linear(
            swiglu(h), down, 1, *order, grouped_in=True, gates=weights.to(x.dtype)
        )

    return layer


def momoe_layer(saved):
    """The package momoe (github.com/tilde-research/MoMoE-impl), which keeps `saved` percent of H
    and Y for backward and recomputes the rest. Its gate is the second half of w_up."""

    def make(shape):
        from momoe import MoMoE

        nothing = torch.empty(0, dtype=torch.bfloat16)  # replaced by the weights of each call
        experts = MoMoE(
            embedding_dim=shape.d,
            intermediate_dim=shape.n,
            num_experts=shape.E,
            num_chosen_experts=shape.K,
            save_percent=saved,
            Wl1_ND2H=nothing,
            Wl2_NHD=nothing,
        )

        def layer(x, logits, w_up, w_down):
            ids, weights = topk_softmax(logits, shape.K)
            ids, by_expert = ids.t(), (shape.E, x.shape[0])
            chosen = torch.zeros(by_expert, dtype=torch.int32, device=x.device).scatter(0, ids, 1)
            scores = torch.zeros(by_expert, device=x.device).scatter(0, ids, weights.t())
            own = {"Wl1_ND2H": w_up.transpose(1, 2), "Wl2_NHD": w_down.transpose(1, 2)}
            arguments = (x.unsqueeze(0), chosen, scores)
            out, _ = torch.func.functional_call(experts, own, arguments)
            return out.squeeze(0)

        layer.up_first = True
        return layer

    return make


LAYERS = {
    "transformers": transformers_layer,
    "sonicmoe": sonicmoe_layer,
    "scattermoe": scattermoe_layer,
    "momoe": momoe_layer(saved=0),
    "momoe_saving": momoe_layer(saved=100),
    "deep_gemm": deepgemm_layer,
}
# Module names that differ from the layer's name.
MODULES = {"momoe_saving": "momoe"}


def first_line(error) -> str:
    """The error in one line."""
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0]}" if text else type(error).__name__


def problem(name, error) -> str:
    """Why this layer cannot be timed, from the error of its construction or call."""
    module = MODULES.get(name, name)
    if name in LAYERS and importlib.util.find_spec(module) is None:
        return "absent"
    if name not in LAYERS:
        return f"absent: {error}"
    return f"installed, but this version does not fit: {first_line(error)}"
