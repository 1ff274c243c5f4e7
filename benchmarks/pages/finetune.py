"""Fine-tuning on one H200: the tables and the plot of docs/finetune.md."""

from __future__ import annotations

import statistics

from .common import COLOURS, OURS, grid, legend_above, open_axes, source, span, total

RIVALS = {
    "torch": "grouped_mm of weights and factors",
    "merged": "grouped_mm of W + BA (PEFT)",
    "axolotl": "axolotl's ScatterMoE layer",
}


def timed(rows):
    """The titles of the rivals that some row has."""
    return {name: title for name, title in RIVALS.items() if any(name in row for row in rows)}


def ratio(row, name, other):
    """The time of one over that of another."""
    return total(row[name]) / total(row[other])


def over(name, other, rows):
    return [ratio(row, name, other) for row in rows]


def layers(record):
    rivals = timed(record["rows"])
    columns = ["layer", "T", "r", "frozen, ms", "LoRA over frozen"]
    columns += [f"{title}, over ours" for title in rivals.values()]
    columns += ["kept MiB: frozen, LoRA, PyTorch", "peak MiB"]
    rows = []
    for row in record["rows"]:
        ratios = [ratio(row, "lora", "frozen")]
        ratios += [ratio(row, name, "lora") if name in row else None for name in rivals]
        memory = (
            ", ".join(f"{row[name][key]:.0f}" for name in ("frozen", "lora", "torch"))
            for key in ("kept_mib", "peak_mib")
        )
        cells = [row["config"], row["T"], row["r"], f"{total(row['frozen']):.2f}"]
        rows.append(
            [*cells, *("-" if value is None else f"{value:.2f}" for value in ratios), *memory]
        )
    notes = "".join(
        f" {name}'s layer is not timed at r {row['r']}, T {row['T']}: {why}."
        for row in record["rows"]
        for name, why in row.get("left_out", {}).items()
        if name in rivals
    )
    where = source(record) + later(record["rows"])
    return f"{grid(columns, rows)}\n\nMeans: {means(record)}. {where}{notes}"


def later(rows):
    """Which rows are of other commits than the record."""
    commits = sorted({row["commit"] for row in rows if "commit" in row})
    return f" The rows of {', '.join(commits)} are later." if commits else ""


def means(record):
    """The mean of LoRA over frozen for each layer and rank."""
    groups = {}
    for row in record["rows"]:
        groups.setdefault((row["config"], row["r"]), []).append(row)
    return ", ".join(
        f"{config} r {rank} {statistics.mean(over('lora', 'frozen', rows)):.2f}"
        for (config, rank), rows in groups.items()
    )


def packed(record):
    columns = ["layer", "format", "bytes a weight", "unpacking, GB/s", "of a copy's rate"]
    columns += ["over bf16", "over bf16 and unpacking"]
    rows = []
    for row in record["packed"]:
        share = row["unpack_gbs"] / row["copy_gbs"]
        alone = row["packed_ms"] / row["frozen_ms"]
        both = row["packed_ms"] / (row["frozen_ms"] + row["unpack_ms"])
        cells = [row["config"], row["format"], row["bytes_a_weight"], row["unpack_gbs"]]
        rows.append([*cells, *(f"{value:.2f}" for value in (share, alone, both))])
    return f"{grid(columns, rows, words=2)}\n\nT = {record['packed'][0]['T']}. {source(record)}"


def models(record):
    columns = [
        "model",
        "weights",
        "rank",
        "factors, optimizer",
        "tokens",
        "limit, GiB",
        "peak, GiB",
    ]
    columns += ["tokens/s", "transformers' experts: peak, tokens/s", "over it"]
    rows = []
    for row in record["models"]:
        beside = row.get("beside")
        rival, times = "-", "-"
        if beside:
            rival = f"{beside['peak_gib']}, {beside['tokens_per_s']}"
            times = f"{row['tokens_per_s'] / beside['tokens_per_s']:.2f}"
        kind = f"{row['factors']}, {row['optim'].replace('_', ' ')}"
        kind += ", compiled" if row.get("compiled") else ""
        cells = [row["model"], row["weights"], row["rank"], kind, row["sequence"]]
        cells.append(row["cap_gib"] or "-")
        rows.append([*cells, row["peak_gib"], row["tokens_per_s"], rival, times])
    return f"{grid(columns, rows, words=2)}\n\n{source(record)}{later(record['models'])}"


