"""Records, tables and plots: what all figures share."""

from __future__ import annotations

import functools
import json
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
RECORDS = ROOT / "benchmarks/results"
IMAGES = ROOT / "docs/images"
PASSES = {"fwd": "forward", "bwd": "backward"}
# Names of the contenders in plots and tables.
CONTENDERS = {
    "bound": "cuBLAS reference",
    "ours_cpp": "sonicmoe.cpp",
    "ours_torch": "sonicmoe.cpp in PyTorch",
    "torch": "compiled grouped_mm",
    "loop": "loop over experts",
    "transformers": "transformers grouped_mm",
    "sonicmoe": "sonic-moe",
    "scattermoe": "ScatterMoE",
    "momoe": "MoMoE",
    "momoe_saving": "MoMoE, all saved",
    "deep_gemm": "DeepGEMM",
    "portable": "portable engine",
    "hopper": "Hopper engine",
}
# Our results have one colour in every plot; the others have muted ones.
OURS = "#c4451c"
COLOURS = {
    "bound": "#4d4d4d",
    "ours_cpp": OURS,
    "ours_torch": OURS,
    "torch": "#b9c4cf",
    "loop": "#e3e0d3",
    "transformers": "#d9d9d9",
    "sonicmoe": "#8095a8",
    "scattermoe": "#c9bfa8",
    "momoe": "#a9bda9",
    "momoe_saving": "#cddccd",
    "deep_gemm": "#b3a5bd",
    "portable": OURS,
    "hopper": "#e3a48f",
}


@functools.cache
def record(name):
    """The record benchmarks/results/NAME.json, or None."""
    path = RECORDS / f"{name}.json"
    return json.loads(path.read_text()) if path.exists() else None


def grid(columns, rows, words=1):
    """A Markdown table; `words` columns are left-aligned."""
    lines = [columns, ["---"] * words + ["---:"] * (len(columns) - words), *rows]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines)


def shape_text(row):
    return ",".join(str(row[k]) for k in ("T", "d", "n", "E", "K"))


def source(record):
    where = f"{record['device']}, torch {record['torch']}"
    return f"{where}, {record['date'][:10]}, commit {record['commit']}."


def span(values):
    return f"{min(values):.2f} to {max(values):.2f}"


def total(times):
    """Milliseconds of forward and backward."""
    return times["fwd_ms"] + times["bwd_ms"]


def save_plot(name, plot, *records):
    """Writes docs/images/NAME.svg, with the same bytes for the same records. plot(pyplot, *records)
    returns a figure."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "sonicmoe"
    import matplotlib.pyplot as plt

    IMAGES.mkdir(parents=True, exist_ok=True)
    figure = plot(plt, *records)
    figure.savefig(IMAGES / f"{name}.svg", metadata={"Date": None})
    plt.close(figure)


def open_axes(*charts):
    """Removes the upper and the right edge."""
    for axes in charts:
        axes.spines[["top", "right"]].set_visible(False)


def bars(axes, names, values, labels):
    """Groups of bars: values[i] holds {name: height} of the group labels[i]."""
    width = 0.84 / len(names)
    for i, name in enumerate(names):
        positions = [x + (i - (len(names) - 1) / 2) * width for x in range(len(labels))]
        heights = [group.get(name, 0) for group in values]
        hatch = "///" if name == "ours_torch" and "ours_cpp" in names else None
        style = {"color": COLOURS[name], "hatch": hatch, "edgecolor": "white", "linewidth": 0.3}
        axes.bar(positions, heights, width, label=CONTENDERS[name], **style)
    axes.set_xticks(range(len(labels)), labels)
    axes.set_xlim(-0.6, len(labels) - 0.4)
    open_axes(axes)


def legend_above(figure, axes, columns=5, size=9):
    """One legend above all charts."""
    handles, labels = axes.get_legend_handles_labels()
    above = {"loc": "outside upper center", "ncols": columns, "fontsize": size}
    figure.legend(handles, labels, frameon=False, **above)
