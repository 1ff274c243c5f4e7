"""The one kind of failure that is the user's to mend."""


class UserError(Exception):
    """One sentence: what is wrong, what was got, what is allowed. The command exits with 2."""
