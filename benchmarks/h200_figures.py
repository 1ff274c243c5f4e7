"""Tables and plots of the H200 records, nothing measured here.

python benchmarks/h200_figures.py            draw the plots into docs/images/
python benchmarks/check_figures.py --fix     put the table into README.md
"""

from __future__ import annotations

import json
import statistics
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RECORDS = ROOT / "benchmarks/results/h200"
IMAGES = ROOT / "docs/images"
MARKERS = ("<!-- h200-bench:begin -->", "<!-- h200-bench:end -->")
PEERS = {
    row["config"]: row
    for row in json.loads((ROOT / "benchmarks/data/peers-h200.json").read_text())["rows"]
}
PASSES = {"fwd": "forward", "bwd": "backward"}
# What is timed, as plots and tables call it.
CONTENDERS = {
    "bound": "bound (cuBLAS)",
    "ours_cpp": "sonicmoe.cpp",
    "ours_torch": "sonicmoe.cpp in PyTorch",
    "torch": "compiled grouped_mm",
    "transformers": "transformers grouped_mm",
    "sonicmoe": "sonic-moe",
    "scattermoe": "ScatterMoE",
    "momoe": "MoMoE",
    "momoe_saving": "MoMoE, all saved",
    "deep_gemm": "DeepGEMM",
}


def newest(state):
    """The newest record of a state that has the layer in it, or None."""
    records = [json.loads(path.read_text()) for path in RECORDS.glob("*.json")]
    records = [r for r in records if r.get("state") == state and "what" not in r]
    return max(records, key=lambda r: r["date"], default=None)


def extra(what):
    path = RECORDS / f"{what}.json"
    return json.loads(path.read_text()) if path.exists() else None


def ratio(row, which, name="ours_cpp"):
    """Speed over the bound's, or None where either was not timed."""
    key = f"{which}_ms"
    if key not in row.get(name, {}) or key not in row.get("bound", {}):
        return None
    return row["bound"][key] / row[name][key]


def earlier_ratio(row, which, name):
    """A peer's speed over the bound's, from a run of its own."""
    peer = PEERS[row["config"]]
    return peer[name][f"{which}_tflops"] / peer["bound"][f"{which}_tflops"]


def sonic_ratio(row, which):
    return earlier_ratio(row, which, "sonicmoe")


def grouped_ratio(row, which):
    """The compiled grouped_mm layer's, of the same run where it was in it."""
    own = ratio(row, which, "torch")
    return earlier_ratio(row, which, "torch") if own is None else own


def grouped_source(record):
    """A sentence on where grouped_mm's ratios are from."""
    missing = [row["config"] for row in record["rows"] if "torch" not in row]
    if not missing:
        return "grouped_mm ran in the same run."
    which = "" if len(missing) == len(record["rows"]) else f" of {', '.join(missing)}"
    return f"The ratios of grouped_mm{which} are from a run of its own, beside its own bound."


def large(record):
    return [row for row in record["rows"] if "l2" not in row]


def mean_over_sonic(record, which, name="ours_cpp"):
    found = [(ratio(row, which, name), sonic_ratio(row, which)) for row in large(record)]
    found = [ours / sonic for ours, sonic in found if ours is not None]
    return statistics.geometric_mean(found) if found else None


def pair(row, name):
    """TFLOP/s forward/backward."""
    values = [row.get(name, {}).get(f"{which}_tflops") for which in PASSES]
    if not any(values):
        return "-"
    return "/".join("-" if value is None else f"{value:.0f}" for value in values)


def ratios(row):
    """Ours, sonic-moe's and grouped_mm's, forward then backward."""
    for which in PASSES:
        ours = ratio(row, which)
        yield f"{ours:.2f}" if ours else "-"
        yield f"{sonic_ratio(row, which):.2f}"
        yield f"{grouped_ratio(row, which):.2f}"


