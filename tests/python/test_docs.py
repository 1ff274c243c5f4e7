"""The first example of a page runs as it stands there."""

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
