"""Makes the tables in README.md and docs/ and the plots in docs/images/ from the newest records.

    python benchmarks/figures.py           compares tables with records; exit 1 on a difference
    python benchmarks/figures.py --fix     rewrites the tables and draws the plots

A table stands between <!-- NAME:begin --> and <!-- NAME:end -->. docs/cpp.md's example is compared
with the marked part of examples/layer.cc.
"""

from __future__ import annotations

import argparse
import sys
import textwrap

import cpu_layer
from pages import (
    finetune,
    first_screens,
    fp8,
    layers,
    portable,
    ranks,
    scaling,
    training,
)
from pages.common import RECORDS, ROOT, record, save_plot

# Records: what writes them. Those of examples/ come with their tables.
MADE_BY = {
    "cpu/layer": "benchmarks/cpu_layer.py",
    "h200/hot": "benchmarks/h200.py",
    "h200/cool": "benchmarks/h200.py",
    **{
        f"h200/{name}": f"benchmarks/h200_extra.py {name}"
        for name in ("kernels", "skew", "rounding", "memory", "tokens", "host")
    },
    "h200/rivals": "benchmarks/rivals.py",
    "h200/portable": "benchmarks/portable.py",
    "h200/host_cost": "benchmarks/host_cost.py",
    "h200/fp8": "benchmarks/fp8.py",
    "study/fp8_scales": "benchmarks/fp8_scales.py",
    "h200/finetune": "benchmarks/finetune.py",
    "h100/training": "benchmarks/training.py",
    "h200/training": "benchmarks/training.py on four GPUs",
    "h100/training_curves": "benchmarks/training.py",
    "h200/ep2": "benchmarks/ep2.py on two GPUs",
    "h200/scaling": "benchmarks/scaling.py on four or eight GPUs",
    "study/study": "examples/rounding_study.py",
    "study/precision": "examples/precision_study.py",
    "h200/precision": "examples/precision_study.py",
    "study/quality": "examples/quality_study.py",
    "study/quality_finetune": "examples/quality_study.py finetune",
}


def quality(name):
    """A table that examples/quality_study.py wrote with its record; not all calls write each."""
    path = RECORDS / f"study/quality-{name}.md"
    return lambda _: path.read_text() if path.exists() else "Not measured yet."


def written_beside(name):
    """The table that a program of examples/ wrote with its record."""
    return lambda _: (RECORDS / f"{name}.md").read_text()


# page: {name of the table: (function of the record, the record)}
TABLES = {
    "README.md": {
        "why": (first_screens.reasons, "h200/hot"),
        "beside": (first_screens.beside, "h200/hot"),
    },
    "docs/performance.md": {
        "answers": (first_screens.answers, "h200/hot"),
        "cpu-bench": (cpu_layer.table, "cpu/layer"),
        "hot": (layers.hot, "h200/hot"),
        "cool": (layers.cool, "h200/cool"),
        "kernels": (layers.kernels, "h200/kernels"),
        "skew": (layers.skew, "h200/skew"),
        "rounding": (layers.rounding, "h200/rounding"),
        "memory": (layers.memory, "h200/memory"),
        "tokens": (layers.tokens, "h200/tokens"),
        "rivals": (layers.rivals, "h200/rivals"),
        "portable": (portable.portable, "h200/portable"),
        "host": (layers.host, "h200/host"),
    },
    "docs/demo.md": {"study": (written_beside("study/study"), "study/study")},
    "docs/rounding-study.md": {
        "quality-rounding": (quality("rounding"), "study/quality"),
        "quality-spread": (quality("spread"), "study/quality"),
        "quality-times": (quality("times"), "study/quality"),
    },
    "docs/fp8.md": {
        "expect": (first_screens.fp8, "h200/fp8"),
        "fp8-layers": (fp8.layers, "h200/fp8"),
        "fp8-products": (fp8.products, "h200/fp8"),
        "fp8-scales": (fp8.scales, "study/fp8_scales"),
        "precision": (written_beside("study/precision"), "study/precision"),
        "precision-126m": (written_beside("h200/precision"), "h200/precision"),
    },
    "docs/pytorch.md": {"host-calls": (layers.host_calls, "h200/host_cost")},
    "docs/finetune.md": {
        "finetune-models": (finetune.models, "h200/finetune"),
        "finetune-trace": (finetune.trace, "h200/finetune"),
        "finetune-layers": (finetune.layers, "h200/finetune"),
        "finetune-packed": (finetune.packed, "h200/finetune"),
        "quality-finetune": (quality("finetune"), "study/quality_finetune"),
    },
    "docs/torchtitan.md": {
        "training": (training.rates, "h100/training"),
        "training-four": (training.rates, "h200/training"),
        "training-where": (training.where, "h100/training"),
        "training-curves": (training.curves, "h100/training_curves"),
    },
    "docs/distributed.md": {
        "expect": (first_screens.ranks, "h200/ep2"),
        "ep2-cost": (ranks.cost, "h200/ep2"),
        "ep2-rivals": (ranks.rivals, "h200/ep2"),
        "ep2-memory": (ranks.memory, "h200/ep2"),
        "scaling": (scaling.part, "h200/scaling"),
    },
}

