"""Checks that README.md shows what it claims to show.

The tables must be those drawn from the newest records in benchmarks/results/, and the C++ example
the marked part of examples/layer.cc.

    python benchmarks/check_figures.py         compare; exit 1 on a difference
    python benchmarks/check_figures.py --fix   rewrite README.md
"""

import argparse
import json
import sys
import textwrap
from pathlib import Path

import h200_figures
from cpu_layer import MARKERS, ROOT, table

EXAMPLE = ("<!-- example:begin -->", "<!-- example:end -->")
SOURCE_MARKERS = ("  // [readme\n", "  // readme]\n")


def newest_record():
    records = [json.loads(p.read_text()) for p in (ROOT / "benchmarks/results/cpu").glob("*.json")]
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


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--fix", action="store_true")
    fix = parser.parse_args().fix
    readme = Path(ROOT / "README.md")
    text = readme.read_text()
    stale = []
    for markers, what, content in (
        (MARKERS, "the CPU table", table(newest_record())),
        (h200_figures.MARKERS, "the H200 table", h200_figures.table(h200_figures.newest("hot"))),
        (EXAMPLE, "the C++ example", example()),
    ):
        begin, end = between(text, markers, "README.md")
        if text[begin:end].strip() != content.strip():
            stale.append(what)
            text = f"{text[:begin]}\n{content}\n{text[end:]}"
    if fix:
        readme.write_text(text)
    elif stale:
        print(f"README.md: {' and '.join(stale)} differ from their source", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
