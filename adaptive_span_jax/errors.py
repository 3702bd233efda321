"""The one exception whose message is meant for the user."""


class UserError(Exception):
    """Bad input: says which field or file, what was found, what is allowed and what to do.

    `main.py` prints the message without a traceback and exits with code 2.
    """
