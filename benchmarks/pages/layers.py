"""The layer beside others on one H200: docs/performance.md, and a table of docs/pytorch.md."""

from __future__ import annotations

import json
import statistics

from .common import (
    COLOURS,
    CONTENDERS,
    OURS,
    PASSES,
    ROOT,
    bars,
    grid,
    legend_above,
    open_axes,
    shape_text,
    source,
)

DATA = ROOT / "benchmarks/data"
# Rivals, timed in a process of their own.
EARLIER = {
    row["config"]: row for row in json.loads((DATA / "rivals-h200.json").read_text())["rows"]
}
# The cuBLAS reference, sonic-moe and our PyTorch front end, timed alternately in one process.
TOGETHER = json.loads((DATA / "side-by-side-h200.json").read_text())
TOGETHER_ROWS = {row["config"]: row for row in TOGETHER["rows"]}
SPEED_COLUMNS = [f"over {name}" for name in ("reference", "sonic-moe", "grouped_mm")]
PRODUCTS = ("A", "Y", "dH", "dW", "dX~")


def ratio(row, which, name="ours_cpp"):
    """Speed over the reference's, or None if one of the two was not timed."""
    key = f"{which}_ms"
    if key not in row.get(name, {}) or key not in row.get("bound", {}):
        return None
    return row["bound"][key] / row[name][key]


def earlier_ratio(row, which, name):
    """A rival's speed over the reference's, from an earlier run without our layer."""
    rival = EARLIER[row["config"]]
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


def timed(record):
    """The contenders of a record, in the order of CONTENDERS."""
    return [name for name in CONTENDERS if any(name in row for row in record["rows"])]


def hot(record):
    means = [mean_over_sonic(record, which) for which in PASSES]
    rows = sorted(record["rows"], key=lambda row: list(EARLIER).index(row["config"]))
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
            f"{small}: single calls, L2 flushed before each. {grouped_source(record)} "
            f"{record['device']}, driver {record['driver']}, torch {record['torch']}, "
            f"{record['date'][:10]}, commit {record['commit']}. Over sonic-moe on layers with "
            f"\\*: commit {TOGETHER['commit']}, {TOGETHER['date'][:10]}.",
        ]
    )


def cool(record):
    columns = ["layer", "reference", "ours", *SPEED_COLUMNS]
    rows = [
        [marked(r["config"]), pair(r, "bound"), pair(r, "ours_cpp"), *speeds(r, "cool")]
        for r in record["rows"]
    ]
    means = ", ".join(f"{mean_over_sonic(record, which):.2f} {n}" for which, n in PASSES.items())
    return (
        f"{grid(columns, rows)}\n\nGeometric mean over sonic-moe on the layers without †: {means}. "
        f"{source(record)}"
    )


def time_and_ratio(kernel):
    ratio = f" ({kernel['of_copy']:.2f})" if "of_copy" in kernel else ""
    return f"{kernel['us']:.0f}{ratio}"


def kernels(record):
    rows = []
    for row in record["rows"]:
        found = row["kernels"]
        cells = [f"{found[k]['tflops']:.0f} ({found[k]['of_bmm']:.2f})" for k in PRODUCTS]
        sums = [time_and_ratio(found[k]) for k in ("O", "dX")]
        rest = [f"{found[f'rest of {which}']['us']:.0f}" for which in PASSES]
        rows.append([row["config"], *cells, *sums, *rest])
    means = [
        statistics.geometric_mean(row["kernels"][k]["of_bmm"] for row in record["rows"])
        for k in PRODUCTS
    ]
    rows.append(["geometric mean", *(f"({mean:.2f})" for mean in means), "", "", "", ""])
    columns = ["layer", *PRODUCTS, "O us", "dX us", "routing fwd us", "routing bwd us"]
    return f"{grid(columns, rows)}\n\n{source(record)}"


def skew(record):
    rows = [
        [row["config"], name, row[name]["most_rows_over_mean"]]
        + [row[name][f"{which}_over_uniform"] for which in PASSES]
        for row in record["rows"]
        for name in ("one hot expert", "zipf")
    ]
    columns = ["layer", "routing", "most rows / mean", "forward / even", "backward / even"]
    return f"{grid(columns, rows)}\n\n{source(record)}"


def rounding(record):
    rows = []
    for row in record["rows"]:
        mean = row["rows"]["topk"] / row["E"] / 128
        rows.append([shape_text(row), f"{mean:g}", row["rows"]["topk"], row["rows"]["rounded"]]
                    + [f"{row[w]['rounded_over_topk_a_row']:.3f}" for w in PASSES])  # fmt: skip
    columns = ["T,d,n,E,K", "mean rows / 128", "rows of top-k", "rounded", "forward", "backward"]
    return f"{grid(columns, rows)}\n\n{source(record)}"


