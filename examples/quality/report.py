"""Tables and plots of the records of quality_study.py."""

import io
import json
import math
import statistics
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib
from lm.study import write_report

matplotlib.use("Agg")
import matplotlib.pyplot as plt

Record = dict[str, Any]
ORIGIN = ("device", "torch", "commit", "date")  # of each record; the report has the newest's
COLOURS = ("#8095a8", "#c4451c", "#2f7f5f", "#7a4fa3", "#b08a1e", "#3a6fb0", "#222222")


def mean_std(values: list[float], form: str = "{:.4f}") -> str:
    """Mean ± sample standard deviation as text."""
    text = form.format(statistics.fmean(values))
    return f"{text} ± {statistics.stdev(values):.4f}" if len(values) > 1 else text


def of(records: list[Record], name: str) -> list[Record]:
    return [record for record in records if record["settings"]["study"] == name]


def groups(records: list[Record], key: Callable[[dict], tuple]) -> dict[tuple, list[Record]]:
    """Records by a key of their settings, in the order of their first appearance."""
    found: dict[tuple, list[Record]] = {}
    for record in records:
        found.setdefault(key(record["settings"]), []).append(record)
    return found


def rounding_rows(records: list[Record]) -> list[dict[str, Any]]:
    """A row for each architecture, size, mode, ratio and begin, with the distances from top-K's
    loss with the same seed, of both evaluations."""

    def model(s: dict) -> tuple:
        return s["architecture"], s["size"], s["seed"]

    runs = of(records, "rounding")
    topk = {model(r["settings"]): r["val_loss"] for r in runs if not r["settings"]["ratio"]}

    def kind(s: dict) -> tuple:
        return s["architecture"], s["size"], s["ratio"], s["mode"], s["begin"]

    rows = []
    for key, members in sorted(groups(runs, kind).items()):
        row = dict(zip(("architecture", "size", "ratio", "mode", "begin"), key, strict=True))
        pairs = [(topk.get(model(r["settings"]), math.nan), r) for r in members]
        pairs = [(base, r) for base, r in pairs if not math.isnan(base)]
        row |= {"runs": members, "losses": [r["val_loss"] for r in members]}
        row["gaps"] = [r["val_loss"] - base for base, r in pairs]
        row["gaps_rounded"] = [r["val_loss_rounded"] - b for b, r in pairs if row["ratio"]]
        rows.append(row)
    return rows


def percent(records: list[Record], name: str) -> str:
    found = [v for r in records for v in r["loads"].get(name, [])]
    return f"{100 * statistics.fmean(found):.1f} %" if found else "-"


