"""Where the demo trains, in what precision, and what a GPU has time for."""

from dataclasses import dataclass, field

import sonicmoe_cpp
import torch

from lm.errors import UserError

# What --device cuda changes of the defaults: a larger model on more tokens a step, 2048 rows an
# expert in the mean, rounded to the 128 rows of a tile.
LARGER = {
    "context": 512,
    "batch": 32,
    "width": 768,
    "layers": 8,
    "heads": 12,
    "expert_width": 128,
    "tile": 128,
    "steps": 400,
    "lr": 1e-3,
}


@dataclass(frozen=True)
class Device:
    """A device with the precision of its matrices and the settings it changes."""

    name: str
    precision: str
    settings: dict = field(default_factory=dict)


CPU = Device("cpu", "fp32")
CUDA = Device("cuda", "bf16", LARGER)


def choose(asked: str) -> Device:
    """The device to train on: what was asked for, if it can be had; a usable GPU by itself."""
    if asked not in ("", "cpu", "cuda"):
        raise UserError(f"device is '{asked}'; it must be cpu or cuda")
    reason = sonicmoe_cpp.unsupported_reason("cuda")
    if asked == "cuda" and reason is not None:
        raise UserError(f"device cuda cannot be used: {reason}")
    return CUDA if asked != "cpu" and reason is None else CPU


def autocast(device: str, precision: str) -> torch.autocast:
    """The precision that matrices are multiplied in; weights and their gradients stay fp32."""
    return torch.autocast(device, torch.bfloat16, enabled=precision == "bf16")
