"""Which of sonicmoe's kernels would run; there is one way here, whatever is asked for."""

from __future__ import annotations

import contextlib

_asked_for = False


@contextlib.contextmanager
def enable_quack_gemm(enable: bool = True):
    """Changes what is_using_quack_gemm() says."""
    global _asked_for
    before, _asked_for = _asked_for, enable
    try:
        yield
    finally:
        _asked_for = before


def is_using_quack_gemm() -> bool:
    return _asked_for
