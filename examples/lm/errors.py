"""The one kind of failure that is the user's to mend, and how a command ends."""

import sys
from collections.abc import Callable


class UserError(Exception):
    """One sentence: what is wrong, what was got, what is allowed. The command exits with 2."""


def exit_code(command: Callable[[], int], interrupted: str) -> int:
    """That of the command; failures that the user can mend are one sentence, and so is Ctrl-C."""
    try:
        return command()
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(interrupted, file=sys.stderr)
        return 130
