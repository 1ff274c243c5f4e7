"""The tables of docs/performance.md, and one of docs/pytorch.md, from the records in
benchmarks/results/h200/."""

from __future__ import annotations

import statistics

from h200_bench import summary
from h200_figures import (
    CONTENDERS,
    PASSES,
    SPEED_COLUMNS,
    extra,
    grid,
    hot_table,
    marked,
    mean_over_sonic,
    newest,
    pair,
    shape_text,
    speeds,
    timed,
)

PRODUCTS = ("A", "Y", "dH", "dW", "dX~")


def source(record):
    where = f"{record['device']}, torch {record['torch']}"
    return f"{where}, {record['date'][:10]}, commit {record['commit']}."


def hot():
    return hot_table(newest("hot"))


def cool():
    record = newest("cool")
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


def kernels():
    record = extra("kernels")
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


def skew():
    record = extra("skew")
    rows = [
        [row["config"], name, row[name]["most_rows_over_mean"]]
        + [row[name][f"{which}_over_uniform"] for which in PASSES]
        for row in record["rows"]
        for name in ("one hot expert", "zipf")
    ]
    columns = ["layer", "routing", "most rows / mean", "forward / even", "backward / even"]
    return f"{grid(columns, rows)}\n\n{source(record)}"


def rounding():
    record = extra("rounding")
    rows = []
    for row in record["rows"]:
        mean = row["rows"]["topk"] / row["E"] / 128
        rows.append([shape_text(row), f"{mean:g}", row["rows"]["topk"], row["rows"]["rounded"]]
                    + [f"{row[w]['rounded_over_topk_a_row']:.3f}" for w in PASSES])  # fmt: skip
    columns = ["T,d,n,E,K", "mean rows / 128", "rows of top-k", "rounded", "forward", "backward"]
    return f"{grid(columns, rows)}\n\n{source(record)}"


def memory():
    record = extra("memory")
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


def tokens():
    record = extra("tokens")
    names = timed(record)
    rows = [
        [row["T"]] + [f"{row[n]['fwd_ms']:.3f}/{row[n]['bwd_ms']:.3f}" for n in names]
        for row in record["rows"]
    ]
    shape = ", ".join(f"{k} {record[k]}" for k in ("d", "n", "E", "K"))
    table = grid(["T", *(CONTENDERS[n] for n in names)], rows)
    plot = "![Time over T](images/h200-tokens.svg)"
    return f"{shape}; ms forward/backward.\n\n{table}\n\n{source(record)}\n\n{plot}"


def rivals():
    record = extra("rivals")
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


def left_out(rows):
    """A sentence for each contender that a row does not have."""
    return [
        f"{name} on {row['config']}: {reason}."
        for row in rows
        for name, reason in row.get("left_out", {}).items()
    ]


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


def portable():
    record = extra("portable")
    if record is None:
        return "No record yet."
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


def host():
    record = extra("host")
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


def host_calls():
    """The table of docs/pytorch.md."""
    record = extra("host_cost")
    shape = ", ".join(f"{letter} {size}" for letter, size in record["shape"].items())
    rows = [
        [name, f"{record['microseconds'][call]['best']:.0f}"] for call, name in HOST_CALLS.items()
    ]
    return f"{grid(['call', 'us'], rows)}\n\n{shape}; the best round. {source(record)}"


TABLES = {
    "hot": hot,
    "cool": cool,
    "kernels": kernels,
    "skew": skew,
    "rounding": rounding,
    "memory": memory,
    "tokens": tokens,
    "rivals": rivals,
    "portable": portable,
    "host": host,
}
