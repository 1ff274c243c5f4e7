"""Checkpoints: a folder a step, complete or absent, whatever moment the power fails.

    step-00000400/model.safetensors      weights under the model's own names
                  optimizer.safetensors  AdamW's moments and the random state
                  state.json             step, settings, history

A checkpoint is written under another name, flushed to the disk and renamed; only then are older
ones removed. So the newest folder is always whole.
"""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import nn

from lm.config import FREE_KEYS, SHAPE_KEYS, Config
from lm.errors import UserError

_UNFINISHED = ".writing"


def _flush_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_file(path: Path, content: bytes) -> None:
    """Replaces a file as a whole: readers see the old content or the new one."""
    unfinished = path.with_name(path.name + _UNFINISHED)
    with open(unfinished, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    os.replace(unfinished, path)


def checkpoints(folder: Path) -> list[Path]:
    """The whole checkpoints in a folder, oldest first."""
    return sorted(folder.glob("step-*"))


def _optimizer_tensors(optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    state = optimizer.state_dict()["state"]
    return {f"{i}.{key}": value for i, item in state.items() for key, value in item.items()}


def save_checkpoint(
    folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer, state: dict[str, Any]
) -> Path:
    """Writes the checkpoint of state["step"] and removes the ones before it."""
    final = folder / f"step-{state['step']:08d}"
    if final.exists():  # the same run at the same step: the same bits
        return final
    folder.mkdir(parents=True, exist_ok=True)
    unfinished = folder / _UNFINISHED
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir()
    tensors = _optimizer_tensors(optimizer) | {"rng": torch.get_rng_state()}
    write_file(unfinished / "model.safetensors", save(model.state_dict()))
    write_file(unfinished / "optimizer.safetensors", save(tensors))
    write_file(unfinished / "state.json", json.dumps(state, indent=1).encode())
    _flush_folder(unfinished)
    older = checkpoints(folder)
    os.rename(unfinished, final)
    _flush_folder(folder)
    for path in older:
        shutil.rmtree(path)
    return final


def _check_settings(path: Path, saved: dict[str, Any], config: Config) -> None:
    """A run continues only as the run that it was."""
    wanted = vars(config)
    for key in [*SHAPE_KEYS, *(k for k in wanted if k not in SHAPE_KEYS)]:
        if key not in FREE_KEYS and saved.get(key) != wanted[key]:
            kind = "shape" if key in SHAPE_KEYS else "run"
            raise UserError(
                f"checkpoint {path} is of another {kind}: it has {key} = {saved.get(key)}, "
                f"asked for is {key} = {wanted[key]}; pass its setting or start afresh without "
                "--resume"
            )


def load_checkpoint(
    path: Path, model: nn.Module, optimizer: torch.optim.Optimizer, config: Config
) -> dict[str, Any]:
    """Fills model, optimizer and random state; returns what state.json holds."""
    try:
        state = json.loads((path / "state.json").read_bytes())
        weights = load_file(path / "model.safetensors")
        tensors = load_file(path / "optimizer.safetensors")
    except (OSError, ValueError, SafetensorError) as error:
        raise UserError(f"checkpoint {path} cannot be read: {error}") from error
    _check_settings(path, state["config"], config)
    expected = {name: tuple(value.shape) for name, value in model.state_dict().items()}
    found = {name: tuple(value.shape) for name, value in weights.items()}
    for name in sorted(expected.keys() | found.keys()):
        if expected.get(name) != found.get(name):
            raise UserError(
                f"checkpoint {path} is of another shape: {name} is {found.get(name)}, "
                f"the model's is {expected.get(name)}"
            )
    model.load_state_dict(weights)
    torch.set_rng_state(tensors.pop("rng"))
    moments: dict[int, dict[str, torch.Tensor]] = {}
    for name, value in tensors.items():
        index, key = name.split(".", 1)
        moments.setdefault(int(index), {})[key] = value
    groups = optimizer.state_dict()["param_groups"]
    optimizer.load_state_dict({"state": moments, "param_groups": groups})
    return state
