"""Experts divided over the two GPUs of ep2.json: the tables and the plot of docs/distributed.md."""

from __future__ import annotations

from ep2 import GOAL, RIVALS
from ep2_bench.data import CAPACITY

from .common import COLOURS, OURS, grid, legend_above, open_axes, shape_text, total

NAMES = {
    "ours_torch": "sonicmoe.cpp, peer memory, arena",
    "ours_exact": "sonicmoe.cpp, peer memory, exact",
    "ours_all_to_all": 'sonicmoe.cpp, "all_to_all"',
    "nccl_grouped": "NCCL all-to-all, moe_grouped",
    "nccl_grouped_mm": "NCCL all-to-all, compiled grouped_mm",
    "gather_scatter": "all-gather, moe, reduce-scatter",
    "vdev_2d": "all_to_all_vdev_2d, moe_grouped",
}
PLOT_COLOURS = {
    "ours_torch": OURS,
    "ours_exact": COLOURS["bound"],
    "ours_all_to_all": COLOURS["hopper"],
    "nccl_grouped": COLOURS["sonicmoe"],
    "nccl_grouped_mm": COLOURS["torch"],
    "gather_scatter": COLOURS["scattermoe"],
    "vdev_2d": COLOURS["momoe"],
}
DIGITS = (2, 2, 3, 2, 2, 2, 2)


def over_alone(row: dict) -> float:
    return total(row["ours"]) / total(row["alone"])


def best_rival(row: dict) -> float | None:
    """The time of the fastest rival divided by our time in the same run."""
    ratios = [total(row[name]) / of_run(row, name) for name in RIVALS if name in row]
    return min(ratios, default=None)


def of_run(row: dict, name: str) -> float:
    """Our time in the run in which the rival `name` was timed."""
    return total(row["ours_beside_vdev_2d" if name == "vdev_2d" else "ours_torch"])


def in_cpp(record: dict) -> list[dict]:
    return [row for row in record["rows"] if "ours" in row]


def pretended(record: dict) -> str:
    """A sentence for each record with ranks that share GPUs."""
    texts = [
        f" {row['config']} with {row['ranks']} ranks that share the GPUs: {over_alone(row):.3f} "
        f"times alone, which shares them too; without overlap "
        f"{row['not_overlapped_ms'] / total(row['alone']):.3f}."
        for row in record.get("pretended", [])
    ]
    return "".join(texts)


def cost(record: dict) -> str:
    """The table that compares the layer over peer memory with the layer alone."""
    cells = []
    for row in in_cpp(record):
        alone, ours = total(row["alone"]), total(row["ours"])
        times = (alone, ours, over_alone(row), GOAL.get(row["config"]))
        times += (row["not_overlapped_ms"], row["hidden"], row["ours"]["replayed_ms"])
        figures = [
            "-" if value is None else f"{value:.{digits}f}"
            for value, digits in zip(times, DIGITS, strict=True)
        ]
        cells.append([row["config"], shape_text(row), *figures])
    columns = ["layer", "T,d,n,E,K", "alone, ms", "ours, ms", "over alone", "goal"]
    columns += ["alone and transfers, ms", "share hidden", "as a graph, ms"]
    rates = f"{record['dispatch_gbs']:.0f} and {record['combine_gbs']:.0f} GB/s"
    where = f"{record['gpus']} {record['device']}, torch {record['torch']}, {record['date'][:10]}"
    return "\n\n".join(
        [
            grid(columns, cells, words=2),
            "Forward and backward in C++, T tokens on each rank, hot. *Alone*: the same layer on "
            "one GPU with as many routed rows and E/W experts, without communication. *Ours*: the "
            f"arena mode with room for {CAPACITY} times the mean rows. *Share "
            "hidden*: 1 - (ours - alone) / time of the transfers without products. "
            f"Transfers without products, rows of 4 KB: {rates} each way, dispatch and combine. "
            f"{where}, commit {record['commit']}.{pretended(record)}",
        ]
    )


