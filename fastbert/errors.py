"""The one exception type for input a person can mend."""


class UserError(ValueError):
    """Bad input: one sentence that names the value, the limit and the remedy.

    The commands print it without a traceback and exit with status 2.
    """

    def __init__(self, message: str = "") -> None:
        # a loader's process that meets one hands it on inside its traceback: the sentence is at the end
        if message.startswith("Caught "):
            message = message.rsplit(f"{type(self).__name__}: ", 1)[-1].strip()
        super().__init__(message)