RATIO_COLUMNS = [f"{w}: {name}" for w in PASSES for name in ("ours", "sonic-moe", "grouped_mm")]


def grid(columns, rows, words=1):
    """A Markdown table; `words` columns are left-aligned."""
    lines = [columns, ["---"] * words + ["---:"] * (len(columns) - words), *rows]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines)


def table(hot):
    if hot is None:
        return "No record yet."
    means = [mean_over_sonic(hot, which) for which in PASSES]
    rows = sorted(hot["rows"], key=lambda row: list(PEERS).index(row["config"]))
    cells = [
        [row["config"], ",".join(str(row[k]) for k in ("T", "d", "n", "E", "K"))]
        + [pair(row, name) for name in ("bound", "ours_cpp", "ours_torch")]
        + list(ratios(row))
        for row in rows
    ]
    columns = ["layer", "T,d,n,E,K", "bound", "ours", "ours in PyTorch", *RATIO_COLUMNS]
    small = ", ".join(row["config"] for row in rows if "l2" in row)
    return "\n\n".join(
        [
            "TFLOP/s forward/backward (6 T K n d and 12 T K n d flops), then speed over the "
            "bound's, hot: bursts one after the other, so that the chip's power limit holds. The "
            f"geometric mean of our ratio over sonic-moe's on the {len(large(hot))} large rows is "
            f"{means[0]:.2f} forward and {means[1]:.2f} backward.",
            grid(columns, cells, words=2),
            f"{small}: single calls, L2 flushed before each. "
            f"{grouped_source(hot)} "
            f"{hot['device']}, driver {hot['driver']}, torch {hot['torch']}, {hot['date'][:10]}, "
            f"commit {hot['commit']}.",
        ]
    )


def bars(axes, hot, which):
    rows = hot["rows"]
    names = [row["config"] for row in rows]
    series = [
        ("bound (cuBLAS)", [row.get("bound", {}).get(f"{which}_tflops", 0) for row in rows]),
        ("sonicmoe.cpp", [row.get("ours_cpp", {}).get(f"{which}_tflops", 0) for row in rows]),
        (
            "sonic-moe (its ratio times this bound)",
            [row["bound"][f"{which}_tflops"] * sonic_ratio(row, which) for row in rows],
        ),
        (
            "compiled grouped_mm",
            [row["bound"][f"{which}_tflops"] * grouped_ratio(row, which) for row in rows],
        ),
    ]
    width = 0.8 / len(series)
    for i, (label, values) in enumerate(series):
        places = [x + (i - (len(series) - 1) / 2) * width for x in range(len(rows))]
        axes.bar(places, values, width, label=label)
    axes.set_xticks(range(len(rows)), names, rotation=60, ha="right", fontsize=8)
    axes.set_ylabel("TFLOP/s (model flops)")
    axes.set_title(f"{PASSES[which]}, routing included, one H200, hot")


def plot_throughput(plt, hot):
    figure, (top, bottom) = plt.subplots(2, 1, figsize=(11, 9))
    bars(top, hot, "fwd")
    bars(bottom, hot, "bwd")
    top.legend(fontsize=8, loc="lower right")
    return figure


def plot_memory(plt, record):
    figure, axes = plt.subplots(figsize=(6.4, 4.2))
    x = [row["d"] / row["n"] for row in record["rows"]]
    series = {
        "sonicmoe.cpp": [row["ours_cpp"]["kept_MiB"] for row in record["rows"]],
        "compiled grouped_mm": [row["torch"]["kept_MiB"] for row in record["rows"]],
        "ScatterMoE (formula)": [row["scattermoe_formula_MiB"] for row in record["rows"]],
        "4TKn": [row["formula_MiB"] for row in record["rows"]],
    }
    for label, values in series.items():
        axes.plot(x, values, "--" if label == "4TKn" else "o-", label=label)
    first = record["rows"][0]
    axes.set(xscale="log", ylim=(0, None), xlabel="granularity d/n", ylabel="MiB for backward")
    axes.set_xticks(x, [f"{v:g}" for v in x])
    axes.minorticks_off()
    axes.set_title(f"kept beside X: T={first['T']}, d={first['d']}, K*n={first['K'] * first['n']}")
    axes.legend(fontsize=8)
    return figure


