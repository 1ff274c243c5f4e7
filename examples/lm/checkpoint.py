"""The checkpoint of a run: the file checkpoint.pt of torch.save, replaced as a whole.

It holds the weights, AdamW's state, the random state, the run's name, text and settings, the step
and the history. torch.load reads it without running code of the file.
"""

import io
from pathlib import Path
from typing import Any

import torch

from lm.config import FREE_KEYS, SHAPE_KEYS
from lm.errors import UserError, first_line
from lm.files import write_file

NAME = "checkpoint.pt"
KEYS = {"run", "text", "config", "step", "history", "model", "optimizer", "rng"}


def newest(folder: Path) -> Path | None:
    """The checkpoint in the folder of a run; None if there is none."""
    path = folder / NAME
    return path if path.is_file() else None


def save(folder: Path, content: dict[str, Any]) -> Path:
    """Replaces the folder's checkpoint by one with the values of KEYS."""
    buffer = io.BytesIO()
    torch.save(content, buffer)
    write_file(folder / NAME, buffer.getbuffer())
    return folder / NAME


def remove(folder: Path) -> bool:
    """Removes the folder's checkpoint. False if there was none."""
    path = newest(folder)
    if path is None:
        return False
    try:
        path.unlink()
    except OSError as error:
        raise UserError(f"cannot remove {path}: {error.strerror}") from error
    return True


def _check_settings(path: Path, saved: dict[str, Any], wanted: dict[str, Any]) -> None:
    """Refuses a checkpoint whose settings differ from the run's."""
    for key in [*SHAPE_KEYS, *(k for k in wanted if k not in SHAPE_KEYS)]:
        if key not in FREE_KEYS and saved.get(key) != wanted[key]:
            kind = "shape" if key in SHAPE_KEYS else "run"
            raise UserError(
                f"checkpoint {path} is of another {kind}: it has {key} = {saved.get(key)}, "
                f"asked for is {key} = {wanted[key]}; pass its setting or start afresh without "
                "--resume"
            )


def load(path: Path, identity: dict[str, Any]) -> dict[str, Any]:
    """The content of a checkpoint of the run with this identity: its `run`, `text` and `config`."""
    move = "move it elsewhere or choose another --out"
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # a damaged file raises errors of many kinds
        raise UserError(f"checkpoint {path} cannot be read: {first_line(error)}; {move}") from error
    if not isinstance(content, dict) or content.keys() != KEYS:
        raise UserError(f"{path} is no checkpoint of this program; {move}")
    if content["run"] != identity["run"]:
        raise UserError(
            f"checkpoint {path} is of another run: {content['run']}, not {identity['run']}; {move}"
        )
    _check_settings(path, content["config"], identity["config"])
    if content["text"] != identity["text"]:
        raise UserError(f"checkpoint {path} was trained on other text than is here now")
    return content
