"""The tables of docs/fp8.md on speed and on the scale of x, from their records."""

from __future__ import annotations

import json

from fp8 import CONFIGS, GOALS, MICRO_BATCHES, PRODUCTS, RIVALS, TINY, speeds_over, summary
from h200_figures import ROOT, extra, fp8_speeds, grid, shape_text
from h200_page import source


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


def layers():
    record = extra("fp8")
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


def products():
    rows, found = [], {name: [] for name in PRODUCTS}
    for row in extra("fp8")["products"]:
        for name, values in found.items():  # of_cublas is rounded already
            values.append(row["products"][name]["cublas_ms"] / row["products"][name]["ours_ms"])
        rows.append([row["config"], shape_text(row), *(f"{v[-1]:.2f}" for v in found.values())])
    spans = (f"{min(values):.2f} to {max(values):.2f}" for values in found.values())
    rows.append(["least to most", "", *spans])
    return grid(["layer", "T,d,n,E,K", *PRODUCTS], rows, words=2)


def scales():
    """The cosine of dx with fp64 by activation and scale of x, from fp8_scales.py."""
    path = ROOT / "benchmarks/results/study/fp8_scales.json"
    found = {(r["activation"], r["scale"]): r for r in json.loads(path.read_text())["rows"]}
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


TABLES = {"fp8-layers": layers, "fp8-products": products, "fp8-scales": scales}
