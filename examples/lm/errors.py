"""Failures that end a command with one sentence, and the exit status of each."""

import os
import sys
from collections.abc import Callable
from typing import TextIO

LONGEST = 600  # characters of a sentence; a setting of thousands of digits is cut in the middle


class UserError(Exception):
    """One sentence: the argument, its value, and what is allowed. The command exits with 2."""

    status = 2


class TrainingFailed(UserError):
    """A training run cannot go on; its last checkpoint is kept. The command exits with 1."""

    status = 1


def first_line(error: BaseException) -> str:
    """The error's own sentence, without the C++ stack that torch may append."""
    return next(iter(str(error).splitlines()), "") or type(error).__name__


def _one_line(sentence: str) -> str:
    """The sentence as one line, also if file names or settings contain line breaks."""
    line = " ".join(sentence.split())
    half = LONGEST // 2
    return line if len(line) <= LONGEST else f"{line[:half]} ... {line[-half:]}"


def _stream(name: str) -> TextIO:
    """stdout or stderr, able to print file names that are not UTF-8; /dev/null if it is closed."""
    stream = getattr(sys, name) or open(os.devnull, "w")  # noqa: SIM115 (open until the exit)
    stream.reconfigure(errors="backslashreplace")
    return stream


def _abandon(stream: TextIO) -> None:
    """Sends the unwritten rest of a full or broken stream to /dev/null.

    The interpreter flushes the stream once more at its exit, which would fail again.
    """
    try:
        stream.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def exit_code(command: Callable[[], int], interrupted: str) -> int:
    """Runs the command; a UserError, an OSError and Ctrl-C each end it with one sentence."""
    sys.stdout, sys.stderr = _stream("stdout"), _stream("stderr")
    try:
        status, sentence = command(), ""
        sys.stdout.flush()
    except UserError as error:
        status, sentence = error.status, f"error: {error}"
    except KeyboardInterrupt:
        status, sentence = 130, interrupted
    except OSError as error:
        file = f"{error.filename}: " if error.filename else ""
        status, sentence = 2, f"error: {file}{error.strerror or error}"
    _abandon(sys.stdout)
    if sentence:
        print(_one_line(sentence), file=sys.stderr)
    return status
