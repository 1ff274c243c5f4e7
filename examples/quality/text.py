"""The parts that make_text.py wrote, as tokens on a device."""

import json
import lzma
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lm.errors import UserError


def read_meta(folder: Path) -> dict[str, Any]:
    try:
        return json.loads((folder / "meta.json").read_bytes())
    except (OSError, ValueError) as error:
        raise UserError(f"{folder} must be a folder that make_text.py wrote: {error}") from error


def read_part(path: Path) -> np.ndarray:
    try:
        return np.frombuffer(lzma.decompress(path.read_bytes()), dtype="<u2")
    except (OSError, lzma.LZMAError) as error:
        raise UserError(f"{path} cannot be read: {error}") from error


def read_tokens(folder: Path, name: str, least: int) -> np.ndarray:
    """The tokens of a kind and split, as int32: of the parts that are there, in order."""
    paths = [folder / part["file"] for part in read_meta(folder)["parts"].get(name, [])]
    with ThreadPoolExecutor() as threads:  # xz takes seconds for each part
        found = list(threads.map(read_part, (path for path in paths if path.exists())))
    tokens = np.concatenate(found).astype(np.int32) if found else np.empty(0, np.int32)
    if len(tokens) < least:
        raise UserError(f"{folder} has {len(tokens)} tokens of {name}, at least {least} are needed")
    return tokens


class Windows:
    """Windows of context + 1 tokens, on the device; without end, each epoch in another order."""

    def __init__(self, tokens: np.ndarray, context: int, device: torch.device, seed: int):
        self._tokens = torch.from_numpy(tokens).to(device)
        self._span = torch.arange(context + 1, device=device)
        self._context, self._seed = context, seed
        self.count = (len(tokens) - 1) // context
        self._epoch, self._starts = -1, torch.empty(0)

    def batch(self, first: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Inputs and targets (count, context) int64 of the windows from `first` on, in the order of
        the seed. Copies to the device only at the beginning of an epoch."""
        starts = []
        while count:
            epoch, place = divmod(first, self.count)
            if epoch != self._epoch:
                order = np.random.default_rng([self._seed, epoch]).permutation(self.count)
                self._starts = torch.from_numpy(order * self._context).to(self._span.device)
                self._epoch = epoch
            starts.append(self._starts[place : place + count])
            first, count = first + len(starts[-1]), count - len(starts[-1])
        rows = self._tokens[torch.cat(starts)[:, None] + self._span].long()
        return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()
