"""Tables and plots of the H200 records; measures nothing.

python benchmarks/h200_figures.py            writes the plots to docs/images/
python benchmarks/check_figures.py --fix     writes the tables to README.md and docs/
"""

from __future__ import annotations

import json
import statistics
import sys
from pathlib import Path

from h200_bench import summary
from plots import save_plots

ROOT = Path(__file__).resolve().parent.parent
RECORDS = ROOT / "benchmarks/results/h200"
DATA = ROOT / "benchmarks/data"
RIVALS = {row["config"]: row for row in json.loads((DATA / "rivals-h200.json").read_text())["rows"]}
# The cuBLAS reference, sonic-moe and our PyTorch front end, timed alternately in one process.
TOGETHER = json.loads((DATA / "side-by-side-h200.json").read_text())
TOGETHER_ROWS = {row["config"]: row for row in TOGETHER["rows"]}
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


def newest(state):
    """The newest record of the layer in a state, or None."""
    records = [json.loads(path.read_text()) for path in RECORDS.glob("*.json")]
    records = [r for r in records if r.get("state") == state and "what" not in r]
    return max(records, key=lambda r: r["date"], default=None)


def extra(what):
    path = RECORDS / f"{what}.json"
    return json.loads(path.read_text()) if path.exists() else None


def ratio(row, which, name="ours_cpp"):
    """Speed over the reference's, or None if one of the two was not timed."""
    key = f"{which}_ms"
    if key not in row.get(name, {}) or key not in row.get("bound", {}):
        return None
    return row["bound"][key] / row[name][key]


def earlier_ratio(row, which, name):
    """A rival's speed over the reference's, from an earlier run without our layer."""
    rival = RIVALS[row["config"]]
    return rival[name][f"{which}_tflops"] / rival["bound"][f"{which}_tflops"]


def over_sonic(row, which, state="hot"):
    """Our speed over sonic-moe's. If no process timed both, it is the quotient of their speeds over
    the reference."""
    together = TOGETHER_ROWS.get(row["config"])
    if together is None:
        return ratio(row, which) / earlier_ratio(row, which, "sonicmoe")
    key = f"{which}_ms" if state == "hot" else f"cool_{which}_ms"
    return together["sonicmoe"][key] / together["ours_torch"][key]


def grouped_ratio(row, which):
    """Speed of the compiled grouped_mm layer over the reference's: of this run, or else of an
    earlier one."""
    own = ratio(row, which, "torch")
    return earlier_ratio(row, which, "torch") if own is None else own


def grouped_source(record):
    """A sentence that names the run of grouped_mm's ratios."""
    missing = [row["config"] for row in record["rows"] if "torch" not in row]
    if not missing:
        return "grouped_mm ran in the same run."
    which = "" if len(missing) == len(record["rows"]) else f" of {', '.join(missing)}"
    return f"The ratios of grouped_mm{which} are from a run of its own, beside its own reference."


def host_limited(config):
    """Whether the host limits sonic-moe's time. If it does, a cool chip is not faster."""
    sonic = TOGETHER_ROWS.get(config, {}).get("sonicmoe")
    return sonic is not None and sonic["cool_fwd_ms"] > sonic["fwd_ms"]


def marked(config):
    """The name with * if timed in one process with sonic-moe, † if the host limits sonic-moe."""
    return config + ("*" if config in TOGETHER_ROWS else "") + ("†" * host_limited(config))


def large(record):
    return [row for row in record["rows"] if "l2" not in row]


def mean_over_sonic(record, which, rows=None):
    """Geometric mean of our speed over sonic-moe's on layers that the host does not limit."""
    rows = [row for row in rows or large(record) if not host_limited(row["config"])]
    state = record["state"]
    return statistics.geometric_mean(over_sonic(row, which, state) for row in rows)


def pair(row, name):
    """TFLOP/s forward/backward."""
    values = [row.get(name, {}).get(f"{which}_tflops") for which in PASSES]
    if not any(values):
        return "-"
    return "/".join("-" if value is None else f"{value:.0f}" for value in values)


def speeds(row, state):
    """Our speed over the reference's, sonic-moe's and grouped_mm's, forward/backward."""
    own = {which: ratio(row, which) for which in PASSES}
    over = [own, {w: over_sonic(row, w, state) for w in PASSES}]
    over.append({which: own[which] / grouped_ratio(row, which) for which in PASSES})
    return ["/".join(f"{each[which]:.2f}" for which in PASSES) for each in over]


SPEED_COLUMNS = [f"over {name}" for name in ("reference", "sonic-moe", "grouped_mm")]


def grid(columns, rows, words=1):
    """A Markdown table; `words` columns are left-aligned."""
    lines = [columns, ["---"] * words + ["---:"] * (len(columns) - words), *rows]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines)


def shape_text(row):
    return ",".join(str(row[k]) for k in ("T", "d", "n", "E", "K"))


