"""The one error type for bad input. Everything that raises it does so before any training."""


class InputError(Exception):
    """Bad input from the user: run file, data, adapter folder or output folder.

    The message is one or more whole sentences that name the job, file, line, key or module, what was found and what is
    accepted. The command line prints it without a traceback and exits with code 2.
    """
