"""The figures by which the portable engine is judged, from its record. Needs no torch."""

from __future__ import annotations

import statistics

WIDE = 1024  # the goal in TFLOP/s is for layers of at least this width
RIVAL_CONFIGS = ("7B-n256", "olmoe", "qwen3-next", "gpt-oss-20b", "30B-n1024")
RIVALS = {"scattermoe": "ScatterMoE", "loop": "the loop over experts"}
GOALS = {"tflops": 380.0, "hopper": 0.60, "scattermoe": 1.5, "loop": 2.0, "roles": 0.80}


def timed(row, name):
    return {"fwd_ms", "bwd_ms"} <= row.get(name, {}).keys()


def total_ms(row, name):
    return row[name]["fwd_ms"] + row[name]["bwd_ms"]


def tflops(row, name="portable"):
    """Of forward and backward together: 18 T K n d."""
    flops = 18 * row["T"] * row["K"] * row["n"] * row["d"]
    return flops / total_ms(row, name) * 1e-9


def speedup(row, over, name="portable"):
    """Forward and backward together; above 1 `name` is faster."""
    return total_ms(row, over) / total_ms(row, name)


def both(rows, *names):
    return [row for row in rows if all(timed(row, name) for name in names)]


def spread(values):
    """{mean (geometric), least, of (number of values)}; None if there are no values."""
    if not values:
        return None
    return {"mean": statistics.geometric_mean(values), "least": min(values), "of": len(values)}


def role_figures(record):
    """{(config, role): the best rival's time over ours}"""
    return {
        (row["config"], role): part["of_best_rival"]
        for row in record.get("roles", [])
        for role, part in row["kernels"].items()
    }


def summary(record):
    """{goal: {mean, least, of}} over the rows of the goal; None where nothing was timed."""
    rows = record["rows"]
    wide = [row for row in both(rows, "portable") if row["n"] >= WIDE]
    found = {
        "tflops": spread([tflops(row) for row in wide]),
        "hopper": spread([speedup(row, "hopper") for row in both(rows, "portable", "hopper")]),
    }
    judged = [row for row in rows if row["config"] in RIVAL_CONFIGS]
    for rival in RIVALS:
        found[rival] = spread([speedup(row, rival) for row in both(judged, "portable", rival)])
    return found | {"roles": spread(list(role_figures(record).values()))}


def over_promise(record):
    """The configs whose engine keeps more for backward than the library promises."""
    return [
        row["config"]
        for row in record["rows"]
        if "memory" in row and row["memory"]["kept_bytes"] > row["memory"]["promised_bytes"]
    ]


# The figure that must reach the goal: the mean over the layers, or the least of all values.
JUDGED_BY = {"tflops": "mean", "hopper": "mean", "scattermoe": "least", "loop": "least",
             "roles": "least"}  # fmt: skip


def met(goal, found):
    return found is not None and found[JUDGED_BY[goal]] >= GOALS[goal]


TITLES = {
    "tflops": f"TFLOP/s, forward + backward, n >= {WIDE}",
    "hopper": "speed over the Hopper engine's",
    **{rival: f"speed over {title}" for rival, title in RIVALS.items()},
    "roles": "speed of a product over the best mma.sync product's",
}


def lines(record):
    """The summary as text, one line for each goal."""
    result = []
    for goal, found in summary(record).items():
        if found is None:
            result.append(f"{TITLES[goal]}: nothing timed")
            continue
        digits = 0 if goal == "tflops" else 2
        state = "met" if met(goal, found) else "MISSED"
        result.append(
            f"{TITLES[goal]}: geometric mean {found['mean']:.{digits}f}, least "
            f"{found['least']:.{digits}f}, of {found['of']}; goal {GOALS[goal]:g} for the "
            f"{JUDGED_BY[goal]}: {state}"
        )
    too_much = over_promise(record)
    measured = sum("memory" in row for row in record["rows"])
    verdict = f"above the promise on {', '.join(too_much)}" if too_much else "within the promise"
    result.append(f"bytes kept for backward on {measured} layers: {verdict}")
    return result