# name of the image: (function of pyplot and the record, the record)
PLOTS = {
    "h200-throughput": (layers.plot_throughput, "h200/hot"),
    "h200-memory": (layers.plot_memory, "h200/memory"),
    "h200-tokens": (layers.plot_tokens, "h200/tokens"),
    "h200-rivals": (layers.plot_rivals, "h200/rivals"),
    "h200-rounding": (layers.plot_rounding, "h200/rounding"),
    "h200-portable": (portable.plot_portable, "h200/portable"),
    "h200-fp8": (fp8.plot_fp8, "h200/fp8"),
    "finetune": (finetune.plot, "h200/finetune"),
    "training-curves": (training.plot_curves, "h100/training_curves"),
    "training-where": (training.plot_where, "h100/training"),
    "ep2-rivals": (ranks.plot, "h200/ep2"),
}


def between(text, begin, end, where):
    """The positions after `begin` and of `end`."""
    first, last = text.find(begin), text.find(end)
    if not 0 <= first < last:
        raise SystemExit(f"{where} has no {begin.strip()} ... {end.strip()}")
    return first + len(begin), last


def example():
    source = (ROOT / "examples/layer.cc").read_text()
    first, last = between(source, "  // [readme\n", "  // readme]\n", "examples/layer.cc")
    return f"```cpp\n{textwrap.dedent(source[first:last])}```"


def table(make, name):
    found = record(name)
    return f"No record yet: {MADE_BY[name]} writes it." if found is None else make(found)


def parts():
    """(page, name, text) of each part."""
    yield "docs/cpp.md", "example", example()
    for page, tables in TABLES.items():
        for name, (make, of_record) in tables.items():
            yield page, name, table(make, of_record)


def stale(fix):
    """The parts that differ from their source; with `fix` they are rewritten."""
    found = []
    for page, name, content in parts():
        document = ROOT / page
        text = document.read_text()
        first, last = between(text, f"<!-- {name}:begin -->", f"<!-- {name}:end -->", page)
        if text[first:last].strip() != content.strip():
            found.append(f"{page}: {name}")
            if fix:
                document.write_text(f"{text[:first]}\n{content}\n{text[last:]}")
    return found


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--fix", action="store_true")
    fix = parser.parse_args().fix
    different = stale(fix)
    if fix:
        for name, (plot, of_record) in PLOTS.items():
            if record(of_record) is not None:
                save_plot(name, plot, record(of_record))
    for part in different:
        print(f"{part} {'is rewritten' if fix else 'differs from its record'}", file=sys.stderr)
    return 1 if different and not fix else 0


if __name__ == "__main__":
    sys.exit(main())
