"""Finds and loads the operators' library, and says why when it cannot."""

from __future__ import annotations

import os
from pathlib import Path

import torch

OLDEST_TORCH = (2, 10)
VARIABLE = "SONICMOE_CPP_LIBRARY"
UNSUPPORTED = "NotImplementedError: "


def path() -> Path:
    """The library beside this package, unless the environment names another one."""
    named = os.environ.get(VARIABLE)
    return Path(named) if named else Path(__file__).parent / "libsonicmoe_torch.so"


def _load() -> str | None:
    """None when the operators are there afterwards, else one sentence."""
    release = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
    if release < OLDEST_TORCH:
        oldest = ".".join(map(str, OLDEST_TORCH))
        return f"torch is {torch.__version__}, sonicmoe_cpp needs {oldest} or later"
    library = path()
    if not library.is_file():
        return f"the library {library} does not exist: install the wheel, or set {VARIABLE}"
    try:
        torch.ops.load_library(library)
    except OSError as error:
        return f"the library {library} does not load: {error}"
    return None


# Why the operators are missing, or None. A constant, so that compiled code may ask for it.
PROBLEM = _load()


def unsupported_reason(device: str | torch.device = "cpu") -> str | None:
    """Why tensors on `device` cannot be computed here, or None when they can."""
    if PROBLEM is not None:
        return PROBLEM
    kind = torch.device(device).type
    if kind in ("cpu", "meta"):
        return None
    return f"device is {kind}, this build of sonicmoe_cpp computes on: cpu"


def is_available(device: str | torch.device = "cpu") -> bool:
    """Whether tensors on `device` can be computed here."""
    return unsupported_reason(device) is None


def call(operator: str, *arguments):
    """Calls an operator; what it does not support raises NotImplementedError outside of a graph."""
    function = getattr(torch.ops.sonicmoe_cpp, operator)
    if torch.compiler.is_compiling():
        return function(*arguments)
    try:
        return function(*arguments)
    except RuntimeError as error:
        sentence = str(error)
        if sentence.startswith(UNSUPPORTED):
            raise NotImplementedError(sentence.removeprefix(UNSUPPORTED)) from None
        raise
