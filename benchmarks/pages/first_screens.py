"""What the first screens of README.md and of pages promise, from the records."""

from __future__ import annotations

import statistics

from scaling import best_rival

from . import finetune, training
from .common import PASSES, record, span
from .fp8 import fp8_speeds
from .layers import (
    EARLIER,
    TOGETHER,
    TOGETHER_ROWS,
    earlier_ratio,
    grouped_ratio,
    host_limited,
    large,
    mean_over_sonic,
    ratio,
)

LAYER = "7B-n256"  # of the memory
FIRST = "7B-T2048"  # of the first call
CARDS = "[H100, H200; others not yet run](docs/troubleshooting.md#which-cards); CPU"


def spelled(values):
    return "/".join(f"{value:.2f}" for value in values)


def mean_over(hot, other_ratio):
    """Geometric means of our speed over another's, forward and backward, on large layers.
    `other_ratio(row, pass)`: the other's speed over the reference's, or None."""
    rows = [row for row in large(hot) if other_ratio(row, "fwd") is not None]
    means = (
        statistics.geometric_mean(ratio(row, which) / other_ratio(row, which) for row in rows)
        for which in PASSES
    )
    return list(means), len(rows)


def over_sonic(hot):
    count = sum(not host_limited(row["config"]) for row in large(hot))
    return [mean_over_sonic(hot, which) for which in PASSES], count


def over_scatter(hot):
    def other(row, which):
        timed = "scattermoe" in EARLIER[row["config"]]
        return earlier_ratio(row, which, "scattermoe") if timed else None

    return mean_over(hot, other)


def kept():
    """MiB kept for backward by this layer, sonic-moe, ScatterMoE and compiled grouped_mm."""
    rivals = EARLIER[LAYER]
    ours = next(row for row in record("h200/memory")["rows"] if row["n"] == EARLIER[LAYER]["n"])
    names = ("sonicmoe", "scattermoe", "torch")
    return [ours["ours_torch"]["kept_MiB"], *(rivals[name]["act_MiB"] for name in names)]


def first_calls():
    """Seconds of the first forward and backward: this layer, sonic-moe, compiled grouped_mm."""
    seconds = record("h200/rivals")["first_call"]["seconds"]
    sonic = TOGETHER_ROWS[FIRST]["sonicmoe"]["first_call_s"]
    return [seconds["ours_torch"], sonic, seconds["torch"]]


def reasons(hot):
    (forward, backward), count = over_sonic(hot)
    grouped, _ = mean_over(hot, grouped_ratio)
    ours, _, _, torch = kept()
    first = first_calls()
    fp8 = [fp8_speeds(row)[1] for row in record("h200/fp8")["rows"]]
    halves = [
        row["kept_mib"]["fp8"] / row["kept_mib"]["bf16"] for row in record("h200/fp8")["rows"]
    ]
    lines = [
        f"**Faster**: {forward:.2f} times the forward and {backward:.2f} times the backward speed "
        f"of sonic-moe, the authors' implementation (H200, bf16, {count} layers), and "
        f"{grouped[0]:.2f} and {grouped[1]:.2f} times those of compiled `grouped_mm`.",
        f"**Less memory**: backward keeps {ours / torch:.2f} of the bytes that compiled "
        f"`grouped_mm` keeps ({ours:.0f} instead of {torch:.0f} MiB, {LAYER}), and hardly more "
        "when experts get smaller.",
        f"**No compiling at run time**: the first forward and backward of a process take "
        f"{first[0]:.2f} s, those of compiled `grouped_mm` {first[2]:.1f} s.",
        f"**FP8**: {min(fp8):.2f} to {max(fp8):.2f} times the speed of bf16 and "
        f"{min(halves):.2f} to {max(halves):.2f} of its kept memory ({len(fp8)} layers, H200).",
        finetune.sentence(record("h200/finetune")),
        "**In training**: " + training.sentence(record("h100/training")).replace("\n", " "),
    ]
    return "\n".join(f"- {line}" for line in lines)


def beside(hot):
    names = ["this layer", "sonic-moe 0.1.2", "ScatterMoE 47b5e15", "compiled `grouped_mm`"]
    (sonic, count), (scatter, few), (grouped, all_rows) = (
        over_sonic(hot),
        over_scatter(hot),
        mean_over(hot, grouped_ratio),
    )
    memory = [f"{value:.0f} MiB" for value in kept()]
    first = [f"{value:.2g} s" for value in first_calls()]
    rows = [
        ["our speed over it, forward/backward", "", *map(spelled, (sonic, scatter, grouped))],
        [f"kept for backward, {LAYER}", *memory],
        [f"first call, {FIRST}", first[0], first[1], "-", first[2]],
        ["fp8 training", "H100, H200; the CPU for tests", "in its repository", "no", "no"],
        ["experts divided over GPUs", "PyTorch, C, C++", "in its repository", "no", "no"],
        ["token rounding", "with gradients, 6 modes", "in a benchmark script", "no", "no"],
        ["equal bits in every run and batch", "yes, tested", "-", "-", "-"],
        ["cards", CARDS, "Hopper, Blackwell", "Triton's", "torch's"],
    ]
    head = ["", *names]
    lines = ["| " + " | ".join(line) + " |" for line in (head, ["---"] * len(head), *rows)]
    return "\n".join(lines) + (
        f"\n\nSpeed: geometric means over {count}, {few} and {all_rows} layers on an H200, under "
        "sustained load ([how](docs/performance.md#how-it-is-measured)). -: not measured, not "
        f"documented. {TOGETHER['device']}, torch {TOGETHER['torch']}."
    )


