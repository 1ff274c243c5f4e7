"""Reads a checkpoint. The whole checkpoint is checked against the run before any part is used:
torch's fused AdamW does not check shapes and dtypes of moments, and writes past their end if they
are wrong."""

import math
from pathlib import Path
from typing import Any, NoReturn

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import nn

from lm.checkpoint import MODEL, MOVE, OPTIMIZER, STATE, read_state
from lm.config import FREE_KEYS, SHAPE_KEYS
from lm.errors import UserError

Tensors = dict[str, torch.Tensor]
Layout = dict[str, tuple[tuple[int, ...], torch.dtype]]  # shape and dtype of each tensor

STATE_KEYS = {"run": str, "step": int, "text": str, "torch": str, "config": dict, "history": dict}
HISTORY_KEYS = ("train_loss", "val_steps", "val_loss", "padding", "seconds")
PADDING_KEYS = {"topk_rows", "topk_tiled", "rounded_rows", "rounded_tiled"}


def _damaged(path: Path, what: str) -> NoReturn:
    raise UserError(f"checkpoint {path} is damaged: {what}; {MOVE}")


def _check_keys(path: Path, state: dict[str, Any]) -> None:
    for key, kind in STATE_KEYS.items():
        if type(state.get(key)) is not kind:
            _damaged(path, f"{STATE} has no {kind.__name__} '{key}'")
    for key in HISTORY_KEYS:
        if key not in state["history"]:
            _damaged(path, f"{STATE} has no '{key}' in its history")
    for key in [*(state.keys() - STATE_KEYS), *(state["history"].keys() - set(HISTORY_KEYS))]:
        _damaged(path, f"{STATE} has an unknown key '{key}'")


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


def _numbers(value: Any) -> bool:
    """Whether a JSON value is a list of finite numbers."""
    return isinstance(value, list) and all(
        type(x) in (int, float) and abs(x) < math.inf for x in value
    )


def _is_padding(value: Any) -> bool:
    """Whether a JSON value has the form of a result of lm.measure.padding()."""
    if not isinstance(value, dict) or value.keys() != PADDING_KEYS:
        return False
    return all(type(rows) is int and 0 <= rows < 2**63 for rows in value.values())


def _check_history(path: Path, history: dict[str, Any], step: int, config: dict) -> None:
    """Refuses a history whose lengths and steps differ from those of a run at this step."""
    steps, every = config["steps"], config["eval_every"]
    if not 0 <= step <= steps:
        _damaged(path, f"its step {step} is not from 0 to {steps}")
    points = [*range(0, step + 1, every)]
    if step == steps and step % every:
        points.append(step)
    padding = history["padding"]
    for key, good in (
        ("train_loss", _numbers(history["train_loss"]) and len(history["train_loss"]) == step),
        ("val_steps", history["val_steps"] == points),
        ("val_loss", _numbers(history["val_loss"]) and len(history["val_loss"]) == len(points)),
        ("padding", isinstance(padding, list) and len(padding) == len(points) - 1),
        ("padding", isinstance(padding, list) and all(map(_is_padding, padding))),
        ("seconds", _numbers([history["seconds"]]) and history["seconds"] >= 0),
    ):
        if not good:
            _damaged(path, f"'{key}' in its history is not that of step {step}")


def _check_tensors(path: Path, file: str, expected: Layout, found: Tensors) -> None:
    """Refuses tensors unless they have exactly the run's names, shapes and dtypes, and finite
    values."""
    for name in sorted(expected.keys() | found.keys()):
        if name not in found:
            _damaged(path, f"{file} lacks {name}")
        if name not in expected:
            _damaged(path, f"{file} holds {name}, which the run does not have")
        value = found[name]
        shape, dtype = expected[name]
        if tuple(value.shape) != shape or value.dtype != dtype:
            raise UserError(
                f"checkpoint {path} is of another shape: {name} is {tuple(value.shape)} "
                f"{value.dtype}, the run's is {shape} {dtype}; {MOVE}"
            )
        if not value.isfinite().all():
            _damaged(path, f"{name} in {file} is not finite")


def _optimizer_layout(optimizer: torch.optim.Optimizer, step: int) -> Layout:
    """The tensors of the optimizer's state after `step` steps: none before the first step, then
    three for each parameter."""
    expected: Layout = {"rng": (tuple(torch.get_rng_state().shape), torch.uint8)}
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    for i, parameter in enumerate(parameters if step else []):
        expected[f"{i}.step"] = ((), torch.float32)
        for key in ("exp_avg", "exp_avg_sq"):
            expected[f"{i}.{key}"] = (tuple(parameter.shape), parameter.dtype)
    return expected


def _check_moments(path: Path, tensors: Tensors, step: int) -> None:
    for name, value in tensors.items():
        if name.endswith(".step") and value.item() != step:
            _damaged(path, f"{name} in {OPTIMIZER} is {value.item()}, the run's step is {step}")
        if name.endswith(".exp_avg_sq") and (value < 0).any():
            _damaged(path, f"{name} in {OPTIMIZER} is negative")
    try:
        torch.Generator().set_state(tensors["rng"])
    except RuntimeError:
        _damaged(path, f"rng in {OPTIMIZER} is no random state")


def _read_tensors(path: Path, file: str) -> Tensors:
    try:
        return load_file(path / file)
    except (OSError, ValueError, LookupError, AttributeError, SafetensorError) as error:
        raise UserError(f"checkpoint {path} cannot be read: {file}: {error}; {MOVE}") from error


def load_checkpoint(
    path: Path, model: nn.Module, optimizer: torch.optim.Optimizer, identity: dict[str, Any]
) -> dict[str, Any]:
    """Fills model, optimizer and random state; returns the content of state.json.

    `identity` holds the run, text and config that state.json must name.
    """
    state = read_state(path)
    _check_keys(path, state)
    if state["run"] != identity["run"]:
        raise UserError(
            f"checkpoint {path} is of another run: {state['run']}, not {identity['run']}; {MOVE}"
        )
    _check_settings(path, state["config"], identity["config"])
    if state["text"] != identity["text"]:
        raise UserError(f"checkpoint {path} was trained on other text than is here now")
    step = state["step"]
    _check_history(path, state["history"], step, identity["config"])
    weights, tensors = _read_tensors(path, MODEL), _read_tensors(path, OPTIMIZER)
    layout = {name: (tuple(v.shape), v.dtype) for name, v in model.state_dict().items()}
    _check_tensors(path, MODEL, layout, weights)
    _check_tensors(path, OPTIMIZER, _optimizer_layout(optimizer, step), tensors)
    _check_moments(path, tensors, step)

    model.load_state_dict(weights)
    torch.set_rng_state(tensors.pop("rng"))
    moments: dict[int, Tensors] = {}
    for name, value in tensors.items():
        index, key = name.split(".", 1)
        moments.setdefault(int(index), {})[key] = value
    groups = optimizer.state_dict()["param_groups"]
    optimizer.load_state_dict({"state": moments, "param_groups": groups})
    return state
