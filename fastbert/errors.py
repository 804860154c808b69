"""The one exception type for input a person can mend."""


class UserError(ValueError):
    """Bad input: one sentence that names the value, the limit and the remedy.

    The commands print it without a traceback and exit with status 2.
    """
