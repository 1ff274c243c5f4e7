"""Writes files as a whole, and never replaces files that this program did not write."""

import os
import tempfile
from collections.abc import Sequence
from pathlib import Path

from lm.errors import UserError

UNFINISHED = ".writing"  # ends the name of a file or folder that is not complete yet


def flush_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_file(path: Path, content: bytes) -> None:
    """Replaces a file as a whole: readers see the old content or the new one."""
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


def claim(out: Path, marker: str, names: Sequence[str], earlier: bool) -> None:
    """Makes `out` the output folder of a program that writes files of these names.

    The file `marker` says that the program wrote to the folder before. `earlier` says that the
    folder has checkpoints of this program, for versions that wrote no marker. If neither holds, a
    file with one of these names is foreign: it is refused and not replaced.
    """
    make_folder(out)
    ours = earlier or (out / marker).is_file()
    for path in (out / name for name in names):
        if path.is_dir() or (not ours and os.path.lexists(path)):
            raise UserError(
                f"{path} was not written by this program and would be replaced; move it elsewhere "
                "or choose another --out"
            )
    try:
        write_file(out / marker, b"")
    except OSError as error:
        raise UserError(f"cannot write to output folder {out}: {error.strerror}") from error
