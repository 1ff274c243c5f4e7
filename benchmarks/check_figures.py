"""Checks that the tables and examples in README.md and docs/ match their sources.

Tables must match the newest records in benchmarks/results/; the C++ example must match the marked
part of examples/layer.cc.

    python benchmarks/check_figures.py         compare; exit 1 on a difference
    python benchmarks/check_figures.py --fix   rewrite them
"""

import argparse
import json
import sys
import textwrap
from pathlib import Path

import ep2_figures
import finetune_page
import fp8_page
import h200_page
import readme_page
import scaling_figures
import training_figures
from cpu_layer import MARKERS, ROOT, table

EXAMPLE = ("<!-- example:begin -->", "<!-- example:end -->")
SOURCE_MARKERS = ("  // [readme\n", "  // readme]\n")
RESULTS = ROOT / "benchmarks/results"


def newest_record():
    records = [json.loads(p.read_text()) for p in (RESULTS / "cpu").glob("*.json")]
    if not records:
        raise SystemExit("benchmarks/results/cpu has no record")
    return max(records, key=lambda record: record["date"])


def between(text, markers, where):
    begin, end = (text.find(marker) for marker in markers)
    if not 0 <= begin < end:
        raise SystemExit(f"{where} has no {markers[0].strip()} ... {markers[1].strip()}")
    return begin + len(markers[0]), end


def example():
    source = (ROOT / "examples/layer.cc").read_text()
    begin, end = between(source, SOURCE_MARKERS, "examples/layer.cc")
    return f"```cpp\n{textwrap.dedent(source[begin:end])}```"


def readme_parts():
    """Yields (markers, name, expected content) of each part."""
    yield from tables_of(readme_page.TABLES)


def cpp_parts():
    yield EXAMPLE, "the C++ example", example()


def tables_of(tables):
    for name, make_table in tables.items():
        yield (f"<!-- {name}:begin -->", f"<!-- {name}:end -->"), f"the table {name}", make_table()


def performance_parts():
    yield MARKERS, "the CPU table", table(newest_record())
    yield from tables_of(h200_page.TABLES | readme_page.ANSWERS)


def demo_parts():
    """The table that examples/rounding_study.py wrote with its record."""
    yield from tables_of({"study": (RESULTS / "study/study.md").read_text})


def fp8_parts():
    """The speed, and the tables that examples/precision_study.py wrote with its records."""
    yield from tables_of(fp8_page.TABLES | readme_page.FP8)
    small, large = (RESULTS / folder / "precision.md" for folder in ("study", "h200"))
    yield from tables_of({"precision": small.read_text, "precision-126m": large.read_text})


def pytorch_parts():
    yield from tables_of({"host-calls": h200_page.host_calls})


def finetune_parts():
    yield from tables_of(finetune_page.TABLES)


def training_parts():
    yield from tables_of(training_figures.TABLES)


def distributed_parts():
    yield from tables_of(ep2_figures.TABLES | scaling_figures.TABLES | readme_page.RANKS)


DOCUMENTS = {
    "README.md": readme_parts,
    "docs/cpp.md": cpp_parts,
    "docs/performance.md": performance_parts,
    "docs/demo.md": demo_parts,
    "docs/fp8.md": fp8_parts,
    "docs/pytorch.md": pytorch_parts,
    "docs/finetune.md": finetune_parts,
    "docs/torchtitan.md": training_parts,
    "docs/distributed.md": distributed_parts,
}


def stale_parts(path, parts, fix):
    document = Path(ROOT / path)
    text = document.read_text()
    stale = []
    for markers, what, content in parts():
        begin, end = between(text, markers, path)
        if text[begin:end].strip() != content.strip():
            stale.append(what)
            text = f"{text[:begin]}\n{content}\n{text[end:]}"
    if fix:
        document.write_text(text)
    return stale


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--fix", action="store_true")
    fix = parser.parse_args().fix
    status = 0
    for path, parts in DOCUMENTS.items():
        stale = stale_parts(path, parts, fix)
        if stale and not fix:
            print(f"{path}: {' and '.join(stale)} differ from their source", file=sys.stderr)
            status = 1
    return status


if __name__ == "__main__":
    sys.exit(main())