def rivals(record: dict) -> str:
    """The table that compares our layer through PyTorch with other implementations."""
    rows = [row for row in record["rows"] if "ours_torch" in row]
    names = [name for name in NAMES if any(name in row for row in rows)]
    cells = []
    for row in rows:
        times = [f"{total(row[name]):.2f}" if name in row else "-" for name in names]
        best = best_rival(row)
        alone = total(row["alone_torch"])
        cost = f"{total(row['ours_torch']) / alone:.3f}"
        best = "-" if best is None else f"{best:.2f}"
        cells.append([row["config"], f"{alone:.2f}", *times, cost, best])
    columns = ["layer", "the layer alone", *(NAMES[name] for name in names)]
    columns += ["ours over alone", "best of the others over ours"]
    notes = [
        "Milliseconds of forward and backward through PyTorch, interleaved, hot. *Arena*: with "
        f"`max_tokens` and `capacity={CAPACITY}`, the host waits for nothing. *Exact*: "
        "with `max_tokens` alone, the host waits for the counts of rows. The "
        "last two columns are for the arena. The default, without both, waits once more and was "
        "not timed."
    ]
    absent = {}
    for row in rows:
        for name_and_why in row.get("absent", {}).items():
            absent.setdefault(name_and_why, []).append(row["config"])
    notes += [
        f"{NAMES.get(name, name)} is absent at {', '.join(layers)}: {why}."
        for (name, why), layers in absent.items()
    ]
    parts = [grid(columns, cells), " ".join(notes), "![Time beside others](images/ep2-rivals.svg)"]
    return "\n\n".join(parts)


def memory(record: dict) -> str:
    """The sentence on the memory kept for backward with uneven routings."""
    kept = record["kept"]
    parts = ", ".join(f"{part:.2f}" for part in kept["rows_of_rank_0_over_mean"])
    ratios = " and ".join(f"{ratio:.2f}" for ratio in kept["arena_over_exact"])
    exact = " and ".join(f"{value:.0f}" for value in kept["exact_MiB"])
    return (
        f"Measured with {kept['layers']} layers {kept['config']}, in which rank 0's experts get "
        f"{parts} of the mean rows: the ranks keep {exact} MiB beside x without `capacity`, and "
        f"with `capacity={kept['capacity']}` {ratios} times as much (commit "
        f"{kept.get('commit', record['commit'])})."
    )


def plot(plt, record: dict):
    """Two charts: the times of all implementations, and the share of transfers that is hidden."""
    figure, (times, share) = plt.subplots(
        2, 1, figsize=(9, 7), layout="constrained", height_ratios=(2, 1)
    )
    rows = [row for row in record["rows"] if "ours_torch" in row]
    names = [name for name in NAMES if any(name in row for row in rows)]
    width = 0.84 / len(names)
    for i, name in enumerate(names):
        at = [x + (i - (len(names) - 1) / 2) * width for x in range(len(rows))]
        heights = [
            total(row[name]) / total(row["alone_torch"]) if name in row else 0 for row in rows
        ]
        times.bar(at, heights, width, label=NAMES[name], color=PLOT_COLOURS[name])
    times.axhline(1.0, color=COLOURS["bound"], linewidth=0.8)
    times.set_xticks(range(len(rows)), [row["config"] for row in rows])
    title = f"forward + backward through PyTorch, {record['gpus']} {record['device']}, hot"
    times.set(ylabel="time over the layer alone", title=title)
    legend_above(figure, times, columns=2)
    rows = in_cpp(record)
    share.bar(range(len(rows)), [row["hidden"] for row in rows], 0.4, color=OURS)
    share.set_xticks(range(len(rows)), [row["config"] for row in rows])
    share.set(ylabel="share hidden", ylim=(-0.25, 1), title="transfers hidden by products, C++")
    share.axhline(0.0, color=COLOURS["bound"], linewidth=0.8)
    open_axes(times, share)
    return figure
