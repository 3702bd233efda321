"""Exceptions whose messages are shown to the user."""


class UserError(ValueError):
    """Invalid input. The message names the field, argument or file, its value, what is allowed, and what to do.

    `main.py` prints the message without a traceback and exits with code 2. To Python callers it is a ValueError.
    """


class UserTypeError(UserError, TypeError):
    """Invalid input of the wrong type. To Python callers it is a TypeError as well."""