def plot_tokens(plt, record):
    figure, panels = plt.subplots(1, 2, figsize=(10, 4.2))
    x = [row["T"] for row in record["rows"]]
    names = [name for name in CONTENDERS if name in record["rows"][0]]
    for axes, (which, title) in zip(panels, PASSES.items(), strict=True):
        for name in names:
            ms = [row[name][f"{which}_ms"] for row in record["rows"]]
            axes.plot(x, ms, "o-", label=CONTENDERS[name])
        shape = ", ".join(f"{k}={record[k]}" for k in ("d", "n", "E", "K"))
        axes.set(xscale="log", yscale="log", xlabel="T", ylabel="ms", title=f"{title}, {shape}")
    panels[0].legend(fontsize=8)
    return figure


def plot_peers(plt, record):
    rows, names = record["rows"], timed(record)
    figure, panels = plt.subplots(3, 1, figsize=(9, 10))
    kinds = {f"{which}_tflops": f"{title}, TFLOP/s" for which, title in PASSES.items()}
    kinds["kept_MiB"] = "kept for backward beside X, MiB"
    width = 0.8 / len(names)
    for axes, (key, label) in zip(panels, kinds.items(), strict=True):
        for i, name in enumerate(names):
            places = [x + (i - (len(names) - 1) / 2) * width for x in range(len(rows))]
            values = [row.get(name, {}).get(key, 0) for row in rows]
            axes.bar(places, values, width, label=CONTENDERS[name])
        axes.set_xticks(range(len(rows)), [row["config"] for row in rows])
        axes.set_ylabel(label)
    panels[2].set_yscale("log")
    panels[0].legend(fontsize=8)
    return figure


def timed(record):
    """The contenders of a record, in the order of CONTENDERS."""
    return [name for name in CONTENDERS if any(name in row for row in record["rows"])]


def plot_rounding(plt, record):
    figure, axes = plt.subplots(figsize=(6.4, 4.2))
    rows = [row for row in record["rows"] if row["config"].startswith("2048-n1024")]
    x = [row["rows"]["topk"] / row["E"] / 128 for row in rows]
    for which, title in PASSES.items():
        axes.plot(x, [row[which]["rounded_over_topk_a_row"] for row in rows], "o-", label=title)
    axes.axhline(1.0, color="grey", linewidth=0.8)
    axes.set(xscale="log", xlabel="mean rows an expert / tile (128)", ylabel="rounded / top-k")
    axes.set_xticks(x, [f"{v:g}" for v in x])
    axes.minorticks_off()
    first = rows[0]
    shape = ", ".join(f"{k}={first[k]}" for k in ("T", "d", "n", "K"))
    axes.set_title(f"time a routed row, nearest, {shape}, E varies")
    axes.legend(fontsize=8)
    return figure


def main():
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "sonicmoe"
    import matplotlib.pyplot as plt

    plots = {
        "h200-throughput": (plot_throughput, newest("hot")),
        "h200-memory": (plot_memory, extra("memory")),
        "h200-tokens": (plot_tokens, extra("tokens")),
        "h200-peers": (plot_peers, extra("peers")),
        "h200-rounding": (plot_rounding, extra("rounding")),
    }
    IMAGES.mkdir(parents=True, exist_ok=True)
    for name, (draw, record) in plots.items():
        if record is None:
            print(f"{name}: no record", file=sys.stderr)
            continue
        figure = draw(plt, record)
        figure.tight_layout()
        figure.savefig(IMAGES / f"{name}.svg", metadata={"Date": None})
        plt.close(figure)
    return 0


if __name__ == "__main__":
    sys.exit(main())