def answers(hot):
    """The three answers of docs/performance.md."""
    (forward, backward), _ = over_sonic(hot)
    (grouped_fwd, grouped_bwd), _ = mean_over(hot, grouped_ratio)
    rows = large(hot)
    rates = [row["ours_cpp"][f"{which}_tflops"] for row in rows for which in PASSES]
    ours, sonic, scatter, torch = kept()
    least = min(hot["rows"], key=lambda row: ratio(row, "fwd"))
    close = min(rows, key=lambda row: ratio(row, "fwd") / grouped_ratio(row, "fwd"))
    small = ratio(close, "fwd") / grouped_ratio(close, "fwd")
    fast = (
        f"- **How fast?** {min(rates):.0f} to {max(rates):.0f} TFLOP/s on the {len(rows)} large "
        f"layers: {forward:.2f}/{backward:.2f} times the speed of sonic-moe (forward/backward, "
        f"geometric means), {grouped_fwd:.2f}/{grouped_bwd:.2f} times that of compiled "
        f"`grouped_mm`, and {span([ratio(r, 'fwd') for r in rows])} / "
        f"{span([ratio(r, 'bwd') for r in rows])} times that of an idealised cuBLAS layer."
    )
    memory = (
        "- **How much memory?** X, H (4TKn bytes in bf16) and a little metadata: "
        f"{ours:.0f} MiB beside X at {LAYER}, where sonic-moe keeps {sonic:.0f}, ScatterMoE "
        f"{scatter:.0f} and compiled `grouped_mm` {torch:.0f}."
    )
    unless = (
        "- **When not?** With few tokens the weights' bytes decide, and the layer is at best as "
        f"fast as cuBLAS ({least['config']}, {least['T']} tokens: {ratio(least, 'fwd'):.2f} times "
        "the forward speed). With few wide experts the gain over `grouped_mm` is small "
        f"({close['config']}: {small:.2f} times the forward speed). Cards other than H100 and "
        "H200 have not been tried. The CPU backend is for tests."
    )
    return "\n".join((fast, memory, unless))


def ranks(ep2):
    """What docs/distributed.md promises."""
    rows = ep2["rows"]

    def times(name):
        found = [row for row in rows if name in row and "alone_torch" in row]
        return [sum(row[name].values()) / sum(row["alone_torch"].values()) for row in found]

    ours = [row for row in rows if "ours_torch" in row]
    more = over_more_gpus(record("h200/scaling"))
    return (
        f"**What to expect**: over peer memory on two H200, forward and backward take "
        f"{span(times('ours_torch'))} times as long as the layer alone with as many rows "
        f"({len(ours)} layers, `max_tokens` and `capacity` given), over NCCL's all-to-all "
        f"{span(times('ours_all_to_all'))} times. {more} ([tables](#what-it-costs))."
    )


def over_more_gpus(scaling):
    rows = scaling["layers"]
    most = max(row["ranks"] for row in rows)
    rows = [row for row in rows if row["ranks"] == most]
    ours = [sum(row["ours_torch"].values()) for row in rows]
    alone = [sum(row["alone_torch"].values()) for row in rows]
    over = [mine / one for mine, one in zip(ours, alone, strict=True)]
    rivals = [best_rival(row) / mine for row, mine in zip(rows, ours, strict=True)]
    tokens = " or ".join(str(count) for count in sorted({row["T"] for row in rows}))
    return (
        f"On {most} of them with {tokens} tokens each it takes {span(over)} times as long as "
        f"alone, and is {span(rivals)} times as fast as the fastest way over NCCL"
    )


def fp8(record):
    """What docs/fp8.md promises."""
    rows = record["rows"]
    speeds = [fp8_speeds(row)[1] for row in rows]
    halves = [row["kept_mib"]["fp8"] / row["kept_mib"]["bf16"] for row in rows]
    return (
        f'**What to call**: `precision="auto"`. **What to expect**: {span(speeds)} times the speed '
        f"of bf16, forward and backward, and {span(halves)} of its kept memory ({len(rows)} "
        "layers, one H200). In two studies the final loss was not worse than with bf16 "
        "([quality](#quality))."
    )