PHASES = ("forward", "recomputed", "backward")


def trace(record):
    """Where the time of a step goes, of each traced row."""
    traced = [row for row in record["models"] if "trace" in row]
    return "\n\n".join(map(trace_of, traced)) or "Not measured yet."


def trace_of(row):
    columns = ["ms of the GPU", *PHASES, "all"]
    lines = {part: [] for part in sorted(row["trace"]["parts"])}
    beside = row.get("beside", {}).get("trace")
    for part in lines:
        times = row["trace"]["parts"][part]
        lines[part] = [*(times.get(phase, 0.0) for phase in PHASES), sum(times.values())]
        if beside:
            lines[part].append(sum(beside["parts"].get(part, {}).values()))
    rows = [
        [part, *(f"{value:.1f}" for value in values)]
        for part, values in sorted(lines.items(), key=lambda item: -item[1][3])
    ]
    columns += ["all, transformers' experts"] if beside else []
    for name, of in (
        ("GPU busy", lambda run: run["trace"]["busy_ms"]),
        ("step without the profiler", lambda run: run["step_ms"]),
    ):
        cells = [f"{of(row):.1f}", *([f"{of(row['beside']):.1f}"] if beside else [])]
        rows.append([name, "", "", "", *cells])
    kind = f"{row['model']}, {row['weights']}" + (", compiled" if row["compiled"] else "")
    kernels = f"{row['trace']['kernels']:,} kernels"
    kernels += f", with transformers' experts {beside['kernels']:,}" if beside else ""
    return f"{grid(columns, rows)}\n\n{kind}, {kernels}. {row['card']}, commit {row['commit']}."


def sentence(record):
    """What README promises."""
    rows = record["rows"]
    kept = [row["lora"]["kept_mib"] / row["torch"]["kept_mib"] for row in rows]
    return (
        f"**Fine-tuning**: LoRA on frozen experts takes {span(over('lora', 'frozen', rows))} times "
        f"as long as the frozen layer. In compiled PyTorch the same takes "
        f"{span(over('torch', 'lora', rows))} times as long as here and keeps "
        f"{1 / max(kept):.1f} to {1 / min(kept):.1f} times the bytes (r 16 and 64, one H200)."
    )


def plot(plt, record):
    ranks = sorted({row["r"] for row in record["rows"]})
    figure, charts = plt.subplots(1, len(ranks), figsize=(10, 3.6), layout="constrained")
    names = {"lora": "sonicmoe.cpp", **timed(record["rows"])}
    colours = (OURS, *(COLOURS[name] for name in ("bound", "torch", "scattermoe")))
    for rank, axes in zip(ranks, charts, strict=True):
        rows = [row for row in record["rows"] if row["r"] == rank]
        width = 0.84 / len(names)
        for i, name in enumerate(names):
            at = [x + (i - (len(names) - 1) / 2) * width for x in range(len(rows))]
            heights = [ratio(row, name, "frozen") if name in row else 0 for row in rows]
            axes.bar(at, heights, width, label=names[name], color=colours[i])
        axes.axhline(1.0, color="black", linewidth=0.8)
        labels = [f"{row['config']}\nT {row['T']}" for row in rows]
        axes.set_xticks(range(len(rows)), labels, fontsize=7)
        axes.set(title=f"rank {rank}", ylabel="time over the frozen layer")
        open_axes(axes)
    legend_above(figure, charts[0], columns=3, size=8)
    return figure
