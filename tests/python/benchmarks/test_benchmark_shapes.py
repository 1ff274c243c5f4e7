"""The named layers of benchmarks/shapes.py, and their names in the records."""

import json
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parents[3] / "benchmarks"


@pytest.fixture
def shapes():
    import shapes

    return shapes


def test_every_line_of_the_table_is_read(shapes):
    lines = shapes.TABLE.read_text().splitlines()
    assert len(shapes.NAMED) == sum(line.startswith("{") for line in lines) > 20
    assert shapes.NAMED["7B-n256"] == shapes.Shape(T=24576, d=1536, n=256, E=128, K=8)


def test_tokens_may_follow_a_name(shapes):
    few = shapes.named("olmoe-T64")
    assert vars(few) == vars(shapes.NAMED["olmoe"]) | {"T": 64}
    assert shapes.named("7B-T2048").T == 2048  # a name of its own
    for name in ("tiny", "olmoe-T", "olmoe-T0", "olmoe-T64x", "tiny-T64", "-T64"):
        with pytest.raises(KeyError, match="is no layer of"):
            shapes.named(name)


def test_one_name_is_one_layer_in_every_record(shapes):
    seen = set()
    for path in BENCHMARKS.glob("**/*.json"):
        record = json.loads(path.read_text())
        for row in [row for key in ("rows", "products") for row in record.get(key, [])]:
            if not {"config", "T", "d", "n", "E", "K"} <= row.keys():
                continue
            sizes = {name: row[name] for name in "TdnEK"}
            if path.name == "rounding.json":  # layers that its program names by their sizes
                continue
            expected = vars(shapes.named(row["config"]))
            if path.name == "finetune.json":  # several T of each layer
                expected = expected | {"T": row["T"]}
            assert sizes == expected, (path.name, row["config"])
            seen.add(path.name)
    assert {"hot.json", "ep2.json", "fp8.json", "portable.json", "finetune.json"} <= seen
