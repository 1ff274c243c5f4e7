"""Checks which release of another package is installed."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from importlib import metadata


@contextlib.contextmanager
def needs(integration: str, package: str, release: str) -> Iterator[None]:
    """A context for imports of `package`. If an import fails or another release is installed,
    raises an ImportError that names the needed release. `release` is the major and minor version:
    "0.16"."""
    try:
        version = metadata.version(package)
        if ".".join(re.findall(r"\d+", version)[:2]) != release:
            raise ImportError(f"{version} is installed")
        yield
    except ImportError as error:
        raise ImportError(
            f"sonicmoe_cpp.integrations.{integration} needs {package} {release}: {error}"
        ) from error
