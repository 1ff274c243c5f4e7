"""Takes reports of examples/finetune.py, which measured whole models, into the record of
finetuning, and rows of layers of a later run of benchmarks/finetune.py. A row of the same kind is
replaced: model, weights, rank, tokens and limit, or layer, T and r.

    python benchmarks/finetune_models.py report.json ... --commit 1a2b3c4
    python benchmarks/finetune_models.py --layers OUT/finetune.json --commit 1a2b3c4
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from pages.common import RECORDS

GIB = 2**30
KEY = ("model", "weights", "rank", "factors", "sequence", "cap_gib", "compiled")
EXTRAS = ("offload_embedding", "dense", "unpack_mib")  # in a row where they are set


def speed(found):
    """Tokens/s, peak and trace of a run of a report."""
    part = {"tokens_per_s": round(found["tokens_per_s"])}
    part["peak_gib"] = round(found["peak_bytes"] / GIB, 2)
    if found.get("trace"):
        part["step_ms"] = round(found["step_ms"], 1)
        part["trace"] = found["trace"]
    return part


def row_of(report, commit):
    s = report["settings"]
    row = {"model": s["config"] or Path(s["model"]).name, "weights": s["weights"] or "bf16"}
    row |= {"card": report["device"], "compiled": s["compile"], "commit": commit}
    row |= {key: s[key] for key in ("cap_gib", "rank", "sequence", "optim", "factors")}
    row |= {key: s[key] for key in EXTRAS if s[key]}
    row |= speed(report)
    row["predicted_gib"] = round(report["predicted_bytes"]["peak"] / GIB, 2)
    beside = report.get("beside")
    if beside and beside["fits"]:
        row["beside"] = {"experts": beside["experts"]} | speed(beside)
    return row


def replaced(rows, row):
    """The rows with `row` in place of the one of the same kind, or after the last of its model."""

    def kind(r):
        return tuple(r.get(key, False) for key in KEY)

    kept = [r for r in rows if kind(r) != kind(row)]
    last = max((i for i, r in enumerate(kept) if r["model"] == row["model"]), default=len(kept) - 1)
    return [*kept[: last + 1], row, *kept[last + 1 :]]


def with_layers(rows, found, commit):
    """Rows of layers with those of a later run in place of the same ones."""

    def kind(r):
        return r["config"], r["T"], r["r"]

    new = {kind(r): r | {"commit": commit} for r in found}
    return [*(new.pop(kind(r), r) for r in rows), *new.values()]


def main(argv):
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("reports", nargs="*", type=Path)
    parser.add_argument("--layers", type=Path, help="record of a later run on the same device")
    parser.add_argument("--commit", required=True, help="of the measured tree")
    parser.add_argument("--record", type=Path, default=RECORDS / "h200/finetune.json")
    arguments = parser.parse_args(argv)
    record = json.loads(arguments.record.read_text())
    for path in arguments.reports:
        row = row_of(json.loads(path.read_text()), arguments.commit)
        record["models"] = replaced(record["models"], row)
    if arguments.layers:
        other = json.loads(arguments.layers.read_text())
        if other["device"] != record["device"]:
            parser.error(f"{other['device']} is not the record's {record['device']}")
        record["rows"] = with_layers(record["rows"], other["rows"], arguments.commit)
    arguments.record.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