def hot_table(hot):
    if hot is None:
        return "No record yet."
    means = [mean_over_sonic(hot, which) for which in PASSES]
    rows = sorted(hot["rows"], key=lambda row: list(RIVALS).index(row["config"]))
    cells = [
        [marked(row["config"]), shape_text(row)]
        + [pair(row, name) for name in ("bound", "ours_cpp", "ours_torch")]
        + speeds(row, "hot")
        for row in rows
    ]
    columns = ["layer", "T,d,n,E,K", "reference", "ours", "ours in PyTorch", *SPEED_COLUMNS]
    small = ", ".join(row["config"] for row in rows if "l2" in row)
    return "\n\n".join(
        [
            grid(columns, cells, words=2),
            f"Geometric mean over sonic-moe on the large layers without †: {means[0]:.2f} forward, "
            f"{means[1]:.2f} backward.",
            f"{small}: single calls, L2 flushed before each. {grouped_source(hot)} "
            f"{hot['device']}, driver {hot['driver']}, torch {hot['torch']}, {hot['date'][:10]}, "
            f"commit {hot['commit']}. Over sonic-moe on layers with \\*: commit "
            f"{TOGETHER['commit']}, {TOGETHER['date'][:10]}.",
        ]
    )


def tflops(row, which):
    """{contender: TFLOP/s} in PyTorch, from one process if there is such a record."""
    key = f"{which}_tflops"
    together = TOGETHER_ROWS.get(row["config"])
    source = together or row
    found = {name: source[name][key] for name in ("bound", "ours_torch")}
    found["torch"] = found["bound"] * grouped_ratio(row, which)
    sonic = found["bound"] * earlier_ratio(row, which, "sonicmoe")
    found["sonicmoe"] = together["sonicmoe"][key] if together else sonic
    return found


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
    axes.spines[["top", "right"]].set_visible(False)


def legend_above(figure, axes):
    """One legend above all panels."""
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=5, fontsize=9, frameon=False)


def plot_throughput(plt, hot):
    figure, panels = plt.subplots(2, 1, figsize=(11, 6.2), layout="constrained")
    names = ("bound", "torch", "sonicmoe", "ours_torch")
    rows = large(hot)
    labels = [marked(row["config"]) for row in rows]
    for axes, (which, title) in zip(panels, PASSES.items(), strict=True):
        bars(axes, names, [tflops(row, which) for row in rows], labels)
        axes.tick_params(axis="x", rotation=40, labelsize=8)
        where = "one H200 at its power limit; routing included, not in the reference"
        axes.set(ylabel="TFLOP/s", title=f"{title}, {where}")
    legend_above(figure, panels[0])
    return figure


def lines(axes, x, series):
    """{contender or label: values} over x."""
    for name, values in series.items():
        colour = COLOURS.get(name, COLOURS["scattermoe"] if "ScatterMoE" in name else "black")
        style = ":" if name == "4TKn" else "o-"
        style = "o--" if name == "ours_torch" and "ours_cpp" in series else style
        axes.plot(x, values, style, color=colour, label=CONTENDERS.get(name, name))
    axes.spines[["top", "right"]].set_visible(False)


def plot_memory(plt, record):
    figure, axes = plt.subplots(figsize=(6.4, 4.4), layout="constrained")
    rows = record["rows"]
    x = [row["d"] / row["n"] for row in rows]
    series = {name: [row[name]["kept_MiB"] for row in rows] for name in ("torch", "ours_cpp")}
    series["ScatterMoE (formula)"] = [row["scattermoe_formula_MiB"] for row in rows]
    series["4TKn"] = [row["formula_MiB"] for row in rows]
    lines(axes, x, series)
    first = rows[0]
    axes.set(xscale="log", ylim=(0, None), xlabel="granularity d/n", ylabel="MiB for backward")
    axes.set_xticks(x, [f"{v:g}" for v in x])
    axes.minorticks_off()
    axes.set_title(f"kept beside X: T={first['T']}, d={first['d']}, K*n={first['K'] * first['n']}")
    legend_above(figure, axes)
    return figure


def plot_tokens(plt, record):
    figure, panels = plt.subplots(1, 2, figsize=(10, 4.4), layout="constrained")
    x = [row["T"] for row in record["rows"]]
    for axes, (which, title) in zip(panels, PASSES.items(), strict=True):
        ms = {n: [row[n][f"{which}_ms"] for row in record["rows"]] for n in timed(record)}
        lines(axes, x, ms)
        shape = ", ".join(f"{k}={record[k]}" for k in ("d", "n", "E", "K"))
        axes.set(xscale="log", yscale="log", xlabel="T", ylabel="ms", title=f"{title}, {shape}")
    legend_above(figure, panels[0])
    return figure


def plot_rivals(plt, record):
    rows, names = record["rows"], timed(record)
    figure, panels = plt.subplots(3, 1, figsize=(9, 10), layout="constrained")
    kinds = {f"{which}_tflops": f"{title}, TFLOP/s" for which, title in PASSES.items()}
    kinds["kept_MiB"] = "kept for backward beside X, MiB"
    for axes, (key, label) in zip(panels, kinds.items(), strict=True):
        values = [{name: row.get(name, {}).get(key, 0) for name in names} for row in rows]
        bars(axes, names, values, [row["config"] for row in rows])
        axes.set_ylabel(label)
    panels[2].set_yscale("log")
    legend_above(figure, panels[0])
    return figure


