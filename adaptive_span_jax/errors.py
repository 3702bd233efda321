"""The exceptions whose messages are meant for the user."""


class UserError(ValueError):
    """Bad input: says which field, argument or file, what was found, what is allowed and what to do.

    `main.py` prints the message without a traceback and exits with code 2. To Python callers it is a ValueError.
    """


class UserTypeError(UserError, TypeError):
    """Bad input of a wrong type. To Python callers it is a TypeError as well."""
