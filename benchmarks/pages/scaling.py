"""Layers and training on two to eight GPUs: a part of docs/distributed.md."""

from __future__ import annotations

from scaling import best_rival

from .common import grid, total

PARALLEL = {"fsdp": "FSDP2", "ep": "FSDP2 and expert parallelism"}


def layers(record: dict) -> str:
    columns = [
        "layer",
        "GPUs",
        "alone, ms",
        "ours, ms",
        "over alone",
        "others over ours",
    ]
    cells = []
    for row in sorted(record["layers"], key=lambda row: (row["config"], row["ranks"])):
        ours, alone = total(row["ours_torch"]), total(row["alone_torch"])
        figures = [f"{alone:.2f}", f"{ours:.2f}", f"{ours / alone:.3f}"]
        cells.append([row["config"], row["ranks"], *figures, f"{best_rival(row) / ours:.2f}"])
    return grid(columns, cells, words=1)


def training(record: dict) -> str:
    columns = ["model", "scaling", "parallel", "GPUs", "tokens a GPU", "tokens/s", "a day and GPU"]
    cells = []
    for row in record["training"]:
        names = (row["model"], row["scaling"], PARALLEL[row["parallel"]], row["ranks"])
        figures = [row.get("absent", "-")] * 2
        if "absent" not in row:
            a_day = f"{row['tokens_per_day_and_gpu'] / 1e9:.2f} billion"
            figures = [f"{row['tokens_per_s']:,}", a_day]
        cells.append([*names, row["tokens_per_gpu"], *figures])
    return grid(columns, cells, words=3)


def part(record: dict) -> str:
    where = f"{record['device']}, torch {record['torch']}, {record['date'][:10]}"
    tables = [make(record) for make, name in ((layers, "layers"), (training, "training"))
              if record[name]]  # fmt: skip
    return "\n\n".join([*tables, f"{where}, commit {record['commit']}."])
