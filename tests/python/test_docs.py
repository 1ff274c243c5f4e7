"""The first example of a page runs as it stands there; the reference has every name."""

import re
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("page", ["README.md", "docs/pytorch.md", "docs/determinism.md"])
def test_first_example(page):
    if not (ROOT / page).is_file():
        pytest.skip("this copy has no documentation")
    example = re.search(r"```python\n(.*?)```", (ROOT / page).read_text(), re.DOTALL).group(1)
    names = {}
    exec(compile(example, page, "exec"), names)
    x, out = names["x"], names["out"]
    assert out.shape[-1] == x.shape[-1] and out.numel() == x.numel()
    assert torch.isfinite(out).all() and out.abs().sum() > 0


def test_reference_names_all_that_headers_declare():
    if not (ROOT / "docs/api.md").is_file():
        pytest.skip("this copy has no documentation")
    headings = set(
        re.findall(
            r"`(\w+)`",
            "\n".join(
                line
                for line in (ROOT / "docs/api.md").read_text().splitlines()
                if line.startswith("###")
            ),
        )
    )
    declared = re.compile(
        r"^(?:struct|class|enum class|typedef struct) (\w+)|^(?:\w+_API|constexpr) [^(]*?(\w+)\(",
        re.MULTILINE,
    )
    headers = sorted((ROOT / "include/sonicmoe").glob("*.h"))
    found = {a or b for h in headers for a, b in declared.findall(h.read_text())}
    assert {"smoe_moe_forward", "smoe_tensor", "tensor3", "Pass", "Backend"} <= found
    assert found <= headings


def test_hooks_have_the_pinned_versions():
    hooks = ROOT / ".pre-commit-config.yaml"
    if not hooks.is_file():
        pytest.skip("this copy has no hooks")
    pins = set((ROOT / "tools/requirements-dev.txt").read_text().split())
    used = re.findall(r"additional_dependencies: \[(.*)\]", hooks.read_text())
    assert len(used) == 3 and set(used) <= pins


def test_lines_that_the_engine_page_cites():
    """Each citation links a line of a file and quotes what stands there."""
    page = ROOT / "docs/engine.md"
    if not page.is_file():
        pytest.skip("this copy has no documentation")
    cited = re.findall(r"\[`([\w.]+):(\d+)`\]\((\S+?)#L(\d+)\) `(.+?)`", page.read_text())
    assert len(cited) > 10
    for name, shown, link, line, code in cited:
        assert link.endswith("/" + name) and shown == line
        lines = (page.parent / link).resolve().read_text().splitlines()
        where = [i for i, text in enumerate(lines, 1) if code in text]
        assert int(line) in where, f"{name}: `{code}` stands in line {where}, not {line}"
