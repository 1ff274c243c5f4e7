"""Dimensions of the SonicMoE paper's models (arXiv 2512.14080).

The paper gives d, n, E and K. We chose layers, heads and vocabulary so that the number of
parameters, embeddings included, matches the model's name: 1.40 and 7.06 billion.
"""

from __future__ import annotations

from typing import NamedTuple

VOCABULARY = 50304


class Size(NamedTuple):
    """A model's dimensions; d, n, E and K as in src/core/named_shapes.inc."""

    layers: int
    d: int
    heads: int
    n: int
    E: int
    K: int
    vocabulary: int = VOCABULARY


SIZES = {
    "1.4B-n256": Size(17, 768, 12, 256, 128, 8),
    "1.4B-n512": Size(17, 768, 12, 512, 64, 4),
    "1.4B-n1024": Size(17, 768, 12, 1024, 32, 2),
    "7B-n256": Size(43, 1536, 12, 256, 128, 8),
    "7B-n512": Size(43, 1536, 12, 512, 64, 4),
    "7B-n1024": Size(43, 1536, 12, 1024, 32, 2),
    "debug": Size(2, 64, 4, 32, 8, 2, 512),
}