def memory(record):
    rows = []
    for row in record["rows"]:
        ours = row.get("ours_torch", {}).get("kept_MiB", "-")
        rows.append([f"{row['n']}, {row['E']}, {row['K']}", row["formula_MiB"],
                     row["ours_cpp"]["kept_MiB"], ours, row["ours_cpp"]["workspace_MiB"],
                     row["torch"]["kept_MiB"], row["scattermoe_formula_MiB"]])  # fmt: skip
    columns = ["n, E, K", "4TKn", "ours, C", "ours, PyTorch", "workspace, C",
               "compiled grouped_mm", "ScatterMoE (formula)"]  # fmt: skip
    first = record["rows"][0]
    return f"MiB, T {first['T']}, d {first['d']}.\n\n{grid(columns, rows)}\n\n{source(record)}"


def tokens(record):
    names = timed(record)
    rows = [
        [row["T"]] + [f"{row[n]['fwd_ms']:.3f}/{row[n]['bwd_ms']:.3f}" for n in names]
        for row in record["rows"]
    ]
    shape = ", ".join(f"{k} {record[k]}" for k in ("d", "n", "E", "K"))
    table = grid(["T", *(CONTENDERS[n] for n in names)], rows)
    plot = "![Time over T](images/h200-tokens.svg)"
    return f"{shape}; ms forward/backward.\n\n{table}\n\n{source(record)}\n\n{plot}"


def rivals(record):
    names = timed(record)
    columns = ["layer", *(CONTENDERS[n] for n in names)]
    speed = [[row["config"], *(pair(row, n) for n in names)] for row in record["rows"]]
    keeping = [n for n in names if any("kept_MiB" in row.get(n, {}) for row in record["rows"])]
    memory = [
        [row["config"], *(row.get(n, {}).get("kept_MiB", "-") for n in keeping)]
        for row in record["rows"]
    ]
    first = record["first_call"]
    calls = ", ".join(f"{CONTENDERS[n]} {s:.2f} s" for n, s in first["seconds"].items())
    absent = {n: state for n, state in record["rivals"].items() if not state.startswith("timed")}
    missing = ", ".join(f"{n} ({state.split(':')[0]})" for n, state in absent.items())
    failed = "".join(f" {sentence}" for sentence in left_out(record["rows"]))
    return "\n\n".join(
        [
            "TFLOP/s forward/backward:",
            grid(columns, speed),
            "MiB kept from forward to backward, without X:",
            grid(["layer", *(CONTENDERS[n] for n in keeping)], memory),
            f"Time of the first forward and backward in a process, {first['config']}, with nothing "
            f"compiled before: {calls}. Not timed: {missing or 'none'}.{failed} {source(record)}",
            "![Beside other implementations](images/h200-rivals.svg)",
        ]
    )


def left_out(rows):
    """A sentence for each contender that a row does not have."""
    return [
        f"{name} on {row['config']}: {reason}."
        for row in rows
        for name, reason in row.get("left_out", {}).items()
    ]


def host(record):
    calls = ", ".join(f"{name} {us} us" for name, us in record["host_us"].items())
    first = record["first_call_s"]
    return (
        f"A call costs the host: {calls} (C interface, called by ctypes). The first forward of a "
        f"process, opening the device and loading the kernels included, takes "
        f"{1e3 * first['forward']:.0f} ms, with its backward "
        f"{1e3 * first['forward_backward']:.0f} ms. {source(record)}"
    )


HOST_CALLS = {
    "forward": "`moe()`",
    "route": "`route()`",
    "forward + backward": "`moe()`, forward and backward",
    "forward + backward, autograd on one thread": (
        "the same under `torch.autograd.set_multithreading_enabled(False)`"
    ),
    "autograd alone, forward + backward": (
        "for comparison: both passes of an empty `autograd.Function` with the same four leaves"
    ),
}


def host_calls(record):
    """The table of docs/pytorch.md."""
    shape = ", ".join(f"{letter} {size}" for letter, size in record["shape"].items())
    rows = [
        [name, f"{record['microseconds'][call]['best']:.0f}"] for call, name in HOST_CALLS.items()
    ]
    return f"{grid(['call', 'us'], rows)}\n\n{shape}; the best round. {source(record)}"


# ---- plots ---------------------------------------------------------------------------------------


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


def plot_throughput(plt, record):
    figure, panels = plt.subplots(2, 1, figsize=(11, 6.2), layout="constrained")
    names = ("bound", "torch", "sonicmoe", "ours_torch")
    rows = large(record)
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
    open_axes(axes)


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
    open_axes(axes)
    first = rows[0]
    shape = ", ".join(f"{k}={first[k]}" for k in ("T", "d", "n", "K"))
    axes.set_title(f"time a routed row, nearest, {shape}, E varies")
    legend_above(figure, axes)
    return figure
