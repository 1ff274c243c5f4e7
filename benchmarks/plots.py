"""Writes plots as SVG, with the same bytes for the same data."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

IMAGES = Path(__file__).resolve().parents[1] / "docs/images"


def save_plots(plots: dict[str, Callable]) -> None:
    """Writes docs/images/NAME.svg for each {NAME: a function of matplotlib.pyplot that returns a
    figure}."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "sonicmoe"
    import matplotlib.pyplot as plt

    IMAGES.mkdir(parents=True, exist_ok=True)
    for name, draw in plots.items():
        figure = draw(plt)
        figure.savefig(IMAGES / f"{name}.svg", metadata={"Date": None})
        plt.close(figure)