def timed(record):
    """The contenders of a record, in the order of CONTENDERS."""
    return [name for name in CONTENDERS if any(name in row for row in record["rows"])]


def plot_rounding(plt, record):
    figure, axes = plt.subplots(figsize=(6.4, 4.4), layout="constrained")
    rows = [row for row in record["rows"] if row["config"].startswith("2048-n1024")]
    x = [row["rows"]["topk"] / row["E"] / 128 for row in rows]
    for (which, title), style in zip(PASSES.items(), ("o-", "s--"), strict=True):
        values = [row[which]["rounded_over_topk_a_row"] for row in rows]
        axes.plot(x, values, style, color=OURS, label=title)
    axes.axhline(1.0, color=COLOURS["bound"], linewidth=0.8, label="top-k")
    axes.set(xscale="log", xlabel="mean rows an expert / tile (128)", ylabel="rounded / top-k")
    axes.set_xticks(x, [f"{v:g}" for v in x])
    axes.minorticks_off()
    axes.spines[["top", "right"]].set_visible(False)
    first = rows[0]
    shape = ", ".join(f"{k}={first[k]}" for k in ("T", "d", "n", "K"))
    axes.set_title(f"time a routed row, nearest, {shape}, E varies")
    legend_above(figure, axes)
    return figure


def plot_portable(plt, record):
    figure, (layers, products) = plt.subplots(2, 1, figsize=(11, 7), layout="constrained")
    rows = record["rows"]
    names = ("loop", "scattermoe", "portable", "hopper")
    values = [{n: summary.tflops(row, n) for n in names if summary.timed(row, n)} for row in rows]
    bars(layers, names, values, [row["config"] for row in rows])
    layers.tick_params(axis="x", rotation=40, labelsize=8)
    goal = summary.GOALS["tflops"]
    layers.axhline(goal, color="black", linewidth=0.8, linestyle=":")
    layers.set(ylabel="TFLOP/s", title=f"forward + backward, one {record['device']}, hot")
    for row, marker in zip(record["roles"], "osD^vP*X", strict=False):
        ratios = {role: part["of_best_rival"] for role, part in row["kernels"].items()}
        style = {"color": OURS, "alpha": 0.7, "linestyle": "", "label": row["config"]}
        products.plot(list(ratios), list(ratios.values()), marker, **style)
    products.axhline(summary.GOALS["roles"], color="black", linewidth=0.8, linestyle=":")
    products.axhline(1.0, color=COLOURS["bound"], linewidth=0.8)
    title = "each product, with gather and activation: speed over the best plain mma.sync product"
    products.set(ylim=(0, None), title=title)
    products.spines[["top", "right"]].set_visible(False)
    products.legend(fontsize=8, frameon=False, ncols=5, loc="lower center")
    legend_above(figure, layers)
    return figure


def fp8_speeds(row):
    """Speed of fp8 over bf16: forward, forward + backward."""
    forward = {name: row[name]["fwd_ms"] for name in ("bf16", "fp8")}
    both = {name: forward[name] + row[name]["bwd_ms"] for name in forward}
    return tuple(ms["bf16"] / ms["fp8"] for ms in (forward, both))


def plot_fp8(plt, record):
    figure, axes = plt.subplots(figsize=(9, 4.4), layout="constrained")
    rows, width = record["rows"], 0.4
    series = zip(*map(fp8_speeds, rows), strict=True)
    styles = (("forward", COLOURS["hopper"]), ("forward + backward", OURS))
    for i, (values, (label, colour)) in enumerate(zip(series, styles, strict=True)):
        positions = [x + (i - 0.5) * width for x in range(len(rows))]
        style = {"color": colour, "edgecolor": "white", "linewidth": 0.3}
        axes.bar(positions, values, width, label=label, **style)
    axes.axhline(1.0, color=COLOURS["bound"], linewidth=0.8, label="bf16")
    labels = [f"{row['config']}\nd={row['d']}, n={row['n']}" for row in rows]
    axes.set_xticks(range(len(rows)), labels)
    axes.tick_params(axis="x", rotation=40, labelsize=8)
    axes.set(ylabel="speed over bf16", title=f"fp8 over bf16, one {record['device']}, hot")
    axes.spines[["top", "right"]].set_visible(False)
    legend_above(figure, axes)
    return figure


def main():
    plots = {
        "h200-throughput": (plot_throughput, newest("hot")),
        "h200-memory": (plot_memory, extra("memory")),
        "h200-tokens": (plot_tokens, extra("tokens")),
        "h200-rivals": (plot_rivals, extra("rivals")),
        "h200-rounding": (plot_rounding, extra("rounding")),
        "h200-portable": (plot_portable, extra("portable")),
        "h200-fp8": (plot_fp8, extra("fp8")),
    }
    for name, (plot, record) in plots.items():
        if record is None:
            print(f"{name}: no record", file=sys.stderr)
            continue
        save_plots({name: lambda plt, plot=plot, record=record: plot(plt, record)})
    return 0


if __name__ == "__main__":
    sys.exit(main())
