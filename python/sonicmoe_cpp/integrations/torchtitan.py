"""torchtitan's grouped experts: a function to put in the place of its own.

import torchtitan.models.moe.moe as titan_moe
from sonicmoe_cpp.integrations import torchtitan
torchtitan.replace(titan_moe)
"""

from __future__ import annotations

from types import ModuleType

import torch
from torch import Tensor

from ..layer import moe_grouped
from ._grouped import offsets_of
from ._recognise import local

# The names by which torchtitan's module of experts calls its own functions.
SEAM = "_run_experts_grouped_mm"
PADDING = "indices_padding_wrapper"


def run_experts(
    w1: Tensor, w2: Tensor, w3: Tensor, x: Tensor, num_tokens_per_expert: Tensor
) -> Tensor:
    """SwiGLU experts over grouped rows, as torchtitan's grouped_mm function: computed in bf16.

    w1, w3 (E, F, D) gate and up, w2 (E, D, F), x (rows, D) grouped by expert, num_tokens_per_expert
    (E,) on the device. Rows past the counts give zeros and are not read. Groups need no alignment.
    """
    gate, down, up = (local(w).bfloat16() for w in (w1, w2, w3))
    rows, offsets = x.bfloat16(), offsets_of(num_tokens_per_expert, down.shape[0])
    with torch.autocast(x.device.type, enabled=False):
        out = moe_grouped(rows, offsets, (gate, up), down)
    return out.type_as(x)


def replace(module: ModuleType) -> None:
    """Makes `module`, where torchtitan defines its GroupedExperts, call run_experts.

    Its padding of every group to a multiple of 8 rows, where the module has it, is left out.
    """
    if not hasattr(module, SEAM):
        raise AttributeError(
            f"{module.__name__} has no {SEAM}: pass the module of torchtitan that defines it, "
            "such as torchtitan.models.moe.moe"
        )
    setattr(module, SEAM, run_experts)
    padding = getattr(module, PADDING, None)
    if padding is not None:

        def pad_others(function):
            return function if function is run_experts else padding(function)

        setattr(module, PADDING, pad_others)
