"""The one base of errors meant for the person at the terminal."""


class UserError(Exception):
    """Something the user can mend. The message names the file, key or step, what was expected and what to do;
    command-line entry points print it without a traceback and exit non-zero."""
