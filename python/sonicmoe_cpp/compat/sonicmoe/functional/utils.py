"""The switch between sonicmoe's kernels. This library has no such choice and ignores the switch."""

from __future__ import annotations

import contextlib

_asked_for = False


@contextlib.contextmanager
def enable_quack_gemm(enable: bool = True):
    """Changes only the result of is_using_quack_gemm()."""
    global _asked_for
    before, _asked_for = _asked_for, enable
    try:
        yield
    finally:
        _asked_for = before


def is_using_quack_gemm() -> bool:
    return _asked_for
