"""FP8: the tables and the plot of docs/fp8.md."""

from __future__ import annotations

from fp8 import CONFIGS, GOALS, MICRO_BATCHES, PRODUCTS, RIVALS, TINY, speeds_over, summary

from .common import COLOURS, OURS, grid, legend_above, open_axes, shape_text, source


def fp8_speeds(row):
    """Speed of fp8 over bf16: forward, forward + backward."""
    forward = {name: row[name]["fwd_ms"] for name in ("bf16", "fp8")}
    both = {name: forward[name] + row[name]["bwd_ms"] for name in forward}
    return tuple(ms["bf16"] / ms["fp8"] for ms in (forward, both))


def step_speeds(row):
    steps = (row["step_ms"][str(micro)] for micro in MICRO_BATCHES)
    return [step["bf16"] / step["fp8"] for step in steps]


def over(rival, row):
    """How many times as fast fp8 is, as text."""
    return "".join(f"{speed:.2f}" for speed in speeds_over(rival, [row])) or "-"


def layer_cells(row):
    over_bf16 = [*fp8_speeds(row), *step_speeds(row)]
    beside = (over(name, row) for name in RIVALS)
    kept = f"{row['kept_mib']['bf16']:.0f} -> {row['kept_mib']['fp8']:.0f}"
    rows = row["T"] * row["K"] // row["E"]
    speeds = (f"{value:.2f}" for value in over_bf16)
    return [row["config"], row["d"], row["n"], rows, *speeds, *beside, kept]


def means(record):
    """A sentence on the wide layers and their goals."""
    found = summary(record)
    parts, goals = [], []
    for title in list(GOALS)[:2]:
        name, goal = title.split(" over bf16")[0], GOALS[title][0]
        mean = found[title]["mean"]
        parts.append(f"{name} {mean:.3f}")
        goals.append(f"{goal:.2f} ({'met' if mean >= goal else 'missed'})")
    return (
        f"Geometric mean over bf16 of the {found[title]['of']} layers with d >= 2048 and "
        f"n >= 1024: {', '.join(parts)}. The goals were {' and '.join(goals)}."
    )


def difference(row, which):
    """The relative difference between the times of fp8 and auto."""
    times = [sum(row[name][key] for key in which) for name in ("fp8", "auto")]
    return max(times) / min(times) - 1


def repeated(record):
    """Sentences on the accuracy of the times: where auto takes fp8, it repeats the measurement."""
    rows = [row for row in record["rows"] if row["cosine"]["auto"] == row["cosine"]["fp8"]]
    forward, both = (
        max(difference(row, which) for row in rows) for which in (("fwd_ms",), ("fwd_ms", "bwd_ms"))
    )
    above = [r["config"] for r in record["rows"] if max(step_speeds(r)) > fp8_speeds(r)[1]]
    steps = (
        f" At {' and '.join(above)} a step has a higher ratio than forward + backward, although it "
        "also quantises; the cause is not known."
    )
    return (
        f'On {len(rows)} layers `"auto"` runs the same kernels as `"fp8"`. In this run their times '
        f"differ by up to {forward:.0%} forward and {both:.0%} forward + backward."
    ).replace("%", " %") + steps * bool(above)


def deep_gemm(record):
    return f" DeepGEMM {record['deep_gemm']}." if "deep_gemm" in record else ""


def layers(record):
    columns = ["layer", "d", "n", "rows an expert", "forward", "forward + backward"]
    columns += [f"{micro} micro-batch{'es' * (micro > 1)} a step" for micro in MICRO_BATCHES]
    columns += ["over torch's scaled products", "over DeepGEMM", "kept MiB, bf16 -> fp8"]
    measured = {row["config"] for row in record["rows"]}
    missing = [name for name in CONFIGS if name not in measured | set(TINY)]
    absent = f"Not measured: {', '.join(missing)}. " if missing else ""
    return "\n\n".join(
        [
            grid(columns, [layer_cells(row) for row in record["rows"]]),
            f"{means(record)} {repeated(record)}",
            f"{absent}{source(record)}{deep_gemm(record)}",
        ]
    )


def products(record):
    rows, found = [], {name: [] for name in PRODUCTS}
    for row in record["products"]:
        for name, values in found.items():  # of_cublas is rounded already
            values.append(row["products"][name]["cublas_ms"] / row["products"][name]["ours_ms"])
        rows.append([row["config"], shape_text(row), *(f"{v[-1]:.2f}" for v in found.values())])
    spans = (f"{min(values):.2f} to {max(values):.2f}" for values in found.values())
    rows.append(["least to most", "", *spans])
    return grid(["layer", "T,d,n,E,K", *PRODUCTS], rows, words=2)


def scales(record):
    """The cosine of dx with fp64 by activation and scale of x, from fp8_scales.py."""
    found = {(r["activation"], r["scale"]): r for r in record["rows"]}
    activations = dict.fromkeys(activation for activation, _ in found)
    widths = dict.fromkeys(scale for _, scale in found)
    cells = [
        [f"`{name}`"]
        + [
            f"{found[name, s]['fp8']['dx']:.3f} ({found[name, s]['bf16']['dx']:.3f})"
            for s in widths
        ]
        for name in activations
    ]
    return grid(["activation", *(f"x at {scale} times unit scale" for scale in widths)], cells)


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
    open_axes(axes)
    legend_above(figure, axes)
    return figure