def rounding_table(rows: list[dict[str, Any]]) -> str:
    lines = [
        "| model | routing in training | T_e / tile | seeds | validation loss | beyond top-K, same "
        "seed | the same, evaluated with rounding | rows added, dropped | largest load |",
        "|---|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for row in rows:
        gap = mean_std(row["gaps"], "{:+.4f}") if row["gaps"] and row["ratio"] else "-"
        rounded = mean_std(row["gaps_rounded"], "{:+.4f}") if row["gaps_rounded"] else "-"
        mode = "top-K" if not row["ratio"] else row["mode"]
        mode += "" if row["begin"] == "start" else " after 10 %"
        loads = [v for r in row["runs"] for v in r["loads"]["largest"]]
        cells = [f"{row['architecture']} {row['size']}", mode, row["ratio"] or "-"]
        cells += [len(row["losses"]), mean_std(row["losses"]), gap, rounded]
        cells += [f"{percent(row['runs'], 'added')}, {percent(row['runs'], 'dropped')}"]
        cells += [f"{statistics.fmean(loads):.2f}"]
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join(lines)


def spread_table(records: list[Record]) -> str:
    """What differs between runs with top-K, and by how much their losses do."""
    lines = [
        "| model | what differs | runs | validation loss | largest distance of two |",
        "|---|---|---:|---:|---:|",
    ]
    topk = [r for r in of(records, "rounding") if not r["settings"]["ratio"]]
    changed = of(records, "spread")

    def model(s: dict) -> tuple:
        return s["architecture"], s["size"]

    for key, members in groups(changed, model).items():
        mine = [r for r in topk if model(r["settings"]) == key]
        first = [r for r in mine if r["settings"]["seed"] == 0]
        kinds = {
            "nothing": first + [r for r in members if r["settings"]["again"]],
            "the order of the text": first + [r for r in members if r["settings"]["order"]],
            "the initial weights": first + [r for r in members if r["settings"]["order"] == 0],
            "both": mine,
        }
        for kind, runs in kinds.items():
            losses = _losses(runs)
            if len(losses) > 1:
                cells = [" ".join(key), kind, len(losses), mean_std(losses)]
                cells.append(f"{max(losses) - min(losses):.4f}")
                lines.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join(lines)


def times_table(records: list[Record]) -> str:
    """Times with top-K over those with rounding, of a micro-batch and of a whole step."""
    lines = [
        "| model | T_e / tile | tokens of a micro-batch | experts' kernels, ms: top-K, rounded | "
        "top-K / rounded | forward + backward, ms: top-K, rounded | top-K / rounded | "
        "whole step, ms: top-K, rounded | top-K / rounded |",
        "|---|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for record in records:
        if "times" not in record:
            continue
        s, t = record["settings"], record["times"]
        cells = [f"{s['architecture']} {s['size']}", s["ratio"], t["tokens"]]
        for name in ("experts_ms", "micro_ms", "step_ms"):
            a, b = t["topk"][name], t["rounded"][name]
            cells += [f"{a:.2f}, {b:.2f}", f"{a / b:.3f}"]
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join(lines)


def finetune_table(records: list[Record]) -> str:
    lines = [
        "| trained | parameters | seeds | before | after, mean ± std over seeds | beyond full, "
        "same seed | merged - unmerged |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    tuned = of(records, "finetune")
    full = {r["settings"]["seed"]: r["val_loss"] for r in tuned if _variant(r) == "full"}
    for (variant,), members in groups(tuned, lambda s: (s["variant"],)).items():
        gaps = [
            r["val_loss"] - full[r["settings"]["seed"]]
            for r in members
            if r["settings"]["seed"] in full
        ]
        merged = [r["val_loss_merged"] - r["val_loss"] for r in members if "val_loss_merged" in r]
        cells = [variant, f"{members[0]['parameters']['trained'] / 1e6:.1f} M", len(members)]
        cells += [f"{members[0]['curve'][0]['loss']:.4f}", mean_std(_losses(members))]
        cells += [mean_std(gaps, "{:+.4f}") if gaps and variant != "full" else "-"]
        cells += [f"{max(merged, key=abs):+.5f}" if merged else "-"]
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join(lines)


def _variant(record: Record) -> str:
    return record["settings"]["variant"]


def _losses(records: list[Record]) -> list[float]:
    return [record["val_loss"] for record in records]


def _image(figure) -> bytes:
    image = io.BytesIO()
    figure.savefig(image, format="png", dpi=150)
    plt.close(figure)
    return image.getvalue()


def rounding_plot(rows: list[dict[str, Any]]) -> bytes:
    """For each architecture, in the size with most rows: the distance from top-K over T_e / tile,
    and the loss over time."""
    sizes = Counter((row["architecture"], row["size"]) for row in rows)
    most = {architecture: size for (architecture, size), _ in sizes.most_common()[::-1]}
    models = sorted(most.items())
    figure, axes = plt.subplots(
        2, len(models), figsize=(4 * len(models), 6.5), layout="constrained", squeeze=False
    )
    for column, model in enumerate(models):
        mine = [row for row in rows if (row["architecture"], row["size"]) == model]
        _gaps(axes[0, column], mine, " ".join(model))
        _curves(axes[1, column], mine)
    axes[0, 0].set_ylabel("validation loss beyond top-K, nats a token")
    axes[1, 0].set_ylabel("validation loss, nats a token")
    return _image(figure)


def _gaps(axes, rows: list[dict[str, Any]], title: str) -> None:
    axes.set_title(title)
    axes.axhline(0, color="black", linewidth=1)
    kinds = list(dict.fromkeys((r["mode"], r["begin"]) for r in rows if r["ratio"]))
    for i, kind in enumerate(kinds):
        points = [r for r in rows if (r["mode"], r["begin"]) == kind and r["gaps"]]
        x = [r["ratio"] * 1.04 ** (i - (len(kinds) - 1) / 2) for r in points]
        bars = [statistics.stdev(r["gaps"]) if len(r["gaps"]) > 1 else 0.0 for r in points]
        label = kind[0] + ("" if kind[1] == "start" else " after 10 %")
        y = [statistics.fmean(r["gaps"]) for r in points]
        axes.errorbar(
            x,
            y,
            bars,
            marker="o",
            capsize=3,
            label=label,
            color=COLOURS[1 + i % (len(COLOURS) - 1)],
        )
    ratios = sorted({r["ratio"] for r in rows if r["ratio"]})
    if ratios:
        axes.set_xscale("log", base=2)
        axes.set_xticks(ratios, [str(r) for r in ratios])
        axes.legend(fontsize=8, frameon=False)
    axes.set_xlabel("T_e / tile")


def _curves(axes, rows: list[dict[str, Any]]) -> None:
    """Loss over the seconds of training, of the first seed with top-K and with `nearest` from the
    start. The last point of a curve is left out: it is the loss of more text."""
    drawn = [r for r in rows if r["mode"] in ("topk", "nearest") and r["begin"] == "start"]
    for i, row in enumerate(drawn):
        curve = row["runs"][0]["curve"][1:-1]
        label = "top-K" if not row["ratio"] else f"{row['mode']} {row['ratio']}"
        axes.plot(
            [p["seconds"] for p in curve],
            [p["loss"] for p in curve],
            label=label,
            color=COLOURS[i % len(COLOURS)],
            linewidth=1,
        )
    axes.set_xlabel("seconds of training")
    axes.legend(fontsize=8, frameon=False)


def finetune_plot(records: list[Record]) -> bytes:
    figure, axes = plt.subplots(figsize=(7, 4.2), layout="constrained")
    kinds = groups(of(records, "finetune"), lambda s: (s["variant"],))
    for colour, ((variant,), members) in zip(COLOURS, kinds.items(), strict=False):
        for i, record in enumerate(members):
            curve = record["curve"][:-1]
            axes.plot(
                [p["step"] for p in curve],
                [p["loss"] for p in curve],
                color=colour,
                linewidth=1,
                label=variant if i == 0 else None,
            )
    axes.set(xlabel="step", ylabel="validation loss, nats a token")
    axes.legend(fontsize=8, frameon=False)
    return _image(figure)


def tables(records: list[Record]) -> dict[str, str]:
    """Tables by the names of their files, of what has records."""
    found = {}
    if of(records, "rounding"):
        found["quality-rounding.md"] = rounding_table(rounding_rows(records))
    if of(records, "spread"):
        found["quality-spread.md"] = spread_table(records)
    if any("times" in record for record in records):
        found["quality-times.md"] = times_table(records)
    if of(records, "finetune"):
        found["quality-finetune.md"] = finetune_table(records)
    return {name: text + "\n" for name, text in found.items()}


def write(out: Path, records: list[Record]) -> None:
    """Writes all records as quality.json, and tables and plots of what has records; prints the
    tables."""
    texts = tables(records)
    contents = {name: text.encode() for name, text in texts.items()}
    facts = {key: records[-1][key] for key in ORIGIN} if records else {}
    contents["quality.json"] = (json.dumps(facts | {"runs": records}) + "\n").encode()
    if "quality-rounding.md" in texts:
        contents["quality-rounding.png"] = rounding_plot(rounding_rows(records))
    if "quality-finetune.md" in texts:
        contents["quality-finetune.png"] = finetune_plot(records)
    write_report(out, contents)
    print("\n".join(texts.values()))
