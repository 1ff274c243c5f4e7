"""The portable engine on one H200: its part of docs/performance.md."""

from __future__ import annotations

from h200_bench import summary

from .common import (
    COLOURS,
    CONTENDERS,
    OURS,
    bars,
    grid,
    legend_above,
    open_axes,
    shape_text,
    source,
)
from .layers import left_out


def rates(row, name):
    """TFLOP/s forward/backward, from the times."""
    if not summary.timed(row, name):
        return "-"
    work = row["T"] * row["K"] * row["n"] * row["d"] * 1e-9
    return f"{6 * work / row[name]['fwd_ms']:.0f}/{12 * work / row[name]['bwd_ms']:.0f}"


def goals(record):
    cells = []
    for goal, found in summary.summary(record).items():
        digits = 0 if goal == "tflops" else 2
        values = [f"{found[k]:.{digits}f}" for k in ("mean", "least")] if found else ["-", "-"]
        judged = f"{summary.GOALS[goal]:g}, {summary.JUDGED_BY[goal]}"
        cells.append([summary.TITLES[goal], *values, found["of"] if found else 0, judged])
    return grid(["figure", "geometric mean", "least", "of", "goal"], cells)


def layers_beside(record):
    names = ("portable", "hopper", "scattermoe", "loop")
    rows = []
    for row in record["rows"]:
        over = [
            f"{summary.speedup(row, name):.2f}" if summary.timed(row, name) else "-"
            for name in names[1:]
        ]
        rows.append([row["config"], shape_text(row), *(rates(row, n) for n in names), *over])
    titles = [CONTENDERS[name] for name in names]
    columns = ["layer", "T,d,n,E,K", *titles, *(f"over {title}" for title in titles[1:])]
    return grid(columns, rows, words=2)


def products_beside(record):
    rows = []
    for row in record["roles"]:
        cells = []
        for part in row["kernels"].values():
            ours, *rivals = (part[who]["tflops"] for who in ("ours", "triton", "cublas")
                            if who in part)  # fmt: skip
            cells.append(f"{ours:.0f} of {max(rivals):.0f} ({part['of_best_rival']:.2f})")
        rows.append([row["config"], *cells])
    roles = record["roles"][0]["kernels"] if record["roles"] else ()
    return grid(["layer", *roles], rows)


def kept_text(record):
    shares = [
        row["memory"]["kept_bytes"] / row["memory"]["formula_bytes"]
        for row in record["rows"]
        if "memory" in row
    ]
    if not shares:
        return "No memory figures."
    above = summary.over_promise(record)
    verdict = f"exceeded on {', '.join(above)}" if above else "kept on all layers"
    return (
        f"Kept from forward to backward, without X: {min(shares):.3f} to {max(shares):.3f} times "
        f"4TKn bytes. Limit 4TKn + 20TK + 16T + 1024E: {verdict}."
    )


def portable(record):
    missing = left_out([*record["rows"], *record["roles"]])
    return "\n\n".join(
        [
            goals(record),
            'TFLOP/s forward/backward. Columns "over": the other\'s time of forward + backward '
            "divided by the portable engine's.",
            layers_beside(record),
            "TFLOP/s of each product: ours, the best rival's, and in brackets ours divided by it:",
            products_beside(record),
            f"{kept_text(record)}{' Not timed: ' + ' '.join(missing) if missing else ''} "
            f"Triton {record['triton']}. {source(record)}",
            "![The portable engine beside others](images/h200-portable.svg)",
        ]
    )


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
    open_axes(products)
    products.legend(fontsize=8, frameon=False, ncols=5, loc="lower center")
    legend_above(figure, layers)
    return figure
