"""Writes files as a whole, into an output folder that holds nothing else."""

import os
import tempfile
from pathlib import Path

from lm.errors import UserError

UNFINISHED = ".writing"  # ends the name of a file that is not complete yet


def write_file(path: Path, content: bytes | memoryview) -> None:
    """Replaces a file as a whole: readers see the old content or the new one, also after a power
    failure."""
    unfinished = path.with_name(path.name + UNFINISHED)
    unfinished.unlink(missing_ok=True)
    with open(unfinished, "xb") as file:  # "x": never writes through a symlink
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    os.replace(unfinished, path)


def make_folder(folder: Path) -> None:
    """Creates a folder, and shows by a temporary file that it can be written to."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as probe:
            probe.write(b"\0")
    except OSError as error:
        raise UserError(f"cannot write to output folder {folder}: {error.strerror}") from error


def claim(out: Path, marker: str) -> None:
    """Makes `out` the output folder of a program. The file `marker` says that the program has
    written to the folder before; without it the folder must be empty."""
    make_folder(out)
    others = {path.name for path in out.iterdir()} - {marker + UNFINISHED}
    if others and not (out / marker).is_file():
        raise UserError(
            f"{out} holds files that were not written by this program and could be replaced; "
            "choose another --out"
        )
    try:
        write_file(out / marker, b"")
    except OSError as error:
        raise UserError(f"cannot write to output folder {out}: {error.strerror}") from error
