"""Low-rank factors of experts in PEFT's format: adapter_config.json and adapter_model.safetensors.

PEFT adapts a parameter (E, ...) by LoraConfig.target_parameters. It keeps the factors of all
experts in two matrices: lora_A (E*r, in), whose rows are ordered by (expert, rank), and
lora_B (out, r*E), whose columns are ordered by (rank, expert). It wraps a module once for each
adapted parameter, in the order in which the parameters are registered; every further wrapper adds
".base_layer" to the names inside it.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import NamedTuple

from torch import Tensor

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
_PREFIX = "base_model.model."
# Options that change the formula, with the values for which the formula is as in Scaling.
_PLAIN = {
    "peft_type": ("LORA",),
    "use_dora": (False, None),
    "lora_bias": (False, None),
    "fan_in_fan_out": (False, None),
    "bias": ("none", None),
    "rank_pattern": ({}, None),
    "alpha_pattern": ({}, None),
    "modules_to_save": ([], None),
    "layer_replication": ([], None),
}


class Scaling(NamedTuple):
    """W + (alpha / rank) * B A."""

    rank: int
    alpha: float


def _keys(module: str, parameters: list[str]) -> dict[str, str]:
    """For each adapted parameter, the prefix of the names of its factors."""
    depths = range(len(parameters) - 1, -1, -1)
    return {
        parameter: f"{_PREFIX}{module}{'.base_layer' * depth}."
        for parameter, depth in zip(parameters, depths, strict=True)
    }


def _flat(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """(E, r, in) and (E, out, r) as PEFT's two matrices."""
    return a.flatten(0, 1).contiguous(), b.permute(1, 2, 0).flatten(1).contiguous()


def _by_expert(a: Tensor, b: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    experts = a.shape[0] // rank
    return a.view(experts, rank, -1), b.view(b.shape[0], rank, experts).permute(2, 0, 1)


def write(directory, factors: dict, scaling: Scaling, base_model: str | None) -> None:
    """factors: {module: {parameter: (a, b)}}, parameters in the order in which they are
    registered."""
    from safetensors.torch import save_file

    tensors = {}
    for module, parameters in factors.items():
        for parameter, begin in _keys(module, list(parameters)).items():
            for name, value in zip("AB", _flat(*parameters[parameter]), strict=True):
                tensors[f"{begin}lora_{name}.weight"] = value.detach().cpu()
    config = {
        "peft_type": "LORA",
        "base_model_name_or_path": base_model,
        "r": scaling.rank,
        "lora_alpha": scaling.alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "inference_mode": True,
        "target_modules": [],
        "target_parameters": [f"{m}.{p}" for m, parameters in factors.items() for p in parameters],
    }
    folder = Path(directory)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
    (folder / CONFIG).write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")


def _scaling(path: Path) -> Scaling:
    config = json.loads(path.read_text())
    for name, plain in _PLAIN.items():
        if name in config and config[name] not in plain:
            raise ValueError(
                f"{path}: {name} is {json.dumps(config[name])}, which cannot be loaded beside "
                f"experts: must be {json.dumps(plain[0])}"
            )
    rank, alpha = config["r"], float(config["lora_alpha"])
    return Scaling(rank, alpha * math.sqrt(rank) if config.get("use_rslora") else alpha)


def _take(tensors: dict, begin: str, rank: int, path: Path) -> tuple[Tensor, Tensor]:
    names = [f"{begin}lora_{letter}.weight" for letter in "AB"]
    for name in names:
        if name not in tensors:
            raise ValueError(f"{path} lacks {name}: must adapt both projections of every expert")
    a, b = (tensors.pop(name) for name in names)
    if a.dim() != 2 or b.dim() != 2 or a.shape[0] % rank != 0 or b.shape[1] != a.shape[0]:
        raise ValueError(
            f"{path}: {names[0]} {tuple(a.shape)} and {names[1]} {tuple(b.shape)} must be "
            f"(E*r, in) and (out, r*E) with r = {rank}"
        )
    return _by_expert(a, b, rank)


def read(directory, modules: dict[str, list[str]]) -> tuple[dict, Scaling]:
    """Reads the factors that write() wrote, for {module: parameters}; refuses any other factors."""
    from safetensors.torch import load_file

    path = Path(directory) / WEIGHTS
    scaling = _scaling(Path(directory) / CONFIG)
    tensors, factors = load_file(path), {}
    for module, parameters in modules.items():
        begins = _keys(module, parameters)
        factors[module] = {p: _take(tensors, begins[p], scaling.rank, path) for p in parameters}
    if tensors:
        raise ValueError(
            f"{path} holds {min(tensors)}, which is not a factor of an experts module of this model"
        )
    return factors, scaling
