"""The text of the studies of quality: what is taken of a package, and the parts."""

import gzip
import json
import zipfile

import demo_support  # noqa: F401 (finds the examples)
import make_text
import numpy as np
import pytest
from lm.errors import UserError
from make_text import Package, read_list, usable, write_parts
from quality import text


def make_parts(out):
    """A folder of parts, as make_text.py writes it after the downloads of two packages."""
    for name in ("packages", "parts"):
        (out / name).mkdir()
    words = ("def", "return", "the", "a", "routing", "expert", "token", "tile", "of", "round")
    packages = []
    for kind in make_text.KINDS:
        rng = np.random.default_rng(len(kind))
        files = [" ".join(rng.choice(words, 300)) for _ in range(120)]
        package = Package(kind, "example")
        packages.append(package)
        joined = make_text.SEPARATOR.join([*files, files[0]])
        (out / f"packages/{package.file}.gz").write_bytes(gzip.compress(joined.encode()))
        facts = {"name": "example", "kind": kind, "licence": "MIT", "files": 121}
        (out / f"packages/{package.file}.json").write_text(json.dumps(facts))
    write_parts(packages, out, 280, float("inf"))
    return out / "parts"


def test_every_file_is_in_the_text_once_and_on_one_side(tmp_path):
    parts = make_parts(tmp_path)
    meta = text.read_meta(parts)
    end = 0  # the first entry of the vocabulary
    files = {
        kind: [
            text.read_tokens(parts, f"{kind}-{side}", 1).tolist().count(end)
            for side in ("train", "validation")
        ]
        for kind in make_text.KINDS
    }
    assert all(sum(counts) == 120 and min(counts) > 0 for counts in files.values())
    assert [package["licence"] for package in meta["packages"]] == ["MIT", "MIT"]
    with pytest.raises(UserError, match=r"has \d+ tokens of sources-train, at least"):
        text.read_tokens(parts, "sources-train", 10**9)


@pytest.mark.parametrize(
    ("name", "content", "taken"),
    [
        ("a/b.py", b"x = 1\n" * 100, True),
        ("a/b.md", b"x = 1\n" * 100, False),
        ("a/b.py", b"x = 1\n", False),
        ("a/b.py", b"\xff" * 600, False),
        ("a/b.py", b"x\0" * 300, False),
        ("a/b.py", b"x" * 2000, False),
    ],
)
def test_which_files_are_text(name, content, taken):
    assert (usable(name, content, "sources") is not None) == taken


def wheel(folder):
    path = folder / "a-1-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as whole:
        whole.writestr("a/b.py", "x = 1\n" * 100)
        whole.writestr("a-1.dist-info/METADATA", "Name: a\nLicense-Expression: MIT\n\nLicense: no")
    return path


def test_a_package_is_downloaded_once(tmp_path, monkeypatch, capsys):
    """The text and the licence of a package are kept; a package that pip cannot get is tried again
    by the next call."""
    given = ["--out", str(tmp_path / "out"), "--packages", str(tmp_path / "list")]
    (tmp_path / "list").write_text("sources: a b")
    asked = []

    def download(package, folder):
        asked.append(package.name)
        return wheel(folder) if package.name == "a" else None

    monkeypatch.setattr(make_text, "download", download)
    monkeypatch.setattr(make_text, "write_parts", lambda packages, *_: asked.append(packages))
    a = Package("sources", "a")
    assert [make_text.make(given), make_text.make(given)] == [0, 0]
    assert asked == ["a", "b", [a], "b", [a]]
    assert "sources b: pip cannot get it" in capsys.readouterr().out
    assert json.loads((tmp_path / "out/packages/a.sources.json").read_text())["licence"] == "MIT"
    assert make_text.texts_of(a, tmp_path / "out", set()) == ["x = 1\n" * 100]
    (tmp_path / "list").write_text("sources: b")
    with pytest.raises(UserError, match="pip could get none of the packages"):
        make_text.make(given)


def test_lists_of_packages(tmp_path):
    path = tmp_path / "list"
    path.write_text("# a comment\nsources: a b a  # more\ndocumentation: a\n")
    found = [(p.kind, p.name) for p in read_list(str(path))]
    assert found == [("sources", "a"), ("sources", "b"), ("documentation", "a")]
    for line, sentence in (("binaries: a", "begins with 'binaries'"), ("sources: -a", "'-a' in")):
        path.write_text(line)
        with pytest.raises(UserError, match=sentence):
            read_list(str(path))
