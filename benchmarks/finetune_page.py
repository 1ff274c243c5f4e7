"""The tables and the plot of docs/finetune.md, from finetune.json.

python benchmarks/finetune_page.py    draws docs/images/finetune.svg
"""

from __future__ import annotations

import json
import statistics
import sys

from h200_figures import COLOURS, OURS, ROOT, grid
from h200_page import source
from plots import save_plots

RECORD = ROOT / "benchmarks/results/h200/finetune.json"
RIVALS = {"torch": "grouped_mm of weights and factors", "merged": "grouped_mm of W + BA (PEFT)"}


def record():
    return json.loads(RECORD.read_text())


def total(row, name):
    return row[name]["fwd_ms"] + row[name]["bwd_ms"]


def over(name, other, rows):
    """Times of one over times of another."""
    return [total(row, name) / total(row, other) for row in rows]


def span(values):
    return f"{min(values):.2f} to {max(values):.2f}"


def layers():
    found = record()
    columns = ["layer", "T", "r", "frozen, ms", "LoRA over frozen"]
    columns += [f"{title}, over ours" for title in RIVALS.values()]
    columns += ["kept MiB: frozen, LoRA, PyTorch", "peak MiB"]
    rows = []
    for row in found["rows"]:
        ratios = [total(row, "lora") / total(row, "frozen")]
        ratios += [total(row, name) / total(row, "lora") for name in RIVALS]
        memory = (
            ", ".join(f"{row[name][key]:.0f}" for name in ("frozen", "lora", "torch"))
            for key in ("kept_mib", "peak_mib")
        )
        cells = [row["config"], row["T"], row["r"], f"{total(row, 'frozen'):.2f}"]
        rows.append([*cells, *(f"{value:.2f}" for value in ratios), *memory])
    return f"{grid(columns, rows)}\n\nMeans: {means(found)}. {source(found)}"


def means(found):
    """The mean of LoRA over frozen for each layer and rank."""
    groups = {}
    for row in found["rows"]:
        groups.setdefault((row["config"], row["r"]), []).append(row)
    return ", ".join(
        f"{config} r {rank} {statistics.mean(over('lora', 'frozen', rows)):.2f}"
        for (config, rank), rows in groups.items()
    )


def packed():
    found = record()
    columns = ["layer", "format", "bytes a weight", "unpacking, GB/s", "of a copy's rate"]
    columns += ["over bf16", "over bf16 and unpacking"]
    rows = []
    for row in found["packed"]:
        share = row["unpack_gbs"] / row["copy_gbs"]
        alone = row["packed_ms"] / row["frozen_ms"]
        both = row["packed_ms"] / (row["frozen_ms"] + row["unpack_ms"])
        cells = [row["config"], row["format"], row["bytes_a_weight"], row["unpack_gbs"]]
        rows.append([*cells, *(f"{value:.2f}" for value in (share, alone, both))])
    return f"{grid(columns, rows, words=2)}\n\nT = {found['packed'][0]['T']}. {source(found)}"


def models():
    found = record()
    columns = ["model", "weights", "rank", "factors, optimizer", "limit, GiB", "peak, GiB"]
    columns += ["tokens/s", "transformers' experts: peak, tokens/s", "over it"]
    rows = []
    for row in found["models"]:
        beside = row.get("beside")
        rival, times = "-", "-"
        if beside:
            rival = f"{beside['peak_gib']}, {beside['tokens_per_s']}"
            times = f"{row['tokens_per_s'] / beside['tokens_per_s']:.2f}"
        kind = f"{row['factors']}, {row['optim']}"
        cells = [row["model"], row["weights"], row["rank"], kind, row["cap_gib"] or "-"]
        rows.append([*cells, row["peak_gib"], row["tokens_per_s"], rival, times])
    return f"{grid(columns, rows, words=2)}\n\n{source(found)}"


def sentence():
    """What README promises."""
    rows = record()["rows"]
    kept = [row["lora"]["kept_mib"] / row["torch"]["kept_mib"] for row in rows]
    return (
        f"**Fine-tuning**: LoRA on frozen experts takes {span(over('lora', 'frozen', rows))} times "
        f"as long as the frozen layer. In compiled PyTorch the same takes "
        f"{span(over('torch', 'lora', rows))} times as long as here and keeps "
        f"{1 / max(kept):.1f} to {1 / min(kept):.1f} times the bytes (r 16 and 64, one H200)."
    )


def plot(plt):
    found = record()
    ranks = sorted({row["r"] for row in found["rows"]})
    figure, charts = plt.subplots(1, len(ranks), figsize=(10, 3.6), layout="constrained")
    names = {"lora": "sonicmoe.cpp", **RIVALS}
    colours = (OURS, *list(COLOURS.values())[: len(RIVALS)])
    for rank, axes in zip(ranks, charts, strict=True):
        rows = [row for row in found["rows"] if row["r"] == rank]
        width = 0.84 / len(names)
        for i, name in enumerate(names):
            at = [x + (i - (len(names) - 1) / 2) * width for x in range(len(rows))]
            axes.bar(at, over(name, "frozen", rows), width, label=names[name], color=colours[i])
        axes.axhline(1.0, color="black", linewidth=0.8)
        labels = [f"{row['config']}\nT {row['T']}" for row in rows]
        axes.set_xticks(range(len(rows)), labels, fontsize=7)
        axes.set(title=f"rank {rank}", ylabel="time over the frozen layer")
        axes.spines[["top", "right"]].set_visible(False)
    handles, labels = charts[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=3, fontsize=8, frameon=False)
    return figure


TABLES = {"finetune-models": models, "finetune-layers": layers, "finetune-packed": packed}


if __name__ == "__main__":
    save_plots({"finetune": plot})
    sys.exit(0)
