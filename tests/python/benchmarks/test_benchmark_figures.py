"""benchmarks/figures.py: its table of figures, and pages that differ from their records."""

from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def figures():
    import figures

    return figures


def test_every_figure_names_a_known_record(figures):
    tables = [of for tables in figures.TABLES.values() for _, of in tables.values()]
    plots = [of for _, of in figures.PLOTS.values()]
    assert {*tables, *plots} == figures.MADE_BY.keys()


def test_every_contender_has_a_title_and_a_colour(figures):
    from h200_bench import contenders
    from pages import common, ranks

    assert contenders.LAYERS.keys() <= common.CONTENDERS.keys() == common.COLOURS.keys()
    assert {*ranks.RIVALS} <= ranks.NAMES.keys() == ranks.PLOT_COLOURS.keys()


def test_every_plot_is_shown(figures):
    pages = "".join(p.read_text() for p in (ROOT / "README.md", *(ROOT / "docs").glob("*.md")))
    shown = {name for name in figures.PLOTS if f"images/{name}.svg" in pages}
    drawn = {name for name, (_, of) in figures.PLOTS.items() if figures.record(of) is not None}
    assert shown == drawn


def test_a_page_that_differs_is_found_and_rewritten(figures, monkeypatch, tmp_path):
    page = tmp_path / "page.md"
    page.write_text("a\n<!-- one:begin -->\nold\n<!-- one:end -->\nb\n")
    monkeypatch.setattr(figures, "ROOT", tmp_path)
    monkeypatch.setattr(figures, "parts", lambda: [("page.md", "one", "new")])
    assert figures.stale(fix=False) == ["page.md: one"]
    assert "old" in page.read_text()
    assert figures.stale(fix=True) == ["page.md: one"]
    assert page.read_text() == "a\n<!-- one:begin -->\nnew\n<!-- one:end -->\nb\n"
    assert figures.stale(fix=False) == []
    page.write_text("no markers")
    with pytest.raises(SystemExit, match="has no <!-- one:begin -->"):
        figures.stale(fix=False)


def test_a_missing_record_is_named_with_its_program(figures, monkeypatch):
    monkeypatch.setattr(figures, "record", lambda name: None)
    text = figures.table(lambda record: record["rows"], "h200/hot")
    assert text == "No record yet: benchmarks/h200.py writes it."
