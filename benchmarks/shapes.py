"""The named layers of src/core/named_shapes.inc, which the command `sonicmoe` has too."""

from __future__ import annotations

import argparse
import re
from dataclasses import dataclass
from pathlib import Path

TABLE = Path(__file__).resolve().parents[1] / "src/core/named_shapes.inc"


@dataclass(frozen=True)
class Shape:
    T: int  # tokens; over ranks those of one rank
    d: int
    n: int
    E: int
    K: int

    @property
    def rows(self):
        return self.T * self.K

    def flops(self, which):
        return {"fwd": 6, "bwd": 12}[which] * self.rows * self.n * self.d

    def least_bytes(self, which):
        """Bytes that any implementation must move: used weights, x, out, and their gradients."""
        weights = 3 * min(self.E, self.rows) * self.n * self.d * 2
        tokens = 2 * self.T * self.d * 2
        return {"fwd": weights + tokens, "bwd": 2 * (weights + tokens)}[which]


NAMED = {
    name: Shape(*map(int, sizes.split(",")))
    for name, sizes in re.findall(r'\{"([^"]+)", \{([\d, ]+)\}\}', TABLE.read_text())
}


def named(name: str) -> Shape:
    """The layer of a name, with T tokens if -T<tokens> follows it; raises KeyError."""
    if name in NAMED:
        return NAMED[name]
    layer, _, tokens = name.rpartition("-T")
    if layer not in NAMED or not re.fullmatch("[0-9]+", tokens) or int(tokens) == 0:
        raise KeyError(f'"{name}" is no layer of {TABLE.name}')
    return Shape(**vars(NAMED[layer]) | {"T": int(tokens)})


def argument(name: str) -> str:
    """The name of a layer on a command line, for argparse."""
    try:
        named(name)
    except KeyError as unknown:
        raise argparse.ArgumentTypeError(f"{unknown.args[0]}: {', '.join(NAMED)}") from None
    return name
