"""Makes the plot and the part of docs/distributed.md from the record of scaling.py.

python benchmarks/scaling_figures.py         writes the plot to docs/images/
python benchmarks/check_figures.py --fix     writes the part to docs/distributed.md
"""

from __future__ import annotations

import json
import sys

from ep2 import total
from h200_figures import COLOURS, OURS, RECORDS, grid
from plots import save_plots
from scaling import best_rival

RECORD = RECORDS / "scaling.json"
ABSENT = (
    "No record yet: `python benchmarks/scaling.py layers` and `python benchmarks/scaling.py "
    "training` on four or eight GPUs write it."
)
STYLES = {"fsdp": (COLOURS["hopper"], "FSDP2"), "ep": (OURS, "FSDP2 and expert parallelism")}


def record() -> dict | None:
    return json.loads(RECORD.read_text()) if RECORD.exists() else None


def layers(found: dict) -> str:
    columns = [
        "layer",
        "GPUs",
        "alone, ms",
        "ours, ms",
        "over alone",
        "others over ours",
    ]
    cells = []
    for row in sorted(found["layers"], key=lambda row: (row["config"], row["ranks"])):
        ours, alone = total(row["ours_torch"]), total(row["alone_torch"])
        figures = [f"{alone:.2f}", f"{ours:.2f}", f"{ours / alone:.3f}"]
        cells.append([row["config"], row["ranks"], *figures, f"{best_rival(row) / ours:.2f}"])
    return grid(columns, cells, words=1)


def training(found: dict) -> str:
    columns = ["model", "scaling", "parallel", "GPUs", "tokens a GPU", "tokens/s", "a day and GPU"]
    cells = []
    for row in found["training"]:
        names = (row["model"], row["scaling"], STYLES[row["parallel"]][1], row["ranks"])
        figures = [row.get("absent", "-")] * 2
        if "absent" not in row:
            a_day = f"{row['tokens_per_day_and_gpu'] / 1e9:.2f} billion"
            figures = [f"{row['tokens_per_s']:,}", a_day]
        cells.append([*names, row["tokens_per_gpu"], *figures])
    return grid(columns, cells, words=3)


def part() -> str:
    found = record()
    if found is None:
        return ABSENT
    where = f"{found['device']}, torch {found['torch']}, {found['date'][:10]}"
    tables = [make(found) for make, name in ((layers, "layers"), (training, "training"))
              if found[name]]  # fmt: skip
    return "\n\n".join([*tables, f"{where}, commit {found['commit']}."])


TABLES = {"scaling": part}


def plot(plt, found: dict):
    """Tokens a second of training, and the time of layers over alone, by the number of GPUs."""
    figure, (rates, costs) = plt.subplots(1, 2, figsize=(10, 4.2), layout="constrained")
    dashes = {"weak": "-", "strong": "--"}
    trained = [row for row in found["training"] if "absent" not in row]
    kinds = sorted({(row["scaling"], row["parallel"]) for row in trained}, reverse=True)
    for scaling, parallel in kinds:
        rows = [r for r in trained if (r["scaling"], r["parallel"]) == (scaling, parallel)]
        points = sorted((r["ranks"], r["tokens_per_s"]) for r in rows)
        colour, name = STYLES[parallel]
        style = {"color": colour, "linestyle": dashes[scaling], "marker": "o", "markersize": 4}
        rates.plot(*zip(*points, strict=True), label=f"{name}, {scaling}", **style)
    rates.set(xlabel="GPUs", ylabel="tokens a second", title="training", ylim=(0, None))
    for name in dict.fromkeys(row["config"] for row in found["layers"]):
        rows = sorted((r for r in found["layers"] if r["config"] == name), key=lambda r: r["ranks"])
        over = [total(r["ours_torch"]) / total(r["alone_torch"]) for r in rows]
        costs.plot([r["ranks"] for r in rows], over, marker="o", markersize=4, label=name)
    costs.set(xlabel="GPUs", ylabel="time over the layer alone", title="layer, forward + backward")
    for axes in (rates, costs):
        axes.spines[["top", "right"]].set_visible(False)
        if axes.lines:
            axes.legend(frameon=False, fontsize=8)
    return figure


def main() -> int:
    found = record()
    if found is None:
        print(ABSENT, file=sys.stderr)
        return 0
    save_plots({"scaling": lambda plt: plot(plt, found)})
    return 0


if __name__ == "__main__":
    sys.exit(main())
