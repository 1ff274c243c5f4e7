"""Replaces the function that computes torchtitan's grouped experts, in releases 0.2.0 to 0.2.2.

from sonicmoe_cpp.integrations import torchtitan
torchtitan.replace()
"""

from __future__ import annotations

import importlib
import inspect
from importlib import metadata
from types import ModuleType

import torch
from torch import Tensor

from ...layer import moe_grouped
from .._grouped import offsets_of
from .._recognise import local

MODULE = "torchtitan.models.moe.moe"
# Names of functions in torchtitan's module of experts.
SEAM = "_run_experts_grouped_mm"
PADDING = "indices_padding_wrapper"


def run_experts(
    w1: Tensor, w2: Tensor, w3: Tensor, x: Tensor, num_tokens_per_expert: Tensor
) -> Tensor:
    """SwiGLU experts over grouped rows in bf16, with the signature of torchtitan's function.

    w1, w3 (E, F, D) gate and up, w2 (E, D, F), x (rows, D) grouped by expert, num_tokens_per_expert
    (E,) on the device. Rows past the counts give zeros and are not read. Groups need no alignment.
    """
    gate, down, up = (local(w).bfloat16() for w in (w1, w2, w3))
    rows, offsets = x.bfloat16(), offsets_of(num_tokens_per_expert, down.shape[0])
    with torch.autocast(x.device.type, enabled=False):
        out = moe_grouped(rows, offsets, (gate, up), down)
    return out.type_as(x)


def _refuse(problem: str) -> None:
    try:
        installed = f"torchtitan {metadata.version('torchtitan')} is installed"
    except metadata.PackageNotFoundError:
        installed = "torchtitan is not installed"
    raise ImportError(
        f"{problem}: this adapter works with torchtitan 0.2.0 to 0.2.2 (from 0.3 on GroupedExperts "
        f"calls no such function); {installed}"
    )


def _found(module: ModuleType | None) -> ModuleType:
    """The module whose function can be replaced."""
    if module is None:
        try:
            module = importlib.import_module(MODULE)
        except ModuleNotFoundError as error:
            if not (error.name or "").startswith("torchtitan"):
                raise  # a package that torchtitan itself needs is missing
            _refuse(f"{error.name} is missing")
    function = getattr(module, SEAM, None)
    if function is None:
        _refuse(f"{module.__name__} has no {SEAM}")
    theirs, ours = (tuple(inspect.signature(f).parameters) for f in (function, run_experts))
    if theirs != ours:
        _refuse(
            f"{SEAM} of {module.__name__} takes {', '.join(theirs)}, must take {', '.join(ours)}"
        )
    return module


def replace(module: ModuleType | None = None) -> None:
    """Makes `module`, in which torchtitan defines its GroupedExperts, call run_experts.

    The default is torchtitan.models.moe.moe. If the module pads every group to a multiple of 8
    rows, that padding is left out. Raises ImportError if the module has no such function.
    """
    module = _found(module)
    setattr(module, SEAM, run_experts)
    padding = getattr(module, PADDING, None)
    if padding is not None:

        def pad_others(function):
            return function if function is run_experts else padding(function)

        setattr(module, PADDING, pad_others)
