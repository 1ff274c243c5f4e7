"""Finds and loads the library of operators. PROBLEM is the reason if it cannot be loaded."""

from __future__ import annotations

import functools
import os
from pathlib import Path

import torch

OLDEST_TORCH = (2, 10)
VARIABLE = "SONICMOE_CPP_LIBRARY"


def path() -> Path:
    """The path of the library: in this package, or as the environment variable VARIABLE says."""
    named = os.environ.get(VARIABLE)
    return Path(named) if named else Path(__file__).parent / "libsonicmoe_torch.so"


def _load() -> str | None:
    """Loads the operators. Returns None, or one sentence: the reason why they cannot be loaded."""
    release = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
    if release < OLDEST_TORCH:
        oldest = ".".join(map(str, OLDEST_TORCH))
        return f"torch is {torch.__version__}, sonicmoe_cpp needs {oldest} or later"
    if hasattr(torch.ops.sonicmoe_cpp, "version"):  # loading them twice would end the process
        return "another copy of sonicmoe_cpp has loaded its operators in this process: import one"
    library = path()
    if not library.is_file():
        return f"the library {library} does not exist: install the wheel, or set {VARIABLE}"
    try:
        torch.ops.load_library(library)
    except OSError as error:
        return f"the library {library} does not load: {error}"
    return None


# The reason why the operators are missing, or None. A constant, so that compiled code can read it.
PROBLEM = _load()


@functools.cache
def _cuda_problem(ordinal: int) -> str | None:
    """The reason why a CUDA device cannot be used, or None. Asks torch for the device and the
    library for its kernels; touches no CUDA context."""
    device = f"device is cuda:{ordinal}"
    if not torch.backends.cuda.is_built():
        return f"{device}, but torch {torch.__version__} is built without CUDA"
    if not torch.cuda.is_available():
        return f"{device}, but torch sees no usable CUDA device"
    problem = torch.ops.sonicmoe_cpp.cuda_problem(ordinal)
    return f"{device}, but {problem}" if problem else None


def unsupported_reason(device: str | int | torch.device = "cpu") -> str | None:
    """The reason why tensors on `device` cannot be computed here, or None if they can."""
    if PROBLEM is not None:
        return PROBLEM
    device = torch.device(f"cuda:{device}" if isinstance(device, int) else device)
    if device.type in ("cpu", "meta"):
        return None
    if device.type != "cuda":
        return f"device is {device.type}, sonicmoe_cpp computes on: cpu, cuda"
    if device.index is not None:
        return _cuda_problem(device.index)
    return _cuda_problem(torch.cuda.current_device() if torch.cuda.is_initialized() else 0)


_choices = 0


def choices() -> int:
    """How often use_engine() has been called. Caches of values that depend on the engine have this
    number in their keys."""
    return _choices


def engines() -> tuple[str, ...]:
    """The names of this build's engines, which compute products on CUDA. The first one that serves
    a GPU is its default. Empty in a build without CUDA."""
    return () if PROBLEM is not None else tuple(torch.ops.sonicmoe_cpp.engine_names().split())


def use_engine(name: str | None) -> str | None:
    """Chooses the engine for all later calls on CUDA, in all threads. None, the default, means the
    engine of the environment variable SONICMOE_ENGINE, else the first that serves the device.
    Returns the previous choice. An unknown name is refused here. If the engine does not serve a
    device, the calls on that device are refused."""
    names = engines()
    if name is not None and name not in names:
        known = ", ".join(names) or "none, because this build has no CUDA backend"
        raise ValueError(f"engine is {name!r}, must be one of: {known}")
    if PROBLEM is not None:
        return None
    before = torch.ops.sonicmoe_cpp.use_engine(-1 if name is None else names.index(name))
    _cuda_problem.cache_clear()
    global _choices
    _choices += 1
    return None if before < 0 else names[before]


def is_available(device: str | torch.device = "cpu") -> bool:
    """Whether tensors on `device` can be computed here."""
    return unsupported_reason(device) is None
