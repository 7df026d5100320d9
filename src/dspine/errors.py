"""The one error that means "you can fix this": commands print it as a single line and exit with code 2."""


class UserError(ValueError):
    """Bad input, with the offending value and the remedy in its message."""
