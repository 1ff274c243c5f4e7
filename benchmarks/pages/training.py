"""Training beside torchtitan: the tables and plots of docs/torchtitan.md."""

from __future__ import annotations

from .common import OURS, grid, open_axes

NAMES = {"ours": "sonicmoe.cpp", "titan": "torchtitan"}
# How experts are shared among GPUs, by training_bench/worker.py's PARALLEL.
SHARED = {"fsdp": "sharded", "ep": "divided", "ep-gathered": "divided, others gathered"}
KINDS = (
    "experts",
    "rows",
    "products",
    "attention",
    "other",
    "optimizer",
    "copies",
    "communication",
)
WINDOW = 50  # steps of one mean in the table of curves


def order(row):
    return row["gpus"] == 1, row["model"], row["micro_batches"], row["tokens_per_gpu"]


def rows(record):
    """The rows that have this library's experts."""
    return sorted((row for row in record["rows"] if row.get("ours")), key=order)


def runs(row):
    """The runs of a row as (kind of experts, run, whether it is the fastest)."""
    found = [(kind, row[kind], True) for kind in NAMES if row.get(kind)]
    found += [(run["experts"], run, False) for run in row["others"]]
    return sorted(found, key=lambda item: list(NAMES).index(item[0]))


def source(content):
    found = [content, *content.get("rows", [])]
    names = ("date", "commit", "driver")
    when = {tuple(part[name] for name in names) for part in found if "commit" in part}
    each = [f"{date}, commit {commit}, driver {driver}" for date, commit, driver in sorted(when)]
    return f"{content['device']}, torch {content['torch']}; {'; '.join(each)}."


def tokens(row):
    """The tokens of a GPU in a step; with several micro-batches also their number."""
    count = row["micro_batches"]
    return row["tokens_per_gpu"] if count == 1 else f"{count} x {row['tokens_per_gpu']}"


def over_gpus(row, run):
    """How the experts are shared among GPUs."""
    if row["gpus"] == 1:
        return "-"
    shared = SHARED[run.get("parallel", "fsdp")]
    return shared if run["compiled"] else f"{shared}, eager"


def load(row, run):
    """The largest load of a GPU's experts over the mean."""
    return f"{run['load']['rank']:.2f}" if "load" in run and row["gpus"] > 1 else "-"


def over_torchtitan(row, run):
    """How many times as fast as torchtitan's experts; a ratio of one machine only."""
    if "machine" in run or not row.get("titan"):
        return "-"
    return f"{run['tokens_per_s'] / row['titan']['tokens_per_s']:.2f}"


def rates(record):
    columns = ["model", "GPUs", "tokens a GPU", "experts", "over GPUs", "keeps", "tokens/s"]
    columns += ["a day and GPU", "MFU", "peak GiB", "load", "over torchtitan"]
    lines = []
    for row in rows(record):
        for kind, run, fastest in runs(row):
            speed = f"{run['tokens_per_s']:,}"
            a_day = f"{run['tokens_per_day_and_gpu'] / 1e9:.2f} billion"
            lines.append([
                *(row["model"], row["gpus"], tokens(row), NAMES[kind], over_gpus(row, run)),
                run["policy"] if kind == "ours" else run["policy"].removesuffix("+H"),
                f"**{speed}**" if fastest else speed,
                *(a_day, f"{run['mfu']:.3f}", f"{run['peak_gib']:.1f}", load(row, run)),
                over_torchtitan(row, run),
            ])  # fmt: skip
    return f"{grid(columns, lines)}\n\n{source(record)}"


def where(record):
    columns = ["model", "GPUs", "tokens a GPU", "experts of", "step", *KINDS]
    lines = []
    for row in rows(record):
        for kind, run, fastest in runs(row):
            if fastest:
                each_step = row["tokens_per_gpu"] * row["micro_batches"] * row["gpus"]
                step = 1e3 * each_step / run["tokens_per_s"]
                parts = [f"{run['where_ms'].get(k, 0):.0f}" for k in KINDS]
                head = [row["model"], row["gpus"], tokens(row), NAMES[kind]]
                lines.append([*head, f"{step:.0f}", *parts])
    return grid(columns, lines)


def mean_difference(a, b, begin, end):
    return sum(abs(x - y) for x, y in zip(a[begin:end], b[begin:end], strict=True)) / (end - begin)


def curves(record):
    lines = []
    for row in record["curves"]:
        ours, titan, again = (row[name] for name in ("ours", "titan", "titan_again"))
        for begin in range(0, record["steps"], WINDOW):
            end = begin + WINDOW
            pairs = ((ours, titan), (ours, again), (titan, again))
            values = [f"{mean_difference(a, b, begin, end):.3f}" for a, b in pairs]
            lines.append([row["model"], f"{begin + 1} to {end}", *values])
    columns = ["model", "steps", "ours and torchtitan", "ours and torchtitan again"]
    columns += ["torchtitan twice"]
    return f"{grid(columns, lines)}\n\n{source(record)}"


def sentence(record):
    """The sentence of the README, from the fastest row of more than one GPU."""
    fast = max((r for r in rows(record) if r["gpus"] > 1), key=lambda r: r["ours"]["tokens_per_s"])
    ours, titan = fast["ours"], fast["titan"]
    by = "FSDP2" if ours.get("parallel", "fsdp") == "fsdp" else "FSDP2 and divided experts"
    return (
        f"With {by} on {fast['gpus']} {record['device']}, the paper's {fast['model']} "
        f"trains on {ours['tokens_per_day_and_gpu'] / 1e9:.2f} billion tokens\n"
        f"a day and GPU, {ours['tokens_per_s'] / titan['tokens_per_s']:.2f} times as many as with "
        "torchtitan's own experts in the same program ([speed](docs/torchtitan.md#speed))."
    )


def plot_curves(plt, record):
    figure, axes = plt.subplots(figsize=(9, 4.5), layout="constrained")
    row = record["curves"][0]
    styles = {"titan": ("#8095a8", "torchtitan"), "titan_again": ("#b9c4cf", "torchtitan, again")}
    for name, (colour, label) in (styles | {"ours": (OURS, NAMES["ours"])}).items():
        axes.plot(row[name], color=colour, linewidth=1, label=label)
    axes.set(xlabel="step", ylabel="loss", title=f"{row['model']}, same seed and text")
    open_axes(axes)
    axes.legend(frameon=False)
    return figure


def plot_where(plt, record):
    figure, axes = plt.subplots(figsize=(9, 4.5), layout="constrained")
    bars = [(row, *run) for row in rows(record) for run in runs(row) if run[2]]
    shades = plt.get_cmap("tab20c").colors
    left = [0.0] * len(bars)
    labels = [f"{r['model']}, T {tokens(r)}, {NAMES[kind]}" for r, kind, *_ in bars]
    for kind, colour in zip(KINDS, shades[::2], strict=False):
        values = [
            1e6 * run["where_ms"].get(kind, 0) / (r["tokens_per_gpu"] * r["micro_batches"])
            for r, _, run, _ in bars
        ]
        axes.barh(
            labels, values, left=left, color=OURS if kind == "experts" else colour, label=kind
        )
        left = [a + b for a, b in zip(left, values, strict=True)]
    axes.invert_yaxis()
    axes.set(xlabel="ns a token of a GPU; kernels that overlap count each")
    open_axes(axes)
    axes.legend(frameon=False, ncols=4, fontsize=8, loc="upper center", bbox_to_anchor=(0.5, 1.18))
    return figure
