"""Checkpoints: one folder for a step. It is complete or absent, even after a power failure.

    step-00000400/model.safetensors      weights under the model's own names
                  optimizer.safetensors  AdamW's moments and the random state
                  state.json             run, step, settings, history

A checkpoint is written to the folder .writing, flushed to the disk and renamed. Older checkpoints
are removed after that, so the newest checkpoint is always complete.

A folder is taken for a checkpoint if its name is exactly step- and eight digits, and its state.json
names the same step. Nothing else in the folder of a run is read, replaced or removed.
"""

import json
import os
import re
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from torch import nn

from lm.errors import UserError
from lm.files import UNFINISHED, flush_folder, make_folder, write_file

MODEL, OPTIMIZER, STATE = FILES = ("model.safetensors", "optimizer.safetensors", "state.json")
MOVE = "move it elsewhere or choose another --out"
_NAME = re.compile(r"step-([0-9]{8})")


def read_state(path: Path) -> dict[str, Any]:
    """The content of a checkpoint's state.json."""
    try:
        state = json.loads((path / STATE).read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"checkpoint {path} cannot be read: {error}; {MOVE}") from error
    if not isinstance(state, dict):
        raise UserError(f"checkpoint {path} cannot be read: {STATE} is no mapping; {MOVE}")
    return state


def _named(folder: Path) -> list[Path]:
    """The entries whose names have the form of a checkpoint's name, oldest first."""
    try:
        return [folder / name for name in sorted(os.listdir(folder)) if _NAME.fullmatch(name)]
    except FileNotFoundError:
        return []
    except OSError as error:
        raise UserError(f"cannot read {folder}: {error.strerror}") from error


def _check_ours(path: Path) -> None:
    """Refuses a folder that has the name of a checkpoint but is not a checkpoint."""
    if path.is_symlink() or not path.is_dir():
        raise UserError(f"{path} has the name of a checkpoint and is no folder; {MOVE}")
    if not os.path.lexists(path / STATE):
        raise UserError(f"{path} has the name of a checkpoint and no {STATE}; {MOVE}")
    step = read_state(path).get("step")
    if type(step) is not int or path.name != f"step-{step:08d}":
        raise UserError(f"{path} has a {STATE} that does not name its step; {MOVE}")


def _is_ours(path: Path) -> bool:
    try:
        _check_ours(path)
    except UserError:
        return False
    return True


def _foreign(folder: Path) -> list[str]:
    """The names in a checkpoint's folder, finished or not, that this program does not write."""
    known = {*FILES, *(name + UNFINISHED for name in FILES)}
    return sorted(set(os.listdir(folder)) - known)


def checkpoints(folder: Path) -> list[Path]:
    """The checkpoints in a folder, oldest first. Refuses any other entry with such a name."""
    found = _named(folder)
    for path in found:
        _check_ours(path)
    return found


def newest(folder: Path) -> Path | None:
    """The last checkpoint in a folder; None if there is none. Other entries are ignored."""
    return next(filter(_is_ours, reversed(_named(folder))), None)


def any_checkpoint(folder: Path) -> bool:
    """Whether a run below this folder, folder/RUN/step-N, has a checkpoint."""
    return any(_is_ours(path) for path in folder.glob("*/step-*") if _NAME.fullmatch(path.name))


def _clear(folder: Path) -> None:
    """Removes the unfinished checkpoint that an interrupted process left."""
    unfinished = folder / UNFINISHED
    if not os.path.lexists(unfinished):
        return
    if unfinished.is_symlink() or not unfinished.is_dir() or _foreign(unfinished):
        raise UserError(f"{unfinished} is in the way of checkpoints; {MOVE}")
    for name in os.listdir(unfinished):
        os.unlink(unfinished / name)
    os.rmdir(unfinished)


def open_folder(folder: Path) -> Path:
    """Makes the folder of a run ready for checkpoints."""
    make_folder(folder)
    try:
        _clear(folder)
    except OSError as error:
        raise UserError(f"cannot write to {folder}: {error.strerror}") from error
    return folder


def _remove(path: Path) -> None:
    """Removes a checkpoint. The folder is renamed first, so that after an interruption it counts as
    an unfinished checkpoint, which _clear() removes."""
    _clear(path.parent)
    os.rename(path, path.parent / UNFINISHED)
    _clear(path.parent)


def remove_all(folders: list[Path]) -> bool:
    """Removes the checkpoints of these folders, or none of them if one holds a foreign file.

    False if there were none.
    """
    found = [path for folder in folders for path in checkpoints(folder)]
    for path in found:
        for name in _foreign(path):
            raise UserError(
                f"{path} holds {name}, which was not written by this program, and would be "
                f"removed; {MOVE}"
            )
    try:
        for path in found:
            _remove(path)
    except OSError as error:
        raise UserError(f"cannot remove old checkpoints: {error}") from error
    return bool(found)


def optimizer_tensors(optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """AdamW's state by names INDEX.KEY, with the index of the parameter."""
    state = optimizer.state_dict()["state"]
    return {f"{i}.{key}": value for i, item in state.items() for key, value in item.items()}


def save_checkpoint(
    folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer, state: dict[str, Any]
) -> Path:
    """Writes the checkpoint of state["step"] and removes earlier checkpoints.

    An earlier checkpoint that contains a foreign file is not removed.
    """
    final = folder / f"step-{state['step']:08d}"
    if os.path.lexists(final):
        _check_ours(final)
        return final  # the same run at the same step: the same bits
    _clear(folder)
    unfinished = folder / UNFINISHED
    unfinished.mkdir(parents=True)
    tensors = optimizer_tensors(optimizer) | {"rng": torch.get_rng_state()}
    write_file(unfinished / MODEL, save(model.state_dict()))
    write_file(unfinished / OPTIMIZER, save(tensors))
    write_file(unfinished / STATE, json.dumps(state, indent=1).encode())
    flush_folder(unfinished)
    older = _named(folder)
    os.rename(unfinished, final)
    flush_folder(folder)
    for path in older:
        if _is_ours(path) and not _foreign(path):
            _remove(path)
    return final
